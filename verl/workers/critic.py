"""CriticWorker: one rank of the value model. It estimates values and fits them to returns."""

from functools import partial

import torch

from verl.algos import compute_value_loss
from verl.config.schema.critic import CriticConfig
from verl.models.policy import ValueModel
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine import TrainEngine
from verl.workers.mini_batches import call_on_micro_batches
from verl.workers.policy_loss import Denominators, compute_denominators
from verl.workers.rows import Rows, choose_micro_batch_limits
from verl.workers.training_worker import TrainingWorker
from verl.workers.update import StepOutcome, optimizer_step

METRIC_NAMES = ("vf_loss", "vf_clipfrac", "vpred_mean")  # metrics of a micro-batch


class CriticWorker(TrainingWorker):
    """One rank of the value model: a backbone with a scalar head. Initially all values are zero.

    ``config`` is the ``critic`` section. ``seed``, ``num_threads`` and ``device`` are those of
    ``TrainingWorker``.
    """

    def __init__(
        self,
        config: CriticConfig,
        seed: int = 0,
        num_threads: int | None = None,
        device: str = "auto",
    ) -> None:
        super().__init__(seed, num_threads, device, config.checkpoint)
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the backbone and shard it. Only rank 0 reads the weights from disk."""
        self._join_process_group()
        config = self.config
        model = config.model
        self._engine = TrainEngine(
            ValueModel(self._load_model(model, purpose="value")),
            device=self.device_name,
            dtype=config.dtype,
            fsdp=model.fsdp_config,
            optim=config.optim,
            grad_clip=config.grad_clip,
            sequence_ranks=config.ulysses_sequence_parallel_size,
            prefix_tree=model.prefix_tree,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """Compute ``values`` [B, R] of the state before each sampled token, zero elsewhere."""
        rows = self._make_rows(data)
        values = torch.zeros(rows.mask.shape)

        def store_row_values(row_indices: list[int]) -> None:
            values[torch.as_tensor(row_indices)] = rows.scatter_to_responses(
                self._compute_row_values(rows, row_indices), row_indices
            ).cpu()

        limits = choose_micro_batch_limits(
            self.config.use_dynamic_bsz,
            self.config.forward_micro_batch_size_per_gpu,
            self.config.forward_max_token_len_per_gpu,
        )
        call_on_micro_batches(self.train_engine, rows, rows.lengths, limits, store_row_values)
        return DataProto.from_dict({"values": values})

    def _compute_row_values(self, rows: Rows, row_indices: list[int]) -> torch.Tensor:
        packed = rows.pack_rows(row_indices)
        targets = rows.sampled_targets(packed, row_indices or [0])
        return self.train_engine.module(
            packed.input_ids, packed.position_ids, packed.layout, targets.predicting_positions
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        """Train ``ppo_epochs`` epochs with the value loss and return ``meta_info["metrics"]``."""
        metrics = self._run_update("critic", self.config, data, self._take_step)
        return DataProto(meta_info={"metrics": metrics})

    def _take_step(self, rows: Rows, data: DataProto, row_indices: list[int]) -> StepOutcome:
        denominators = compute_denominators(data, row_indices, self.config.loss_agg_mode)
        compute_loss = partial(self._compute_micro_batch_loss, rows, data, denominators)
        return optimizer_step(
            self.train_engine, rows, row_indices, self.config, compute_loss, METRIC_NAMES
        )

    def _compute_micro_batch_loss(
        self, rows: Rows, data: DataProto, denominators: Denominators, row_indices: list[int]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # A rank without rows passes row 0 through the model and returns a zero loss, because all
        # ranks must take part in the collective calls of FSDP.
        values = self._compute_row_values(rows, row_indices)
        if not row_indices:
            return values.sum() * 0.0, {}
        batch = data.batch[torch.as_tensor(row_indices)].to(values.device)
        num_tokens = denominators.num_tokens or 1.0
        loss, clipfrac = compute_value_loss(
            vpreds=rows.scatter_to_responses(values, row_indices),
            returns=batch["returns"],
            values=batch["values"],
            response_mask=batch["response_mask"].bool(),
            cliprange_value=self.config.cliprange_value,
            loss_agg_mode=self.config.loss_agg_mode,
            row_shares=batch.get("row_shares", None),
            denominator=denominators.loss_denominator,
            loss_scale_factor=self.config.loss_scale_factor,
            num_tokens=num_tokens,
        )
        return loss, {
            "vf_loss": loss.detach(),
            "vf_clipfrac": clipfrac,
            "vpred_mean": values.detach().sum() / num_tokens,
        }
