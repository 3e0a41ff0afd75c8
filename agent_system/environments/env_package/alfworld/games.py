"""Generate ALFWorld games offline: rooms drawn from the wheel's floor plans, solvable by
construction.

These are not the official ALFWorld splits. They use the same engine, domain, grammar, object tables
and floor plans, but the rooms are drawn here, may be smaller, and carry data sources of their own
(``alfworld_generated/pick``). Held-out games come from the wheel's test floor plans, training games
from its training floor plans, and the draws of the two have different seeds.
"""

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any

from agent_system.environments.env_package.alfworld import layout
from agent_system.environments.env_package.alfworld.layout import FloorPlan, Receptacle
from agent_system.environments.env_package.alfworld.pddl import problem_text
from agent_system.environments.env_package.alfworld.settings import TASK_TYPES, AlfworldSettings
from verl.utils.seeds import derive_seed

GENERATOR = 1  # part of every store's name: raise it when the same settings would draw other games
TOOLS = {
    "clean": ("SinkBasin", "Cleanable"),
    "heat": ("Microwave", "Heatable"),
    "cool": ("Fridge", "Coolable"),
}
# A draw fails where a floor plan lacks the tool, the lamp or an object that fits; settings that
# fail a thousand times most likely leave no room at all.
ATTEMPTS = 1000


@dataclass(frozen=True, slots=True)
class SceneObject:
    """An object: scene id, class, and the index of the receptacle it starts in."""

    id: str
    cls: str
    inside: int


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked for: short task type, object class, receptacle class ("" for light), lamp class
    ("" elsewhere).
    """

    kind: str
    object: str
    receptacle: str
    lamp: str


@dataclass(frozen=True, slots=True)
class Room:
    """A drawn room: the receptacles kept of a floor plan and the objects put in them."""

    scene: int
    receptacles: tuple[Receptacle, ...]
    objects: tuple[SceneObject, ...]


def generate(settings: AlfworldSettings, split: str, index: int) -> dict[str, Any]:
    """Game ``index`` of ``split`` (``val`` is held out, any other name draws from the training
    floor plans).

    Depends on the settings that shape rooms, on ``split`` and on ``index`` alone. Task types take
    turns. Returns ``{hash, kind, scene, description, problem, traj}``; ``game_file`` makes the
    engine's file of it. Raises ``RuntimeError`` when the settings leave no possible room.
    """
    kind = settings.task_types[index % len(settings.task_types)]
    # By index and not one after the other: a worker draws game 700 without the 699 before it.
    rng = random.Random(derive_seed("alfworld", GENERATOR, settings.seed, split, index))
    numbers = layout.scenes(TASK_TYPES[kind], held_out=split == "val")
    for _ in range(ATTEMPTS):
        drawn = draw_room(layout.floor_plan(rng.choice(numbers)), kind, settings, rng)
        if drawn is not None:
            return describe(*drawn, rng)
    raise RuntimeError(
        f"no {kind!r} game with receptacles={list(settings.receptacles)} and "
        f"objects={list(settings.objects)} in "
        f"{ATTEMPTS} draws: widen env.alfworld.receptacles"
    )


def draw_room(
    plan: FloorPlan, kind: str, settings: AlfworldSettings, rng: random.Random
) -> tuple[Room, Goal] | None:
    """Draw furniture, a goal that this furniture allows, and objects; ``None`` where the floor plan
    does not fit.

    Solvable by construction: enough target objects lie in receptacles one can walk to (and open),
    none lies where it is wanted, the wanted receptacle may hold it, and the tool or lamp the task
    needs is there.
    """
    tool, property_name = TOOLS.get(kind, ("", ""))
    receptacles = draw_receptacles(plan, tool, rng.randint(*settings.receptacles), rng)
    lamps = [lamp for lamp in layout.LAMPS if lamp in plan.classes] if kind == "light" else []
    if receptacles is None or (kind == "light" and not lamps):
        return None
    # Sorted, for the draw from what is built on it must not follow the order of a set.
    present = sorted({receptacle.cls for receptacle in receptacles})
    objects = [
        cls
        for cls in layout.portable(plan)
        if any(layout.can_contain(place, cls) for place in present)
    ]
    goals = []
    for cls in objects:
        if property_name and cls not in layout.constants().VAL_ACTION_OBJECTS[property_name]:
            continue
        homes = [place for place in present if layout.can_contain(place, cls)]
        # ``homes[1:]``: where the class fits into one kind of place only, no copy of it could start
        # elsewhere.
        goals += (
            [(cls, "")]
            if kind == "light"
            else [(cls, place) for place in homes if place != tool and homes[1:]]
        )
    if not goals:
        return None
    target, wanted = rng.choice(goals)
    goal = Goal(kind, target, wanted, rng.choice(lamps) if lamps else "")
    things = draw_objects(receptacles, objects, goal, rng.randint(*settings.objects), rng)
    return Room(plan.number, receptacles, things), goal


def draw_receptacles(
    plan: FloorPlan, tool: str, count: int, rng: random.Random
) -> tuple[Receptacle, ...] | None:
    """``count`` receptacles of the floor plan in its order, the tool's among them; ``None`` where
    it has no tool.

    No two of them are used from the same place: walking from one to the other would read "Nothing
    happens.".
    """
    order = list(plan.receptacles)
    rng.shuffle(order)
    if tool:
        tools = [receptacle for receptacle in order if receptacle.cls == tool]
        if not tools:
            return None
        order.remove(tools[0])
        # The tool goes to the front, so that cutting the list to ``count`` cannot lose it.
        order.insert(0, tools[0])
    by_place: dict[str, Receptacle] = {}
    for receptacle in order:
        by_place.setdefault(receptacle.location, receptacle)
    kept = set(list(by_place.values())[:count])
    return tuple(receptacle for receptacle in plan.receptacles if receptacle in kept)


def draw_objects(
    receptacles: tuple[Receptacle, ...],
    classes: list[str],
    goal: Goal,
    others: int,
    rng: random.Random,
) -> tuple[SceneObject, ...]:
    """The targets (away from where they are wanted), ``others`` more objects, and the lamp of a
    light task.
    """
    least = 2 if goal.kind == "two" else 1
    # In a third of the rooms one more than is needed: which one is taken is then a choice.
    chosen = [goal.object] * (least + (rng.random() < 1 / 3))
    rest = [cls for cls in classes if cls != goal.object]
    rng.shuffle(rest)
    things = []
    for cls in chosen + rest[:others]:
        homes = [
            index
            for index, receptacle in enumerate(receptacles)
            if layout.can_contain(receptacle.cls, cls)
            and (cls, receptacle.cls) != (goal.object, goal.receptacle)
        ]
        things.append(SceneObject(_object_id(cls, rng), cls, rng.choice(homes)))
    if goal.lamp:
        furniture = [
            i for i, receptacle in enumerate(receptacles) if receptacle.cls in layout.LAMP_FURNITURE
        ]
        things.append(
            SceneObject(
                _object_id(goal.lamp, rng),
                goal.lamp,
                rng.choice(furniture or range(len(receptacles))),
            )
        )
    return tuple(things)


def _object_id(cls: str, rng: random.Random) -> str:
    # ALFRED's ids are class and position; positions make two of a class differ.
    return "|".join([cls, *(f"{rng.uniform(-3, 3):+06.2f}" for _ in range(3))])


def describe(room: Room, goal: Goal, rng: random.Random) -> dict[str, Any]:
    """The game of a room: task sentence from the wheel's templates, PDDL problem, ALFRED-style
    trajectory record.
    """
    official = TASK_TYPES[goal.kind]
    entry = layout.goals()[official]
    slots = {"obj": goal.object, "recep": goal.receptacle, "toggle": goal.lamp, "mrecep": ""}
    sentence = rng.choice(entry["templates"]).format(
        **{name: value.lower() for name, value in slots.items()}
    )
    parameters = {
        "object_target": goal.object,
        "parent_target": goal.receptacle,
        "toggle_target": goal.lamp,
        "mrecep_target": "",
        "object_sliced": False,
    }
    game = {
        "kind": goal.kind,
        "scene": room.scene,
        "description": sentence,
        # The library writes # for - in some of its PDDL.
        "problem": problem_text(room, entry["pddl"].format(**slots).replace("#", "-")),
        "traj": {
            "task_type": official,
            "pddl_params": parameters,
            "scene": {"scene_num": room.scene},
        },
    }
    return {"hash": content_hash(game), **game}


def game_file(game: dict[str, Any]) -> dict[str, Any]:
    """The content of ``game.tw-pddl`` for a generated game: what the engine loads."""
    domain, grammar = layout.domain_and_grammar()
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", game["description"]),
        "pddl_problem": game["problem"],
        "solvable": True,
        # Not known without a planner.
        "walkthrough": None,
    }


def content_hash(game: dict[str, Any]) -> str:
    """Hash of everything the engine will load: domain, grammar, task sentence and problem."""
    domain, grammar = layout.domain_and_grammar()
    parts = json.dumps([domain, grammar, game["description"], game["problem"]])
    return hashlib.blake2b(parts.encode(), digest_size=10).hexdigest()
