"""What a room can look like: floor plans, receptacles and object classes, read from the installed
alfworld wheel.

Only the wheel's data modules and JSON files are touched: ``alfworld.info`` is left alone because
importing it creates a cache folder and sets ``ALFWORLD_DATA``.
"""

import functools
import importlib.util
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LAMPS = ("DeskLamp", "FloorLamp")
BASINS = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}
# Where a lamp is put, in this order of preference: the furniture ALFRED scenes have lamps on or
# beside.
LAMP_FURNITURE = ("SideTable", "Desk", "Dresser", "Shelf", "DiningTable", "CoffeeTable")


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A piece of furniture: scene id (``Drawer|+00.95|+00.22|-02.20``), class and the place one
    stands at to use it.
    """

    id: str
    cls: str
    location: str


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """One of the 120 scenes: its receptacles (sorted by id) and the object classes that occur in it
    (sorted).
    """

    number: int
    receptacles: tuple[Receptacle, ...]
    classes: tuple[str, ...]


@functools.cache
def constants():
    """The wheel's table of classes, properties and scene splits."""
    from alfworld.gen import constants as module

    return module


@functools.cache
def goals() -> dict[str, dict]:
    """The wheel's goal library: PDDL goal and task sentences by official task type."""
    from alfworld.gen import goal_library

    return goal_library.gdict


@functools.cache
def wheel() -> Path:
    """The folder of the installed ``alfworld`` package.

    Raises ``ModuleNotFoundError`` where it is not installed.
    """
    spec = importlib.util.find_spec("alfworld")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'alfworld'", name="alfworld")
    return Path(spec.origin).parent


@functools.cache
def domain_and_grammar() -> tuple[str, str]:
    """The PDDL domain and the text grammar every ALFWorld game shares (the task sentence reads
    ``UNKNOWN GOAL``).
    """
    data = wheel() / "data"
    return (data / "alfred.pddl").read_text(), (data / "alfred.twl2").read_text()


def scenes(task_type: str, held_out: bool) -> list[int]:
    """Scene numbers a task type (official name) can be set in; the wheel's own train/test split of
    floor plans.
    """
    table = constants()
    rooms = [table.SCENE_TYPE[room] for room in sorted(table.GOALS_VALID[task_type])]
    numbers = table.TEST_SCENE_NUMBERS if held_out else table.TRAIN_SCENE_NUMBERS
    return [number for number in sorted(numbers) if any(number in room for room in rooms)]


@functools.cache
def floor_plan(number: int) -> FloorPlan:
    """Read one scene.

    Receptacle classes listed without a viewing pose get one instance at a place of their own.
    """
    layouts = wheel() / "gen" / "layouts"
    poses = json.loads((layouts / f"FloorPlan{number}-openable.json").read_text())
    classes = sorted(set(json.loads((layouts / f"FloorPlan{number}-objects.json").read_text())))
    found = []
    for identifier, (x, z, rotation, horizon) in poses.items():
        cls = receptacle_class(identifier)
        if is_furniture(cls):
            # Poses are in metres, the ids of places in quarters of a metre and quarters of a turn,
            # as ALFRED's.
            place = f"loc|{round(x * 4)}|{round(z * 4)}|{int(rotation) // 90}|{int(horizon)}"
            found.append(Receptacle(identifier, cls, place))
    posed = {receptacle.cls for receptacle in found}
    missing = [
        cls
        for cls in classes
        if is_furniture(cls) and cls not in posed and cls not in BASINS.values()
    ]
    for index, cls in enumerate(missing):
        # The engine names "Sink|..|SinkBasin" sinkbasin; an id that starts with SinkBasin would
        # read sinkbasinbasin.
        stem, tail = (BASINS[cls], f"|{cls}") if cls in BASINS else (cls, "")
        identifier = f"{stem}|+{index:02d}.00|+00.50|+{index:02d}.25{tail}"
        # Another x for each, so that no two of them share a place.
        found.append(Receptacle(identifier, cls, f"loc|{index + 20}|{index}|0|30"))
    return FloorPlan(
        number, tuple(sorted(found, key=lambda receptacle: receptacle.id)), tuple(classes)
    )


def receptacle_class(identifier: str) -> str:
    """The class of a scene id as the engine names it: ``Sink|..|SinkBasin`` is a sinkbasin."""
    stem = identifier.split("|", 1)[0]
    return f"{stem}Basin" if identifier.endswith("Basin") else stem


def is_furniture(cls: str) -> bool:
    """Whether objects can be put in or on this class and it stays where it is."""
    table = constants()
    return cls in table.VAL_RECEPTACLE_OBJECTS and cls not in table.MOVABLE_RECEPTACLES_SET


def can_contain(receptacle_cls: str, object_cls: str) -> bool:
    """Whether the wheel's table lets ``object_cls`` be in or on ``receptacle_cls``."""
    return object_cls in constants().VAL_RECEPTACLE_OBJECTS.get(receptacle_cls, ())


def portable(plan: FloorPlan) -> list[str]:
    """Object classes of the scene that can be carried, sorted."""
    fixed = constants().RECEPTACLES - constants().MOVABLE_RECEPTACLES_SET
    held = set().union(*(constants().VAL_RECEPTACLE_OBJECTS[r.cls] for r in plan.receptacles))
    return [cls for cls in plan.classes if cls in held and cls not in fixed and cls not in LAMPS]


def words() -> list[str]:
    """Names of everything the scenes hold, and instance numbers, each with the space before it."""
    table = constants()
    names = sorted({name.lower() for name in table.OBJECTS_SET | set(table.VAL_RECEPTACLE_OBJECTS)})
    return [f" {name}" for name in names] + [f" {number}" for number in range(1, 31)]


def receptacle_names(most: int) -> list[str]:
    """Names that receptacles of a room of ``most`` can have, each with the space before it."""
    plans = [floor_plan(number) for number in sorted(all_scenes())]
    largest: Counter[str] = Counter()
    for plan in plans:
        largest |= Counter(receptacle.cls.lower() for receptacle in plan.receptacles)
    return [
        f" {name} {number}"
        for name, count in sorted(largest.items())
        for number in range(1, min(count, most) + 1)
    ]


def all_scenes() -> set[int]:
    """The numbers of all scenes."""
    table = constants()
    return {*table.TRAIN_SCENE_NUMBERS, *table.TEST_SCENE_NUMBERS}
