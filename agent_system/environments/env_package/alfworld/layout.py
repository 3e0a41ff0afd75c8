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
    cls: str
    location: str


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """One of the 120 scenes: its receptacles (sorted by id) and its object classes (sorted)."""

    number: int
    receptacles: tuple[Receptacle, ...]
    classes: tuple[str, ...]


def load_constants():
    """Import and return the wheel's module of object classes, properties and scene splits."""
    from alfworld.gen import constants

    return constants


def load_goals() -> dict[str, dict]:
    """Return the wheel's goal library: PDDL goal and task sentences by official task type."""
    from alfworld.gen import goal_library

    return goal_library.gdict


@functools.cache
def load_domain_and_grammar() -> tuple[str, str]:
    """Return the PDDL domain and the text grammar, which all games share.

    The grammar contains the placeholder ``UNKNOWN GOAL`` instead of a task sentence.
    """
    data = resources.files("alfworld") / "data"
    return (data / "alfred.pddl").read_text(), (data / "alfred.twl2").read_text()


def list_scenes(task_type: str, held_out: bool) -> list[int]:
    """Return the numbers of the scenes that suit a task type (official name), sorted.

    ``held_out`` selects the wheel's test floor plans, otherwise its training floor plans.
    """
    constants = load_constants()
    scene_ranges = [
        constants.SCENE_TYPE[room_type] for room_type in sorted(constants.GOALS_VALID[task_type])
    ]
    split_numbers = constants.TEST_SCENE_NUMBERS if held_out else constants.TRAIN_SCENE_NUMBERS
    return [
        number
        for number in sorted(split_numbers)
        if any(number in scene_range for scene_range in scene_ranges)
    ]


@functools.cache
def load_floor_plan(number: int) -> FloorPlan:
    """Return the floor plan of scene ``number``.

    The scene file lists the agent's pose at each receptacle. A receptacle class without a pose gets
    one receptacle, at a location that no other receptacle uses.
    """
    layout_folder = resources.files("alfworld") / "gen" / "layouts"
    poses = json.loads((layout_folder / f"FloorPlan{number}-openable.json").read_text())
    classes = sorted(
        set(json.loads((layout_folder / f"FloorPlan{number}-objects.json").read_text()))
    )
    receptacles = []
    for receptacle_id, (x, z, rotation, horizon) in poses.items():
        # The engine reads the class from the id: ``Sink|..|SinkBasin`` is a ``SinkBasin``.
        cls = receptacle_id.split("|", 1)[0] + ("Basin" if receptacle_id.endswith("Basin") else "")
        if is_furniture(cls):
            # Poses are in metres and degrees. As in ALFRED, location ids use quarters of a metre
            # and quarter turns.
            location_id = f"loc|{round(x * 4)}|{round(z * 4)}|{int(rotation) // 90}|{int(horizon)}"
            receptacles.append(Receptacle(receptacle_id, cls, location_id))
    classes_with_pose = {receptacle.cls for receptacle in receptacles}
    excluded_classes = classes_with_pose.union(SINK_CLASSES_BY_BASIN.values())
    missing_classes = [cls for cls in classes if is_furniture(cls) and cls not in excluded_classes]
    for class_index, cls in enumerate(missing_classes):
        # The engine makes the name "sinkbasin" of the id "Sink|..|SinkBasin". An id that starts
        # with "SinkBasin" would get the name "sinkbasinbasin".
        id_prefix, id_suffix = (
            (SINK_CLASSES_BY_BASIN[cls], f"|{cls}") if cls in SINK_CLASSES_BY_BASIN else (cls, "")
        )
        receptacle_id = f"{id_prefix}|+{class_index:02d}.00|+00.50|+{class_index:02d}.25{id_suffix}"
        # Use a different x coordinate for each, so that all locations differ.
        receptacles.append(
            Receptacle(receptacle_id, cls, f"loc|{class_index + 20}|{class_index}|0|30")
        )
    receptacles.sort(key=lambda receptacle: receptacle.id)
    return FloorPlan(number, tuple(receptacles), tuple(classes))


def is_furniture(cls: str) -> bool:
    """Return True if the class can contain objects and cannot be moved."""
    constants = load_constants()
    return cls in constants.VAL_RECEPTACLE_OBJECTS and cls not in constants.MOVABLE_RECEPTACLES_SET


def can_contain(receptacle_cls: str, object_cls: str) -> bool:
    """Return True if the wheel's table allows ``object_cls`` in or on ``receptacle_cls``."""
    return object_cls in load_constants().VAL_RECEPTACLE_OBJECTS.get(receptacle_cls, ())


def list_class_words() -> list[str]:
    """Return the words of object names: all class names and the numbers 1 to 30.

    A new tokenizer encodes each of them as one token. Each has a leading space.
    """
    constants = load_constants()
    names = sorted(
        {name.lower() for name in constants.OBJECTS_SET | set(constants.VAL_RECEPTACLE_OBJECTS)}
    )
    return [f" {name}" for name in names] + [f" {number}" for number in range(1, 31)]


def list_receptacle_names(max_receptacles: int) -> list[str]:
    """Return the names (``desk 1``) of receptacles that rooms can contain, with a leading space.

    A room has at most ``max_receptacles`` receptacles.
    """
    constants = load_constants()
    max_counts: Counter[str] = Counter()
    for number in {*constants.TRAIN_SCENE_NUMBERS, *constants.TEST_SCENE_NUMBERS}:
        receptacles = load_floor_plan(number).receptacles
        max_counts |= Counter(receptacle.cls.lower() for receptacle in receptacles)
    return [
        f" {name} {number}"
        for name, count in sorted(max_counts.items())
        for number in range(1, min(count, max_receptacles) + 1)
    ]
