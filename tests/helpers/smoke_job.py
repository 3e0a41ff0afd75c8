"""The smallest real job: cold start, Ray, vLLM and ALFWorld, with all paths in one directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.jobs import Job, start

STEPS = 3
TIMEOUT_S = 420
# The package is looked up without an import, which takes seconds.
NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def format_cold_start(overrides: Sequence[str]) -> str:
    """Return the argument of ``main_ppo`` that gives its cold start ``overrides``."""
    quoted = ",".join(f"'{override}'" for override in overrides)
    return f"cold_start.overrides=[{quoted}]"


def smoke_words(root: Path, run: str, *more: str) -> list[str]:
    """Return the arguments of ``main_ppo``, with all paths and the run directory ``run`` below
    ``root``.
    """
    cold_start = [
        "data.episodes=32",
        "data.val_episodes=0",
        "data.noise=0.0",
        "data.tokens_per_batch=1024",
        "trainer.total_training_steps=60",  # until most answers follow the format of a turn
        "trainer.num_threads=1",  # the other core is for processes beside the test
        f"data.data_dir={root}/episodes",
        f"trainer.default_local_dir={root}/sft",
    ]
    return [
        "--config-name",
        "smoke",
        f"actor_rollout_ref.model.path={root}/policy",
        f"env.alfworld.data_dir={root}/games",
        f"trainer.default_local_dir={root}/{run}",
        format_cold_start(cold_start),
        "env.max_steps=8",
        "trainer.num_threads=1",
        "actor_rollout_ref.rollout.num_threads=1",
        *more,
    ]


@dataclass
class FinishedJob:
    """Job that ended with status 0, with its root and run directories."""

    root: Path
    run: Path
    job: Job


def run_smoke_job(root: Path) -> FinishedJob:
    """Run ``STEPS`` steps of RLVCR from scratch, with a validation before the first and after the
    last.
    """
    schedule = [f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={STEPS}"]
    job = start(smoke_words(root, "run", *schedule), root / "log.txt")
    job.finish(TIMEOUT_S)
    return FinishedJob(root, root / "run", job)
