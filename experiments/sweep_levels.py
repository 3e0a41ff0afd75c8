"""Measure the accuracy at each thinking level for the final policies of a sweep.

    python experiments/sweep_levels.py experiments/relay8.yaml --seed 7 --workers 2
    python experiments/sweep_levels.py experiments/relay8.yaml --arms grpo,success --seed 7
    python experiments/sweep_levels.py experiments/relay8.yaml --report

``level_matrix.py`` measures the last checkpoint of each run in the episodes of ``--config-name``.
Its output is kept as ``<plan>/levels/<run>.json``. A run with this file is not measured again.

A run without checkpoints is first trained again. If its success rate differs from its stored
result, which can happen on another CPU model, the run is not measured.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import sweep
from experiments.sweep import Run, RunFailedError
from rlvcr.levels import LEVELS
from verl.utils.checkpoint import CheckpointManager
from verl.utils.commands import parse_positive_int, run_and_report_mistakes
from verl.utils.files import atomic_write

SUCCESS = "val/success_rate"
DEFAULT_ARMS = "grpo,priced,success,permuted"


def get_levels_path(run: Run) -> Path:
    """Return the path of the file with the accuracies of ``run`` at each thinking level."""
    return run.result_path.parent / "levels" / run.result_path.name


def measure_run(run: Run, core: int, config: str) -> str:
    """Measure the last policy of ``run``, write the result, and return a one-line summary.

    A run without checkpoints is trained again first. Raises ``RunFailedError`` if its success rate
    then differs from its stored result.
    """
    checkpoints = CheckpointManager(run.run_directory / "checkpoints")
    if checkpoints.find_latest_valid() is None:
        _train_again(run, core)
    checkpoint = checkpoints.find_latest_valid()
    policy_folder = run.run_directory / "policy"
    log_path = run.run_directory / "levels.log"
    export_command = [
        "-m",
        "verl.trainer.main_export",
        f"checkpoint={checkpoint}",
        f"target={policy_folder}",
    ]
    sweep.run_on_core([sys.executable, *export_command], log_path, core)
    measured_file = run.run_directory / "levels.json"
    matrix_command = ["experiments/level_matrix.py", str(policy_folder), "--config-name", config]
    sweep.run_on_core(
        [sys.executable, *matrix_command, "--out", str(measured_file)], log_path, core
    )
    stored_file = get_levels_path(run)
    stored_file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(stored_file) as file:
        file.write(measured_file.read_text())
    level_information = json.loads(measured_file.read_text())["level_information"]
    return f"mutual information of level and situation: {level_information:.2f} nats"


def _train_again(run: Run, core: int) -> None:
    stored_result = json.loads(run.result_path.read_text())
    new_result = sweep.train_run(run, core)
    stored_success, new_success = (
        result["metrics"][SUCCESS][-1] for result in (stored_result, new_result)
    )
    if stored_success != new_success:
        raise RunFailedError(
            f"success after repeated training is {new_success} on {new_result['cpu']}, but its "
            f"result has {stored_success} on {stored_result['cpu']}; the policies differ, so "
            "nothing was measured"
        )


def format_levels_table(levels_by_run: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table with one line per run.

    The first columns have the accuracy at each level, for states with the same required level.
    Then follow tokens of a turn at each level, success for chosen and for required levels, and the
    mutual information of chosen level and situation.
    """
    accuracy_titles = [f"right, required {level}" for level in LEVELS]
    column_titles = [
        "run",
        *accuracy_titles,
        "tokens of a turn",
        "success, free",
        "success, required",
        "nats",
    ]
    lines = [f"| {' | '.join(column_titles)} |", "|---" * len(column_titles) + "|"]
    for name, level_results in levels_by_run.items():
        episodes = level_results["episodes"]
        cells = [
            name,
            *(_format_accuracies(level_results["situations"], level) for level in LEVELS),
            " ".join(f"{num_tokens:.1f}" for num_tokens in level_results["tokens_by_level"]),
            f"{100 * episodes['free']['success']:.0f}%",
            f"{100 * episodes['needed']['success']:.0f}%",
            f"{level_results['level_information']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _format_accuracies(situations: Sequence[Mapping[str, Any]], required_level: int) -> str:
    """Return the mean accuracy at each forced level over situations, in percent."""
    accuracy_rows = [
        situation_row["accuracy"]
        for situation_row in situations
        if situation_row["needed"] == required_level
    ]
    return " ".join(
        f"{100 * statistics.fmean(column):.0f}" for column in zip(*accuracy_rows, strict=True)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path, help="YAML file of a plan whose runs are finished")
    parser.add_argument(
        "--arms", default=DEFAULT_ARMS, help=f"separated by commas; default {DEFAULT_ARMS}"
    )
    parser.add_argument("--seed", type=int, default=7, help="seed of these runs; default 7")
    parser.add_argument("--config-name", default="relay", help="config of the episodes")
    parser.add_argument(
        "--workers", type=parse_positive_int, default=1, help="parallel runs, each on its own core"
    )
    parser.add_argument("--report", action="store_true", help="print the table and run nothing")
    args = parser.parse_args(argv)
    path = args.plan.resolve()
    _, runs = sweep.read_plan(path)
    if args.report:
        files = sorted((path.with_suffix("") / "levels").glob("*.json"))
        sys.stdout.write(
            format_levels_table({file.stem: json.loads(file.read_text()) for file in files})
        )
        return 0
    arms = sweep.require_known_arms(args.arms.split(","), runs, "--arms")
    selected_runs = [run for run in runs if run.arm in arms and run.seed == args.seed]
    if unfinished_runs := [run.name for run in selected_runs if not sweep.is_finished(run)]:
        raise SystemExit(
            f"{path.stem}: there is no result of {', '.join(unfinished_runs)}; fix: run "
            "experiments/sweep.py first"
        )
    runs_to_measure = [run for run in selected_runs if not get_levels_path(run).exists()]
    sys.stdout.write(
        f"{path.stem}: {len(runs_to_measure)} of {len(selected_runs)} runs to measure\n"
    )
    return sweep.print_results(
        sweep.run_in_parallel(
            runs_to_measure, args.workers, partial(measure_run, config=args.config_name)
        )
    )


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
