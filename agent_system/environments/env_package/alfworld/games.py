"""Offline generation of ALFWorld games, as PDDL problems. Rooms are drawn from the wheel's floor
plans and solvable by construction.

These are not the official ALFWorld splits. They share engine, domain, grammar, object tables and
floor plans with them. The rooms may be smaller, and their data sources differ
(``alfworld_generated/pick``). Held-out games use the wheel's test floor plans and training games
its training floor plans. The two splits are drawn with different seeds.
"""

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any

from agent_system.environments.env_package.alfworld import layout
from agent_system.environments.env_package.alfworld.layout import FloorPlan, Receptacle
from agent_system.environments.env_package.alfworld.settings import (
    TASK_TYPES,
    AlfworldSettings,
    TaskGoal,
)
from verl.utils.seeds import derive_seed

# Part of each folder's name: increase it when the code changes the games for equal settings.
GENERATOR_VERSION = 1
START_LOCATION = "loc|0|0|0|30"
PROPERTIES = {
    "Heatable": "heatable",
    "Coolable": "coolable",
    "Cleanable": "cleanable",
    "Sliceable": "sliceable",
}
_SYMBOL_ENCODING = str.maketrans(
    {"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_", " ": "", ",": "_comma_"}
)
TOOLS = {
    "clean": ("SinkBasin", "Cleanable"),
    "heat": ("Microwave", "Heatable"),
    "cool": ("Fridge", "Coolable"),
}
# A room is drawn again if the floor plan lacks the tool, the lamp or a suitable object. After a
# thousand failures the settings most likely allow no room.
MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class SceneObject:
    """Object of a room: id in the scene, class, and the receptacle that it starts in."""

    id: str
    cls: str
    receptacle: Receptacle


@dataclass(frozen=True, slots=True)
class Room:
    """Random room: a subset of the receptacles of a floor plan, and the objects in them."""

    scene: int
    receptacles: tuple[Receptacle, ...]
    objects: tuple[SceneObject, ...]


def generate(settings: AlfworldSettings, split: str, index: int) -> dict[str, Any]:
    """Generate game ``index`` of ``split`` as ``{hash, kind, scene, description, problem, traj}``.

    The split ``val`` uses the test floor plans, any other name the training floor plans. The game
    depends only on ``split``, ``index`` and the settings of rooms. Game ``index`` has task type
    ``index % number of task types``. ``game_file`` converts the result to the engine's file. Raises
    ``RuntimeError`` if no draw succeeds.
    """
    task_type = settings.task_types[index % len(settings.task_types)]
    # The seed depends on the index, so game 700 can be generated without the games before it.
    rng = random.Random(derive_seed("alfworld", GENERATOR_VERSION, settings.seed, split, index))
    numbers = layout.list_scenes(TASK_TYPES[task_type], held_out=split == "val")
    for _ in range(MAX_DRAWS):
        floor_plan = layout.load_floor_plan(rng.choice(numbers))
        room_and_goal = draw_room(floor_plan, task_type, settings, rng)
        if room_and_goal is not None:
            return make_game(*room_and_goal, rng)
    raise RuntimeError(
        f"env.alfworld.receptacles={list(settings.receptacles)} and "
        f"env.alfworld.objects={list(settings.objects)} gave no {task_type!r} game in "
        f"{MAX_DRAWS} draws; fix: widen env.alfworld.receptacles"
    )


def draw_room(
    floor_plan: FloorPlan, task_type: str, settings: AlfworldSettings, rng: random.Random
) -> tuple[Room, TaskGoal] | None:
    """Draw furniture, a goal that this furniture allows, and objects. Return None if the floor plan
    does not fit.

    The room is solvable by construction:

    - Enough target objects start in receptacles that can be reached and opened.
    - No target object starts in a receptacle of the target class. That class can contain it.
    - The room has the tool or lamp that the task needs.
    """
    tool, property_name = TOOLS.get(task_type, ("", ""))
    receptacles = draw_receptacles(floor_plan, tool, rng.randint(*settings.receptacles), rng)
    needs_lamp = task_type == "light"
    lamps = [lamp for lamp in layout.LAMPS if needs_lamp and lamp in floor_plan.classes]
    if receptacles is None or (needs_lamp and not lamps):
        return None
    # Sorted because later draws depend on the order, and the order of a set differs by process.
    receptacle_classes = sorted({receptacle.cls for receptacle in receptacles})
    constants = layout.load_constants()
    fixed = constants.RECEPTACLES - constants.MOVABLE_RECEPTACLES_SET | set(layout.LAMPS)
    object_classes = []
    goals = []
    for cls in floor_plan.classes:
        containers = [place for place in receptacle_classes if layout.can_contain(place, cls)]
        if cls in fixed or not containers:
            continue
        object_classes.append(cls)
        if property_name and cls not in constants.VAL_ACTION_OBJECTS[property_name]:
            continue
        if needs_lamp:
            goals.append((cls, ""))
        elif len(containers) > 1:
            # With a single container, the object could start only in the target receptacle.
            goals += [(cls, place) for place in containers if place != tool]
    if not goals:
        return None
    object_class, target_class = rng.choice(goals)
    goal = TaskGoal(task_type, object_class, target_class, rng.choice(lamps) if lamps else "")
    other_count = rng.randint(*settings.objects)
    scene_objects = draw_objects(receptacles, object_classes, goal, other_count, rng)
    return Room(floor_plan.number, receptacles, scene_objects), goal


def draw_receptacles(
    floor_plan: FloorPlan, tool: str, count: int, rng: random.Random
) -> tuple[Receptacle, ...] | None:
    """Draw ``count`` receptacles of the floor plan, the tool among them, and return them in the
    plan's order.

    There are fewer if the plan has fewer locations. Return None if it lacks the tool. No two of
    them have the same location: going from one to the other would give "Nothing happens.".
    """
    order = list(floor_plan.receptacles)
    rng.shuffle(order)
    if tool:
        first_tool = next((receptacle for receptacle in order if receptacle.cls == tool), None)
        if first_tool is None:
            return None
        # The tool comes first, so that cutting the list to ``count`` keeps it.
        order.insert(0, first_tool)
    by_place: dict[str, Receptacle] = {}
    for receptacle in order:
        by_place.setdefault(receptacle.location, receptacle)
    kept = list(by_place.values())[:count]
    return tuple(receptacle for receptacle in floor_plan.receptacles if receptacle in kept)


def draw_objects(
    receptacles: tuple[Receptacle, ...],
    classes: list[str],
    goal: TaskGoal,
    other_count: int,
    rng: random.Random,
) -> tuple[SceneObject, ...]:
    """Draw the target objects, ``other_count`` more objects, and the lamp of a light task."""
    target_count = 2 if goal.task_type == "two" else 1
    # In a third of the rooms there is one more target object than the task needs.
    target_classes = [goal.object_class] * (target_count + (rng.random() < 1 / 3))
    other_classes = [cls for cls in classes if cls != goal.object_class]
    rng.shuffle(other_classes)
    scene_objects = []
    for cls in target_classes + other_classes[:other_count]:
        fitting = [
            receptacle
            for receptacle in receptacles
            if layout.can_contain(receptacle.cls, cls)
            and (cls, receptacle.cls) != (goal.object_class, goal.receptacle_class)
        ]
        scene_objects.append(SceneObject(_object_id(cls, rng), cls, rng.choice(fitting)))
    if goal.lamp_class:
        lamp_id = _object_id(goal.lamp_class, rng)
        furniture = [place for place in receptacles if place.cls in layout.LAMP_FURNITURE]
        receptacle = rng.choice(furniture or receptacles)
        scene_objects.append(SceneObject(lamp_id, goal.lamp_class, receptacle))
    return tuple(scene_objects)


def _object_id(cls: str, rng: random.Random) -> str:
    # ALFRED's ids consist of class and position. The position distinguishes objects of a class.
    return "|".join([cls, *(f"{rng.uniform(-3, 3):+06.2f}" for _ in range(3))])


def make_game(room: Room, goal: TaskGoal, rng: random.Random) -> dict[str, Any]:
    """Return the game of a room, with a trajectory record in ALFRED's format."""
    official = TASK_TYPES[goal.task_type]
    entry = layout.load_goals()[official]
    slots = {
        "obj": goal.object_class,
        "recep": goal.receptacle_class,
        "toggle": goal.lamp_class,
        "mrecep": "",
    }
    sentence = rng.choice(entry["templates"]).format(
        **{name: value.lower() for name, value in slots.items()}
    )
    game = {
        "kind": goal.task_type,
        "scene": room.scene,
        "description": sentence,
        # Some PDDL texts of the wheel's goal library contain "#" instead of "-".
        "problem": write_problem(room, entry["pddl"].format(**slots).replace("#", "-")),
        "traj": {
            "task_type": official,
            "pddl_params": {
                "object_target": goal.object_class,
                "parent_target": goal.receptacle_class,
                "toggle_target": goal.lamp_class,
                "mrecep_target": "",
                "object_sliced": False,
            },
            "scene": {"scene_num": room.scene},
        },
    }
    return {"hash": content_hash(game), **game}


def write_problem(room: Room, goal: str) -> str:
    """Return the PDDL problem of a room. ``goal`` includes the bracket that closes the problem."""
    # Sorted because the text is hashed: the order of a set differs between processes.
    receptacle_classes = sorted({receptacle.cls for receptacle in room.receptacles})
    object_classes = sorted({scene_object.cls for scene_object in room.objects})
    locations = sorted({receptacle.location for receptacle in room.receptacles} | {START_LOCATION})
    lines = ["(define (problem plan_generated)", "(:domain alfred)", "(:objects", "agent1 - agent"]
    lines += [f"{cls}Type - otype" for cls in object_classes]
    lines += [f"{cls}Type - rtype" for cls in receptacle_classes]
    lines += [f"{encode_symbol(thing.id)} - object" for thing in room.objects]
    lines += [f"{encode_symbol(receptacle.id)} - receptacle" for receptacle in room.receptacles]
    lines += [f"{encode_symbol(location)} - location" for location in locations]
    lines += [")", "(:init", "(= (total-cost) 0)"]
    for receptacle in room.receptacles:
        symbol = encode_symbol(receptacle.id)
        lines.append(f"(receptacleType {symbol} {receptacle.cls}Type)")
        lines.append(f"(receptacleAtLocation {symbol} {encode_symbol(receptacle.location)})")
        if receptacle.cls in layout.load_constants().OPENABLE_CLASS_SET:
            lines.append(f"(openable {symbol})")
    for receptacle_cls in receptacle_classes:
        fitting = [cls for cls in object_classes if layout.can_contain(receptacle_cls, cls)]
        lines += [f"(canContain {receptacle_cls}Type {cls}Type)" for cls in fitting]
    for thing in room.objects:
        lines += _object_facts(thing)
    lines += [f"(atLocation agent1 {encode_symbol(START_LOCATION)})", ")", goal.strip()]
    return "\n".join(lines)


def encode_symbol(identifier: str) -> str:
    """Return the PDDL symbol of an object id. The engine converts the symbol to a readable name.

    >>> encode_symbol("Mug|+00.20")
    'Mug_bar__plus_00_dot_20'
    """
    return identifier.translate(_SYMBOL_ENCODING)


def _object_facts(thing: SceneObject) -> list[str]:
    symbol = encode_symbol(thing.id)
    table = layout.load_constants().VAL_ACTION_OBJECTS
    # Lamps can be switched on and not taken. All other objects can be taken.
    use = "toggleable" if thing.cls in layout.LAMPS else "pickupable"
    properties = [predicate for key, predicate in PROPERTIES.items() if thing.cls in table[key]]
    return [
        f"(objectType {symbol} {thing.cls}Type)",
        f"(inReceptacle {symbol} {encode_symbol(thing.receptacle.id)})",
        f"(objectAtLocation {symbol} {encode_symbol(thing.receptacle.location)})",
        *(f"({predicate} {symbol})" for predicate in (use, *properties)),
    ]


def game_file(game: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``game.tw-pddl`` for a generated game, which the engine loads."""
    domain, grammar = layout.load_domain_and_grammar()
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", game["description"]),
        "pddl_problem": game["problem"],
        "solvable": True,
        # Unknown: it would need a planner.
        "walkthrough": None,
    }


def content_hash(game: dict[str, Any]) -> str:
    """Return a hash of all that the engine loads: domain, grammar, task sentence and problem."""
    domain, grammar = layout.load_domain_and_grammar()
    content_json = json.dumps([domain, grammar, game["description"], game["problem"]])
    return hashlib.blake2b(content_json.encode(), digest_size=10).hexdigest()
