"""What travels between a collector and a rollout engine: one request for tokens, one result.

Plain dataclasses without torch, so that both sides can import them cheaply and Ray can ship them
fast.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class StopReason(StrEnum):
    """Why a sampled segment ended."""

    STOP = "stop"  # an end-of-turn token or a stop string; it is the last of ``token_ids``
    LENGTH = "length"  # ``max_tokens`` reached
    ABORT = "abort"  # the engine gave the request up; ``token_ids`` may be empty


@dataclass(slots=True)
class SamplingRequest:
    """Ask for one continuation of ``prompt_ids``.

    ``stop`` holds strings; the tokens that complete one are kept in the result. ``client`` names
    the caller whose ``poll`` receives the result. ``top_k`` -1 and ``top_p`` 1.0 mean no
    truncation; ``temperature`` 0 is greedy.
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
    """The sampled tokens with the log-probability (after temperature and truncation) each was
    sampled with.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_version: int
    info: dict[str, Any] = field(default_factory=dict)
