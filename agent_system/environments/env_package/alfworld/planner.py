"""Planner library, and translations of PDDL problems to its SAS format, cached on disk.

The library holds the state of a game and never plans. A translation takes as long as ten episodes.
The result is written to ``data_dir/translations``. Other processes and later runs read it from
there. Only environment workers import this module.
"""

import base64
import functools
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

from agent_system.environments.tasks import hash_json
from verl.utils.files import atomic_write

logger = logging.getLogger(__name__)
MAX_CACHED_TRANSLATIONS = 256  # translations cached by a process, about 0.2 MB each
FILE_FORMAT = 1  # version of the file format; part of a file's name, so older files are not read
# First bytes of 64-bit little-endian ELF files, and the segment type (PT_LOAD) of segments that are
# mapped into memory.
ELF_HEADER = b"\x7fELF\x02\x01"
PT_LOAD = 1


# Planner library


def load_planner() -> Any:
    """Load a new copy of the planner library, which holds the state of one game."""
    if sys.platform == "linux":
        _use_stripped_planner_library()
    return fast_downward.load_lib()


@functools.cache
def _use_stripped_planner_library() -> None:
    """Make ``fast_downward`` load copies of the library without debug information.

    Each engine copies the library file at its start. Debug information is 30 MB of it (90%).
    """
    # A file in memory, open until the process ends: no file remains if the process is killed.
    stripped_file = os.memfd_create("planner")
    with open(stripped_file, "wb", closefd=False) as file:
        file.write(strip_debug_info(Path(interface.DOWNWARD_LIB_PATH).read_bytes()))
    interface.DOWNWARD_LIB_PATH = f"/proc/self/fd/{stripped_file}"


def strip_debug_info(library: bytes) -> bytes:
    """Return the bytes of an ELF ``library`` up to the end of its last mapped segment.

    The header is changed to name no section table. A file of another format is returned unchanged.
    """
    if not library.startswith(ELF_HEADER):
        return library
    (header_table_offset,) = struct.unpack_from("<Q", library, 32)
    header_size, header_count = struct.unpack_from("<HH", library, 54)
    segment_ends: list[int] = []
    for header_index in range(header_count):
        segment_type, _, segment_offset, _, _, segment_length = struct.unpack_from(
            "<IIQQQQ", library, header_table_offset + header_index * header_size
        )
        if segment_type == PT_LOAD:
            segment_ends.append(segment_offset + segment_length)
    stripped_library = bytearray(library[: max(segment_ends)])
    stripped_library[40:48] = bytes(8)  # clear the ELF header field e_shoff
    stripped_library[58:64] = bytes(6)  # clear e_shentsize, e_shnum, e_shstrndx
    return bytes(stripped_library)


# Translations of PDDL problems, which the planner needs


@dataclass(slots=True)
class PddlTranslation:
    """Translated PDDL problem, with caches that all episodes of the game share.

    ``actions`` maps an action name to its parameters, each (name, type). ``operator_cache`` maps an
    operator id to its name with arguments, and its action. ``start_state`` is set when the first
    ``CachedPddlState`` is made.
    """

    sas: str  # the problem in the planner's SAS format
    object_types: dict[str, str]  # type of each object by name
    actions: dict[str, list[tuple[str, str]]]
    static_facts: list[Proposition]
    types: TypeHierarchy
    operator_cache: dict[int, tuple[str, Any]] = field(default_factory=dict)
    start_state: tuple | None = None


@functools.lru_cache(maxsize=MAX_CACHED_TRANSLATIONS)
def load_pddl_translation(domain: str, problem: str, folder: Path) -> PddlTranslation:
    """Return the SAS translation of the PDDL ``problem``. It is cached as a file in ``folder``."""
    cache_key = hash_json([FILE_FORMAT, _get_planner_version(), domain, problem], digest_size=16)
    path = folder / f"{cache_key}.json"
    # The file is compressed to a twelfth of its size. The checksum of zlib detects damaged files.
    try:
        content = json.loads(zlib.decompress(base64.b85decode(path.read_text())))
    except (OSError, ValueError, zlib.error):  # missing or damaged
        content = _translate_problem(domain, problem)
        compressed = zlib.compress(json.dumps(content).encode(), level=1)
        try:
            with atomic_write(path) as file:
                file.write(base64.b85encode(compressed).decode())
        except OSError as error:
            logger.warning("cannot cache the translation of a game in %s: %s", folder, error)
    return _build_translation(content)


@functools.cache
def _get_planner_version() -> str:
    # Cached, because reading the version takes a third of the time of reading a translation.
    return metadata.version("fast-downward-textworld")


def _translate_problem(domain: str, problem: str) -> dict[str, Any]:
    # Restore ``sys.argv`` afterwards: the translator overwrites it.
    saved_arguments = sys.argv
    try:
        task_and_sas: Any = fast_downward.pddl2sas(domain, problem)
    finally:
        sys.argv = saved_arguments
    task, sas = task_and_sas
    initial_facts = [_convert_fact(atom) for atom in task.init]
    return {
        "sas": sas,
        "things": {pddl_object.name: pddl_object.type_name for pddl_object in task.objects},
        "actions": {
            action.name: [(parameter.name, parameter.type_name) for parameter in action.parameters]
            for action in task.actions
        },
        "facts": [fact for fact in initial_facts if fact is not None],
        "types": [(pddl_type.name, pddl_type.supertype_names) for pddl_type in task.types],
    }


def _convert_fact(atom: Any) -> tuple[str, list[str]] | None:
    """Return name and arguments of an initial fact; None for equalities, costs and distances."""
    pddl_module = vars(fast_downward.translate)["pddl"]  # module without a public import path
    if isinstance(atom, pddl_module.conditions.Atom) and atom.predicate != "=":
        name = atom.predicate
        arguments = atom.args
    elif isinstance(atom, pddl_module.f_expression.Assign) and atom.fluent.symbol != "total-cost":
        name = str(atom.expression.value)
        arguments = atom.fluent.args
    else:
        return None
    # Omit facts with a numeric name: they are distances between places.
    return None if name.isdigit() else (name, list(arguments))


def _build_translation(content: dict[str, Any]) -> PddlTranslation:
    object_types = content["things"]
    facts = [
        Proposition(name, [Variable(argument, object_types[argument]) for argument in arguments])
        for name, arguments in content["facts"]
    ]
    type_hierarchy = TypeHierarchy()
    parents_by_type: dict[str, list[str]] = {}
    for name, parent_types in content["types"]:
        # The translator lists the type "object" twice, from itself and from the domain. Keep the
        # first definition.
        parents_by_type.setdefault(name, parent_types)
    for name, parent_types in parents_by_type.items():
        type_hierarchy.add(Type(name, parent_types))
    return PddlTranslation(content["sas"], object_types, content["actions"], facts, type_hierarchy)
