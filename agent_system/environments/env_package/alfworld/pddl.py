"""PDDL problem text of a room: locations and properties of its objects, and the goal."""

from typing import TYPE_CHECKING

from agent_system.environments.env_package.alfworld import layout

if TYPE_CHECKING:
    from agent_system.environments.env_package.alfworld.games import Room

START_LOCATION = "loc|0|0|0|30"
PROPERTIES = {
    "Heatable": "heatable",
    "Coolable": "coolable",
    "Cleanable": "cleanable",
    "Sliceable": "sliceable",
}
_ENCODING = str.maketrans(
    {"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_", " ": "", ",": "_comma_"}
)


def encode_symbol(identifier: str) -> str:
    """Return the PDDL symbol of an object id. The engine converts the symbol to a readable name.

    >>> encode_symbol("Mug|+00.20")
    'Mug_bar__plus_00_dot_20'
    """
    return identifier.translate(_ENCODING)


def write_problem(room: "Room", goal: str) -> str:
    """Return the PDDL problem of a ``games.Room``.

    ``goal`` is the goal clause, including the bracket that closes the problem.
    """
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
    lines += _receptacle_facts(room.receptacles)
    for receptacle_cls in receptacle_classes:
        fitting = [cls for cls in object_classes if layout.can_contain(receptacle_cls, cls)]
        lines += [f"(canContain {receptacle_cls}Type {cls}Type)" for cls in fitting]
    for thing in room.objects:
        lines += _object_facts(thing, room.receptacles[thing.receptacle_index])
    lines += [f"(atLocation agent1 {encode_symbol(START_LOCATION)})", ")", goal.strip()]
    return "\n".join(lines)


def _receptacle_facts(receptacles) -> list[str]:
    openable = layout.load_constants().OPENABLE_CLASS_SET
    facts = []
    for receptacle in receptacles:
        symbol = encode_symbol(receptacle.id)
        facts.append(f"(receptacleType {symbol} {receptacle.cls}Type)")
        facts.append(f"(receptacleAtLocation {symbol} {encode_symbol(receptacle.location)})")
        if receptacle.cls in openable:
            facts.append(f"(openable {symbol})")
    return facts


def _object_facts(thing, receptacle) -> list[str]:
    symbol = encode_symbol(thing.id)
    table = layout.load_constants().VAL_ACTION_OBJECTS
    facts = [
        f"(objectType {symbol} {thing.cls}Type)",
        f"(inReceptacle {symbol} {encode_symbol(receptacle.id)})",
        f"(objectAtLocation {symbol} {encode_symbol(receptacle.location)})",
        # Lamps can be switched on and not taken. All other objects can be taken.
        f"({'toggleable' if thing.cls in layout.LAMPS else 'pickupable'} {symbol})",
    ]
    return facts + [
        f"({predicate} {symbol})"
        for key, predicate in PROPERTIES.items()
        if thing.cls in table[key]
    ]
