"""Train all arms and seeds of a plan, and keep a small result file of each run.

    python experiments/sweep.py experiments/relay8.yaml                 # the runs without a result
    python experiments/sweep.py experiments/relay8.yaml --arms grpo,priced --workers 2 --commit
    python experiments/sweep.py experiments/relay8.yaml --report        # the tables, in Markdown
    python experiments/sweep.py experiments/relay8.yaml --report --baseline permuted
    python experiments/sweep.py experiments/relay8.yaml --svg relay8.svg     # success in training

A plan is a YAML file::

    config: relay                         # of main_ppo
    words: [trainer.total_training_steps=100]          # overrides of every run
    baseline: grpo                        # arm that the others are compared with
    arms:
      grpo: {words: [algorithm.adv_estimator=grpo], seeds: [0, 1, 2]}

The result of a run is ``<plan>/<arm>_s<seed>.json``, next to the plan. Runs with a result are
skipped, so an interrupted sweep continues. An interrupted run starts again, or continues from its
newest checkpoint if the plan has ``resume: true``. If a stored result was made with other
overrides, the sweep is refused. ``--commit`` commits every result as soon as it is written. An arm
with ``retired: true`` ran with an earlier version of the code. Its stored results are reported, and
it is not trained.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments.compare_runs import TRAINING_SUCCESS, Points, draw_success_curves
from experiments.sweep_report import format_sweep_report
from verl.config.settings import PositiveInt, Section, Seed
from verl.config.settings.reading import read_section_or_raise
from verl.record.report.run_data import load_run
from verl.trainer.launch.extensions import load_config
from verl.utils.commands import (
    UsageError,
    parse_positive_int,
    read_yaml_mapping,
    run_and_report_mistakes,
)
from verl.utils.files import atomic_write, write_html_or_svg
from verl.utils.processes import die_with_parent

# A result has all values of the metrics CURVE_METRICS. Of the metrics whose name starts with
# END_METRIC_PREFIX it has the first and the last value.
CURVE_METRICS = (TRAINING_SUCCESS, "rollout/tokens_per_episode", "rlvcr/level_information")
END_METRIC_PREFIX = "val/"


class Arm(Section):
    """Arm of a plan: runs with the same overrides and different seeds."""

    words: tuple[str, ...] = ()
    """overrides of this arm"""
    seeds: tuple[Seed, ...] = (0,)
    """seeds of weights, tasks and samples"""
    retired: bool = False
    """the code no longer has the settings of this arm: report its results, do not train it"""


class _StoredResult(BaseModel):
    """Types of the values of a result file that tables and curves use."""

    arm: str
    seed: int
    config: str
    words: list[str]
    metrics: dict[str, list[float]]


class SweepPlan(Section):
    """Config, overrides, baseline and threads that all runs of a plan have in common."""

    config: str = "relay"
    """config of main_ppo"""
    words: tuple[str, ...] = ()
    """overrides of every run"""
    baseline: str = ""
    """arm that the others are compared with, seed by seed"""
    threads: PositiveInt = 1
    """threads of a run"""
    resume: bool = False
    """continue an interrupted run from its newest checkpoint; without trainer.save_freq it starts
    again"""


@dataclass(frozen=True, slots=True)
class Run:
    """One training run of a plan, and the paths of its files."""

    plan: Path
    config: str
    arm: str
    seed: int
    words: tuple[str, ...]
    threads: int
    is_retired: bool = False
    should_resume: bool = False

    @property
    def name(self) -> str:
        """Name of the run, usable as a file name: "grpo_s0"."""
        return f"{self.arm}_s{self.seed}"

    @property
    def result_path(self) -> Path:
        """Path of the result file. It exists once the run is finished."""
        return self.plan.with_suffix("") / f"{self.name}.json"

    @property
    def run_directory(self) -> Path:
        """Run directory, where training writes its files."""
        return ROOT / "runs" / "sweeps" / self.plan.stem / self.name

    def build_command(self) -> list[str]:
        """Return the command line that starts the run."""
        return [
            sys.executable,
            *("-m", "verl.trainer.main_ppo", "--config-name", self.config),
            *self.words,
            f"trainer.seed={self.seed}",
            f"trainer.num_threads={self.threads}",
            f"actor_rollout_ref.rollout.num_threads={self.threads}",
            f"trainer.experiment_name={self.name}",
            f"trainer.default_local_dir={self.run_directory}",
            f"trainer.resume_mode={'auto' if self.should_resume else 'disable'}",
        ]


def read_plan(path: Path) -> tuple[SweepPlan, list[Run]]:
    """Read the plan in ``path`` and list its runs.

    The runs are ordered by seed, then by arm, so that an interrupted sweep has the same seeds of
    all arms. Raises ``ConfigError`` that names every wrong key.
    """
    values = read_yaml_mapping(path)
    arm_sections = values.pop("arms", None)
    if not isinstance(arm_sections, Mapping) or not arm_sections:
        example = "{grpo: {words: [algorithm.adv_estimator=grpo], seeds: [0]}}"
        message = f"{path}: arms={arm_sections!r}; allowed: arms by name; fix: arms: {example}"
        raise UsageError(message, "wrong_type")
    arms = {str(name): read_arm(str(name), arm) for name, arm in arm_sections.items()}
    plan = read_section_or_raise(SweepPlan, values)
    if plan.baseline and plan.baseline not in arms:
        allowed = ", ".join(arms)
        raise UsageError(
            f"baseline={plan.baseline!r}; allowed: {allowed}; fix: name one of them", "unknown_name"
        )
    runs = [
        Run(
            path,
            plan.config,
            name,
            seed,
            (*plan.words, *arm.words),
            plan.threads,
            arm.retired,
            plan.resume,
        )
        for name, arm in arms.items()
        for seed in arm.seeds
    ]
    return plan, sorted(runs, key=lambda run: arms[run.arm].seeds.index(run.seed))


def read_arm(name: str, values: Any) -> Arm:
    """Return the arm ``name``. Raises ``ConfigError`` or ``UsageError`` for a wrong key of it."""
    if values is not None and not isinstance(values, Mapping):
        raise UsageError(
            f"arms.{name}={values!r}; allowed: keys of an arm; fix: {{seeds: [0]}}", "wrong_type"
        )
    # The name becomes part of file names.
    if not re.fullmatch(r"[\w.+-]{1,100}", name):
        allowed = "at most 100 letters, digits, _ . + -"
        raise UsageError(
            f"arms: {name!r}; allowed: {allowed}; fix: rename the arm", "invalid_syntax"
        )
    arm = read_section_or_raise(Arm, values, f"arms.{name}")
    if len(set(arm.seeds)) < len(arm.seeds):
        fix = "remove the repeated seed"
        message = f"arms.{name}.seeds={[*arm.seeds]}; allowed: different seeds; fix: {fix}"
        raise UsageError(message, "out_of_range")
    return arm


def is_finished(run: Run) -> bool:
    """Return True if the result of ``run`` exists.

    Raises ``UsageError`` if it was made with another config or other overrides.
    """
    if not run.result_path.exists():
        return False
    result = read_result(run.result_path)
    stored_settings = [result["config"], *result["words"]]
    current_settings = [run.config, *run.words]
    if stored_settings != current_settings:
        differences = sorted(set(stored_settings) ^ set(current_settings))
        raise UsageError(
            f"{run.result_path}: it was made with other settings ({', '.join(differences)}); "
            "fix: delete it, or give the arm another name",
            "file_exists",
        )
    return True


def read_result(path: Path) -> dict[str, Any]:
    """Return the result in ``path``. Raises ``UsageError`` if it is no complete result file."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        _StoredResult.model_validate(result, strict=True)
    except ValueError:  # no JSON, or values of other types
        message = f"{path}: it is not the result of a run; fix: delete it and start the sweep again"
        raise UsageError(message, "unreadable_file") from None
    return result


def build_result(run: Run, seconds: float | None) -> dict[str, Any]:
    """Return the result of a finished run as a dict that is small enough to commit.

    ``seconds`` is the duration of the run, or None if it was resumed.
    """
    run_data = load_run(run.run_directory)
    facts = run_data.facts
    metrics: dict[str, Any] = {
        name: _round_values(run_data.metric_points(name)[1]) for name in CURVE_METRICS
    }
    for name in run_data.metric_names:
        if name.startswith(END_METRIC_PREFIX):
            values = run_data.metric_points(name)[1]
            # A run that validates only at its end has one value.
            metrics[name] = _round_values(values if len(values) < 2 else [values[0], values[-1]])
    return {
        "arm": run.arm,
        "seed": run.seed,
        "config": run.config,
        "words": list(run.words),
        "seconds": None if seconds is None else round(seconds),
        "git": facts.get("git"),
        "cpu": facts.get("devices", {}).get("cpu"),
        "packages": {name: facts.get("packages", {}).get(name) for name in ("torch", "vllm")},
        "metrics": metrics,
    }


def _round_values(values: Sequence[float]) -> list[float]:
    # Five digits suffice for comparisons and keep a file at a few kilobytes.
    return [float(f"{value:.5g}") for value in values if math.isfinite(value)]


class RunFailedError(RuntimeError):
    """A run ended without a result."""


def run_on_core(command: Sequence[str], log: Path, core: int, threads: int = 1) -> None:
    """Run ``command`` until it ends, pinned to ``threads`` separate cores.

    Without pinning, parallel runs would slow each other down. Output goes to the file ``log``. The
    command gets SIGTERM if this process ends before it. Raises ``RunFailedError``, which names
    ``log``, for a nonzero exit status.
    """

    def prepare_child() -> None:
        os.sched_setaffinity(0, _select_cores(core, threads))
        die_with_parent(signal.SIGTERM)

    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)},
            preexec_fn=prepare_child,
            start_new_session=True,  # so that Ctrl-C reaches the command only once
        )
        exit_status = process.wait()
    if exit_status:
        raise RunFailedError(f"failed with status {exit_status}, see {log}")


def train_run(run: Run, core: int) -> dict[str, Any]:
    """Train ``run`` and return its result. Raises ``RunFailedError``.

    With ``run.should_resume``, training continues from the newest checkpoint of an interrupted run.
    """
    if run.is_retired:
        raise RunFailedError(f"arm {run.arm} is retired, so it cannot be trained with this code")
    run.run_directory.mkdir(parents=True, exist_ok=True)
    is_resumed = run.should_resume and any(run.run_directory.glob("checkpoints/global_step_*"))
    start_time = time.monotonic()
    run_on_core(run.build_command(), run.run_directory / "console.log", core, run.threads)
    return build_result(run, None if is_resumed else time.monotonic() - start_time)


def train_and_store(run: Run, core: int, commit: bool) -> str:
    """Train ``run``, write its result file and return a one-line summary.

    With ``commit``, also commit the result. Raises ``RunFailedError``.
    """
    result = train_run(run, core)
    run.result_path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(run.result_path) as file:
        file.write(json.dumps(result, indent=1) + "\n")
    if commit:
        _commit_result(run)
    success_rates = result["metrics"].get("val/success_rate", [math.nan])
    duration = "after a resume" if result["seconds"] is None else f"in {result['seconds']} s"
    return f"success {' -> '.join(f'{value:.3f}' for value in success_rates)} {duration}"


def _select_cores(group_index: int, num_cores: int) -> set[int]:
    available_cores = sorted(os.sched_getaffinity(0))
    return {
        available_cores[(group_index * num_cores + n) % len(available_cores)]
        for n in range(num_cores)
    }


# Two runs may end at the same time, but only one git process at a time can change the index.
_GIT_LOCK = threading.Lock()


def _commit_result(run: Run) -> None:
    path = str(run.result_path.relative_to(ROOT))
    message = f"Result: {run.plan.stem} {run.name}"
    with _GIT_LOCK:
        for command in (["git", "add", path], ["git", "commit", "-q", "-m", message, "--", path]):
            subprocess.run(command, cwd=ROOT, check=True)


def run_in_parallel(
    runs: Sequence[Run], workers: int, process_run: Callable[[Run, int], str]
) -> Iterator[tuple[bool, str]]:
    """Call ``process_run(run, core)`` for each run, in ``workers`` threads with a core each.

    As soon as a run ends, yield True for success, and a one-line summary.
    """
    remaining_runs: Queue[Run] = Queue()
    for run in runs:
        remaining_runs.put(run)
    finished_runs: Queue[tuple[bool, str]] = Queue()

    def run_remaining(core: int) -> None:
        while True:
            try:
                run = remaining_runs.get_nowait()
            except Empty:
                return
            # A failed run must not end the sweep.
            try:
                finished_runs.put((True, f"{run.name}: {process_run(run, core)}"))
            except Exception as error:
                finished_runs.put((False, f"{run.name}: {type(error).__name__}: {error}"))

    for core in range(min(workers, len(runs))):
        threading.Thread(target=run_remaining, args=(core,), daemon=True).start()
    for _ in runs:
        yield finished_runs.get()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path, help="YAML file of a plan")
    parser.add_argument("--arms", default="", help="names, separated by commas; default: all")
    parser.add_argument(
        "--seeds", type=parse_positive_int, help="number of seeds of each arm, at most"
    )
    parser.add_argument(
        "--workers", type=parse_positive_int, default=1, help="parallel runs, each on its own core"
    )
    parser.add_argument("--commit", action="store_true", help="commit every result")
    parser.add_argument("--report", action="store_true", help="print the tables and run nothing")
    parser.add_argument(
        "--baseline", help="arm that the tables compare with; default: the plan's baseline"
    )
    parser.add_argument(
        "--svg", type=Path, help="write the curves of training success here and run nothing"
    )
    args = parser.parse_args(argv)
    path = args.plan.resolve()
    plan, runs = read_plan(path)
    arms = require_known_arms([name for name in args.arms.split(",") if name], runs, "--arms")
    selected_runs = _select_runs(runs, arms, args.seeds)
    finished_runs = [run for run in selected_runs if is_finished(run)]
    if args.report or args.svg:
        results: list[Mapping[str, Any]] = [read_result(run.result_path) for run in finished_runs]
        if args.svg:
            write_html_or_svg(
                args.svg, draw_success_curves(_group_training_curves(results)), "--svg"
            )
        if args.report:
            baseline = args.baseline or plan.baseline
            sys.stdout.write(
                format_sweep_report(results, require_known_arms([baseline], runs, "--baseline")[0])
            )
        return 0
    runs_to_train = [
        run for run in selected_runs if run not in finished_runs and not run.is_retired
    ]
    for words in {run.words for run in runs_to_train}:
        load_config(plan.config, list(words))  # refuse a mistake before the first run starts
    sys.stdout.write(
        f"{path.stem}: {len(finished_runs)} runs are finished, {len(runs_to_train)} remain\n"
    )
    return print_results(
        run_in_parallel(runs_to_train, args.workers, partial(train_and_store, commit=args.commit))
    )


def _group_training_curves(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Points]]:
    """Return the curves (steps, success rates in training) by arm, one for each seed."""
    curves_by_arm: dict[str, list[Points]] = {}
    for result in results:
        values = result["metrics"].get(TRAINING_SUCCESS, [])
        curves_by_arm.setdefault(result["arm"], []).append(
            (list(range(1, len(values) + 1)), values)
        )
    return curves_by_arm


def print_results(outcomes: Iterable[tuple[bool, str]]) -> int:
    """Print a line for every run as it ends. Return the exit status: 1 if a run failed."""
    num_failed = 0
    for is_success, line in outcomes:
        num_failed += not is_success
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        sys.stdout.flush()
    return 1 if num_failed else 0


def require_known_arms(arms: Sequence[str], runs: Sequence[Run], option: str) -> Sequence[str]:
    """Return ``arms`` unchanged. Raises ``SystemExit`` if one of them is not an arm of the plan."""
    known_arms = list(dict.fromkeys(run.arm for run in runs))
    unknown_arms = sorted(set(arms) - set(known_arms))
    if unknown_arms:
        raise SystemExit(
            f"{option}: there is no arm {', '.join(unknown_arms)}; allowed: {', '.join(known_arms)}"
        )
    return arms


def _select_runs(runs: Sequence[Run], arms: Sequence[str], seeds: int | None) -> list[Run]:
    """Return the runs of ``arms`` (all if empty) with the first ``seeds`` seeds of each arm."""
    arm_names = arms or {run.arm for run in runs}
    runs_by_arm = {name: [run for run in runs if run.arm == name][:seeds] for name in arm_names}
    return [run for run in runs if run in runs_by_arm.get(run.arm, ())]


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
