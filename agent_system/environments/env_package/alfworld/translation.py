"""Translations of PDDL problems into the planner's format (SAS), cached on disk.

A translation takes as long as ten episodes. It is written to ``data_dir/translations``, from where
other processes and later runs read it. Only environment workers import this module, because it
needs the planner.
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
MAX_CACHED_TRANSLATIONS = 256  # translations cached by a process, about 0.2 MB each
FILE_FORMAT = 1  # version of the file format; part of a file's name, so older files are not read


@dataclass(slots=True)
class Translation:
    """Translated PDDL problem.

    ``actions`` maps an action name to its parameters, each (name, type). ``start_state`` is the
    initial state, set when the first ``MemoState`` is made. ``known_operators`` caches label and
    action by operator id.
    """

    sas: str
    types_of_things: dict[str, str]
    actions: dict[str, list[tuple[str, str]]]
    static_facts: list[Proposition]
    types: TypeHierarchy
    known_operators: dict[int, tuple[str, Any]] = field(default_factory=dict)
    start_state: tuple | None = None


@functools.lru_cache(maxsize=MAX_CACHED_TRANSLATIONS)
def load_translation(domain: str, problem: str, folder: Path) -> Translation:
    """Return the translation of a problem: read from ``folder``, or made and written there."""
    path = folder / f"{_file_name(domain, problem)}.json"
    content = _read_file(path)
    if content is None:
        content = _translate_problem(domain, problem)
        _write_file(path, content)
    return _build_translation(content)


def _file_name(domain: str, problem: str) -> str:
    key = json.dumps([FILE_FORMAT, _planner_version(), domain, problem])
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


@functools.cache
def _planner_version() -> str:
    # Cached because it is slow: it would add a third to the time of reading a translation.
    return metadata.version("fast-downward-textworld")


def _translate_problem(domain: str, problem: str) -> dict[str, Any]:
    """Translate a problem and return the content of its file, a JSON object.

    The translator overwrites ``sys.argv``, which is restored.
    """
    arguments = sys.argv
    try:
        translated: Any = fast_downward.pddl2sas(domain, problem)
    finally:
        sys.argv = arguments
    task, sas = translated
    facts = [_convert_fact(atom) for atom in task.init]
    return {
        "sas": sas,
        "things": {pddl_object.name: pddl_object.type_name for pddl_object in task.objects},
        "actions": {
            action.name: [(parameter.name, parameter.type_name) for parameter in action.parameters]
            for action in task.actions
        },
        "facts": [fact for fact in facts if fact is not None],
        "types": [(pddl_type.name, pddl_type.supertype_names) for pddl_type in task.types],
    }


def _convert_fact(atom: Any) -> tuple[str, list[str]] | None:
    """Return name and arguments of a fact of the problem's ``:init`` section.

    Return None for equalities, costs and distances.
    """
    translator = vars(fast_downward.translate)["pddl"]  # module without a public import path
    if isinstance(atom, translator.conditions.Atom) and atom.predicate != "=":
        name = atom.predicate
        arguments = atom.args
    elif isinstance(atom, translator.f_expression.Assign) and atom.fluent.symbol != "total-cost":
        name = str(atom.expression.value)
        arguments = atom.fluent.args
    else:
        return None
    # A numeric value is a distance between places.
    return None if name.isdigit() else (name, list(arguments))


def _build_translation(content: dict[str, Any]) -> Translation:
    object_types = content["things"]
    facts = [
        Proposition(name, [Variable(argument, object_types[argument]) for argument in arguments])
        for name, arguments in content["facts"]
    ]
    return Translation(
        content["sas"], object_types, content["actions"], facts, _build_hierarchy(content["types"])
    )


def _build_hierarchy(types: list[tuple[str, list[str]]]) -> TypeHierarchy:
    hierarchy = TypeHierarchy()
    parents_of: dict[str, list[str]] = {}
    for name, parents in types:
        # The translator lists the type "object" twice, from itself and from the domain. Use the
        # first.
        parents_of.setdefault(name, parents)
    for name, parents in parents_of.items():
        hierarchy.add(Type(name, parents))
    return hierarchy


# Compression divides the size by twelve, and zlib's checksum detects damaged files.
def _write_file(path: Path, content: dict[str, Any]) -> None:
    packed = zlib.compress(json.dumps(content).encode(), level=1)
    try:
        with atomic_write(path) as file:
            file.write(base64.b85encode(packed).decode())
    except OSError as error:
        logger.warning("cannot cache the translation of a game in %s: %s", path.parent, error)


def _read_file(path: Path) -> dict[str, Any] | None:
    """Return the content of a file, or None if it is missing or damaged."""
    try:
        return json.loads(zlib.decompress(base64.b85decode(path.read_text())))
    except (OSError, ValueError, zlib.error):
        return None
