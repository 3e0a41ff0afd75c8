"""OpenMP's threads wait passively in every process that computes, and the cores are shared out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils import processes

ROOT = Path(__file__).resolve().parents[4]
# Prints how threads would wait at the moment torch is first asked for (or at the end), and stops
# there: torch itself is never imported.
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


def first_sight_of_torch(module: str, **environment: str) -> str:
    """What a fresh process that imports ``module`` prints."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", WATCH, module],
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "verl.trainer.launch.ppo",  # the driver, behind main_ppo and main_eval
        "verl.trainer.launch.sft",  # the cold start
        "verl.single_controller.ray.host",  # a rank, before it imports its worker
        "verl.workers.actor",  # what a training rank imports
        "verl.workers.critic",
        "verl.workers.rollout.worker",  # what an engine imports
        "agent_system.multi_turn_rollout.collector_worker",
        "agent_system.environments.pool.worker",  # an environment worker
    ],
)
def test_threads_wait_passively_before_torch_is_imported(module):
    assert first_sight_of_torch(module).endswith("PASSIVE")


def test_the_environment_decides_how_threads_wait():
    seen = first_sight_of_torch("verl.workers.actor", OMP_WAIT_POLICY="ACTIVE")
    assert seen == "torch finds ACTIVE"


def test_cpus_are_shared_evenly_and_nobody_goes_without(monkeypatch):
    monkeypatch.setattr(processes, "available_cpus", lambda: 8)
    assert [processes.count_threads_per_process(n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_only_the_cpus_this_process_may_use_count():
    assert processes.available_cpus() == len(os.sched_getaffinity(0))


def test_without_affinity_the_machine_is_counted(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert processes.available_cpus() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processes.available_cpus() == 1
