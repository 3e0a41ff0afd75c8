"""What rollout workers and engines read of the configuration.

Any object with these values will do; in a run they are sections of ``actor_rollout_ref``. Nothing
heavy is imported here.
"""

from collections.abc import Mapping
from typing import Protocol


class EngineSection(Protocol):
    """What an engine reads: ``actor_rollout_ref.rollout``. Lengths in tokens, caches in GiB."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def enable_chunked_prefill(self) -> bool: ...
    @property
    def kv_cache_gb(self) -> float | None: ...
    @property
    def enforce_eager(self) -> bool | None: ...
    @property
    def gpu_memory_utilization(self) -> float: ...
    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def free_cache_engine(self) -> bool: ...
    @property
    def weight_transfer(self) -> str: ...
    @property
    def engine_kwargs(self) -> Mapping[str, object]: ...


class SourceSection(Protocol):
    """How a rollout worker may load its model: ``actor_rollout_ref.model``."""

    @property
    def external_lib(self) -> str | None: ...
    @property
    def trust_remote_code(self) -> bool: ...


class WorkerSection(Protocol):
    """What a ``RolloutWorker`` reads: ``actor_rollout_ref``."""

    @property
    def rollout(self) -> EngineSection: ...
    @property
    def model(self) -> SourceSection: ...
