"""ActorWorker: one rank of the policy. It computes log-probs, and trains and sends the weights."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.algos import TokenSelector
from verl.config.schema.actor_rollout_ref import ActorRolloutRefConfig, RefConfig, RolloutConfig
from verl.models.adapters import convert_adapter_for_engine
from verl.models.checkpoint_format import describe_transforms, set_transforms
from verl.models.export import convert_to_hf_weights, save_hf, tied_names
from verl.models.flops import ForwardSize
from verl.models.lora import lora_scales, without_adapters
from verl.models.policy import LM_PREFIX, PolicyModel
from verl.protocol import DataProto
from verl.records import WeightFingerprints
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.weight_arrays import as_array, compute_fingerprint
from verl.workers.branch_scores import compute_log_probs_and_scores
from verl.workers.collectives import broadcast_text, get_rank, sum_over_ranks
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import gather_full_weights
from verl.workers.policy_loss import (
    Denominators,
    PolicyLoss,
    compute_denominators,
    create_policy_loss,
)
from verl.workers.rows import MicroBatchLimits, Rows, choose_micro_batch_limits
from verl.workers.training_worker import TrainingWorker
from verl.workers.update import StepOutcome, optimizer_step, prefix_tree_metrics
from verl.workers.weight_transfer import WeightSender, WeightStream


class ActorWorker(TrainingWorker):
    """One rank of the trained policy (``role="actor"``) or frozen reference (``role="ref"``).

    ``config`` is the ``actor_rollout_ref`` section. ``seed``, ``num_threads`` and ``device`` are
    those of ``TrainingWorker``.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: str = "actor",
        seed: int = 0,
        num_threads: int | None = None,
        device: str = "auto",
    ) -> None:
        super().__init__(seed, num_threads, device, config.actor.checkpoint)
        self.config = config
        self.role = role
        self._sent_fingerprints = WeightFingerprints({}, {})
        self._sender: WeightSender | None = None
        # Sum over the passes for log-probs since the last update.
        self._scoring_forward_size = ForwardSize()

    # ------------------------------------------------------------------ set-up

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy and shard it. Only rank 0 reads the weights from disk."""
        self._join_process_group()
        model, actor, ref = self.config.model, self.config.actor, self.config.ref
        is_trained = self.role == "actor"
        self.lm = self._load_model(
            model,
            is_trained=is_trained,
            lora_adapter_path=model.lora_adapter_path if is_trained else None,
        )
        # Tied weights and LoRA scales are read now, because sharded parameters do not show them.
        self.tied_names = tied_names(self.lm)
        self.lora_scales = lora_scales(self.lm)
        # Only rank 0 has read the files, so only rank 0 knows how their weights were converted.
        set_transforms(
            self.lm, json.loads(broadcast_text(json.dumps(describe_transforms(self.lm))))
        )
        section, optim = (actor, actor.optim) if is_trained else (ref, None)
        self._engine = TrainEngine(
            PolicyModel(self.lm),
            device=self.device_name,
            dtype=section.dtype,
            fsdp=section.fsdp_config,
            optim=optim,
            grad_clip=actor.grad_clip,
            sequence_ranks=actor.ulysses_sequence_parallel_size,
            compiled=actor.use_torch_compile,
            prefix_tree=model.prefix_tree,
        )

    # ------------------------------------------------------------------ scoring

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Compute ``old_log_probs`` and ``entropys`` [B, R] of the sampled tokens.

        Both are computed at ``meta_info["temperature"]`` and are zero at other positions. With the
        column ``branches`` (alternative continuations of a row) or ``spans`` (token ranges of a
        row) the result also has ``branch_scores`` and ``span_scores``: their mean log-prob and
        entropy at temperature 1.
        """
        limits = _get_scoring_limits(self.config.rollout)
        scores = compute_log_probs_and_scores(
            self.train_engine, data, self._get_sampling_temperature(data), **limits
        )
        self._scoring_forward_size += scores.forward_size
        segment_scores = {"branch_scores": scores.branch_scores, "span_scores": scores.span_scores}
        return DataProto.from_dict(
            {"old_log_probs": scores.log_probs, "entropys": scores.entropy},
            segment_scores if scores.branch_scores is not None else None,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Compute ``ref_log_prob`` [B, R] of the sampled tokens at the rollout temperature.

        An actor with a LoRA adapter computes it without the adapter: the base model is then the
        reference policy.
        """
        inputs = data.select(["input_ids", "attention_mask", "responses", "response_mask"], [])
        limits = _get_scoring_limits(self.config.ref)
        if self.role == "actor" and not self.lora_scales:
            raise RuntimeError("all weights of the actor are trained; a reference needs role='ref'")
        with without_adapters(self.lm):
            scores = compute_log_probs_and_scores(
                self.train_engine, inputs, self._get_sampling_temperature(data), **limits
            )
        return DataProto.from_dict({"ref_log_prob": scores.log_probs})

    def _get_sampling_temperature(self, data: DataProto) -> float:
        temperature = float(data.meta_info.get("temperature", self.config.rollout.temperature))
        return temperature or 1.0  # greedy rollouts have log-probs at temperature 1

    # ------------------------------------------------------------------ updating

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """Train ``ppo_epochs`` epochs on the rows and return ``meta_info["metrics"]``.

        The metrics are equal on every rank. The number of optimizer steps depends only on the
        number of groups and trajectories. The gradient of a step does not depend on the split of
        its mini-batch into micro-batches and ranks.

        Rows whose advantages are all zero skip the forward and backward pass if no other loss term
        gives them a gradient. If a mini-batch has only such rows, the learning rate schedule
        advances but the weights do not change. Steps with a non-finite gradient are skipped.
        """
        section = self.config.actor
        loss = create_policy_loss(section, data, self.device_name)
        metrics = self._run_update("actor", section, data, partial(self._take_step, loss))
        metrics |= prefix_tree_metrics("log_prob", self._scoring_forward_size)
        self._scoring_forward_size = ForwardSize()
        return DataProto(meta_info={"metrics": metrics})

    def _take_step(
        self, loss: PolicyLoss, rows: Rows, data: DataProto, row_indices: list[int]
    ) -> StepOutcome:
        section = self.config.actor
        rows_to_compute = loss.rows_with_gradient(data, row_indices)
        if section.skip_without_advantage:
            # The count is summed over ranks: either all ranks take the step or none does.
            num_with_advantage = len(loss.rows_with_advantage(data, row_indices))
            rows_to_compute = rows_to_compute if sum_over_ranks([num_with_advantage])[0] else []
        denominators = compute_denominators(
            data, row_indices, section.loss_agg_mode, rows_to_compute
        )
        if not denominators.num_rows:  # no rank has a row to compute
            return {"pg_loss": 0.0}, self.train_engine.skip_step()
        token_selector = loss.make_token_selector(data, row_indices)
        compute_loss = partial(
            self._compute_micro_batch_loss, loss, rows, data, denominators, token_selector
        )
        return optimizer_step(
            self.train_engine, rows, rows_to_compute, section, compute_loss, loss.metrics
        )

    def _compute_micro_batch_loss(
        self,
        loss: PolicyLoss,
        rows: Rows,
        data: DataProto,
        denominators: Denominators,
        token_selector: TokenSelector | None,
        row_indices: list[int],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        packed_rows = rows.pack_rows(row_indices)
        temperature = self._get_sampling_temperature(data)
        targets = rows.sampled_targets(
            packed_rows, row_indices or [0], temperature, loss.reads_entropy
        )
        model_inputs = (packed_rows.input_ids, packed_rows.position_ids, packed_rows.layout)
        scores = self.train_engine.module(*model_inputs, [targets], loss.allowed_token_ids)[0]
        if not row_indices:  # take part in the collective calls of ranks that have rows
            return scores.log_probs.sum() * 0.0, {}
        return loss(scores, rows, data, row_indices, denominators, token_selector)

    # ------------------------------------------------------------------ weights and state

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_weights(self) -> list[tuple[str, np.ndarray]]:
        """Return all weights with their Hugging Face names, in host memory of rank 0.

        Other ranks return an empty list. Parameters have the dtype of the rollout engines (bfloat16
        is stored as uint16), buffers their own. Tied weights appear once. LoRA adapters are merged,
        or omitted with ``rollout.lora_sync=adapter``.
        """
        weights = self._collect_hf_weights(self._lora_merge_scales)
        return self._convert_for_engines(weights, self._create_weight_stream().get_dtypes())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_adapter(self) -> list[tuple[str, np.ndarray]]:
        """Return the tensors of the LoRA adapter by name on rank 0, and nothing on other ranks.

        The scale is multiplied into ``lora_B``, because rollout engines apply no scale.
        """
        weights = gather_full_weights(self.train_engine, ".lora_")
        is_sender = get_rank() == 0
        adapter = (
            convert_adapter_for_engine(weights, LM_PREFIX, self.lora_scales) if is_sender else {}
        )
        return self._convert_for_engines(adapter, dict.fromkeys(adapter, self._engine_dtype))

    def _convert_for_engines(
        self, weights: dict[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> list[tuple[str, np.ndarray]]:
        """Return ``weights`` as arrays of the given ``dtypes``, and store their checksums."""
        arrays = {name: as_array(tensor, dtypes[name]) for name, tensor in weights.items()}
        self._sent_fingerprints = WeightFingerprints(
            {name: compute_fingerprint(tensor) for name, tensor in weights.items()},
            {name: compute_fingerprint(array) for name, array in arrays.items()},
            sum(array.nbytes for array in arrays.values()),
        )
        return list(arrays.items())

    @property
    def _engine_dtype(self) -> torch.dtype:
        return getattr(torch, self.config.rollout.dtype)

    @property
    def _lora_merge_scales(self) -> dict[str, float] | None:
        """Scale of each LoRA adapter for merging, or None if engines get the adapter separately."""
        return None if self.config.rollout.lora_sync == "adapter" else self.lora_scales

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, engines: Sequence[Any], version: int) -> list[dict[str, int]]:
        """Send all weights to the rollout workers ``engines``, directly between devices.

        The weights are those of ``export_weights``; see ``verl.workers.weight_transfer``. Rank 0
        returns one dict per engine, from weight name to the checksum of the received weight.
        """
        if self._sender is None:
            weight_stream, rollout = self._create_weight_stream(), self.config.rollout
            num_devices = rollout.tensor_model_parallel_size
            self._sender = WeightSender(
                weight_stream, engines, rollout.weight_transfer, num_devices
            )
        with self.train_engine.model_on_device():
            received_checksums = self._sender.send(version)
        self._sent_fingerprints = self._sender.stream.fingerprints
        return received_checksums

    def _create_weight_stream(self) -> WeightStream:
        lora_scales = self._lora_merge_scales
        stream_arguments = (self.train_engine, self.lm, self._engine_dtype, LM_PREFIX, lora_scales)
        return WeightStream(*stream_arguments, self.tied_names)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_sent_fingerprints(self) -> WeightFingerprints:
        """Return checksums of the weights that rank 0 sent in the last weight sync.

        They are computed before and after the cast to the dtype of the engines.
        """
        return self._sent_fingerprints

    def _collect_hf_weights(self, lora_scales: dict[str, float] | None) -> dict[str, torch.Tensor]:
        weights = gather_full_weights(self.train_engine)
        return convert_to_hf_weights(self.lm, weights, LM_PREFIX, lora_scales, self.tied_names)

    def _export_hf_files(self, directory: Path) -> list[Path]:
        hf_directory = directory / "hf_model"
        self.export_hf(str(hf_directory))
        if get_rank() > 0:
            return []
        # The folder may have subfolders (additional_chat_templates).
        return [path for path in hf_directory.rglob("*") if path.is_file()]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, directory: str) -> None:
        """Write config, weights and tokenizer to a directory for ``from_pretrained`` and vLLM."""
        weights = self._collect_hf_weights(self.lora_scales)
        if get_rank() == 0:
            save_hf(self.lm, weights, directory, self.source)


def _get_scoring_limits(section: RefConfig | RolloutConfig) -> MicroBatchLimits:
    return choose_micro_batch_limits(
        section.log_prob_use_dynamic_bsz,
        section.log_prob_micro_batch_size_per_gpu,
        section.log_prob_max_token_len_per_gpu,
    )
