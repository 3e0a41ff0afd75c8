"""Progress bar, log lines and ``metrics.jsonl`` of a supervised run."""

import logging
from pathlib import Path

from verl.config.schema import SFTConfig
from verl.record.tracking import Tracking
from verl.trainer.sft.trainer import OptimizerStep
from verl.utils.progress import Progress, record_heartbeat

logger = logging.getLogger(__name__)
MAX_RECORDS = (
    400  # approximate lines of metrics.jsonl; steps with a held-out loss are always written
)


class SFTProgress:
    """Recorder of the steps of ``SFTTrainer.fit``. Use it as a context manager."""

    def __init__(self, cfg: SFTConfig, run_dir: Path, total: int, first: int = 0) -> None:
        trainer = cfg.trainer
        # The console output of ``Tracking`` is for rollouts. The progress bar below replaces it.
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
        self.every = max(1, total // MAX_RECORDS)
        self.progress: Progress | None = None
        if "console" in trainer.logger:
            self.progress = Progress("imitating", total, "steps", first=first)

    def on_step(self, record: OptimizerStep) -> None:
        """Show one step and write its metrics.

        Of the steps without a held-out loss, about ``MAX_RECORDS`` are written.
        """
        # The watchdog needs this report of progress also if no progress bar is shown.
        record_heartbeat("imitating")
        metrics = record.metrics | {"training/global_step": float(record.step)}
        self.tokens += metrics.get("perf/tokens", 0.0)
        metrics["perf/total_num_tokens"] = self.tokens
        evaluated = "val/loss" in metrics
        if record.is_last or evaluated or record.step % self.every == 0:
            self.tracking.log(metrics, record.step)
        if self.progress is not None and "train/loss" in metrics:
            self.progress.set_done(record.step, f"loss {metrics['train/loss']:.3f}")
        if evaluated:
            loss = metrics["val/loss"]
            agent = metrics.get("val/agent_loss", float("nan"))
            line = "step %d of %d: held-out loss %.4f, agent tokens %.4f"
            logger.info(line, record.step, self.total, loss, agent)

    def __enter__(self) -> "SFTProgress":
        return self

    def __exit__(self, *error: object) -> None:
        if self.progress is not None:
            self.progress.close()
        self.tracking.finish()
