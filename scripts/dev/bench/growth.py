"""Measure private and shared memory, threads and open files of every process over many steps.

    python -m scripts.dev.bench.growth --steps 1000

A run whose memory grows a little in every step fails after a day on a cluster. The measurements are
repeated every few seconds. The table gives, for each kind of process, the medians of the second,
the sixth and the last tenth of the run. The first tenth is not used, because caches fill in it.
"""

import argparse
import collections
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[3]
PERIOD_S = 5.0  # seconds between two measurements
MEASURES = ("private_mib", "shared_mib", "threads", "files")
# One measurement: kind of process -> name in MEASURES -> sum over the processes of this kind.
Sample = dict[str, dict[str, float]]


def start_run(num_steps: int, run_dir: Path, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a run of ``num_steps`` training steps in the environment ``number_line``."""
    settings = {
        "trainer.total_training_steps": num_steps,
        "trainer.default_local_dir": run_dir,
        "trainer.test_freq": max(1, num_steps // 10),
        "trainer.save_freq": max(1, num_steps // 10),
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.num_threads": 1,
        "actor_rollout_ref.model.path": run_dir.parent / "policy",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.num_threads": 1,
        "data.train_batch_size": 2,
        "env.rollout.n": 2,
        "env.val_tasks": 2,
    }
    cold_start_override = "cold_start.overrides=['data.episodes=200','data.noise=0.35']"
    setting_overrides = [f"{key}={value}" for key, value in settings.items()]
    command = ["-m", "verl.trainer.main_ppo", "--config-name", "number_line", cold_start_override]
    with (run_dir.parent / "console.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command, *setting_overrides, *overrides],
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )


def sample_processes(driver: psutil.Process) -> Sample:
    """Sum memory (MiB), threads and open files of the driver and its descendants, by kind."""
    sums: Sample = collections.defaultdict(lambda: dict.fromkeys(MEASURES, 0.0))
    for process in [driver, *driver.children(recursive=True)]:
        try:
            with process.oneshot():
                process_kind = "driver" if process == driver else get_process_kind(process)
                memory = process.memory_info()
                sums[process_kind]["private_mib"] += (memory.rss - memory.shared) / 2**20
                sums[process_kind]["shared_mib"] += memory.shared / 2**20
                sums[process_kind]["threads"] += process.num_threads()
                sums[process_kind]["files"] += process.num_fds()
        except psutil.Error:
            continue  # the process has ended
    return dict(sums)


def get_process_kind(process: psutil.Process) -> str:
    """Return the kind of a process: "ray::RolloutWorker" for "ray::RolloutWorker.submit"."""
    cmdline = process.cmdline()
    process_title = cmdline[0] if cmdline and cmdline[0].startswith("ray::") else process.name()
    return process_title.partition(".")[0].rstrip("0123456789_-:")


def compare_parts_of_run(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the medians over the second, sixth and last tenth, a row per kind of process."""
    # Use only measurements in which all kinds of processes were running.
    num_kinds = max((len(sample) for sample in samples), default=0)
    samples = [sample for sample in samples if len(sample) == num_kinds]
    tenth_length = max(1, len(samples) // 10)
    tenths = (
        samples[tenth_length : 2 * tenth_length],
        samples[5 * tenth_length : 6 * tenth_length],
        samples[-tenth_length:],
    )
    rows = []
    for kind in sorted({kind for tenth in tenths for sample in tenth for kind in sample}):
        row: dict[str, Any] = {"process": kind}
        for measure in MEASURES:
            row[measure] = [compute_median(tenth, kind, measure) for tenth in tenths]
        rows.append(row)
    return rows


def compute_median(samples: Sequence[Sample], kind: str, measure: str) -> float:
    """Return the median of ``measure`` over ``samples``. A missing value counts as 0."""
    values = [sample[kind][measure] if kind in sample else 0.0 for sample in samples]
    return round(statistics.median(values or [0.0]), 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the processes of a run, and print their growth. Return the run's exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        start_time_s = time.monotonic()
        run = start_run(args.steps, Path(folder) / "run", args.overrides)
        samples = sample_run(run, Path(folder) / "run" / "metrics.jsonl")
        if run.returncode:
            sys.stderr.write((Path(folder) / "console.log").read_text()[-4000:])
            return run.returncode
    rows = compare_parts_of_run(samples)
    seconds = round(time.monotonic() - start_time_s)
    result = {"iterations": args.steps, "seconds": seconds, "processes": rows}
    for row in rows:
        cells = "  ".join(
            f"{name} {' -> '.join(f'{median:6.1f}' for median in row[name])}" for name in MEASURES
        )
        sys.stdout.write(f"{row['process']:<28}{cells}\n")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def sample_run(run: subprocess.Popen[bytes], metrics: Path) -> list[Sample]:
    """Measure the processes of ``run`` every ``PERIOD_S`` seconds, after its first step."""
    driver = psutil.Process(run.pid)
    samples: list[Sample] = []
    while run.poll() is None:
        if metrics.exists():
            samples.append(sample_processes(driver))
        time.sleep(PERIOD_S)
    return samples


if __name__ == "__main__":
    sys.exit(main())
