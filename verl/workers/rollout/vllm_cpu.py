"""Patches of vLLM on CPU: model imports, sampling, and experts and head after a weight update.

All functions use internals of vLLM and fit the version pinned in ``requirements/cpu.txt``.
"""

import functools
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.utils.import_utils import is_torchvision_available

from verl.workers.rollout.base import EngineError
from verl.workers.rollout.token_sampling import derive_uniform_numbers, sample_tokens

if TYPE_CHECKING:  # vLLM is optional
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def patch_model_inspection() -> None:
    """Let vLLM inspect model classes in this process instead of a subprocess.

    The subprocess avoids an early initialisation of CUDA, but must import vLLM again. On CPU it is
    not needed and takes 10 to 25 s for each new architecture on a machine.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def import_image_processor() -> None:
    """Import the image processor of transformers that vLLM's module of Qwen3.5 imports.

    It imports torchvision, which ``requirements/cpu.txt`` does not install, and calls it for images
    only. If torchvision is missing, empty modules replace it during this import.
    """
    # transformers stores this answer. The empty modules therefore do not change it.
    if is_torchvision_available():
        return
    suffixes = ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
    empty_modules = [ModuleType(f"torchvision{suffix}") for suffix in suffixes]
    sys.modules.update({module.__name__: module for module in empty_modules})
    try:
        import_module("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    finally:
        for module in empty_modules:
            del sys.modules[module.__name__]


def replace_lora_kernel() -> None:
    """Replace vLLM's LoRA operation of linear layers on CPU by ``add_lora_products``.

    The original copies the matrices of an adapter for every token. It also reads the slot -1, which
    means no adapter, as the last slot. If the last slot holds an adapter, tokens without an adapter
    would get it.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    def add_lora_linear(
        wrapper: PunicaWrapperCPU,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a: tuple[torch.Tensor, ...],
        lora_b: tuple[torch.Tensor, ...],
        _scale: float,  # always 1, because B already contains the LoRA scale
        output_slices: tuple[int, ...],
    ) -> None:
        start = 0
        for width, a, b in zip(output_slices, lora_a, lora_b, strict=True):
            add_lora_products(y[:, start : start + width], x, a, b, wrapper.token_lora_indices)
            start += width

    PunicaWrapperCPU.add_lora_linear = add_lora_linear  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache  # a process may start several engines, and each call would add another packing
def patch_expert_updates() -> None:
    """Let vLLM pack the weights of experts for its CPU kernels after each weight update.

    It packs them only at the start, so later weights would be read in the wrong layout.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    set_up_kernel = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_and_pack(
        method: UnquantizedFusedMoEMethod, layer: RoutedExperts, w13: torch.Tensor, w2: torch.Tensor
    ) -> None:
        previous_kernel = method.moe_kernel  # None at the start
        set_up_kernel(method, layer, w13, w2)
        if previous_kernel is not None:
            previous_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack  # pyright: ignore[reportAttributeAccessIssue]


def add_lora_products(
    outputs: torch.Tensor,
    inputs: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Add the LoRA product ``B A x`` of each token's adapter to ``outputs`` [T, O].

    x are the ``inputs`` [T, I]. Each of S slots holds an adapter of rank R: A in ``lora_a`` [S, 1,
    R, I] and B in ``lora_b`` [S, 1, O, R]. ``slots`` [T] is the slot of each token; -1 means no
    adapter and adds nothing. No value is read on the host, so that the operation can be compiled.
    """
    num_slots, _, rank, width = lora_a.shape
    is_slot_of_token = slots[:, None] == torch.arange(num_slots, device=slots.device)
    products_with_a = inputs @ lora_a.view(num_slots * rank, width).T
    products_of_slot = products_with_a.view(-1, num_slots, rank) * is_slot_of_token[:, :, None]
    b_matrices = lora_b[:, 0].transpose(1, 2).reshape(num_slots * rank, -1)
    outputs.addmm_(products_of_slot.view(-1, num_slots * rank), b_matrices)


class SeededSampler:
    """Replacement of ``Sampler.sample`` in vLLM's CPU model runner.

    It computes random numbers from request seeds and token indices, and records log-probs. The
    original sampler fails on CPU with chunked prefill.
    """

    def __init__(self, runner: "GPUModelRunner") -> None:
        self._runner = runner  # keep the runner, because it may replace its input_batch
        self._seeds: dict[str, int] = {}
        self._logprobs_of_request: dict[str, list[float]] = {}
        runner.sampler.sample = self.sample

    def register_request(self, request_id: str, seed: int) -> None:
        """Register the request ``request_id`` (vLLM's internal id) with its seed."""
        self._seeds[request_id] = seed
        self._logprobs_of_request[request_id] = []

    def remove_request(self, request_id: str) -> list[float]:
        """Remove ``request_id`` and return the log-probs of its tokens in order."""
        self._seeds.pop(request_id, None)
        return self._logprobs_of_request.pop(request_id, [])

    def sample(
        self,
        logits: torch.Tensor,
        sampling_metadata: "SamplingMetadata",
        logprobs_mode_override: str | None = None,  # noqa: ARG002  given by vLLM
    ) -> tuple[torch.Tensor, None]:
        """Return tokens [N] sampled from ``logits`` [N, V], and None in place of log-probs."""
        batch = self._runner.input_batch
        num_rows = logits.shape[0]
        request_ids = batch.req_ids[:num_rows]
        if len(request_ids) != num_rows:
            raise EngineError(
                f"vLLM sampled {num_rows} rows for {len(request_ids)} requests; speculative "
                "decoding is not supported on CPU"
            )
        token_counters = batch.num_tokens_no_spec[:num_rows] - batch.num_prompt_tokens[:num_rows]
        seeds = np.fromiter(
            (self._seeds.get(i, 0) for i in request_ids), dtype=np.uint64, count=num_rows
        )
        metadata = sampling_metadata
        temperature = None if metadata.all_greedy else metadata.temperature
        tokens, logprobs = sample_tokens(
            logits,
            temperature,
            metadata.top_k,
            metadata.top_p,
            derive_uniform_numbers(seeds, token_counters),
        )
        for request_id, position, logprob in zip(
            request_ids, token_counters.tolist(), logprobs.tolist(), strict=True
        ):
            # A request whose prompt is only partly prefilled has a row too, and its log-prob is not
            # used. The request's next row has the same position and overwrites it.
            request_logprobs = self._logprobs_of_request.get(request_id)
            if request_logprobs is not None:
                request_logprobs[position:] = [logprob]
        return tokens, None


def repack_output_head(model: torch.nn.Module) -> None:
    """Rebuild the repacked copy of the ``lm_head`` weight that matrix products on CPU use.

    With tied embeddings, ``reload_weights`` updates the embedding but not the packed copy.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if isinstance(head, torch.nn.Module) and weight is not None and hasattr(head, "cpu_linear"):
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
