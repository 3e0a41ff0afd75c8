"""ActorWorker: one rank of the policy. It scores rows, updates the weights, and hands them out."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl.models.export import hf_names, save_hf, tied_names
from verl.models.loader import load_causal_lm
from verl.models.lora import lora_scales
from verl.models.policy import PolicyModel
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.utils.seeds import seed_everything
from verl.workers.branch_scores import score_rows
from verl.workers.collectives import rank, resolve_device
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import full_weights, load_engine, save_engine
from verl.workers.policy_loss import Denominators, PolicyLoss, denominators
from verl.workers.rows import Rows, drop_padding
from verl.workers.update import optimizer_step, plan_mini_batches, update_metrics

PREFIX = "lm."  # where PolicyModel keeps the causal LM


class ActorWorker(Worker):
    """The trained policy (``role="actor"``) or the frozen reference (``role="ref"``).

    Args:
        config: the ``actor_rollout_ref`` section.
        role: ``actor`` or ``ref``.
        seed: of everything random in this worker; equal on all ranks.
        num_threads: CPU threads of this rank; None leaves PyTorch's choice.
        device: ``auto``, ``cpu`` or ``cuda``.
    """

    def __init__(
        self,
        config: Any,
        role: str = "actor",
        seed: int = 0,
        num_threads: int | None = None,
        device: str = "auto",
    ) -> None:
        if role not in ("actor", "ref"):
            raise ValueError(f"role={role!r}; a policy worker is 'actor' or 'ref'")
        self.config, self.role, self.seed, self.device_name = (
            config,
            role,
            seed,
            resolve_device(device),
        )
        if num_threads:
            torch.set_num_threads(num_threads)
        self.engine: TrainEngine | None = None
        self.updates = 0

    # ------------------------------------------------------------------ set-up

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy and shard it.

        Raises ``FileNotFoundError`` for a missing model directory.
        """
        seed_everything(self.seed)
        self.init_process_group("cpu:gloo,cuda:nccl" if self.device_name == "cuda" else "gloo")
        model, actor, ref = self.config.model, self.config.actor, self.config.ref
        trained = self.role == "actor"
        lm = load_causal_lm(
            model.path,
            trust_remote_code=model.trust_remote_code,
            override_config=dict(model.override_config),
            external_lib=model.external_lib,
            gradient_checkpointing=trained and model.enable_gradient_checkpointing,
            lora_rank=model.lora_rank if trained else 0,
            lora_alpha=model.lora_alpha,
            target_modules=model.target_modules,
        )
        self.lm, self.tied, self.scales = lm, tied_names(lm), lora_scales(lm)
        self.engine = TrainEngine(
            PolicyModel(lm),
            device=self.device_name,
            dtype=actor.dtype if trained else (ref.dtype or actor.dtype),
            fsdp=actor.fsdp_config if trained else ref.fsdp_config,
            optim=actor.optim if trained else None,
            grad_clip=actor.grad_clip,
        )

    # ------------------------------------------------------------------ scoring

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` and ``entropys`` [B, R] of the sampled tokens (zero elsewhere), without
        gradient.

        Both are at ``meta_info["temperature"]``. With ``branches`` (and ``spans``) in
        ``non_tensor_batch`` the same pass also gives ``branch_scores`` and ``span_scores``, at
        temperature 1; see ``verl.workers.branch_scores``.
        """
        limits = self._scoring_limits(self.config.rollout)
        found = score_rows(self.engine, data, self._temperature(data), **limits)
        tensors = {"old_log_probs": found.log_probs, "entropys": found.entropy}
        others = {}
        if found.branch_scores is not None:
            others = {"branch_scores": found.branch_scores, "span_scores": found.span_scores}
        return DataProto.from_dict(tensors, others)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` [B, R] of the sampled tokens under this worker's weights, at the rollout
        temperature.
        """
        plain = data.select(["input_ids", "attention_mask", "responses", "response_mask"], [])
        found = score_rows(
            self.engine, plain, self._temperature(data), **self._scoring_limits(self.config.ref)
        )
        return DataProto.from_dict({"ref_log_prob": found.log_probs})

    def _temperature(self, data: DataProto) -> float:
        return float(data.meta_info.get("temperature", self.config.rollout.temperature)) or 1.0

    def _scoring_limits(self, section: Any) -> dict[str, int | None]:
        actor = self.config.actor
        by_tokens = section.log_prob_use_dynamic_bsz
        if actor.use_dynamic_bsz if by_tokens is None else by_tokens:
            return {
                "max_tokens": section.log_prob_max_token_len_per_gpu
                or actor.ppo_max_token_len_per_gpu
            }
        return {
            "max_rows": section.log_prob_micro_batch_size_per_gpu
            or actor.ppo_micro_batch_size_per_gpu
        }

    # ------------------------------------------------------------------ updating

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """``ppo_epochs`` passes over the rows; returns ``meta_info["metrics"]``, equal on every
        rank.

        The number of optimizer steps depends on groups and trajectories alone, and the gradient of
        a step is that of its whole mini-batch, however it is cut into micro-batches and ranks. Rows
        without advantage are not computed where no other term of the loss would move the weights; a
        step of such rows alone is counted and not taken. Steps with a non-finite gradient are left
        out and counted.
        """
        if self.role != "actor":
            raise RuntimeError("the reference policy is frozen; update_actor needs role='actor'")
        started = time.perf_counter()
        rows, section = Rows(data, self.device_name), self.config.actor
        data = drop_padding(
            data
        )  # copies are the last rows; one without rows of its own passes a copy through
        loss = self._policy_loss(data)
        step = int(data.meta_info.get("global_step", self.updates))
        records, tokens = [], 0
        with self.engine.resident(training=True):
            for part in plan_mini_batches(data, section, "update_actor", self.seed, step):
                computed = loss.rows_with_gradient(data, part)
                whole = denominators(data, part, section.loss_agg_mode, computed)
                if not whole.rows:
                    records.append(({"pg_loss": 0.0}, self.engine.pass_over()))
                    continue
                share = partial(self._share, loss, rows, data, whole)
                records.append(
                    optimizer_step(self.engine, rows, computed, section, share, loss.metrics)
                )
                tokens += sum(rows.lengths[row] for row in computed)
        self.updates += 1
        return DataProto(
            meta_info={
                "metrics": update_metrics("actor", records, tokens, time.perf_counter() - started)
            }
        )

    def _policy_loss(self, data: DataProto) -> PolicyLoss:
        ids, weight = (
            data.meta_info.get("level_token_ids"),
            float(data.meta_info.get("level_entropy_coef", 0.0)),
        )
        if ids is None or "level_mask" not in data.tensor_keys():
            return PolicyLoss(self.config.actor)
        return PolicyLoss(self.config.actor, torch.as_tensor(ids, device=self.device_name), weight)

    def _share(
        self, loss: PolicyLoss, rows: Rows, data: DataProto, whole: Denominators, index: list[int]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        packed = rows.pack(index or [0])
        targets = rows.targets(packed, index or [0], self._temperature(data))
        inputs = (packed.input_ids, packed.position_ids, packed.layout)
        scores = self.engine.module(*inputs, [targets], loss.level_token_ids)[0]
        if not index:  # another rank still has rows: take part, add nothing
            return scores.log_probs.sum() * 0.0, {}
        return loss(scores, rows, data, index, whole)

    # ------------------------------------------------------------------ weights and state

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_weights(self) -> list[tuple[str, Any]]:
        """All weights under their Hugging Face names, float32, LoRA merged, on rank 0; an empty
        list elsewhere.

        Tied weights appear once. On CPU the values are numpy arrays, on CUDA tensors in host
        memory.
        """
        weights = self._hf_weights()
        if self.device_name == "cpu":
            return [(name, tensor.float().numpy()) for name, tensor in weights.items()]
        return list(weights.items())

    def _hf_weights(self) -> dict[str, torch.Tensor]:
        weights = full_weights(self.engine)
        return hf_names(weights, PREFIX, self.scales, self.tied) if rank() == 0 else {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: str) -> None:
        """Write what ``actor.checkpoint.contents`` lists into ``directory``; the caller makes it
        atomic.
        """
        contents = self.config.actor.checkpoint.contents
        save_engine(
            self.engine, directory, optimizer="optimizer" in contents, extra="extra" in contents
        )
        if "hf_model" in contents:
            self.export_hf(str(Path(directory) / "hf_model"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: str) -> None:
        """Continue from what ``save_checkpoint`` wrote, on any number of ranks."""
        load_engine(self.engine, directory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, directory: str) -> None:
        """Write a directory that ``from_pretrained`` and vLLM load: config, weights, tokenizer."""
        weights = self._hf_weights()
        if rank() == 0:
            save_hf(self.lm, weights, directory, self.config.model.path)
