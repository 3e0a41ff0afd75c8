"""Planner: its library, and translations of PDDL problems into its format (SAS), cached on disk.

A translation takes as long as ten episodes. It is written to ``data_dir/translations``, from where
other processes and later runs read it. Only environment workers import this module.
"""

import base64
import functools
import hashlib
import json
import logging
import os
import struct
import sys
import zlib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import fast_downward
from fast_downward import interface
from textworld.logic import Proposition, Type, TypeHierarchy, Variable

from verl.utils.files import atomic_write

logger = logging.getLogger(__name__)
MAX_CACHED_TRANSLATIONS = 256  # translations cached by a process, about 0.2 MB each
FILE_FORMAT = 1  # version of the file format; part of a file's name, so older files are not read
# First bytes of 64-bit little-endian ELF files, and the segment type (PT_LOAD) of segments that are
# mapped into memory.
ELF_HEADER = b"\x7fELF\x02\x01"
PT_LOAD = 1


# Library


def load_planner() -> Any:
    """Load a new copy of the planner library, which holds the state of one game."""
    if sys.platform == "linux":
        _use_stripped_library()
    return fast_downward.load_lib()


@functools.cache
def _use_stripped_library() -> None:
    """Make ``fast_downward`` copy the library without its debug information in this process.

    Nine tenths of the installed file are debug information, 30 MB that each of 128 engines would
    write to disk at the start.
    """
    # A file in memory, open until the process ends: no file remains if the process is killed.
    stripped_file = os.memfd_create("planner")
    with open(stripped_file, "wb", closefd=False) as file:
        file.write(strip_debug_info(Path(interface.DOWNWARD_LIB_PATH).read_bytes()))
    interface.DOWNWARD_LIB_PATH = f"/proc/self/fd/{stripped_file}"


def strip_debug_info(library: bytes) -> bytes:
    """Return the bytes of an ELF ``library`` up to the end of its last mapped segment.

    The header is changed to name no section table, as the table is cut off. A file of another
    format is returned unchanged.
    """
    if not library.startswith(ELF_HEADER):
        return library
    (table,) = struct.unpack_from("<Q", library, 32)
    size, count = struct.unpack_from("<HH", library, 54)
    segment_ends: list[int] = []
    for header_index in range(count):
        segment_type, _, offset, _, _, length = struct.unpack_from(
            "<IIQQQQ", library, table + header_index * size
        )
        if segment_type == PT_LOAD:
            segment_ends.append(offset + length)
    stripped = bytearray(library[: max(segment_ends)])
    stripped[40:48] = bytes(8)  # e_shoff: offset of the section table
    stripped[58:64] = bytes(6)  # e_shentsize, e_shnum, e_shstrndx
    return bytes(stripped)


# Translations


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
    key = json.dumps([FILE_FORMAT, _planner_version(), domain, problem])
    path = folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"
    # Compression divides the size by twelve, and zlib's checksum detects damaged files.
    try:
        content = json.loads(zlib.decompress(base64.b85decode(path.read_text())))
    except (OSError, ValueError, zlib.error):  # missing or damaged
        content = _translate_problem(domain, problem)
        packed = zlib.compress(json.dumps(content).encode(), level=1)
        try:
            with atomic_write(path) as file:
                file.write(base64.b85encode(packed).decode())
        except OSError as error:
            logger.warning("cannot cache the translation of a game in %s: %s", folder, error)
    return _build_translation(content)


@functools.cache
def _planner_version() -> str:
    # Cached because it is slow: it would add a third to the time of reading a translation.
    return metadata.version("fast-downward-textworld")


def _translate_problem(domain: str, problem: str) -> dict[str, Any]:
    """Translate a problem and return the content of its file, a JSON object."""
    # The translator overwrites ``sys.argv``.
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
    """Return name and arguments of an initial fact; None for equalities, costs and distances."""
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
    hierarchy = TypeHierarchy()
    parents_of: dict[str, list[str]] = {}
    for name, parents in content["types"]:
        # The translator lists the type "object" twice, from itself and from the domain. Use the
        # first.
        parents_of.setdefault(name, parents)
    for name, parents in parents_of.items():
        hierarchy.add(Type(name, parents))
    return Translation(content["sas"], object_types, content["actions"], facts, hierarchy)
