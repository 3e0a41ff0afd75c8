"""vLLM colocated with TRL's trainer on a CPU: what to set before it starts, and a weight sync that
works there.
"""

import os
from collections.abc import Callable
from typing import Any

from verl.workers.rollout.vllm_cpu import inspect_models_in_process, repack_output_head

KV_CACHE_GIB = "1"


def prepare_process() -> None:
    """Set what vLLM reads when it is imported; what the caller has set stays."""
    # The engine stays in this process, where ``weight_sync`` reaches its modules.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_CACHE_GIB)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    inspect_models_in_process()


def weight_sync(generation: Any) -> Callable[[], None]:
    """A replacement for ``sync_weights`` of TRL's ``VLLMGeneration`` in ``colocate`` mode.

    TRL loads tensors into vLLM's modules one by one; on CPU these have been repacked, so that this
    fails. The reload goes through vLLM, renews the packed output head, and drops the prefix cache.
    """

    def sync() -> None:
        weights = [
            (name, tensor.detach().clone()) for name, tensor in generation._iter_named_params()
        ]
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        repack_output_head(
            generation.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        )
        if not generation.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM kept its prefix cache after a weight update: "
                "cached keys would be of old weights"
            )

    return sync
