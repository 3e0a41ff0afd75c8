"""Check that environments are deterministic: same task, seed and actions in two processes.

    python scripts/dev/same_transcripts.py [NAME ...] [--steps 12] [--seed 0]

NAME is a value of ``env.env_name``; by default all registered environments and their variants are
run. One episode of each environment runs in two processes with different hash seeds. Prints the
names whose transcripts differ or whose episode failed, with the reason. If there are such names,
the exit status is 1.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agent_system.environments.env import Observation
from agent_system.environments.env_registry import (
    REGISTRY,
    find_settings_class,
    get_package,
    list_selectable_names,
    read_env_settings,
)
from agent_system.environments.event_loop import await_if_needed
from agent_system.environments.settings import EnvSettings
from verl.config.schema.env import EnvConfig
from verl.utils.limits import time_limit
from verl.utils.seeds import derive_seed

# The first three need user-provided code, files or servers; webshop is an alias of shop.
EXCLUDED_PACKAGES = ("agent", "dataset", "openenv", "webshop")
EPISODE_TIMEOUT_S = 120  # seconds for one episode
# Config keys for numbers of tasks. They are set to FEW_TASKS, so that tasks are made in little
# time.
_TASK_COUNT_KEY = re.compile(r"(train|val)_(tasks|games|maps|levels)")
_MOVE_OR_WORD = re.compile(r"\[[^\[\]\n]{1,30}\]|\w+")
FEW_TASKS = 4
MAX_STEPS = 30  # value of ``env.max_steps``


def make_small_settings(name: str) -> EnvSettings:
    """Return settings of the environment ``name`` with few tasks."""
    task_count_keys = [
        key for key in find_settings_class(name).model_fields if _TASK_COUNT_KEY.fullmatch(key)
    ]
    task_counts = dict.fromkeys(task_count_keys, FEW_TASKS)
    return read_env_settings(EnvConfig(env_name=name, kwargs=task_counts, max_steps=MAX_STEPS))


def run_random_episode(name: str, seed: int, steps: int) -> str:
    """Run the first training task of ``name`` with random actions, for at most ``steps`` env steps.

    Return a hash of its actions, observations and rewards. ``seed`` determines the actions.
    """
    package = get_package(name)
    settings = make_small_settings(name)
    task = package.tasks(settings, "train")[0]
    rng = random.Random(derive_seed("replay", seed))
    with contextlib.closing(package.make(settings)) as env:
        observation = await_if_needed(env.reset(task, seed))
        transcript: list[Any] = [_list_fields(observation)]
        for _ in range(steps):
            action = _draw_action(observation, rng)
            observation, reward, done, info = await_if_needed(env.step(action))
            observation_fields = _list_fields(observation)
            transcript.append([action, observation_fields, reward, bool(done), _info_texts(info)])
            if done:
                break
    text = json.dumps([task, transcript], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _draw_action(observation: Observation, rng: random.Random) -> str:
    """Return a random admissible action, or else a random move or word of the observation."""
    possible_actions = observation.info.get("admissible_actions") or _MOVE_OR_WORD.findall(
        observation.text
    )
    return rng.choice(possible_actions) if possible_actions else "1"


def _list_fields(observation: Observation) -> list[Any]:
    return [observation.text, observation.state, _info_texts(observation.info)]


def _info_texts(info: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in info.items()}


def list_environment_names() -> list[str]:
    """Return every environment name that needs no further settings, ordered by package."""
    packages = [name for name in sorted(REGISTRY) if name not in EXCLUDED_PACKAGES]
    return [name for package in packages for name in list_selectable_names(package)]


def print_digests(names: Sequence[str], seed: int, steps: int) -> None:
    """Run one episode of each environment in ``names`` in this process.

    Print a JSON line with its name, and its hash or its error.
    """
    for name in names:
        try:
            with time_limit(EPISODE_TIMEOUT_S, name):
                digest = run_random_episode(name, seed, steps)
        except Exception as error:  # report any exception of the environment
            digest = f"! {type(error).__name__}: {error}"[:300]
        print("\n" + json.dumps([name, digest]), flush=True)


def record_transcripts_in_child(
    names: Sequence[str], seed: int, steps: int, hash_seed: int
) -> dict[str, str]:
    """Run one episode of each environment in ``names`` in a child process.

    Return the hash of its observations and rewards, or its error, by name.
    """
    command = [sys.executable, __file__, "--child", f"--seed={seed}", f"--steps={steps}"]
    digests: dict[str, str] = {}
    with subprocess.Popen(
        [*command, *names],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        for line in child.stdout or ():
            # Results are lists as JSON. Skip all other output, which comes from libraries.
            if line.startswith('["'):
                name, digests[name] = json.loads(line)
                sys.stderr.write(f"{len(digests)} of {len(names)}: {line}")
    return digests


def main() -> int:
    """Run every environment in two processes and print those with different transcripts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names as env.env_name takes them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12, help="of an episode, at most")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    if args.child:
        print_digests(args.names, args.seed, args.steps)
        return 0
    names = args.names or list_environment_names()
    first_digests, second_digests = (
        record_transcripts_in_child(names, args.seed, args.steps, hash_seed) for hash_seed in (1, 2)
    )
    num_failed = 0
    for name in names:
        digest_pair = [
            digests.get(name, "! it ended its process")
            for digests in (first_digests, second_digests)
        ]
        if digest_pair[0] != digest_pair[1] or digest_pair[0].startswith("!"):
            num_failed += 1
            sys.stdout.write(f"{name}: {' and '.join(dict.fromkeys(digest_pair))}\n")
    sys.stdout.write(f"{len(names) - num_failed} of {len(names)} environments repeat themselves\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
