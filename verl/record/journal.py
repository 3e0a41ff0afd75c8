"""The journal of a run: metrics, trajectories and the report, written as training goes."""

import logging
import shutil
from pathlib import Path
from typing import Any

from verl.protocol import DataProto
from verl.record.report import refresh_report
from verl.record.rollout_log import rollout_lines
from verl.record.run_dir import RunDirectory
from verl.record.tracking import Tracking

logger = logging.getLogger(__name__)
PLAY = ["task", "return", "play"]


class Journal:
    """Writes what the trainer reports into the run directory and to the trackers."""

    def __init__(self, run: RunDirectory, config: Any, tokenizer: Any) -> None:
        self.run, self.config, self.tokenizer = run, config, tokenizer
        self.tracking: Tracking | None = None

    def open(self, resume_step: int | None, total_steps: int) -> None:
        """Start the trackers; lines after ``resume_step`` are removed, ``None`` starts a fresh
        file.
        """
        trainer = self.config.trainer
        self.tracking = Tracking(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            self.config,
            self.run.path,
            resume_step=resume_step,
            total_steps=total_steps,
        )

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics; where it holds a validation, the report is renewed."""
        self.tracking.log(metrics, step)
        if "val/success_rate" in metrics:
            refresh_report(self.run.path)

    def log_rollouts(self, step: int, batch: DataProto, validation: bool = False) -> None:
        """Every trajectory of a step with its credit; the trackers get a few plays of a validation."""
        trainer = self.config.trainer
        lines = list(rollout_lines(batch, self.tokenizer))
        written = self.run.write_rollouts(step, lines, validation)
        second = trainer.validation_data_dir if validation else trainer.rollout_data_dir
        if second is not None:
            Path(second).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(written, Path(second) / f"{step}.jsonl")
        if validation and trainer.log_val_generations:
            self.tracking.log_texts(
                "val/plays", PLAY, plays(lines, trainer.log_val_generations), step
            )

    def finish(self) -> None:
        """Close the trackers and write the report for the last time."""
        if self.tracking is not None:
            self.tracking.finish()
            self.tracking = None
            refresh_report(self.run.path)


def plays(lines: list[dict[str, Any]], count: int) -> list[list[str]]:
    """Task, return, and what was seen and answered, of the first ``count`` trajectories of a
    rollout file.
    """
    found: dict[str, list[str]] = {}
    for line in lines:
        row = found.setdefault(line["traj_uid"], [str(line["task_id"]), f"{line['return']:g}", ""])
        row[2] += "".join(
            f"> {step['observation']}\n\n{step['response']}\n\n" for step in line["steps"]
        )
    return list(found.values())[:count]
