"""Tests that OpenMP threads wait passively, and that processes share the CPUs evenly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils import processes

ROOT = Path(__file__).resolve().parents[4]
# Prints the wait policy when torch is first imported (or at the end) and exits. torch itself is
# never imported.
WATCH = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.stdout.write("torch finds " + os.environ.get("OMP_WAIT_POLICY", "nothing"))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
sys.stdout.write("no torch, but " + os.environ.get("OMP_WAIT_POLICY", "nothing"))
"""

# Prints glibc's memory arenas after eight threads allocated memory at the same time.
ARENAS = """
import ctypes, sys, threading, verl
barrier = threading.Barrier(8)

def allocate():
    blocks = [bytearray(1000) for _ in range(100)]
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stream)
libc.fflush(stream)
"""


def count_arenas(**environment: str) -> int:
    """Return the number of memory arenas of a new process that imports verl."""
    inherited = {k: v for k, v in os.environ.items() if k != processes.ARENAS_VARIABLE}
    result = subprocess.run(
        [sys.executable, "-c", ARENAS],
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout.count("<heap nr=")


def find_wait_policy(module: str, **environment: str) -> str:
    """Return the output of a new process that imports ``module``."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    result = subprocess.run(
        [sys.executable, "-c", WATCH, module],
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout


@pytest.mark.parametrize(
    "module",
    [
        "verl.trainer.launch.ppo",  # the driver of main_ppo and main_eval
        "verl.trainer.launch.sft",  # supervised fine-tuning
        "verl.single_controller.ray.host",  # a rank, before it imports its worker
        "verl.workers.actor",  # imported by a training rank
        "verl.workers.critic",
        "verl.workers.rollout.worker",  # imported by an engine
        "agent_system.multi_turn_rollout.collector_worker",
        "agent_system.environments.pool.worker",  # an environment worker
    ],
)
def test_wait_policy_is_set_before_torch_is_imported(module):
    assert find_wait_policy(module).endswith("PASSIVE")


def test_environment_overrides_the_wait_policy():
    output = find_wait_policy("verl.workers.actor", OMP_WAIT_POLICY="ACTIVE")
    assert output == "torch finds ACTIVE"


def test_cpus_are_shared_evenly_with_at_least_one_thread(monkeypatch):
    monkeypatch.setattr(processes, "available_cpus", lambda: 8)
    assert [processes.count_threads_per_process(n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_only_available_cpus_count():
    assert processes.available_cpus() == len(os.sched_getaffinity(0))


def test_without_affinity_all_cpus_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert processes.available_cpus() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processes.available_cpus() == 1


def test_children_of_a_process_share_two_memory_arenas(monkeypatch):
    monkeypatch.delenv(processes.ARENAS_VARIABLE, raising=False)
    processes.limit_memory_arenas()
    assert os.environ[processes.ARENAS_VARIABLE] == "2"
    monkeypatch.setenv(processes.ARENAS_VARIABLE, "5")
    processes.limit_memory_arenas()
    assert os.environ[processes.ARENAS_VARIABLE] == "5", "the user's value is kept"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc has arenas")
def test_threads_share_two_memory_arenas():
    assert count_arenas() == 2
    assert count_arenas(MALLOC_ARENA_MAX="8") > 2, "the user's value is kept"
