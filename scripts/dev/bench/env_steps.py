"""Measure the speed of environments: resets and env steps per core, start-up time and memory.

    python scripts/dev/bench/env_steps.py                             # all environments
    python scripts/dev/bench/env_steps.py number_line textworld_express --cpu-seconds 10

Every environment runs random admissible actions in a separate process. "Per core" uses the CPU
seconds of this process and its children (for example a JVM), so other work on the machine matters
little. The column "here" uses wall-clock seconds.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from agent_system.environments.env import Env, Observation
from agent_system.environments.env_registry import get_package

SETTINGS_BY_ENVIRONMENT: dict[str, dict[str, Any]] = {
    "number_line": {},
    "alfworld": {"train_games": 8, "val_games": 1, "source": "generated"},
    "scienceworld/boil": {"task_names": ["boil"]},
    "scienceworld/find-animal": {"task_names": ["find-animal"]},
    "frozen_lake": {},
    "sokoban": {},
    "search": {},
    "shop": {},
    "twenty_questions": {},
    "textarena/GuessTheNumber": {"game": "GuessTheNumber"},
    "textarena/FrozenLake": {"game": "FrozenLake"},
    "textworld/treasure_hunter": {"game": "treasure_hunter", "train_games": 4, "val_games": 1},
    "textworld/cooking": {
        "game": "cooking",
        "train_games": 4,
        "val_games": 1,
        "recipe": 2,
        "take": 2,
        "go": 6,
    },
    "textworld_express/coin": {"game": "coin"},
    "textworld_express/cookingworld": {"game": "cookingworld"},
}
# Used where an environment does not list its admissible actions.
FALLBACK_ACTIONS = (
    "look around",
    "inventory",
    "go to kitchen",
    "open cupboard",
    "look at stove",
    "teleport to hallway",
)
MAX_ENV_STEPS = 20  # env steps of a measured episode at most


def list_processes() -> list[psutil.Process]:
    """Return this process and its descendants, because some packages work in a JVM."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def read_cpu_seconds() -> float:
    """Return the CPU seconds of ``list_processes``."""
    cpu_times = [process.cpu_times() for process in list_processes()]
    return sum(t.user + t.system for t in cpu_times)


def run_episode(env: Env, observation: Observation, rng: random.Random) -> int:
    """Run random actions until done, at most ``MAX_ENV_STEPS``. Return the number of actions."""
    for step in range(MAX_ENV_STEPS):
        observation, _, is_done, _ = env.step(
            rng.choice(observation.info.get("admissible_actions") or FALLBACK_ACTIONS)
        )
        if is_done:
            return step + 1
    return MAX_ENV_STEPS


def repeat_until_budget(action: Callable[[], Any], budget: float) -> tuple[int, float, float]:
    """Call ``action`` in ever longer series, until one takes at least half of ``budget``.

    Return the calls, CPU seconds and wall-clock seconds of the last series. ``budget`` is in CPU
    seconds.
    """
    num_calls = 1
    while True:
        cpu_before = read_cpu_seconds()
        wall_before = time.perf_counter()
        for _ in range(num_calls):
            action()
        cpu_seconds = read_cpu_seconds() - cpu_before
        wall_seconds = time.perf_counter() - wall_before
        # Repeat a series that was too short for a precise number; make it up to ten times longer.
        if cpu_seconds >= 0.5 * budget:
            return num_calls, cpu_seconds, wall_seconds
        num_calls = int(num_calls * min(10.0, 1 + 0.7 * budget / max(cpu_seconds, 0.01)))


def measure_environment(label: str, settings: dict[str, Any], budget: float) -> dict[str, Any]:
    """Measure resets, then complete episodes, for ``budget`` CPU seconds each."""
    package = get_package(label)
    tasks = package.tasks(settings, "train")[:8]
    start_time = time.perf_counter()
    env = package.make(settings)
    startup_seconds = time.perf_counter() - start_time
    rng = random.Random(0)
    for task in tasks:  # warm-up: loading and compiling are not counted
        run_episode(env, env.reset(task, 0), rng)
    task_cycle = itertools.cycle(tasks)
    num_resets, cpu_seconds, _ = repeat_until_budget(lambda: env.reset(next(task_cycle), 0), budget)
    reset_seconds = cpu_seconds / num_resets
    steps_by_episode: list[int] = []
    num_episodes, cpu_seconds, wall_seconds = repeat_until_budget(
        lambda: steps_by_episode.append(run_episode(env, env.reset(next(task_cycle), 0), rng)),
        budget,
    )
    # The seconds are those of the last series, so count only the steps of its episodes.
    num_steps = sum(steps_by_episode[-num_episodes:])
    measurements = {
        "placement": env.placement,
        "start_s": startup_seconds,
        "reset_ms": 1000 * reset_seconds,
        # Subtract the measured cost of the reset of each episode.
        "steps_per_core": num_steps / max(cpu_seconds - num_episodes * reset_seconds, 1e-3),
        "with_resets": num_steps / cpu_seconds,
        "here": num_steps / wall_seconds,
        "mb": sum(process.memory_info().rss for process in list_processes()) / 2**20,
    }
    env.close()
    return measurements


def main() -> None:
    """Measure the environments named on the command line and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        help=f"names or prefixes of names; known: {', '.join(SETTINGS_BY_ENVIRONMENT)}",
    )
    parser.add_argument(
        "--cpu-seconds", type=float, default=5.0, help="CPU seconds per environment and phase"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.child:
        print(json.dumps(measure_environment(*json.loads(options.child))))
        return
    labels = [
        label
        for label in SETTINGS_BY_ENVIRONMENT
        if not options.names or label.startswith(tuple(options.names))
    ]
    if not labels:
        known_labels = ", ".join(SETTINGS_BY_ENVIRONMENT)
        parser.error(f"no environment name starts with {options.names}; known: {known_labels}")
    print(f"{'environment':32}{'placement':>10}{'start s':>9}{'reset ms':>10}", end="")
    print(f"{'steps/s per core':>18}{'with resets':>13}{'here':>8}{'MiB':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for label in labels:
            storage_settings = (
                {"data_dir": folder} if label.startswith(("alfworld", "textworld/")) else {}
            )
            child_arguments = json.dumps(
                [label, SETTINGS_BY_ENVIRONMENT[label] | storage_settings, options.cpu_seconds]
            )
            # One process per environment, so that memory and imports are counted separately.
            child_process = subprocess.run(
                [sys.executable, __file__, "--child", child_arguments],
                capture_output=True,
                text=True,
            )
            if child_process.returncode != 0:
                print(f"{label:32}{(child_process.stderr.strip().splitlines() or ['?'])[-1]}")
                continue
            n = json.loads(child_process.stdout.splitlines()[-1])
            print(f"{label:32}{n['placement']:>10}{n['start_s']:9.2f}{n['reset_ms']:10.2f}", end="")
            print(f"{n['steps_per_core']:18.0f}{n['with_resets']:13.0f}", end="")
            print(f"{n['here']:8.0f}{n['mb']:7.0f}", flush=True)


if __name__ == "__main__":
    main()
