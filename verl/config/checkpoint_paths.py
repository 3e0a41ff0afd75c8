"""Directories of the checkpoints of a run."""

import re
from pathlib import Path

_STEP_DIRECTORY = re.compile(r"global_step_(\d+)")


def find_step_directories(root: Path) -> dict[int, Path]:
    """Return a dict n -> directory ``root/global_step_<n>``, in ascending order of n.

    The checkpoints may be incomplete.
    """
    if not root.is_dir():
        return {}
    directories: dict[int, Path] = {}
    for entry in root.iterdir():
        match = _STEP_DIRECTORY.fullmatch(entry.name)
        if match and entry.is_dir():
            directories[int(match[1])] = entry
    return dict(sorted(directories.items()))
