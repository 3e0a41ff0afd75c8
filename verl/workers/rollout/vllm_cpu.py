"""Patches of vLLM on CPU: model inspection, sampling and the output head after a weight update.

All functions use internals of vLLM and fit the version pinned in ``requirements/cpu.txt``.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.workers.rollout.base import EngineError
from verl.workers.rollout.token_sampling import sample_tokens, uniform_numbers

if TYPE_CHECKING:  # vLLM is optional
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def inspect_models_in_process() -> None:
    """Let vLLM inspect model classes in this process instead of a subprocess.

    The subprocess avoids an early initialisation of CUDA, but must import vLLM again. On CPU it is
    not needed and takes 10 to 25 s for each new architecture on a machine.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


class CountedSampler:
    """Replacement of ``Sampler.sample`` in vLLM's CPU model runner.

    Random numbers are computed from request seed and token index, for the whole batch at once. The
    log-prob of each sampled token is recorded here. The original sampler loops over generators in
    Python, which fails on CPU with chunked prefill, and makes a dictionary per token.
    """

    def __init__(self, runner: "GPUModelRunner") -> None:
        self._runner = runner  # not its input_batch, which the runner may replace
        self._seeds: dict[str, int] = {}
        self._logprobs: dict[str, list[float]] = {}
        runner.sampler.sample = self.sample

    def register_request(self, request_id: str, seed: int) -> None:
        """Register the request ``request_id`` (vLLM's internal id) with its seed."""
        self._seeds[request_id] = seed
        self._logprobs[request_id] = []

    def remove_request(self, request_id: str) -> list[float]:
        """Remove ``request_id`` and return the log-probs of its tokens in order."""
        self._seeds.pop(request_id, None)
        return self._logprobs.pop(request_id, [])

    def sample(
        self,
        logits: torch.Tensor,
        sampling_metadata: "SamplingMetadata",
        logprobs_mode_override: str | None = None,  # noqa: ARG002  given by vLLM
    ) -> tuple[torch.Tensor, None]:
        """Sample tokens [N] from ``logits`` [N, V]. Returns them, and None for vLLM's log-probs."""
        batch = self._runner.input_batch
        rows = logits.shape[0]
        ids = batch.req_ids[:rows]
        if len(ids) != rows:
            raise EngineError(
                f"vLLM sampled {rows} rows for {len(ids)} requests; speculative decoding is not "
                "supported on CPU"
            )
        counters = batch.num_tokens_no_spec[:rows] - batch.num_prompt_tokens[:rows]
        seeds = np.fromiter((self._seeds.get(i, 0) for i in ids), dtype=np.uint64, count=rows)
        sampling = sampling_metadata
        temperature = None if sampling.all_greedy else sampling.temperature
        tokens, logprobs = sample_tokens(
            logits, temperature, sampling.top_k, sampling.top_p, uniform_numbers(seeds, counters)
        )
        for request_id, position, logprob in zip(
            ids, counters.tolist(), logprobs.tolist(), strict=True
        ):
            # A partly prefilled prompt also gives a row. The next row of the request has the same
            # position and overwrites its log-prob.
            recorded = self._logprobs.get(request_id)
            if recorded is not None:
                recorded[position:] = [logprob]
        return tokens, None


def repack_output_head(model: torch.nn.Module) -> None:
    """Rebuild the repacked copy of the ``lm_head`` weight that matrix products on CPU use.

    With tied embeddings, ``reload_weights`` updates the embedding but not the packed copy that the
    output head uses. Without this function the engine would sample with an old head.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if isinstance(head, torch.nn.Module) and weight is not None and hasattr(head, "cpu_linear"):
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
