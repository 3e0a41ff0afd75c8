"""Floor plans, receptacles and object classes, read from the installed alfworld wheel.

The wheel is imported on first use, because importing ``alfworld`` creates a cache folder and sets
``ALFWORLD_DATA``. Only its data modules and data files are used.
"""

import functools
import json
from collections import Counter
from dataclasses import dataclass
from importlib import resources

LAMP_CLASSES = ("DeskLamp", "FloorLamp")
SINK_CLASSES_BY_BASIN = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}
# Classes of the furniture on which lamps are placed, as in ALFRED scenes.
LAMP_FURNITURE_CLASSES = ("SideTable", "Desk", "Dresser", "Shelf", "DiningTable", "CoffeeTable")


@dataclass(frozen=True, slots=True)
class Receptacle:
    """Piece of furniture: id in the scene (``Drawer|+00.95|+00.22|-02.20``), class, and the
    location where the agent stands to use it (``loc|x|z|rotation|horizon``).
    """

    id: str
    class_name: str
    location: str


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """One of the 120 scenes: its receptacles (sorted by id) and its object classes (sorted)."""

    number: int  # number of the scene
    receptacles: tuple[Receptacle, ...]
    classes: tuple[str, ...]  # object classes


def load_alfworld_constants():
    """Return the alfworld module of object classes, properties and scene splits."""
    from alfworld.gen import constants

    return constants


def load_alfworld_goals() -> dict[str, dict]:
    """Return ALFWorld's goals: PDDL goal and task sentences by official task type."""
    from alfworld.gen import goal_library

    return goal_library.gdict


@functools.cache
def load_domain_and_grammar() -> tuple[str, str]:
    """Return the PDDL domain and the text grammar, which all games share.

    The grammar contains the placeholder ``UNKNOWN GOAL`` instead of a task sentence.
    """
    data_folder = resources.files("alfworld") / "data"
    return (data_folder / "alfred.pddl").read_text(), (data_folder / "alfred.twl2").read_text()


def list_scenes(task_type: str, is_validation: bool) -> list[int]:
    """Return the numbers of the scenes that suit a task type (official name), sorted.

    They are ALFWorld's test floor plans for validation, otherwise its training floor plans.
    """
    constants = load_alfworld_constants()
    scene_ranges = [
        constants.SCENE_TYPE[room_type] for room_type in sorted(constants.GOALS_VALID[task_type])
    ]
    split_scene_numbers = (
        constants.TEST_SCENE_NUMBERS if is_validation else constants.TRAIN_SCENE_NUMBERS
    )
    return [
        scene_number
        for scene_number in sorted(split_scene_numbers)
        if any(scene_number in scene_range for scene_range in scene_ranges)
    ]


@functools.cache
def load_floor_plan(scene_number: int) -> FloorPlan:
    """Return the floor plan of scene ``scene_number``.

    The scene file lists the agent's pose at each receptacle. A receptacle class without a pose gets
    one receptacle, at a location that no other receptacle uses.
    """
    layout_folder = resources.files("alfworld") / "gen" / "layouts"
    poses = json.loads((layout_folder / f"FloorPlan{scene_number}-openable.json").read_text())
    class_names = sorted(
        set(json.loads((layout_folder / f"FloorPlan{scene_number}-objects.json").read_text()))
    )
    receptacles = []
    for receptacle_id, (x, z, rotation, horizon) in poses.items():
        # The engine reads the class from the id: ``Sink|..|SinkBasin`` is a ``SinkBasin``.
        class_name = receptacle_id.split("|", 1)[0] + (
            "Basin" if receptacle_id.endswith("Basin") else ""
        )
        if is_furniture(class_name):
            # Poses are in metres and degrees. As in ALFRED, location ids use quarters of a metre
            # and quarter turns.
            location_id = f"loc|{round(x * 4)}|{round(z * 4)}|{int(rotation) // 90}|{int(horizon)}"
            receptacles.append(Receptacle(receptacle_id, class_name, location_id))
    classes_with_pose = {receptacle.class_name for receptacle in receptacles}
    excluded_classes = classes_with_pose.union(SINK_CLASSES_BY_BASIN.values())
    missing_classes = [
        class_name
        for class_name in class_names
        if is_furniture(class_name) and class_name not in excluded_classes
    ]
    for class_index, class_name in enumerate(missing_classes):
        # The engine makes the name "sinkbasin" of the id "Sink|..|SinkBasin". An id that starts
        # with "SinkBasin" would get the name "sinkbasinbasin".
        id_prefix, id_suffix = (
            (SINK_CLASSES_BY_BASIN[class_name], f"|{class_name}")
            if class_name in SINK_CLASSES_BY_BASIN
            else (class_name, "")
        )
        receptacle_id = f"{id_prefix}|+{class_index:02d}.00|+00.50|+{class_index:02d}.25{id_suffix}"
        # Give each receptacle another x coordinate, so that all locations differ.
        receptacles.append(
            Receptacle(receptacle_id, class_name, f"loc|{class_index + 20}|{class_index}|0|30")
        )
    receptacles.sort(key=lambda receptacle: receptacle.id)
    return FloorPlan(scene_number, tuple(receptacles), tuple(class_names))


def is_furniture(class_name: str) -> bool:
    """Return True if the class can contain objects and cannot be moved."""
    constants = load_alfworld_constants()
    return (
        class_name in constants.VAL_RECEPTACLE_OBJECTS
        and class_name not in constants.MOVABLE_RECEPTACLES_SET
    )


def can_contain(receptacle_class: str, object_class: str) -> bool:
    """Return True if ALFWorld allows ``object_class`` in or on ``receptacle_class``."""
    return object_class in load_alfworld_constants().VAL_RECEPTACLE_OBJECTS.get(
        receptacle_class, ()
    )


def list_object_name_words() -> list[str]:
    """Return the words of object names: all class names and the numbers 1 to 30.

    A new tokenizer encodes each word as one token. Each word has a leading space.
    """
    constants = load_alfworld_constants()
    class_names = constants.OBJECTS_SET | set(constants.VAL_RECEPTACLE_OBJECTS)
    words = sorted({class_name.lower() for class_name in class_names})
    return [f" {word}" for word in (*words, *range(1, 31))]


def list_receptacle_names(max_receptacles: int) -> list[str]:
    """Return the names (``desk 1``) of receptacles in rooms of at most ``max_receptacles``.

    Each name has a leading space.
    """
    constants = load_alfworld_constants()
    max_count_by_class: Counter[str] = Counter()
    for scene_number in {*constants.TRAIN_SCENE_NUMBERS, *constants.TEST_SCENE_NUMBERS}:
        receptacles = load_floor_plan(scene_number).receptacles
        max_count_by_class |= Counter(receptacle.class_name.lower() for receptacle in receptacles)
    return [
        f" {class_name} {receptacle_number}"
        for class_name, max_count in sorted(max_count_by_class.items())
        for receptacle_number in range(1, min(max_count, max_receptacles) + 1)
    ]
