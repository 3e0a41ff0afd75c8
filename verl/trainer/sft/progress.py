"""What a supervised run shows and writes down: a bar or a few lines, and every step in
``metrics.jsonl``.
"""

import logging
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from verl.record.tracking import Tracking
from verl.trainer.config.schema import SFTConfig
from verl.trainer.sft.trainer import StepRecord

logger = logging.getLogger(__name__)
LINES = 20  # log lines of a run without a terminal
RECORDS = 400  # lines of metrics.jsonl, about; held-out losses are always among them


class SFTProgress:
    """Listens to ``SFTTrainer.fit``; use as a context manager."""

    def __init__(self, cfg: SFTConfig, run_dir: Path, total: int, first: int = 0) -> None:
        trainer = cfg.trainer
        # The console of training shows figures of episodes; the bar below takes its place.
        services = [name for name in trainer.logger if name != "console"]
        resumed = first if first else None
        self.tracking = Tracking(
            trainer.project_name,
            trainer.experiment_name,
            services,
            cfg,
            run_dir,
            resume_step=resumed,
        )
        self.total = total
        self.tokens = 0.0
        self.every = max(1, total // RECORDS)
        self.bar: Progress | None = None
        console = Console(stderr=True)
        if "console" in trainer.logger and console.is_terminal:
            columns = [TextColumn("[bold]imitating"), BarColumn(), MofNCompleteColumn()]
            times = [
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[loss]}"),
            ]
            self.bar = Progress(*columns, *times, console=console, transient=True)
            self.task = self.bar.add_task("steps", total=total, completed=first, loss="")
            self.bar.start()

    def on_step(self, record: StepRecord) -> None:
        """Show and write one step."""
        metrics = record.metrics | {"training/global_step": float(record.step)}
        self.tokens += metrics.get("perf/tokens", 0.0)
        metrics["perf/total_num_tokens"] = self.tokens
        evaluated = "val/loss" in metrics
        if record.last or evaluated or record.step % self.every == 0:
            self.tracking.log(metrics, record.step)
        if self.bar is not None and "train/loss" in metrics:
            self.bar.update(
                self.task, completed=record.step, loss=f"loss {metrics['train/loss']:.3f}"
            )
        if evaluated:
            loss = metrics["val/loss"]
            agent = metrics.get("val/agent_loss", float("nan"))
            line = "step %d of %d: held-out loss %.4f, agent tokens %.4f"
            logger.info(line, record.step, self.total, loss, agent)
        elif self.bar is None and record.step % max(1, self.total // LINES) == 0:
            loss = metrics.get("train/loss", float("nan"))
            speed = metrics.get("perf/throughput", 0.0)
            line = "step %d of %d: loss %.4f, %.0f tokens/s"
            logger.info(line, record.step, self.total, loss, speed)

    def __enter__(self) -> "SFTProgress":
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.tracking.finish()
