"""Compare steps with and without overlap of the rollout and the update.

    python scripts/dev/bench/overlap.py                                   # steps of 10 ms to 1 s
    python scripts/dev/bench/overlap.py --steps 8 env.rollout.carry_over=2

``main_ppo`` runs with ``trainer.rollout_overlap`` off and on in turn, ``--rounds`` times. It uses
the quickstart's policy and an environment that waits (``scripts/dev/bench/waiting.py``).

The first two steps of a run are not counted. Step 1 is a warm-up, and with overlap the rollout of
step 2 runs during step 1. The table shows medians over the other steps, in seconds.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.dev.bench.rlvcr_step import (
    build_training_overrides,
    compute_median_sum,
    run_alternating,
)

POLICY = "configs/policies/quickstart"  # its replies do not matter to the environment
MODES = ("off", "one_step")
STEP_PARTS = {
    "waiting for the rollout": ("timing_s/gen", "timing_s/wait_for_plays"),
    "scoring, rewards, advantages": (
        "timing_s/old_log_prob",
        "timing_s/scoring",
        "timing_s/reward",
        "timing_s/adv",
    ),
    "update": ("timing_s/update_actor",),
    "weights to the engines": ("timing_s/update_weights",),
    "**whole step**": ("timing_s/step",),
}


def build_arguments(mode: str, run_dir: Path, args: argparse.Namespace) -> list[str]:
    """Return the arguments of ``main_ppo`` for a value of ``trainer.rollout_overlap``."""
    synchronous_overrides = [
        item for item in args.overrides if not item.startswith("env.rollout.carry_over")
    ]
    return [
        "--config-name",
        args.config_name,
        f"actor_rollout_ref.model.path={POLICY}",
        "env.env_name=scripts.dev.bench.waiting:PACKAGE",
        "env.kwargs={prompt:compact}",
        "env.max_steps=12",
        "data.max_prompt_length=384",
        "algorithm.adv_estimator=grpo",
        f"trainer.rollout_overlap={mode}",
        *build_training_overrides(args.steps, run_dir),
        # Partial rollouts (``carry_over``) need the overlap.
        *(args.overrides if mode != "off" else synchronous_overrides),
    ]


def format_table(step_metrics_by_mode: dict[str, list[dict]]) -> str:
    """Return the Markdown table: seconds of the parts of a step, and updates since its rollout."""
    lines = ["| seconds per step | in turn | overlapping | ratio |", "|---|---|---|---|"]
    for name, keys in STEP_PARTS.items():
        in_turn_s, overlapping_s = (
            compute_median_sum(step_metrics_by_mode[mode], *keys) for mode in MODES
        )
        ratio = f"{in_turn_s / overlapping_s:.2f}" if overlapping_s > 0 else ""
        lines.append(f"| {name} | {in_turn_s:.2f} | {overlapping_s:.2f} | {ratio} |")
    median_staleness = [
        compute_median_sum(step_metrics_by_mode[mode], "training/staleness") for mode in MODES
    ]
    lines.append(
        f"| updates since the rollout | {median_staleness[0]:.2f} | {median_staleness[1]:.2f} | |"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command-line options and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-name", default="number_line")
    parser.add_argument("--steps", type=int, default=6, help="steps of each run")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each mode, in turn")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for both")
    args = parser.parse_intermixed_args(argv)
    if args.steps < 3:
        parser.error("--steps must be 3 or more: the first two steps are not counted")
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        measured, _ = run_alternating(
            MODES,
            args.rounds,
            Path(scratch),
            lambda mode, run_dir: build_arguments(mode, run_dir, args),
            num_uncounted_steps=2,
        )
    run_label = " ".join([args.config_name, *args.overrides])
    print(f"{run_label}; {len(measured['off'])} steps of each\n\n{format_table(measured)}")


if __name__ == "__main__":
    main()
