"""Check that environments are deterministic: same task, seed and actions in two processes.

    python scripts/dev/same_transcripts.py [NAME ...] [--steps 12] [--seed 0]

NAME is a value of ``env.env_name``; by default all registered environments and their variants are
run. One episode of each environment runs in two processes with different hash seeds. Prints the
names whose transcripts differ or whose episode failed, with the reason. If there are such names,
the exit status is 1.
"""

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agent_system.environments.env import Env, Observation, Task
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


@dataclass(frozen=True, slots=True)
class RandomEpisode:
    """Number of env steps of an episode, and a hash of its observations and rewards."""

    steps: int
    digest: str


def make_small_settings(name: str) -> EnvSettings:
    """Return settings of the environment ``name`` with few tasks."""
    counts = [
        key for key in find_settings_class(name).model_fields if _TASK_COUNT_KEY.fullmatch(key)
    ]
    task_counts = dict.fromkeys(counts, FEW_TASKS)
    return read_env_settings(EnvConfig(env_name=name, kwargs=task_counts, max_steps=MAX_STEPS))


def run_random_episode(name: str, seed: int, steps: int) -> RandomEpisode:
    """Run the first training task of ``name`` with random actions, for at most ``steps`` env steps.

    ``seed`` determines the actions. A new environment is created. Its exceptions are not caught.
    """
    package = get_package(name)
    settings = make_small_settings(name)
    env = package.make(settings)
    try:
        return _run_episode(env, package.tasks(settings, "train")[0], seed, steps)
    finally:
        env.close()


def _run_episode(env: Env, task: Task, seed: int, steps: int) -> RandomEpisode:
    rng = random.Random(derive_seed("replay", seed))
    observation = await_if_needed(env.reset(task, seed))
    transcript: list[Any] = [_list_fields(observation)]
    for _ in range(steps):
        action = _draw_action(observation, rng)
        observation, reward, done, info = await_if_needed(env.step(action))
        transcript.append(
            [action, _list_fields(observation), reward, bool(done), _info_texts(info)]
        )
        if done:
            break
    text = json.dumps([task, transcript], sort_keys=True, default=str)
    return RandomEpisode(
        len(transcript) - 1, hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    )


def _draw_action(observation: Observation, rng: random.Random) -> str:
    """Return a random admissible action, or else a random move or word of the observation."""
    possible = observation.info.get("admissible_actions") or _MOVE_OR_WORD.findall(observation.text)
    return rng.choice(possible) if possible else "1"


def _list_fields(observation: Observation) -> list[Any]:
    return [observation.text, observation.state, _info_texts(observation.info)]


def _info_texts(info: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in info.items()}


def list_environment_names() -> list[str]:
    """Return every environment name that needs no further settings, ordered by package."""
    packages = [name for name in sorted(REGISTRY) if name not in EXCLUDED_PACKAGES]
    return [name for package in packages for name in list_selectable_names(package)]


def run_in_process(names: Sequence[str], seed: int, steps: int) -> Iterator[dict[str, str]]:
    """Run one episode of each environment in ``names`` in this process.

    Yield a dict with the hash of its observations and rewards, or with its error.
    """
    for name in names:
        try:
            with time_limit(EPISODE_TIMEOUT_S, name):
                transcript = run_random_episode(name, seed, steps)
            yield {"name": name, "digest": transcript.digest, "steps": str(transcript.steps)}
        except Exception as error:  # report any exception of the environment
            yield {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}


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
            # Results are lines of JSON. Skip all other output, which comes from libraries.
            if not line.startswith("{"):
                continue
            answer = json.loads(line)
            digests[answer["name"]] = answer.get("digest") or f"! {answer['error']}"
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
        for line in run_in_process(args.names, args.seed, args.steps):
            sys.stdout.write(f"\n{json.dumps(line)}\n")
            sys.stdout.flush()
        return 0
    names = args.names or list_environment_names()
    first_answers, second_answers = (
        record_transcripts_in_child(names, args.seed, args.steps, hashes) for hashes in (1, 2)
    )
    num_failed = 0
    for name in names:
        digest_1, digest_2 = (
            first_answers.get(name, "! it ended its process"),
            second_answers.get(name, "! it ended it"),
        )
        if digest_1 != digest_2 or digest_1.startswith("!"):
            num_failed += 1
            sys.stdout.write(
                f"{name}: {digest_1 if digest_1 == digest_2 else f'{digest_1} and {digest_2}'}\n"
            )
    sys.stdout.write(f"{len(names) - num_failed} of {len(names)} environments repeat themselves\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
