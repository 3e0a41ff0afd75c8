"""Compare the time of an RLVCR step and a GRPO step on the same trajectories and model.

    python scripts/dev/bench/rlvcr_step.py                       # configs/quickstart.yaml
    python scripts/dev/bench/rlvcr_step.py --config-name smoke --steps 3 \\
        algorithm.rlvcr.step_fraction=1.0

``main_ppo`` runs with each estimator in turn, ``--rounds`` times. The learning rate is 0 and every
turn has its own sampling seed, so both runs generate the same trajectories in every step. The last
line says how many replies agree. A few differ because of rounding.

The first step of a run is a warm-up and is not counted. The table shows medians of ``timing_s/*``
over the other steps, in seconds. RLVCR's scoring pass also gives the old log-probs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from verl.record.run_dir import RunDirectory
from verl.utils import jsonl

ESTIMATORS = ("rlvcr", "grpo")
STEP_PARTS = {
    "generation": ("timing_s/gen_engine",),
    "environments": ("timing_s/gen_env",),
    "alternatives after the episode": ("timing_s/alternatives",),
    "rows": ("timing_s/pack",),
    "scoring and old log-probs": ("timing_s/scoring", "timing_s/old_log_prob"),
    "rewards and advantages": ("timing_s/reward", "timing_s/adv"),
    "update": ("timing_s/update_actor", "timing_s/update_critic"),
    "weights to the engines": ("timing_s/update_weights",),
}
COUNT_METRICS = {
    "sampled tokens of turns, per trajectory": "rollout/tokens_per_episode",
    "sampled tokens of alternatives": "rlvcr/alternative_tokens",
    "steps with alternatives": "rlvcr/expanded_steps",
    "tokens of the rows": "perf/total_num_tokens",
}


def build_arguments(estimator: str, run_dir: Path, args: argparse.Namespace) -> list[str]:
    """Return the arguments of ``main_ppo`` for ``estimator``, with the overrides in ``args``."""
    return [
        "--config-name",
        args.config_name,
        f"algorithm.adv_estimator={estimator}",
        # GRPO needs no levels, but the prompts and turns of both runs must be the same.
        "env.levels=true",
        # With learning rate 0 both runs have the same policy in all steps.
        "actor_rollout_ref.actor.optim.lr=0",
        *build_training_overrides(args.steps, run_dir),
        *args.overrides,
    ]


def build_training_overrides(steps: int, run_dir: Path) -> list[str]:
    """Return overrides for ``steps`` steps without validation, checkpoints and resume."""
    return [
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=0",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={run_dir}",
    ]


def run_main_ppo(name: str, run_dir: Path, arguments: Sequence[str]) -> list[dict]:
    """Run ``main_ppo`` with ``arguments``, which set ``run_dir``. Return the metrics of all steps.

    Raises ``SystemExit`` with ``name`` and the end of the log if the run fails.
    """
    run_dir.mkdir(parents=True)
    log_path = run_dir.with_suffix(".log")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log_path.open("wb") as log_file:
        status = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=log_file, stderr=subprocess.STDOUT
        ).returncode
    if status:
        raise SystemExit(
            f"{name} ended with exit status {status}; "
            f"end of {log_path}:\n{log_path.read_text()[-3000:]}"
        )
    return [
        line for line in jsonl.read(RunDirectory(run_dir).metrics_path) if "timing_s/step" in line
    ]


def run_alternating(
    names: Sequence[str],
    rounds: int,
    folder: Path,
    build_run_arguments: Callable[[str, Path], list[str]],
    num_uncounted_steps: int = 1,
) -> tuple[dict[str, list[dict]], dict[str, Path]]:
    """Run ``main_ppo`` once per name and round.

    Return the metrics of all steps except the first ``num_uncounted_steps`` of each run, and the
    run directories of the last round, both by name.
    """
    measured: dict[str, list[dict]] = {name: [] for name in names}
    run_dirs: dict[str, Path] = {}
    for round_index in range(rounds):
        # The order alternates between rounds: the second run profits from cached files.
        for name in names if round_index % 2 == 0 else reversed(names):
            run_dirs[name] = folder / f"{name}-{round_index}"
            step_metrics = run_main_ppo(
                name, run_dirs[name], build_run_arguments(name, run_dirs[name])
            )
            measured[name] += step_metrics[num_uncounted_steps:]
    return measured, run_dirs


def compute_median_sum(steps: list[dict], *names: str) -> float:
    """Return the median over ``steps`` of the sum of metrics. A missing metric counts as 0."""
    # Sum within each step: the median of a sum is not the sum of the medians.
    return median(sum(step.get(name, 0.0) for name in names) for step in steps)


def count_equal_replies(run_dirs: dict[str, Path], steps: int) -> tuple[int, int]:
    """Return the numbers of equal and of compared replies (texts of turns) of both runs."""
    num_equal = num_compared = 0
    for step in range(1, steps + 1):
        rlvcr_replies, grpo_replies = (
            read_replies(RunDirectory(run_dirs[estimator]).rollout_path(step))
            for estimator in ESTIMATORS
        )
        common_keys = rlvcr_replies.keys() & grpo_replies.keys()
        num_compared += len(common_keys)
        num_equal += sum(rlvcr_replies[key] == grpo_replies[key] for key in common_keys)
    return num_equal, num_compared


def read_replies(path: Path) -> dict[tuple[str, int], str]:
    """Return the replies of a rollout file by (``traj_uid``, turn)."""
    return {
        (row["traj_uid"], step["step"]): step["response"]
        for row in jsonl.read(path)
        for step in row.get("steps", ())
    }


def format_table(step_metrics_by_estimator: dict[str, list[dict]]) -> str:
    """Return the Markdown table: seconds of a training step and of its parts, and token counts."""
    steps_by_estimator = [step_metrics_by_estimator[estimator] for estimator in ESTIMATORS]
    lines = ["| seconds per step | RLVCR | GRPO | ratio |", "|---|---|---|---|"]

    def add_line(name: str, values: Iterable[float], digits: int = 2) -> None:
        rlvcr_value, grpo_value = values
        ratio = f"{rlvcr_value / grpo_value:.2f}" if grpo_value > 0 else ""
        lines.append(f"| {name} | {rlvcr_value:,.{digits}f} | {grpo_value:,.{digits}f} | {ratio} |")

    for name, metrics in STEP_PARTS.items():
        add_line(name, (compute_median_sum(steps, *metrics) for steps in steps_by_estimator))
    part_metrics = [metric for metrics in STEP_PARTS.values() for metric in metrics]
    other_seconds = [
        median(
            step["timing_s/step"] - sum(step.get(key, 0.0) for key in part_metrics)
            for step in steps
        )
        for steps in steps_by_estimator
    ]
    add_line("the rest", other_seconds)
    whole_step_seconds = (
        compute_median_sum(steps, "timing_s/step") for steps in steps_by_estimator
    )
    add_line("**whole step**", whole_step_seconds)
    for name, key in COUNT_METRICS.items():
        add_line(name, (compute_median_sum(steps, key) for steps in steps_by_estimator), digits=0)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command-line options and print a Markdown table."""
    parser = argparse.ArgumentParser(description="Compare an RLVCR step with a GRPO step.")
    parser.add_argument("--config-name", default="quickstart")
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of each run; the first is not counted"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="runs of each estimator, in alternating order"
    )
    parser.add_argument(
        "--keep", type=Path, help="directory for runs and logs; default: a temporary one"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for both runs")
    args = parser.parse_intermixed_args(argv)
    if args.steps < 2:
        parser.error("--steps must be 2 or more: the first step is not counted")
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        measured, run_dirs = run_alternating(
            ESTIMATORS,
            args.rounds,
            args.keep or Path(scratch),
            lambda estimator, run_dir: build_arguments(estimator, run_dir, args),
        )
        num_equal, num_compared = count_equal_replies(run_dirs, args.steps)
    run_label = " ".join([args.config_name, *args.overrides])
    print(f"{run_label}; {len(measured['rlvcr'])} steps of each\n\n{format_table(measured)}\n")
    print(f"{num_equal:,} of {num_compared:,} replies are the same in both")


if __name__ == "__main__":
    main()
