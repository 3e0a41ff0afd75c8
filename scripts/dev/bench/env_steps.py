"""How fast the environments are: resets and steps per second of one core, start-up and memory.

    python scripts/dev/bench/env_steps.py                             # all of them
    python scripts/dev/bench/env_steps.py number_line textworld_express --cpu-seconds 10

Every environment plays random possible actions alone in a process of its own. "Per core" counts the
CPU seconds that this process and its children (a JVM) used, so that what else runs on the machine
matters little; "here" counts seconds on the clock.
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

CASES: dict[str, dict[str, Any]] = {
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
# played where an environment does not list what is possible
ANYWHERE = (
    "look around",
    "inventory",
    "go to kitchen",
    "open cupboard",
    "look at stove",
    "teleport to hallway",
)
EPISODE = 20  # steps at most


def cpu_seconds() -> float:
    """CPU time of this process and all below it."""
    me = psutil.Process()
    # Children count: a JVM or an interpreter in a process of its own does the work of some
    # packages.
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def megabytes() -> float:
    """Resident memory of this process and all below it."""
    me = psutil.Process()
    return sum(process.memory_info().rss for process in (me, *me.children(recursive=True))) / 2**20


def episode(env: Env, observation: Observation, rng: random.Random) -> int:
    """Play random actions to the end or for ``EPISODE`` steps; return how many."""
    for step in range(EPISODE):
        observation, _, done, _ = env.step(
            rng.choice(observation.info.get("admissible_actions") or ANYWHERE)
        )
        if done:
            return step + 1
    return EPISODE


def repeat(work: Callable[[], Any], budget: float) -> tuple[int, float, float]:
    """Do ``work`` again and again; return how often, CPU seconds and seconds of the last stretch,
    of ``budget``.
    """
    times = 1
    while True:
        cpu = cpu_seconds()
        clock = time.perf_counter()
        for _ in range(times):
            work()
        spent = cpu_seconds() - cpu
        wall = time.perf_counter() - clock
        # A stretch that is too short says little: a longer one, up to ten times, is tried instead.
        if spent >= 0.5 * budget:
            return times, spent, wall
        times = int(times * min(10.0, 1 + 0.7 * budget / max(spent, 0.01)))


def measure(label: str, section: dict[str, Any], budget: float) -> dict[str, Any]:
    """Numbers of one environment; ``budget`` in CPU seconds for each of the two phases."""
    package = get_package(label)
    tasks = package.tasks(section, "train")[:8]
    began = time.perf_counter()
    env = package.make(section)
    start = time.perf_counter() - began
    rng = random.Random(0)
    for task in tasks:  # what is loaded or compiled once is not counted
        episode(env, env.reset(task, 0), rng)
    played = itertools.cycle(tasks)
    resets, spent, _ = repeat(lambda: env.reset(next(played), 0), budget)
    reset = spent / resets
    steps: list[int] = []
    episodes, spent, wall = repeat(
        lambda: steps.append(episode(env, env.reset(next(played), 0), rng)), budget
    )
    # Only the last stretch counts, as for its seconds.
    count = sum(steps[-episodes:])
    numbers = {
        "placement": env.placement,
        "start_s": start,
        "reset_ms": 1000 * reset,
        # Resets inside the episodes are taken out, at what one of them was measured to cost.
        "steps_per_core": count / max(spent - episodes * reset, 1e-3),
        "with_resets": count / spent,
        "here": count / wall,
        "mb": megabytes(),
    }
    env.close()
    return numbers


def main() -> None:
    """Measure what the command line names and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help=f"of: {', '.join(CASES)}; a name stands for all that begin with it"
    )
    parser.add_argument(
        "--cpu-seconds", type=float, default=5.0, help="CPU seconds per environment and phase"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*json.loads(options.child))))
        return
    labels = [
        label for label in CASES if not options.names or label.startswith(tuple(options.names))
    ]
    if not labels:
        parser.error(f"no environment is called {options.names}; there are: {', '.join(CASES)}")
    print(f"{'environment':32}{'placement':>10}{'start s':>9}{'reset ms':>10}", end="")
    print(f"{'steps/s per core':>18}{'with resets':>13}{'here':>8}{'MB':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for label in labels:
            stored = {"data_dir": folder} if label.startswith(("alfworld", "textworld/")) else {}
            job = json.dumps([label, CASES[label] | stored, options.cpu_seconds])
            # A process for each environment, so that memory and imports of one do not count for the
            # next.
            done = subprocess.run(
                [sys.executable, __file__, "--child", job], capture_output=True, text=True
            )
            if done.returncode != 0:
                print(f"{label:32}{(done.stderr.strip().splitlines() or ['?'])[-1]}")
                continue
            n = json.loads(done.stdout.splitlines()[-1])
            print(f"{label:32}{n['placement']:>10}{n['start_s']:9.2f}{n['reset_ms']:10.2f}", end="")
            print(f"{n['steps_per_core']:18.0f}{n['with_resets']:13.0f}", end="")
            print(f"{n['here']:8.0f}{n['mb']:7.0f}", flush=True)


if __name__ == "__main__":
    main()
