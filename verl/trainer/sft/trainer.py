"""The supervised loop: step through planned batches, measure the held-out loss, keep what is needed
to resume.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from verl.models.branch_attention import pack
from verl.models.token_scores import Targets
from verl.trainer.sft.rows import AGENT_WEIGHT, SFTRow
from verl.utils.checkpoint import CheckpointManager
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import load_engine, save_engine
from verl.workers.rows import micro_batches

logger = logging.getLogger(__name__)
EVAL_TOKENS = 4096  # per forward of the held-out rows
Sums = dict[str, float]


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step was: its number from 1, metrics, and whether it was the last."""

    step: int
    metrics: dict[str, float]
    last: bool


class SFTTrainer:
    """Minimises the weighted mean of ``-log p(token)`` over rows, on one device.

    Args:
        engine: a ``TrainEngine`` around a ``PolicyModel``.
        rows: rows to train on.
        batches: row indices of every optimizer step (``plan_batches``).
        val_rows: rows of the held-out loss, may be empty.
        max_tokens: tokens per forward/backward.
        test_freq, save_freq: every so many steps and after the last one; -1 never (held-out loss:
            before and after).
    """

    def __init__(
        self,
        engine: TrainEngine,
        rows: Sequence[SFTRow],
        batches: Sequence[list[int]],
        val_rows: Sequence[SFTRow] = (),
        max_tokens: int = 16384,
        test_freq: int = -1,
        save_freq: int = -1,
        checkpoints: CheckpointManager | None = None,
    ) -> None:
        self.engine = engine
        self.rows = rows
        self.batches = batches
        self.val_rows = val_rows
        self.max_tokens = max_tokens
        self.test_freq = test_freq
        self.save_freq = save_freq
        self.checkpoints = checkpoints
        self.step = 0

    def resume(self, directory: Path | None) -> None:
        """Continue from a checkpoint of ``fit``; None starts at the beginning."""
        if directory is not None:
            load_engine(self.engine, directory)
            self.step = self.engine.steps
            logger.info("resumed from %s at step %d", directory, self.step)

    def fit(self, on_step: Callable[[StepRecord], None]) -> None:
        """Take the remaining steps; ``on_step`` hears of each, and of the state before the first as
        step 0.
        """
        # A run that goes on has measured this in its first life.
        if self.step == 0:
            on_step(StepRecord(0, self.evaluate(), last=False))
        while self.step < len(self.batches):
            metrics = self.train_step(self.batches[self.step])
            self.step += 1
            last = self.step == len(self.batches)
            if last or (self.test_freq > 0 and self.step % self.test_freq == 0):
                metrics |= self.evaluate()
            if self.save_freq > 0 and (last or self.step % self.save_freq == 0):
                self.save()
            on_step(StepRecord(self.step, metrics, last))

    def save(self) -> None:
        """Write a checkpoint."""
        if self.checkpoints is None:
            raise ValueError("save_freq > 0 needs checkpoints")
        state = {"global_step": self.step}
        self.checkpoints.save(self.step, lambda path: save_engine(self.engine, path), state)

    def train_step(self, batch: Sequence[int]) -> dict[str, float]:
        """One optimizer step on the rows ``batch``; the loss is the mean over the whole batch's
        weights.
        """
        started = time.perf_counter()
        rows = [self.rows[row] for row in batch]
        tokens = sum(len(row) for row in rows)
        # A first token has no prediction before it, whatever its weight.
        weight = sum(sum(row.loss_weights[1:]) for row in rows)
        sums: Sums = {}
        with self.engine.resident(training=True):
            cuts = micro_batches([len(row) for row in rows], max_tokens=self.max_tokens)
            for number, cut in enumerate(cuts, start=1):
                loss = self._weighted_sum([rows[i] for i in cut], sums)
                # Over the weight of the whole batch: gradients do not depend on how it is cut.
                self.engine.backward(loss / weight, last=number == len(cuts))
            report = self.engine.step()
        return _means("train", sums) | {
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/skipped": float(report.skipped),
            "perf/tokens": float(tokens),
            "perf/throughput": tokens / max(time.perf_counter() - started, 1e-9),
        }

    def _weighted_sum(self, rows: Sequence[SFTRow], sums: Sums) -> torch.Tensor:
        """Sum over tokens of ``weight * -log p``; adds its parts by kind of token to ``sums``."""
        device = self.engine.device
        packed = pack([torch.tensor(row.input_ids) for row in rows], device=device)
        weights = torch.cat([torch.tensor((0.0, *row.loss_weights[1:])) for row in rows]).to(device)
        # Only positions that count are scored: most of a row can be observations of weight 0.
        where = weights.nonzero().squeeze(-1)
        # A token is predicted at the position before it.
        targets = Targets(where - 1, packed.input_ids[where])
        scores = self.engine.module(
            packed.input_ids, packed.position_ids, packed.layout, [targets]
        )[0]
        weights = weights[where]
        loss = -scores.log_probs
        agent = weights >= AGENT_WEIGHT
        found = {
            "loss": (weights * loss).sum(),
            "weight": weights.sum(),
            "agent_loss": loss[agent].sum(),
            "agent_tokens": agent.sum(),
        }
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach())
        return found["loss"]

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """``val/loss`` (weighted mean) and ``val/agent_loss`` (agent tokens) of the held-out rows,
        nats per token.
        """
        if not self.val_rows:
            return {}
        sums: Sums = {}
        with self.engine.resident():
            for cut in micro_batches([len(row) for row in self.val_rows], max_tokens=EVAL_TOKENS):
                self._weighted_sum([self.val_rows[i] for i in cut], sums)
        return _means("val", sums)


def _means(prefix: str, sums: Sums) -> dict[str, float]:
    means = {f"{prefix}/loss": sums["loss"] / sums["weight"]}
    if sums["agent_tokens"]:
        means[f"{prefix}/agent_loss"] = sums["agent_loss"] / sums["agent_tokens"]
    return means
