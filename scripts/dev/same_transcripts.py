"""Check that environments are deterministic: same task, seed and actions in two processes.

    python scripts/dev/same_transcripts.py [NAME ...] [--steps 12] [--seed 0]

NAME is a value of ``env.env_name``; by default all registered environments and their variants are
run. An episode of each runs in two processes with different hash seeds. Prints the names whose
transcripts differ or whose episode failed, with the reason. Then the exit status is 1.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agent_system.environments.env_registry import REGISTRY, selectable_names
from agent_system.environments.replay import run_random_episode
from verl.utils.limits import time_limit

# The first three need user-provided code, files or servers; webshop is an alias of shop.
EXCLUDED_PACKAGES = ("agent", "dataset", "openenv", "webshop")
LIMIT_S = 120  # seconds for an episode


def all_names() -> list[str]:
    """Return every environment name that needs no further settings, ordered by package."""
    packages = [name for name in sorted(REGISTRY) if name not in EXCLUDED_PACKAGES]
    return [name for package in packages for name in selectable_names(package)]


def run_in_process(names: Sequence[str], seed: int, steps: int) -> Iterator[dict[str, str]]:
    """Run an episode of each name in this process. Yield its digest or its error."""
    for name in names:
        try:
            with time_limit(LIMIT_S, name):
                transcript = run_random_episode(name, seed, steps)
            yield {"name": name, "digest": transcript.digest, "steps": str(transcript.steps)}
        except Exception as error:  # environment boundary: any failure is reported
            yield {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}


def run_in_child(names: Sequence[str], seed: int, steps: int, hash_seed: int) -> dict[str, str]:
    """Run the names in a child process. Return the digest or error by name."""
    command = [sys.executable, __file__, "--child", f"--seed={seed}", f"--steps={steps}"]
    digests: dict[str, str] = {}
    with subprocess.Popen(
        [*command, *names],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        for line in child.stdout or ():
            # Skip the output of libraries.
            if not line.startswith("{"):
                continue
            answer = json.loads(line)
            digests[answer["name"]] = answer.get("digest") or f"! {answer['error']}"
            sys.stderr.write(f"{len(digests)} of {len(names)}: {line}")
    return digests


def main() -> int:
    """Run every name in two processes and print the names that differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names as env.env_name takes them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12, help="of an episode, at most")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        for line in run_in_process(args.names, args.seed, args.steps):
            sys.stdout.write(f"\n{json.dumps(line)}\n")
            sys.stdout.flush()
        return 0
    names = args.names or all_names()
    first_answers, second_answers = (
        run_in_child(names, args.seed, args.steps, hashes) for hashes in (1, 2)
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
