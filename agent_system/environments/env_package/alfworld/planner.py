"""Loading of the planner library. It holds the state of a game, so each engine loads its own copy.

Nine tenths of the installed file are debug information, 30 MB that each of 128 engines would write
to disk at the start. This module removes them before the library is copied.
"""

import functools
import os
import struct
import sys
from pathlib import Path
from typing import Any

import fast_downward
from fast_downward import interface

# First bytes of 64-bit little-endian ELF files, and the segment type (PT_LOAD) of segments that are
# mapped into memory.
ELF_HEADER = b"\x7fELF\x02\x01"
PT_LOAD = 1


def load_planner() -> Any:
    """Load a new copy of the planner library. Raises ``RuntimeError`` if it is not installed."""
    if sys.platform == "linux":
        _use_stripped_library()
    return fast_downward.load_lib()


@functools.cache
def _use_stripped_library() -> None:
    """Make ``fast_downward`` copy the library without its debug information in this process."""
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
