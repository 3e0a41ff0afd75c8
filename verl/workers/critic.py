"""CriticWorker: one rank of the value model. It estimates values and fits them to returns."""

import time
from functools import partial

import torch

from verl.algos import compute_value_loss
from verl.config.schema.critic import CriticConfig
from verl.models.flops import Work
from verl.models.hub import local_model
from verl.models.policy import value_model_from
from verl.protocol import DataProto
from verl.records import PROFILE
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.collectives import rank
from verl.workers.passes import score_micro_batches
from verl.workers.policy_loss import Denominators, denominators
from verl.workers.profiling import profiled
from verl.workers.rows import Rows, drop_padding, limits_of
from verl.workers.training_worker import TrainingWorker
from verl.workers.update import optimizer_step, plan_mini_batches, update_metrics

METRICS = ("vf_loss", "vf_clipfrac", "vpred_mean")


class CriticWorker(TrainingWorker):
    """One rank of the value model: a backbone with a scalar head. Initially all values are zero.

    Args:
        config: the ``critic`` section, with the values derived from the actor section.
        seed, num_threads, device: as ``TrainingWorker``.
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
        """Load the backbone and shard it. Only rank 0 reads the weights from disk.

        Raises ``FileNotFoundError`` for a missing model directory.
        """
        self._join_group()
        config = self.config
        model = config.model
        module = value_model_from(
            local_model(model.path),
            trust_remote_code=model.trust_remote_code,
            override_config=dict(model.override_config),
            external_lib=model.external_lib,
            gradient_checkpointing=model.enable_gradient_checkpointing,
            attention=model.attn_implementation,
            empty=rank() > 0,
        )
        self._take_model(
            module,
            config.dtype,
            model.fsdp_config,
            config.optim,
            config.grad_clip,
            config.ulysses_sequence_parallel_size,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """Compute ``values`` [B, R] of the state before each sampled token, zero elsewhere."""
        rows = Rows(data, self.device_name)
        values = torch.zeros(rows.mask.shape)

        def score(index: list[int]) -> None:
            values[torch.as_tensor(index)] = rows.unpack(self._values(rows, index), index).cpu()

        limits = limits_of(
            self.config.use_dynamic_bsz,
            self.config.forward_micro_batch_size_per_gpu,
            self.config.forward_max_token_len_per_gpu,
        )
        score_micro_batches(self.engine, rows.lengths, limits, score)
        return DataProto.from_dict({"values": values})

    def _values(self, rows: Rows, index: list[int]) -> torch.Tensor:
        packed = rows.pack(index)
        before = rows.targets(packed, index).index
        return self.engine.module(packed.input_ids, packed.position_ids, packed.layout, before)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        """Train ``ppo_epochs`` epochs with the clipped value loss.

        Returns ``meta_info["metrics"]``, which are equal on every rank.
        """
        started = time.perf_counter()
        config = self.config
        rows = Rows(data, self.device_name)
        data = drop_padding(data)
        step = int(data.meta_info.get("global_step", self.updates))
        records = []
        work = Work()
        tracing = profiled(data.meta_info.get(PROFILE), "update_critic")
        with self.engine.resident(training=True), tracing:
            for part in plan_mini_batches(data, config, "update_critic", self.seed, step):
                whole = denominators(data, part, config.loss_agg_mode)
                share = partial(self._share, rows, data, whole)
                records.append(optimizer_step(self.engine, rows, part, config, share, METRICS))
                work += rows.work(part)
            self.engine.require_finite()
        self.updates += 1
        seconds = time.perf_counter() - started
        metrics = update_metrics("critic", self.engine, records, work, seconds)
        return DataProto(meta_info={"metrics": metrics})

    def _share(
        self, rows: Rows, data: DataProto, whole: Denominators, index: list[int]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # A rank without rows passes row 0 through the model, because all ranks must join the
        # collective calls of FSDP.
        found = self._values(rows, index or [0])
        if not index:  # another rank still has rows: join its collective calls with a zero loss
            return found.sum() * 0.0, {}
        batch = data.batch[torch.as_tensor(index)].to(found.device)
        tokens = whole.tokens or 1.0
        loss, clipfrac = compute_value_loss(
            vpreds=rows.unpack(found, index),
            returns=batch["returns"],
            values=batch["values"],
            response_mask=batch["response_mask"].bool(),
            cliprange_value=self.config.cliprange_value,
            loss_agg_mode=self.config.loss_agg_mode,
            row_shares=batch.get("row_shares", None),
            denominator=whole.loss,
            loss_scale_factor=self.config.loss_scale_factor,
            num_tokens=tokens,
        )
        return loss, {
            "vf_loss": loss.detach(),
            "vf_clipfrac": clipfrac,
            "vpred_mean": found.detach().sum() / tokens,
        }
