"""Journal of a run: a thread that writes metrics, trajectories and the report during training.

driver   step 20: submit ─▶ step 21: submit (raises the error if writing step 20 failed) ─▶ ...
thread                 └─▶ tokens/20 ─▶ rollouts/20 ─▶ metrics of step 20 ─▶ report
"""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.record.rollout_log import ENCODE_ROLLOUTS, ENCODE_TOKENS, TokenDecoder
from verl.record.run_dir import RunDirectory
from verl.record.tracking import Tracking
from verl.records import SUMMARY
from verl.utils import jsonl
from verl.utils.waits import BackgroundQueue

logger = logging.getLogger(__name__)
MAX_WAITING_WRITES = 2  # one validation and one training step; a third write blocks its caller
WRITE_TIMEOUT_S = 1800.0  # for all waiting writes
REPORT_TIMEOUT_S = 600.0  # for the child process that writes the report
REPORT_PROGRAM = """
import sys
from verl.record.report import write_report
from verl.utils.processes import die_with_parent

die_with_parent()
print(write_report(sys.argv[1]))
"""
TRANSCRIPT_COLUMNS = ["task", "return", "trajectory"]
# Function that returns one encoded line for each row of a batch.
EncodeRows: TypeAlias = Callable[[DataProto, jsonl.RowEncoder], Iterable[memoryview]]


class Journal:
    """Writer of metrics and trajectories to the run directory and the trackers, in order.

    ``log_step`` and ``log_rollouts`` return before the data is written. If a write fails, the next
    call of a method raises its error. ``encode_rows`` converts each row of a batch to a line of
    JSON, for example in the processes that hold the texts of the rows. By default this process does
    it.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: PPOConfig,
        tokenizer: TokenDecoder,
        encode_rows: EncodeRows | None = None,
    ) -> None:
        self.run = run
        self.config = config
        self._encode_rows = encode_rows or (lambda batch, encode: encode(batch, tokenizer))
        self.tracking: Tracking | None = None
        self._write_queue = BackgroundQueue("journal", MAX_WAITING_WRITES, WRITE_TIMEOUT_S)

    def open(
        self, resume_step: int | None, total_steps: int, keeps_later_steps: bool = False
    ) -> None:
        """Start the trackers. Remove the records of steps after ``resume_step``.

        With ``resume_step=None`` a new run starts, and the records of an earlier run are renamed.
        With ``keeps_later_steps`` later records stay: the run measures a checkpoint and repeats no
        training step.
        """
        trainer = self.config.trainer
        if resume_step is None or not keeps_later_steps:
            self.run.remove_rollouts_after(resume_step)
        self.tracking = Tracking(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            self.config,
            self.run.path,
            resume_step=resume_step,
            keeps_later_steps=keeps_later_steps,
            total_steps=total_steps,
        )

    def _get_open_tracking(self) -> Tracking:
        if self.tracking is None:
            raise RuntimeError("the journal is not open: call open() first")
        return self.tracking

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. After a validation, also write the report."""
        self._write_queue.add(
            partial(self._write_step, self._get_open_tracking(), step, dict(metrics))
        )

    def log_rollouts(self, step: int, batch: DataProto, validation: bool = False) -> None:
        """Write the trajectories of a step or of its validation.

        Trackers get the texts of the first ``trainer.log_val_generations`` validation trajectories.
        """
        # Pass a new table with the same columns: the caller may add columns to ``batch``.
        self._write_queue.add(partial(self._write_rollouts, step, batch.select(), validation))

    def flush(self) -> None:
        """Wait until the data of all earlier calls is written."""
        self._write_queue.wait()

    def finish_run(self) -> None:
        """Write the remaining data, close the trackers and write the final report."""
        if self.tracking is None:
            return
        try:
            self.flush()
        finally:
            self.tracking.finish()
            self.tracking = None
            report_file = _write_report(self.run.path)
            if report_file is not None:
                logger.info("report: %s", report_file)

    def close(self) -> None:
        """Finish a run that an exception ended. Log errors instead of raising them.

        An error raised here would replace that exception. After ``finish_run`` there is no effect.
        """
        try:
            self.finish_run()
        except Exception as error:  # for example after a full disk
            logger.warning("the last records could not be written: %s", error)

    def _write_step(self, trackers: Tracking, step: int, metrics: Mapping[str, float]) -> None:
        trackers.log(metrics, step)
        # Write the report only after a validation: it reads the metrics of all earlier steps.
        if "val/success_rate" in metrics:
            _write_report(self.run.path)

    def _write_rollouts(self, step: int, batch: DataProto, validation: bool) -> None:
        trainer = self.config.trainer
        # Write token values first: a reader that sees a rollout file can rely on its token file.
        if not validation:
            self.run.write_tokens(step, self._encode_rows(batch, ENCODE_TOKENS))
        lines = self._encode_rows(batch, ENCODE_ROLLOUTS)
        rollout_file = self.run.write_rollouts(step, lines, validation)
        copy_folder = trainer.validation_data_dir if validation else trainer.rollout_data_dir
        if copy_folder is not None:
            Path(copy_folder).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(rollout_file, Path(copy_folder) / f"{step}.jsonl")
        if validation and trainer.log_val_generations:
            transcripts = format_transcripts(jsonl.read(rollout_file), trainer.log_val_generations)
            self._get_open_tracking().log_texts(
                "val/trajectories", TRANSCRIPT_COLUMNS, transcripts, step
            )


def _write_report(run_directory: Path) -> Path | None:
    """Write the report in a child process, so that its memory does not stay in the driver.

    Returns the path, or None after a failure, which is logged and does not end the run.
    """
    try:
        completed_process = subprocess.run(
            [sys.executable, "-c", REPORT_PROGRAM, str(run_directory)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=REPORT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning("the report of %s could not be written: %s", run_directory, reason)
        return None
    return Path(completed_process.stdout.splitlines()[-1])


def format_transcripts(lines: Iterable[Mapping[str, Any]], count: int) -> list[list[str]]:
    """Return task, return and transcript of the first ``count`` trajectories of a rollout file."""
    rows_by_trajectory: dict[str, list[str]] = {}
    for line in lines:
        # Rows of one trajectory are adjacent and in order, so their texts can be joined.
        if line["traj_uid"] not in rows_by_trajectory and len(rows_by_trajectory) == count:
            break
        row = rows_by_trajectory.setdefault(
            line["traj_uid"], [str(line["task_id"]), f"{line['return']:g}", ""]
        )
        for step in line["steps"]:
            row[2] += f"> {step['observation']}\n\n{step['response']}\n\n"
        if line.get(SUMMARY):
            row[2] += f"> summary:\n\n{line[SUMMARY]['response']}\n\n"
    return list(rows_by_trajectory.values())
