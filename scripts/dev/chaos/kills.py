"""SIGKILL at random moments of a deterministic run, which the same command then resumes.

    reference     one run without kills
    round 1, 2    the same run: start ─▶ killed ─▶ start ─▶ killed ... ─▶ done ─▶ compared

The engine samples one trajectory at a time. With several trajectories its batches would depend on
timing, and the last bits of log-probs depend on the batch.
"""

import json
import random
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from scripts.dev.chaos.job import FOLDER, OVERRIDES, RESULTS_DIR, make_policy
from tests.helpers.jobs import AGENTS, Job, start
from verl.utils import jsonl
from verl.utils.checkpoint import verify_checkpoint
from verl.utils.files import atomic_write

RESULTS_PATH = RESULTS_DIR / "kills.json"
NUM_STEPS = 6  # training steps of a run
READY_LINE = re.compile(r"ready after ([\d.]+) s")
RUN_TIMEOUT_S = 1800.0  # deadline of a run, long enough for a busy machine
FIRST_STEP_TIMEOUT_S = 15.0  # maximum time from readiness to the next training step
EXIT_TIMEOUT_S = 30.0  # limit for all processes to end
EARLY_SHARE = 0.2  # share of the kills during start-up
MAX_FURTHER_STEPS = 3  # exclusive limit: a kill happens after 0, 1 or 2 new steps
POLL_INTERVAL_S = 0.05  # seconds between two checks of whether the moment of the kill has come
DETERMINISTIC_OVERRIDES = (
    # A random policy never succeeds. Without the entropy loss its weights would not change.
    "actor_rollout_ref.actor.entropy_coeff=0.1",
    "actor_rollout_ref.actor.optim.lr=0.001",
    "env.env_name=number_line",
    "env.num_workers=1",
    "env.envs_per_worker=1",
    "trainer.max_actor_ckpt_to_keep=2",
    "trainer.test_freq=-1",
    f"trainer.total_training_steps={NUM_STEPS}",
)
# Metrics that measure time differ between any two runs, so they are not compared.
TIME_METRIC_PREFIXES = ("time", "timing_s/", "perf/", "rollout/env_wait_s", "rollout/engine_wait_s")
WAITING_METRIC = "rollout/active_ratio"


@dataclass
class Kill:
    """One SIGKILL, of all processes of the run (``kills_all_processes``) or of the driver only.

    An ``early`` kill happens ``after_s`` seconds after the start. Other kills happen ``after_s``
    seconds after the run was ready and had recorded ``num_new_steps`` new steps.
    """

    number: int
    kills_all_processes: bool
    early: bool
    num_new_steps: int
    after_s: float
    step: int = 0  # last recorded step
    next_s: float | None = None  # seconds from readiness to the next step, if there was one
    problems: list[str] = field(default_factory=list)


@dataclass
class KillRecord:
    """All kills so far, and the result of each run that was killed and resumed until its end."""

    kills: list[Kill]
    rounds: list[list[str]]  # differences from the reference run, for each round

    @classmethod
    def read(cls, path: Path) -> "KillRecord":
        """Return the record in ``path``, or an empty one if the file does not exist."""
        if not path.exists():
            return cls([], [])
        content = json.loads(path.read_text())
        return cls([Kill(**kill) for kill in content["kills"]], content["rounds"])

    def write(self, path: Path) -> None:
        """Write the record to ``path`` as JSON."""
        with atomic_write(path) as file:
            json.dump(asdict(self), file, indent=1)

    def list_problems(self) -> list[str]:
        """Return a line for each problem and each difference."""
        problems = [f"kill {kill.number}: {text}" for kill in self.kills for text in kill.problems]
        return problems + [
            f"round {round_index}: {text}"
            for round_index, differences in enumerate(self.rounds)
            for text in differences
        ]


def run(count: int, seed: int) -> int:
    """Kill runs until there are ``count`` kills. Return 1 if there is any problem.

    A round ends when its run completes. The next kill then starts a new round.
    """
    folder = FOLDER / "kills"
    reference_dir = folder / "reference"
    if not _is_complete(reference_dir):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        start(build_overrides(reference_dir), folder / "reference.txt").finish(RUN_TIMEOUT_S)
    record = KillRecord.read(RESULTS_PATH)
    while len(record.kills) < count:
        run_dir = folder / f"round-{len(record.rounds)}"
        rng = random.Random(f"{seed}/{len(record.kills)}/{len(record.rounds)}")
        kill = draw_kill(len(record.kills), reference_dir, rng)
        if run_and_kill(kill, run_dir):
            record.rounds.append(list(find_differences(reference_dir, run_dir)))
            shutil.rmtree(run_dir)
        else:
            record.kills.append(kill)
        record.write(RESULTS_PATH)
    sys.stdout.write(format_summary(record))
    return int(bool(record.list_problems()))


def build_overrides(run_dir: Path) -> list[str]:
    """Return the overrides of ``main_ppo`` for the run in ``run_dir``."""
    return [
        *OVERRIDES,
        *DETERMINISTIC_OVERRIDES,
        f"actor_rollout_ref.model.path={make_policy()}",
        f"trainer.default_local_dir={run_dir}",
    ]


def draw_kill(number: int, reference_dir: Path, draw: random.Random) -> Kill:
    """Draw a kill at a random moment, by the durations in the reference run."""
    is_early = draw.random() < EARLY_SHARE
    ready_match = READY_LINE.search(reference_dir.with_suffix(".txt").read_text())
    step_s = statistics.median(record["timing_s/step"] for record in _read_records(reference_dir))
    max_delay_s = float(ready_match[1]) if is_early and ready_match else step_s
    after_s = round(draw.uniform(0.0, max_delay_s), 2)
    num_new_steps = 0 if is_early else draw.randrange(MAX_FURTHER_STEPS)
    return Kill(number, number % 2 == 0, is_early, num_new_steps, after_s)


def run_and_kill(kill: Kill, run_dir: Path) -> bool:
    """Start the run in ``run_dir`` and kill it. Return True if it completed before the kill."""
    log_path = run_dir.with_suffix(".txt")
    log_path.unlink(missing_ok=True)
    job = start(build_overrides(run_dir), log_path)
    try:
        if _wait_for_kill_moment(kill, job, run_dir):
            return True
        if kill.kills_all_processes:
            job.end()
        else:
            job.kill_driver()
        kill.problems += [
            f"left: {line}" for line in job.left_over(EXIT_TIMEOUT_S, apart_from=AGENTS)
        ]
    finally:
        job.end()
    kill.problems += _check_step_order(run_dir)
    sys.stderr.write(f"{kill}\n")
    return False


def _wait_for_kill_moment(kill: Kill, job: Job, run_dir: Path) -> bool:
    """Wait for the moment of ``kill``. Return True if the run completed successfully before it.

    Also store ``step`` and ``next_s`` in ``kill``.
    """
    start_time = time.time()
    countdown_start = start_time if kill.early else None
    ready_time = None
    new_step_times: list[float] = []
    while countdown_start is None or time.time() - countdown_start < kill.after_s:
        if ready_time is None and READY_LINE.search(job.log.read_text(errors="replace")):
            ready_time = time.time()
        if ready_time is not None:
            new_step_times = [
                record["time"] for record in _read_records(run_dir) if record["time"] > ready_time
            ]
        if (
            countdown_start is None
            and ready_time is not None
            and len(new_step_times) >= kill.num_new_steps
        ):
            countdown_start = time.time()
        if job.process.poll() is not None or time.time() - start_time > RUN_TIMEOUT_S:
            job.finish(0.0)
            return True
        time.sleep(POLL_INTERVAL_S)
    kill.step = max((record["step"] for record in _read_records(run_dir)), default=0)
    kill.next_s = (
        round(new_step_times[0] - ready_time, 2)
        if ready_time is not None and new_step_times
        else None
    )
    if kill.next_s is not None and kill.next_s > FIRST_STEP_TIMEOUT_S:
        kill.problems.append(f"{kill.next_s} s from readiness to the next step")
    return False


def _read_records(run_dir: Path) -> list[dict[str, Any]]:
    return list(jsonl.read(run_dir / "metrics.jsonl"))


def _check_step_order(run_dir: Path) -> list[str]:
    steps = [record["step"] for record in _read_records(run_dir)]
    return [] if steps == list(range(1, len(steps) + 1)) else [f"steps on record: {steps}"]


def _is_complete(run_dir: Path) -> bool:
    return (run_dir / "checkpoints" / f"global_step_{NUM_STEPS}").is_dir()


def find_differences(reference_dir: Path, run_dir: Path) -> Iterator[str]:
    """Yield the differences of the run in ``run_dir`` from that in ``reference_dir``."""
    reference_records, records = _read_records(reference_dir), _read_records(run_dir)
    if [record["step"] for record in records] != [record["step"] for record in reference_records]:
        yield f"steps {[record['step'] for record in records]}"
        return
    for expected_record, record in zip(reference_records, records, strict=True):
        changed_items = _get_items_without_times(expected_record) ^ _get_items_without_times(record)
        changed_metric_names = {name for name, _ in changed_items}
        if changed_metric_names:
            yield f"step {record['step']} differs in {', '.join(sorted(changed_metric_names))}"
    reference_contents, run_contents = (
        read_checkpoint_contents(folder / f"checkpoints/global_step_{NUM_STEPS}")
        for folder in (reference_dir, run_dir)
    )
    changed_file_names = sorted(
        name
        for name in {*reference_contents, *run_contents}
        if reference_contents.get(name) != run_contents.get(name)
    )
    if changed_file_names:
        yield f"the last checkpoint differs in {', '.join(changed_file_names)}"


def _get_items_without_times(record: Mapping[str, Any]) -> set[tuple[str, Any]]:
    return {
        (k, v)
        for k, v in record.items()
        if not k.startswith(TIME_METRIC_PREFIXES) and k != WAITING_METRIC
    }


def read_checkpoint_contents(checkpoint: Path) -> dict[str, bytes]:
    """Verify ``checkpoint``, and return the bytes of its tensors and other files by name.

    Safetensors files are compared by tensor, because the order of their header is not fixed.
    """
    contents_by_name = {}
    for name in verify_checkpoint(checkpoint)["files"]:
        path = checkpoint / name
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            contents_by_name |= {
                f"{name}: {key}": tensor.tobytes() for key, tensor in tensors.items()
            }
        else:
            contents_by_name[name] = path.read_bytes()
    return contents_by_name


def format_summary(record: KillRecord) -> str:
    """Return a summary of kills, rounds, problems and times."""
    kills = record.kills
    num_whole_kills = sum(kill.kills_all_processes for kill in kills)
    num_early_kills = sum(kill.early for kill in kills)
    next_step_seconds = [kill.next_s for kill in kills if kill.next_s is not None]
    lines = [
        f"{len(kills)} kills ({num_whole_kills} of the whole tree, "
        f"{len(kills) - num_whole_kills} of the driver; "
        f"{num_early_kills} before the run was ready), {len(record.rounds)} completed runs",
        *record.list_problems(),
    ]
    if next_step_seconds:
        lines.append(
            f"from readiness to the next step, {len(next_step_seconds)} times: median "
            f"{statistics.median(next_step_seconds):.1f} s, longest {max(next_step_seconds):.1f} s"
        )
    lines.append(f"{len(record.list_problems())} problems")
    return "\n".join(lines) + "\n"
