"""The planner library, of which every engine has a copy to itself: it holds the state of a game.

Nine tenths of the installed file are notes for debuggers, 30 MB that 128 engines would write one
after another before the first of them plays. Copies are made of what is mapped.
"""

import functools
import os
import struct
import sys
from pathlib import Path
from typing import Any

import fast_downward
from fast_downward import interface

# Of a 64-bit little-endian ELF file: its first bytes, and the kind of a part that is mapped.
ELF = b"\x7fELF\x02\x01"
LOAD = 1


def load_planner() -> Any:
    """Load a copy of the library. Raises ``RuntimeError`` where there is none."""
    if sys.platform == "linux":
        _shorten()
    return fast_downward.load_lib()


@functools.cache
def _shorten() -> None:
    """Have this process copy what is mapped of the library only."""
    # In memory, and open as long as the process lives: nothing is left behind when it is killed.
    short = os.memfd_create("planner")
    with open(short, "wb", closefd=False) as file:
        file.write(mapped_part(Path(interface.DOWNWARD_LIB_PATH).read_bytes()))
    interface.DOWNWARD_LIB_PATH = f"/proc/self/fd/{short}"


def mapped_part(library: bytes) -> bytes:
    """The start of an ELF ``library`` up to the last byte that is mapped, without the table of
    sections that stands behind it; another kind of file as it is.
    """
    if not library.startswith(ELF):
        return library
    (table,) = struct.unpack_from("<Q", library, 32)
    size, count = struct.unpack_from("<HH", library, 54)
    ends: list[int] = []
    for number in range(count):
        kind, _, offset, _, _, length = struct.unpack_from(
            "<IIQQQQ", library, table + number * size
        )
        if kind == LOAD:
            ends.append(offset + length)
    short = bytearray(library[: max(ends)])
    short[40:48] = bytes(8)  # where the sections are
    short[58:64] = bytes(6)  # how large, how many, and which of them names the others
    return bytes(short)
