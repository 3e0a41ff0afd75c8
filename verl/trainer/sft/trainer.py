"""Training loop of supervised learning: optimizer steps, held-out loss and checkpoints."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from verl.models.prefix_tree import pack_rows
from verl.models.token_scores import Targets
from verl.trainer.sft.resume import (
    BATCHES_KEY,
    ROWS_KEY,
    STEP_KEY,
    compute_batches_digest,
    compute_rows_digest,
)
from verl.trainer.sft.rows import SFTRow
from verl.utils.checkpoint import CheckpointError, CheckpointManager
from verl.utils.seqlen_balancing import partition_rows
from verl.workers.collectives import (
    broadcast_text,
    gather_texts,
    get_rank,
    sum_over_ranks,
    world_size,
)
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import load_engine, save_engine
from verl.workers.mini_batches import count_max_passes_of_ranks
from verl.workers.rows import make_micro_batches

logger = logging.getLogger(__name__)
EVAL_TOKENS = 4096  # tokens per forward pass for the held-out loss
LOSS_SUM_NAMES = ("loss", "weight", "agent_loss", "agent_tokens")
LossSumsByName = dict[str, float]  # LOSS_SUM_NAMES -> sum over the micro-batches of this rank


@dataclass(frozen=True)
class OptimizerStepResult:
    """Result of one optimizer step: its number (0: before the first step) and its metrics."""

    step: int
    metrics: dict[str, float]
    is_last: bool


@dataclass(eq=False)
class SFTTrainer:
    """Trainer that minimises the weighted mean of ``-log p(token)`` over rows.

    Every rank has all rows and the same batches. The rows of a batch are assigned to ranks by
    length. The gradient of a step is that of the whole batch, independent of the number of ranks
    and micro-batches. A micro-batch is one packed sequence of whole rows.

    Args:
        batches: row indices of every optimizer step (``plan_batches``).
        max_tokens: tokens per forward/backward pass.
        test_freq: steps between computations of the held-out loss (-1: none between). It is always
            computed before the first and after the last step.
        save_freq: steps between checkpoints (-1: no checkpoints). One is also written after the
            last step.
    """

    engine: TrainEngine
    rows: Sequence[SFTRow]
    batches: Sequence[list[int]]
    val_rows: Sequence[SFTRow] = ()
    max_tokens: int = 16384
    test_freq: int = -1
    save_freq: int = -1
    checkpoints: CheckpointManager | None = None
    step: int = field(default=0, init=False)

    def resume(self, directory: Path | None) -> None:
        """Load the valid checkpoint in ``directory``. Do nothing for None."""
        if directory is not None:
            load_engine(self.engine, directory)
            self.step = self.engine.steps
            logger.info("resumed from %s at step %d", directory, self.step)

    def fit(self, on_step: Callable[[OptimizerStepResult], None]) -> None:
        """Take the remaining optimizer steps, and call ``on_step`` after each step.

        A new run also calls ``on_step`` before the first step, with the held-out loss.
        """
        if self.step == 0:
            on_step(OptimizerStepResult(0, self.evaluate(), is_last=False))
        while self.step < len(self.batches):
            metrics = self.train_step(self.batches[self.step])
            self.step += 1
            is_final_step = self.step == len(self.batches)
            if is_final_step or (self.test_freq > 0 and self.step % self.test_freq == 0):
                metrics |= self.evaluate()
            # Report before the save: a resumed run does not repeat the step of its checkpoint.
            on_step(OptimizerStepResult(self.step, metrics, is_final_step))
            if self.save_freq > 0 and (is_final_step or self.step % self.save_freq == 0):
                self.save()

    def save(self) -> None:
        """Write a checkpoint of the current step. All ranks must call it."""
        if self.checkpoints is None:
            raise ValueError("save_freq > 0 needs checkpoints; fix: pass a CheckpointManager")
        if get_rank() == 0:
            state = {
                STEP_KEY: self.step,
                ROWS_KEY: self._rows_digest,
                BATCHES_KEY: compute_batches_digest(self.batches[: self.step]),
            }
            self.checkpoints.save(self.step, self._write_engine_state, state)
        else:
            self._write_engine_state(Path())

    @cached_property
    def _rows_digest(self) -> str:
        return compute_rows_digest(self.rows)

    def _write_engine_state(self, directory: Path) -> None:
        # Only rank 0 knows the directory. Broadcast it, because every rank writes into it.
        shared_directory = broadcast_text(str(directory))
        error: Exception | None = None
        error_message = ""
        try:
            save_engine(self.engine, shared_directory).wait_for_files()
        except Exception as write_error:
            error = write_error
            error_message = f"rank {get_rank()}: {type(error).__name__}: {error}"
        # The call is also a barrier. All ranks raise, because rank 0 must not publish a checkpoint
        # that lacks the shards of another rank.
        rank_messages = gather_texts(error_message)
        if any(rank_messages):
            error_text = "; ".join(filter(None, rank_messages))
            raise CheckpointError(f"no checkpoint of step {self.step}: {error_text}") from error

    def train_step(self, batch: Sequence[int]) -> dict[str, float]:
        """Take one optimizer step on the rows with indices ``batch``, and return its metrics."""
        start_time = time.perf_counter()
        rows = [self.rows[row] for row in batch]
        batch_tokens = sum(len(row) for row in rows)
        # The first token of a row is not predicted, so its weight does not count.
        batch_weight = sum(sum(row.loss_weights[1:]) for row in rows)
        loss_sums = LossSumsByName()
        with self.engine.model_on_device(training=True):
            micro_batches_of_rank = self._split_rank_rows(rows, self.max_tokens)
            for micro_batch_number, micro_rows in enumerate(micro_batches_of_rank, start=1):
                loss = self._sum_losses(
                    micro_rows or rows[:1], loss_sums if micro_rows else LossSumsByName()
                )
                # Divide by the weight of the whole batch, so that gradients do not depend on the
                # micro-batches.
                scaled_loss = loss / batch_weight if micro_rows else loss * 0.0
                self.engine.backward(
                    scaled_loss,
                    is_last_micro_batch=micro_batch_number == len(micro_batches_of_rank),
                )
            step_report = self.engine.step()
            self.engine.check_finite_weights()
        return compute_mean_losses(loss_sums, "train") | {
            "train/grad_norm": step_report.grad_norm,
            "train/lr": step_report.lr,
            "train/skipped": float(step_report.is_skipped),
            "perf/tokens": float(batch_tokens),
            "perf/throughput": batch_tokens / max(time.perf_counter() - start_time, 1e-9),
        }

    def _split_rank_rows(self, rows: Sequence[SFTRow], max_tokens: int) -> list[list[SFTRow]]:
        """Return the micro-batches of the rows of this rank.

        All ranks return the same number of micro-batches, so some may be empty.
        """
        rows_per_rank = partition_rows([len(row) for row in rows], world_size())
        rank_rows = [rows[i] for i in rows_per_rank[get_rank()]]
        micro_batch_rows = make_micro_batches(
            [len(row) for row in rank_rows], max_tokens=max_tokens
        )
        # A forward pass through a sharded model is a collective operation, so all ranks need the
        # same number of micro-batches.
        empty_batches = [
            [] for _ in range(count_max_passes_of_ranks(micro_batch_rows) - len(micro_batch_rows))
        ]
        return [[rank_rows[i] for i in indices] for indices in micro_batch_rows] + empty_batches

    def _sum_losses(self, rows: Sequence[SFTRow], loss_sums: LossSumsByName) -> torch.Tensor:
        """Return the sum over the tokens of ``rows`` of ``weight * -log p``.

        Add this sum, the sum of the weights, and the loss and number of agent tokens to
        ``loss_sums``.
        """
        device = self.engine.device
        packed_rows = pack_rows([torch.tensor(row.input_ids) for row in rows], device=device)
        loss_weights = torch.cat([torch.tensor((0.0, *row.loss_weights[1:])) for row in rows]).to(
            device
        )
        agent_mask = torch.cat([torch.tensor(row.agent_mask) for row in rows]).to(device)
        # Compute logits only for tokens with a weight: most tokens may be observations of weight 0.
        weighted_positions = loss_weights.nonzero().squeeze(-1)
        # The logits at position i - 1 predict token i.
        targets = Targets(
            weighted_positions - 1, packed_rows.input_ids[weighted_positions], with_entropy=False
        )
        target_log_probs = self.engine.module(
            packed_rows.input_ids, packed_rows.position_ids, packed_rows.layout, [targets]
        )[0]
        loss_weights = loss_weights[weighted_positions]
        token_losses = -target_log_probs.log_probs
        is_agent_token = agent_mask[weighted_positions]
        loss_sum = (loss_weights * token_losses).sum()
        loss_terms = (
            loss_sum,
            loss_weights.sum(),
            token_losses[is_agent_token].sum(),
            is_agent_token.sum(),
        )
        for name, value in zip(LOSS_SUM_NAMES, loss_terms, strict=True):
            loss_sums[name] = loss_sums.get(name, 0.0) + value.item()
        return loss_sum

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return held-out ``val/loss`` and ``val/agent_loss`` (agent tokens) in nats per token."""
        if not self.val_rows:
            return {}
        loss_sums = LossSumsByName()
        with self.engine.model_on_device():
            for batch in self._split_rank_rows(self.val_rows, EVAL_TOKENS):
                self._sum_losses(
                    batch or self.val_rows[:1], loss_sums if batch else LossSumsByName()
                )
        return compute_mean_losses(loss_sums, "val")


def compute_mean_losses(loss_sums: LossSumsByName, prefix: str) -> dict[str, float]:
    """Return ``<prefix>/loss`` and ``<prefix>/agent_loss``, means over the tokens of all ranks.

    ``loss_sums`` are the summed losses and weights of this rank, by name. All ranks must call the
    function. ``agent_loss`` is omitted if there are no tokens of the agent.
    """
    rank_sums = [loss_sums.get(name, 0.0) for name in LOSS_SUM_NAMES]
    loss_sum, weight_sum, agent_loss_sum, num_agent_tokens = sum_over_ranks(rank_sums)
    mean_losses = {f"{prefix}/loss": loss_sum / weight_sum}
    if num_agent_tokens:
        mean_losses[f"{prefix}/agent_loss"] = agent_loss_sum / num_agent_tokens
    return mean_losses
