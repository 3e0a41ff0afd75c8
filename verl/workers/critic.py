"""CriticWorker: one rank of the value model. It values states and fits the values to returns."""

import time
from functools import partial
from typing import Any

import torch

from verl.algos import compute_value_loss
from verl.models.policy import value_model_from
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.utils.seeds import seed_everything
from verl.workers.collectives import max_over_ranks, resolve_device
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import load_engine, save_engine
from verl.workers.policy_loss import Denominators, denominators
from verl.workers.rows import Rows, drop_padding, micro_batches
from verl.workers.update import optimizer_step, plan_mini_batches, update_metrics

METRICS = ("vf_loss", "vf_clipfrac", "vpred_mean")


class CriticWorker(Worker):
    """The value function of a policy: its backbone with a scalar head, starting at zero everywhere.

    Args:
        config: the ``critic`` section, with the values it shares with the actor filled in.
        seed: of everything random in this worker; equal on all ranks.
        num_threads: CPU threads of this rank; None leaves PyTorch's choice.
        device: ``auto``, ``cpu`` or ``cuda``.
    """

    def __init__(
        self, config: Any, seed: int = 0, num_threads: int | None = None, device: str = "auto"
    ) -> None:
        self.config, self.seed, self.device_name = config, seed, resolve_device(device)
        if num_threads:
            torch.set_num_threads(num_threads)
        self.engine: TrainEngine | None = None
        self.updates = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the backbone and shard it.

        Raises ``FileNotFoundError`` for a missing model directory.
        """
        seed_everything(self.seed)
        self.init_process_group("cpu:gloo,cuda:nccl" if self.device_name == "cuda" else "gloo")
        model = self.config.model
        module = value_model_from(
            model.path,
            trust_remote_code=model.trust_remote_code,
            override_config=dict(model.override_config),
            external_lib=model.external_lib,
            gradient_checkpointing=model.enable_gradient_checkpointing,
        )
        self.engine = TrainEngine(
            module,
            device=self.device_name,
            dtype=self.config.dtype or "float32",
            fsdp=model.fsdp_config,
            optim=self.config.optim,
            grad_clip=self.config.grad_clip,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """``values`` [B, R]: of the state before each sampled token, zero elsewhere."""
        rows, config = Rows(data, self.device_name), self.config
        limits = {"max_rows": config.forward_micro_batch_size_per_gpu}
        if config.use_dynamic_bsz:
            limits = {"max_tokens": config.forward_max_token_len_per_gpu}
        cuts = micro_batches(rows.lengths, **limits)
        values = torch.zeros(rows.mask.shape)
        with torch.no_grad(), self.engine.resident():
            for number in range(int(max_over_ranks([len(cuts)])[0])):
                # a rank that has finished repeats a row, since every pass is a collective operation
                index = cuts[number] if number < len(cuts) else [0]
                values[torch.as_tensor(index)] = rows.unpack(self._values(rows, index), index).cpu()
        return DataProto.from_dict({"values": values})

    def _values(self, rows: Rows, index: list[int]) -> torch.Tensor:
        packed = rows.pack(index)
        before = rows.targets(packed, index).index
        return self.engine.module(packed.input_ids, packed.position_ids, packed.layout, before)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        """``ppo_epochs`` passes of the clipped value loss; returns ``meta_info["metrics"]``, equal
        on every rank.
        """
        started = time.perf_counter()
        rows, section = Rows(data, self.device_name), self.config
        data = drop_padding(data)
        step = int(data.meta_info.get("global_step", self.updates))
        records = []
        with self.engine.resident(training=True):
            for part in plan_mini_batches(data, section, "update_critic", self.seed, step):
                whole = denominators(data, part, section.loss_agg_mode)
                share = partial(self._share, rows, data, whole)
                records.append(optimizer_step(self.engine, rows, part, section, share, METRICS))
        self.updates += 1
        tokens = sum(rows.lengths[: len(data)]) * (section.ppo_epochs or 1)
        return DataProto(
            meta_info={
                "metrics": update_metrics("critic", records, tokens, time.perf_counter() - started)
            }
        )

    def _share(
        self, rows: Rows, data: DataProto, whole: Denominators, index: list[int]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found = self._values(rows, index or [0])
        if not index:  # another rank still has rows: take part, add nothing
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
            row_weights=batch.get("loss_weights", None),
            denominator=whole.loss,
            loss_scale_factor=self.config.loss_scale_factor,
            num_tokens=tokens,
        )
        return loss, {
            "vf_loss": loss.detach(),
            "vf_clipfrac": clipfrac,
            "vpred_mean": found.detach().sum() / tokens,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: str) -> None:
        """Write what ``critic.checkpoint.contents`` lists into ``directory``; the caller makes it
        atomic.
        """
        contents = self.config.checkpoint.contents
        save_engine(
            self.engine, directory, optimizer="optimizer" in contents, extra="extra" in contents
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: str) -> None:
        """Continue from what ``save_checkpoint`` wrote, on any number of ranks."""
        load_engine(self.engine, directory)
