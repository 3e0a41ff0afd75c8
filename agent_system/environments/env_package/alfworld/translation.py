"""PDDL problems as the planner reads them: translated once, and kept beside the games.

A translation takes as long as ten played episodes. Whoever makes one writes it to
``data_dir/translations``, where every other process, and every later run, finds it. Needs the
planner, so that it is imported by environment workers only.
"""

import base64
import functools
import hashlib
import json
import logging
import sys
import zlib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import fast_downward
from textworld.logic import Proposition, Type, TypeHierarchy, Variable

from verl.utils.files import atomic_write

logger = logging.getLogger(__name__)
IN_MEMORY = 256  # games kept translated by a process, about 0.2 MB each
FORMAT = 1  # of the files; a file of another one is not found


@dataclass(slots=True)
class Translation:
    """What translating one PDDL problem gives.

    ``actions`` maps a name to its parameters, each (name, type); ``start`` is filled in by the
    first state made of it, and ``known`` by states that meet an operator.
    """

    sas: str
    types_of_things: dict[str, str]
    actions: dict[str, list[tuple[str, str]]]
    static_facts: list[Proposition]
    types: TypeHierarchy
    known: dict[int, tuple[str, Any]] = field(default_factory=dict)
    start: tuple | None = None


@functools.lru_cache(maxsize=IN_MEMORY)
def translation_of(domain: str, problem: str, folder: Path) -> Translation:
    """The translation of a problem: from ``folder``, or made and written there."""
    path = folder / f"{_name(domain, problem)}.json"
    content = _read(path)
    if content is None:
        content = _translate(domain, problem)
        _write(path, content)
    return _translation(content)


def _name(domain: str, problem: str) -> str:
    key = json.dumps([FORMAT, _planner_version(), domain, problem])
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


@functools.cache
def _planner_version() -> str:
    # Asking takes a third as long as all else that a kept translation costs.
    return metadata.version("fast-downward-textworld")


def _translate(domain: str, problem: str) -> dict[str, Any]:
    """The content of a file; ``sys.argv`` stays as it was (the translator overwrites it)."""
    arguments = sys.argv
    try:
        translated: Any = fast_downward.pddl2sas(domain, problem)
    finally:
        sys.argv = arguments
    task, sas = translated
    facts = [_fact(atom) for atom in task.init]
    return {
        "sas": sas,
        "things": {thing.name: thing.type_name for thing in task.objects},
        "actions": {
            action.name: [(parameter.name, parameter.type_name) for parameter in action.parameters]
            for action in task.actions
        },
        "facts": [fact for fact in facts if fact is not None],
        "types": [(kind.name, kind.supertype_names) for kind in task.types],
    }


def _fact(atom: Any) -> tuple[str, list[str]] | None:
    """Name and arguments of a fact of the problem's ``:init`` as the engine states it; equalities,
    costs and distances are no facts.
    """
    translator = vars(fast_downward.translate)["pddl"]  # a module that it imports for itself
    if isinstance(atom, translator.conditions.Atom) and atom.predicate != "=":
        name = atom.predicate
        arguments = atom.args
    elif isinstance(atom, translator.f_expression.Assign) and atom.fluent.symbol != "total-cost":
        name = str(atom.expression.value)
        arguments = atom.fluent.args
    else:
        return None
    # A value that is a number: a distance between places.
    return None if name.isdigit() else (name, list(arguments))


def _translation(content: dict[str, Any]) -> Translation:
    things = content["things"]
    facts = [
        Proposition(name, [Variable(argument, things[argument]) for argument in arguments])
        for name, arguments in content["facts"]
    ]
    return Translation(
        content["sas"], things, content["actions"], facts, _hierarchy(content["types"])
    )


def _hierarchy(types: list[tuple[str, list[str]]]) -> TypeHierarchy:
    hierarchy = TypeHierarchy()
    parents_of: dict[str, list[str]] = {}
    for name, parents in types:
        # The translator lists "object" twice, its own and the domain's: the first one counts.
        parents_of.setdefault(name, parents)
    for name, parents in parents_of.items():
        hierarchy.add(Type(name, parents))
    return hierarchy


# A twelfth of the size; and a file that lost a byte does not unpack.
def _write(path: Path, content: dict[str, Any]) -> None:
    packed = zlib.compress(json.dumps(content).encode(), level=1)
    try:
        with atomic_write(path) as file:
            file.write(base64.b85encode(packed).decode())
    except OSError as error:
        logger.warning("translated games are not kept in %s: %s", path.parent, error)


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a file; None where there is none, or a damaged one."""
    try:
        return json.loads(zlib.decompress(base64.b85decode(path.read_text())))
    except (OSError, ValueError, zlib.error):
        return None
