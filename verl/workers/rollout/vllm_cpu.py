"""vLLM on CPU: what has to be set before it is imported, and what has to be mended afterwards.

Everything here touches vLLM's internals and fits the version pinned in ``requirements/cpu.txt``.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.workers.rollout.base import EngineError
from verl.workers.rollout.draw import draw, uniforms

if TYPE_CHECKING:  # vLLM is optional
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def inspect_models_in_process() -> None:
    """Let vLLM look at a model class here, not in a subprocess that has to import all of vLLM
    again.

    The subprocess protects CUDA from being initialised too early. On CPU it only costs 10 to 25 s,
    the first time a machine meets an architecture.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


class CountedSampler:
    """Takes the place of ``Sampler.sample`` in vLLM's CPU model runner.

    Random numbers come from (request seed, token number), for the whole batch at once, and the
    log-prob of each sampled token is noted here. vLLM's own ways are a Python loop over generators,
    which fails on CPU when a prompt is prefilled in chunks, and a dictionary per token.
    """

    def __init__(self, runner: "GPUModelRunner") -> None:
        self._runner = runner  # not its input_batch, which it replaces now and then
        self._seeds: dict[str, int] = {}
        self._logprobs: dict[str, list[float]] = {}
        runner.sampler.sample = self.sample

    def begin(self, request_id: str, seed: int) -> None:
        """Expect rows of ``request_id`` (vLLM's internal id)."""
        self._seeds[request_id] = seed
        self._logprobs[request_id] = []

    def finish(self, request_id: str) -> list[float]:
        """Forget ``request_id``; return the log-probs of its tokens in order."""
        self._seeds.pop(request_id, None)
        return self._logprobs.pop(request_id, [])

    def sample(
        self,
        logits: torch.Tensor,
        sampling_metadata: "SamplingMetadata",
        logprobs_mode_override: str | None = None,  # noqa: ARG002  given by vLLM
    ) -> tuple[torch.Tensor, None]:
        """Tokens [N] for ``logits`` [N, V]; None tells vLLM that it gets no log-probs."""
        batch = self._runner.input_batch
        rows = logits.shape[0]
        ids = batch.req_ids[:rows]
        if len(ids) != rows:
            raise EngineError(
                f"vLLM sampled {rows} rows for {len(ids)} requests; "
                "speculative decoding is not known here"
            )
        counters = batch.num_tokens_no_spec[:rows] - batch.num_prompt_tokens[:rows]
        seeds = np.fromiter((self._seeds.get(i, 0) for i in ids), dtype=np.uint64, count=rows)
        asked = sampling_metadata
        temperature = None if asked.all_greedy else asked.temperature
        tokens, logprobs = draw(
            logits, temperature, asked.top_k, asked.top_p, uniforms(seeds, counters)
        )
        for request_id, position, logprob in zip(
            ids, counters.tolist(), logprobs.tolist(), strict=True
        ):
            # A prompt that is only partly prefilled also yields a row; its next one has the same
            # position.
            noted = self._logprobs.get(request_id)
            if noted is not None:
                noted[position:] = [logprob]
        return tokens, None


def repack_output_head(model: torch.nn.Module) -> None:
    """Rebuild the packed GEMM of ``lm_head`` from its weight.

    With tied embeddings ``reload_weights`` renews the embedding but leaves the packed copy that the
    output head computes with: the engine would go on sampling with an old head and no error.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if isinstance(head, torch.nn.Module) and weight is not None and hasattr(head, "cpu_linear"):
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
