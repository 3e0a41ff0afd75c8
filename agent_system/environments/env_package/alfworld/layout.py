"""Floor plans, receptacles and object classes, read from the installed alfworld wheel.

Only the wheel's data modules and files are read. They are imported on first use, because importing
``alfworld`` creates a cache folder and sets ``ALFWORLD_DATA``.
"""

import functools
import json
from collections import Counter
from dataclasses import dataclass
from importlib import resources

LAMPS = ("DeskLamp", "FloorLamp")
BASINS = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}
# Receptacle classes for lamps: furniture that has lamps on or near it in ALFRED scenes.
LAMP_FURNITURE = ("SideTable", "Desk", "Dresser", "Shelf", "DiningTable", "CoffeeTable")


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
    """Import the wheel's module with its tables of classes, properties and scene splits."""
    from alfworld.gen import constants

    return constants


def load_goals() -> dict[str, dict]:
    """Return the wheel's goal library: PDDL goal and task sentences by official task type."""
    from alfworld.gen import goal_library

    return goal_library.gdict


@functools.cache
def load_domain_and_grammar() -> tuple[str, str]:
    """Return the PDDL domain and the text grammar of all games, with the task ``UNKNOWN GOAL``."""
    data = resources.files("alfworld") / "data"
    return (data / "alfred.pddl").read_text(), (data / "alfred.twl2").read_text()


def list_scenes(task_type: str, held_out: bool) -> list[int]:
    """Return the numbers of the scenes that suit a task type (official name), sorted.

    ``held_out`` selects the wheel's test floor plans, otherwise its training floor plans.
    """
    table = load_constants()
    rooms = [table.SCENE_TYPE[room] for room in sorted(table.GOALS_VALID[task_type])]
    numbers = table.TEST_SCENE_NUMBERS if held_out else table.TRAIN_SCENE_NUMBERS
    return [number for number in sorted(numbers) if any(number in room for room in rooms)]


@functools.cache
def load_floor_plan(number: int) -> FloorPlan:
    """Return the floor plan of scene ``number``.

    A receptacle class without a pose of the agent in the scene file gets one receptacle at a
    separate location.
    """
    layouts = resources.files("alfworld") / "gen" / "layouts"
    poses = json.loads((layouts / f"FloorPlan{number}-openable.json").read_text())
    classes = sorted(set(json.loads((layouts / f"FloorPlan{number}-objects.json").read_text())))
    receptacles = []
    for identifier, (x, z, rotation, horizon) in poses.items():
        # The engine reads the class from the id: ``Sink|..|SinkBasin`` is a ``SinkBasin``.
        cls = identifier.split("|", 1)[0] + ("Basin" if identifier.endswith("Basin") else "")
        if is_furniture(cls):
            # Poses are in metres and degrees. As in ALFRED, location ids use quarters of a metre
            # and quarter turns.
            location_id = f"loc|{round(x * 4)}|{round(z * 4)}|{int(rotation) // 90}|{int(horizon)}"
            receptacles.append(Receptacle(identifier, cls, location_id))
    posed = {receptacle.cls for receptacle in receptacles}
    excluded = posed.union(BASINS.values())
    missing_classes = [cls for cls in classes if is_furniture(cls) and cls not in excluded]
    for index, cls in enumerate(missing_classes):
        # The engine makes the name "sinkbasin" of the id "Sink|..|SinkBasin". An id that starts
        # with "SinkBasin" would get the name "sinkbasinbasin".
        stem, tail = (BASINS[cls], f"|{cls}") if cls in BASINS else (cls, "")
        identifier = f"{stem}|+{index:02d}.00|+00.50|+{index:02d}.25{tail}"
        # The x coordinates differ, so that no two of them share a location.
        receptacles.append(Receptacle(identifier, cls, f"loc|{index + 20}|{index}|0|30"))
    receptacles.sort(key=lambda receptacle: receptacle.id)
    return FloorPlan(number, tuple(receptacles), tuple(classes))


def is_furniture(cls: str) -> bool:
    """Return True if the class can contain objects and cannot be moved."""
    table = load_constants()
    return cls in table.VAL_RECEPTACLE_OBJECTS and cls not in table.MOVABLE_RECEPTACLES_SET


def can_contain(receptacle_cls: str, object_cls: str) -> bool:
    """Return True if the wheel's table allows ``object_cls`` in or on ``receptacle_cls``."""
    return object_cls in load_constants().VAL_RECEPTACLE_OBJECTS.get(receptacle_cls, ())


def list_words() -> list[str]:
    """Return the names of all classes, and the numbers 1 to 30, each with a leading space."""
    table = load_constants()
    names = sorted({name.lower() for name in table.OBJECTS_SET | set(table.VAL_RECEPTACLE_OBJECTS)})
    return [f" {name}" for name in names] + [f" {number}" for number in range(1, 31)]


def list_receptacle_names(max_receptacles: int) -> list[str]:
    """Return all receptacle names (``desk 1``) that are possible in rooms of at most
    ``max_receptacles`` receptacles, each with a leading space.
    """
    table = load_constants()
    max_counts: Counter[str] = Counter()
    for number in {*table.TRAIN_SCENE_NUMBERS, *table.TEST_SCENE_NUMBERS}:
        receptacles = load_floor_plan(number).receptacles
        max_counts |= Counter(receptacle.cls.lower() for receptacle in receptacles)
    return [
        f" {name} {number}"
        for name, count in sorted(max_counts.items())
        for number in range(1, min(count, max_receptacles) + 1)
    ]
