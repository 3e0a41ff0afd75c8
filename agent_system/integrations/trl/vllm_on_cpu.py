"""vLLM colocated with TRL's trainer on CPU: environment variables and weight sync."""

import os
from collections.abc import Callable
from typing import Any

from verl.workers.rollout.vllm_cpu import inspect_models_in_process, repack_output_head

KV_CACHE_GIB = "1"


def prepare_process() -> None:
    """Set the environment variables that vLLM reads on import, unless they are already set."""
    # Keep the engine in this process, so that the weight sync can access its modules.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_CACHE_GIB)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    inspect_models_in_process()


def make_weight_sync(generation: Any) -> Callable[[], None]:
    """Return a replacement for ``sync_weights`` of TRL's ``VLLMGeneration`` (``colocate`` mode).

    TRL loads tensors into vLLM's modules one by one. This fails on CPU, where vLLM has repacked
    them. The replacement reloads through vLLM, repacks the output head and resets the prefix cache.
    """

    def sync_weights() -> None:
        weights = [
            (name, tensor.detach().clone()) for name, tensor in generation._iter_named_params()
        ]
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        repack_output_head(
            generation.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        )
        if not generation.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache after a weight update: "
                "cached keys would be those of the old weights"
            )

    return sync_weights
