"""Request and result of one generation.

Collectors, the processes that run the environments, send requests to rollout engines.

Plain dataclasses without torch: they import fast, and Ray serialises them fast.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class StopReason(StrEnum):
    """Reason why the engine stopped the generation for a request."""

    STOP = "stop"  # an end-of-turn token or a stop string, at the end of ``token_ids``
    LENGTH = "length"  # ``max_tokens`` reached
    ABORT = "abort"  # the engine aborted the request; ``token_ids`` may be empty


@dataclass(slots=True)
class SamplingRequest:
    """Request for one continuation of ``prompt_ids``.

    The result includes the tokens of a string of ``stop``. ``client`` names the caller whose
    ``poll`` receives it. ``top_k`` -1 and ``top_p`` 1.0 truncate nothing; ``temperature`` 0 is
    greedy.
    """

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    client: str = "default"


@dataclass(slots=True)
class SamplingResult:
    """Sampled tokens with their log-probabilities, after temperature and truncation."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_version: int
    info: dict[str, Any] = field(default_factory=dict)
