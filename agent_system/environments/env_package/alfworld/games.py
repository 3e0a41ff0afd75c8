"""Offline generation of ALFWorld games, as PDDL problems.

A room is a random part of a floor plan from the Python package ``alfworld`` (the wheel). It is
solvable by construction. Generated games are not the official ALFWorld games. Engine, domain,
grammar, object tables and floor plans are the same. The rooms may be smaller, and the data sources
have other names (``alfworld_generated/pick``). Validation games use the wheel's test floor plans,
training games its training floor plans. The two splits are drawn with different seeds.
"""

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
from agent_system.environments.tasks import hash_json
from verl.utils.seeds import derive_seed

# Part of the folder name of the games. Increase it when the code makes other games than before.
GENERATOR_VERSION = 1
START_LOCATION = "loc|0|0|0|30"  # agent at the start of a game, as in ``Receptacle.location``
# Properties of object classes in ALFRED. In lower case, they are predicates of the PDDL domain.
PROPERTIES = ("Heatable", "Coolable", "Cleanable", "Sliceable")
_SYMBOL_ENCODING = str.maketrans(
    {"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_", " ": "", ",": "_comma_"}
)
# Maps a task type to the class of its tool, and to the property that the object must have.
TOOLS_AND_PROPERTIES = {
    "clean": ("SinkBasin", "Cleanable"),
    "heat": ("Microwave", "Heatable"),
    "cool": ("Fridge", "Coolable"),
}
# A room is drawn again if the floor plan lacks the tool, the lamp or a suitable object. After a
# thousand failures the settings most likely allow no room.
MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class SceneObject:
    """Object of a room, and the receptacle that contains it at the start."""

    id: str
    class_name: str
    receptacle: Receptacle


@dataclass(frozen=True, slots=True)
class Room:
    """Random room: a subset of the receptacles of a floor plan, and the objects in them."""

    scene: int  # number of the floor plan
    receptacles: tuple[Receptacle, ...]
    objects: tuple[SceneObject, ...]


def generate_game(settings: AlfworldSettings, split: str, index: int) -> dict[str, Any]:
    """Generate game ``index`` of ``split`` as ``{hash, kind, scene, description, problem, traj}``.

    ``kind`` is the task type, ``scene`` the number of the floor plan, ``problem`` PDDL text.
    ``traj`` describes the goal in the format of ALFRED's trajectory files. The game depends only on
    ``split``, ``index`` and ``settings``. The task types alternate with ``index``. Raises
    ``RuntimeError`` if none of ``MAX_DRAWS`` random rooms allows a goal of the task type.
    """
    task_type = settings.task_types[index % len(settings.task_types)]
    # The seed depends on the index, so game 700 can be generated without the games before it.
    rng = random.Random(derive_seed("alfworld", GENERATOR_VERSION, settings.seed, split, index))
    scene_numbers = layout.list_scenes(TASK_TYPES[task_type], is_validation=split == "val")
    for _ in range(MAX_DRAWS):
        floor_plan = layout.load_floor_plan(rng.choice(scene_numbers))
        room_and_goal = sample_room(floor_plan, task_type, settings, rng)
        if room_and_goal is not None:
            return build_room_game(*room_and_goal, rng)
    raise RuntimeError(
        f"env.alfworld.receptacles={list(settings.receptacles)} and "
        f"env.alfworld.objects={list(settings.objects)} gave no {task_type!r} game in "
        f"{MAX_DRAWS} draws; fix: widen env.alfworld.receptacles"
    )


def sample_room(
    floor_plan: FloorPlan, task_type: str, settings: AlfworldSettings, rng: random.Random
) -> tuple[Room, TaskGoal] | None:
    """Draw the receptacles and objects of a room, and a goal that can be reached in it.

    Return None if the floor plan lacks the tool, the lamp or an object for the task.

    The room is solvable by construction:

    - Enough target objects start in receptacles that can be reached and opened.
    - The receptacle of the goal can contain the target objects. None of them starts in it.
    - The room has the tool or lamp that the task needs.
    """
    tool_class, property_name = TOOLS_AND_PROPERTIES.get(task_type, ("", ""))
    receptacles = pick_receptacles(floor_plan, tool_class, rng.randint(*settings.receptacles), rng)
    needs_lamp = task_type == "light"
    lamp_classes = [
        lamp_class
        for lamp_class in layout.LAMP_CLASSES
        if needs_lamp and lamp_class in floor_plan.classes
    ]
    if receptacles is None or (needs_lamp and not lamp_classes):
        return None
    # Sorted because later draws depend on the order, and the order of a set differs by process.
    receptacle_classes = sorted({receptacle.class_name for receptacle in receptacles})
    constants = layout.load_alfworld_constants()
    fixed_classes = constants.RECEPTACLES - constants.MOVABLE_RECEPTACLES_SET | set(
        layout.LAMP_CLASSES
    )
    object_classes = []
    possible_goals = []
    for class_name in floor_plan.classes:
        containers = [
            container
            for container in receptacle_classes
            if layout.can_contain(container, class_name)
        ]
        if class_name in fixed_classes or not containers:
            continue
        object_classes.append(class_name)
        if property_name and class_name not in constants.VAL_ACTION_OBJECTS[property_name]:
            continue
        if needs_lamp:
            possible_goals.append((class_name, ""))
        elif len(containers) > 1:
            # Skip a class that fits into one receptacle class only: the object would already start
            # in the target receptacle.
            possible_goals += [
                (class_name, container) for container in containers if container != tool_class
            ]
    if not possible_goals:
        return None
    object_class, receptacle_class = rng.choice(possible_goals)
    goal = TaskGoal(
        task_type, object_class, receptacle_class, rng.choice(lamp_classes) if lamp_classes else ""
    )
    other_count = rng.randint(*settings.objects)
    scene_objects = pick_objects(receptacles, object_classes, goal, other_count, rng)
    return Room(floor_plan.number, receptacles, scene_objects), goal


def pick_receptacles(
    floor_plan: FloorPlan, tool_class: str, count: int, rng: random.Random
) -> tuple[Receptacle, ...] | None:
    """Draw ``count`` receptacles, or fewer, and return them in the order of the floor plan.

    One of them has class ``tool_class``, unless this is "". Return None if the plan has no such
    receptacle. All locations differ: to go between receptacles at one location would give "Nothing
    happens.".
    """
    shuffled_receptacles = list(floor_plan.receptacles)
    rng.shuffle(shuffled_receptacles)
    tools = [tool for tool in shuffled_receptacles if tool.class_name == tool_class]
    if tool_class and not tools:
        return None
    receptacles_by_location: dict[str, Receptacle] = {}
    # The tool comes first, so that it is among the first ``count`` receptacles.
    for receptacle in (*tools[:1], *shuffled_receptacles):
        receptacles_by_location.setdefault(receptacle.location, receptacle)
    chosen_receptacles = list(receptacles_by_location.values())[:count]
    return tuple(
        receptacle for receptacle in floor_plan.receptacles if receptacle in chosen_receptacles
    )


def pick_objects(
    receptacles: tuple[Receptacle, ...],
    object_classes: list[str],
    goal: TaskGoal,
    other_count: int,
    rng: random.Random,
) -> tuple[SceneObject, ...]:
    """Draw the objects of a room: target objects, ``other_count`` others, and a lamp if needed.

    A target object is one that the goal asks for. None of them starts in a target receptacle.
    """
    target_count = 2 if goal.task_type == "two" else 1
    # With a probability of 1/3 the room has one more target object than the task needs.
    target_classes = [goal.object_class] * (target_count + (rng.random() < 1 / 3))
    other_classes = [class_name for class_name in object_classes if class_name != goal.object_class]
    rng.shuffle(other_classes)
    scene_objects = []
    for class_name in target_classes + other_classes[:other_count]:
        possible_receptacles = [
            receptacle
            for receptacle in receptacles
            if layout.can_contain(receptacle.class_name, class_name)
            and (class_name, receptacle.class_name) != (goal.object_class, goal.receptacle_class)
        ]
        scene_objects.append(
            SceneObject(
                _sample_object_id(class_name, rng), class_name, rng.choice(possible_receptacles)
            )
        )
    if goal.lamp_class:
        lamp_id = _sample_object_id(goal.lamp_class, rng)
        lamp_receptacles = [
            receptacle
            for receptacle in receptacles
            if receptacle.class_name in layout.LAMP_FURNITURE_CLASSES
        ]
        receptacle = rng.choice(lamp_receptacles or receptacles)
        scene_objects.append(SceneObject(lamp_id, goal.lamp_class, receptacle))
    return tuple(scene_objects)


def _sample_object_id(class_name: str, rng: random.Random) -> str:
    # ALFRED's ids consist of class and position. Random positions make the ids distinct.
    return "|".join([class_name, *(f"{rng.uniform(-3, 3):+06.2f}" for _ in range(3))])


def build_room_game(room: Room, goal: TaskGoal, rng: random.Random) -> dict[str, Any]:
    """Return a game in which ``goal`` must be reached in ``room``.

    ``rng`` chooses the sentence that describes the task.
    """
    official_task_type = TASK_TYPES[goal.task_type]
    goal_entry = layout.load_alfworld_goals()[official_task_type]
    goal_classes = {
        "obj": goal.object_class,
        "recep": goal.receptacle_class,
        "toggle": goal.lamp_class,
        "mrecep": "",
    }
    sentence = rng.choice(goal_entry["templates"]).format(
        **{slot: class_name.lower() for slot, class_name in goal_classes.items()}
    )
    game = {
        "kind": goal.task_type,
        "scene": room.scene,
        "description": sentence,
        # Some PDDL texts of the alfworld wheel contain "#" instead of "-".
        "problem": format_pddl_problem(
            room, goal_entry["pddl"].format(**goal_classes).replace("#", "-")
        ),
        "traj": {
            "task_type": official_task_type,
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
    return {"hash": compute_content_hash(game), **game}


def format_pddl_problem(room: Room, goal_pddl: str) -> str:
    """Return the PDDL problem of a room.

    ``goal_pddl`` is the goal expression, followed by the bracket that closes the problem.
    """
    # Sorted because the text is hashed: the order of a set differs between processes.
    receptacle_classes = sorted({receptacle.class_name for receptacle in room.receptacles})
    object_classes = sorted({scene_object.class_name for scene_object in room.objects})
    locations = sorted({receptacle.location for receptacle in room.receptacles} | {START_LOCATION})
    lines = ["(define (problem plan_generated)", "(:domain alfred)", "(:objects", "agent1 - agent"]
    lines += [f"{class_name}Type - otype" for class_name in object_classes]
    lines += [f"{class_name}Type - rtype" for class_name in receptacle_classes]
    lines += [f"{encode_pddl_symbol(scene_object.id)} - object" for scene_object in room.objects]
    lines += [
        f"{encode_pddl_symbol(receptacle.id)} - receptacle" for receptacle in room.receptacles
    ]
    lines += [f"{encode_pddl_symbol(location)} - location" for location in locations]
    lines += [")", "(:init", "(= (total-cost) 0)"]
    for receptacle in room.receptacles:
        receptacle_symbol = encode_pddl_symbol(receptacle.id)
        lines.append(f"(receptacleType {receptacle_symbol} {receptacle.class_name}Type)")
        lines.append(
            f"(receptacleAtLocation {receptacle_symbol} {encode_pddl_symbol(receptacle.location)})"
        )
        if receptacle.class_name in layout.load_alfworld_constants().OPENABLE_CLASS_SET:
            lines.append(f"(openable {receptacle_symbol})")
    for receptacle_class in receptacle_classes:
        lines += [
            f"(canContain {receptacle_class}Type {class_name}Type)"
            for class_name in object_classes
            if layout.can_contain(receptacle_class, class_name)
        ]
    for scene_object in room.objects:
        lines += _list_object_facts(scene_object)
    lines += [f"(atLocation agent1 {encode_pddl_symbol(START_LOCATION)})", ")", goal_pddl.strip()]
    return "\n".join(lines)


def encode_pddl_symbol(object_id: str) -> str:
    """Return the PDDL symbol of an object id. The engine converts the symbol to a readable name.

    >>> encode_pddl_symbol("Mug|+00.20")
    'Mug_bar__plus_00_dot_20'
    """
    return object_id.translate(_SYMBOL_ENCODING)


def _list_object_facts(scene_object: SceneObject) -> list[str]:
    object_symbol = encode_pddl_symbol(scene_object.id)
    receptacle = scene_object.receptacle
    classes_by_property = layout.load_alfworld_constants().VAL_ACTION_OBJECTS
    # Lamps can be switched on but not taken. Other objects can be taken.
    use_predicate = "toggleable" if scene_object.class_name in layout.LAMP_CLASSES else "pickupable"
    property_predicates = [
        property_name.lower()
        for property_name in PROPERTIES
        if scene_object.class_name in classes_by_property[property_name]
    ]
    return [
        f"(objectType {object_symbol} {scene_object.class_name}Type)",
        f"(inReceptacle {object_symbol} {encode_pddl_symbol(receptacle.id)})",
        f"(objectAtLocation {object_symbol} {encode_pddl_symbol(receptacle.location)})",
        *(f"({predicate} {object_symbol})" for predicate in (use_predicate, *property_predicates)),
    ]


def build_game_file_content(game: dict[str, Any]) -> dict[str, Any]:
    """Convert a generated game to the content of ``game.tw-pddl``, which the engine loads."""
    domain, grammar = layout.load_domain_and_grammar()
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", game["description"]),
        "pddl_problem": game["problem"],
        "solvable": True,
        # No walkthrough is known: a planner would have to compute it.
        "walkthrough": None,
    }


def compute_content_hash(game: dict[str, Any]) -> str:
    """Return a hash of all that the engine loads: domain, grammar, task sentence and problem."""
    domain, grammar = layout.load_domain_and_grammar()
    return hash_json([domain, grammar, game["description"], game["problem"]], digest_size=10)
