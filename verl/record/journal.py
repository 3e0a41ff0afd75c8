"""The journal of a run: metrics, trajectories and the report, written as training goes, by a thread
behind it.

    run      step 20: hand over ─▶ step 21 ─────▶ hand over: raise what writing 20 raised ─▶ ...
    thread                     └─▶ tokens/20 ─▶ rollouts/20 ─▶ metrics of 20 ─▶ report
"""

import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from verl.protocol import DataProto
from verl.record.report import refresh_report
from verl.record.rollout_log import Decoder, rollout_lines, token_lines
from verl.record.run_dir import RunDirectory
from verl.record.tracking import Tracking
from verl.utils.background import BackgroundCalls

logger = logging.getLogger(__name__)
# Beside what is being written: a step with a validation goes on at once, and the next one does not
# hand over its plays while those of this one are not written. Plays wait in memory.
MOST_WAITING = 2
WRITE_TIMEOUT_S = 1800.0  # for all that waits to be written
PLAY = ["task", "return", "play"]


class TrainerConfig(Protocol):
    """What the journal reads of ``trainer``."""

    @property
    def project_name(self) -> str: ...

    @property
    def experiment_name(self) -> str: ...

    @property
    def logger(self) -> Sequence[str]: ...

    @property
    def rollout_data_dir(self) -> str | None: ...

    @property
    def validation_data_dir(self) -> str | None: ...

    @property
    def log_val_generations(self) -> int: ...


class JournalConfig(Protocol):
    """The whole configuration, which the trackers are shown."""

    @property
    def trainer(self) -> TrainerConfig: ...


class Journal:
    """Writes what the trainer reports into the run directory and to the trackers, in the order in
    which it is reported.

    Reports return before they are written; what goes wrong then is raised by the next one, by
    ``flush`` or by ``finish``.
    """

    def __init__(self, run: RunDirectory, config: JournalConfig, tokenizer: Decoder) -> None:
        self.run = run
        self.config = config
        self.tokenizer = tokenizer
        self.tracking: Tracking | None = None
        self._writing = BackgroundCalls("journal", MOST_WAITING, WRITE_TIMEOUT_S)

    def open(self, resume_step: int | None, total_steps: int) -> None:
        """Start the trackers; what was written of steps after ``resume_step`` is removed, ``None``
        starts afresh and puts all of an earlier run aside.
        """
        trainer = self.config.trainer
        self.run.remove_rollouts_after(resume_step)
        self.tracking = Tracking(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            self.config,
            self.run.path,
            resume_step=resume_step,
            total_steps=total_steps,
        )

    @property
    def _trackers(self) -> Tracking:
        if self.tracking is None:
            raise RuntimeError("the journal is not open: call open() first")
        return self.tracking

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics; where it holds a validation, the report is renewed."""
        self._writing.add(partial(self._write_step, self._trackers, step, dict(metrics)))

    def log_rollouts(self, step: int, batch: DataProto, validation: bool = False) -> None:
        """Every trajectory of a step with its credit, and in training what is known of its tokens;
        the trackers get a few plays of a validation.
        """
        # A table of its own, which shares the columns: the caller may go on with his.
        self._writing.add(partial(self._write_rollouts, step, batch.select(), validation))

    def flush(self) -> None:
        """Return when all that was reported until now is written."""
        self._writing.wait()

    def finish(self) -> None:
        """Write what is left, close the trackers and write the report for the last time."""
        if self.tracking is None:
            return
        try:
            self.flush()
        finally:
            self.tracking.finish()
            self.tracking = None
            written = refresh_report(self.run.path)
            if written is not None:
                logger.info("report: %s", written)

    def _write_step(self, trackers: Tracking, step: int, metrics: Mapping[str, float]) -> None:
        trackers.log(metrics, step)
        # A report reads all that was ever logged: at every step it would cost more each time.
        if "val/success_rate" in metrics:
            refresh_report(self.run.path)

    def _write_rollouts(self, step: int, batch: DataProto, validation: bool) -> None:
        trainer = self.config.trainer
        # Before the plays: whoever sees a file of plays finds that of their tokens.
        if not validation:
            self.run.write_tokens(step, token_lines(batch, self.tokenizer))
        # Line by line: with the credit of every token they are many times what the rows are.
        lines = rollout_lines(batch, self.tokenizer)
        written = self.run.write_rollouts(step, lines, validation)
        second = trainer.validation_data_dir if validation else trainer.rollout_data_dir
        if second is not None:
            Path(second).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(written, Path(second) / f"{step}.jsonl")
        if validation and trainer.log_val_generations:
            lines = rollout_lines(batch, self.tokenizer)
            texts = trajectory_texts(lines, trainer.log_val_generations)
            self._trackers.log_texts("val/plays", PLAY, texts, step)


def trajectory_texts(lines: Iterable[Mapping[str, Any]], count: int) -> list[list[str]]:
    """Task, return, and what was seen and answered, of the first ``count`` trajectories of a
    rollout file.
    """
    found: dict[str, list[str]] = {}
    for line in lines:
        # Rows of one trajectory are neighbours and in order: their texts join.
        row = found.setdefault(line["traj_uid"], [str(line["task_id"]), f"{line['return']:g}", ""])
        for step in line["steps"]:
            row[2] += f"> {step['observation']}\n\n{step['response']}\n\n"
    return list(found.values())[:count]
