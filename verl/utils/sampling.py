"""Request for one reply of the policy, and its result.

Collectors, the processes that run the environments, send requests to rollout engines. The classes
are plain dataclasses without torch, so that Ray serialises them fast.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from verl.names import POLICY_MODEL


class StopReason(StrEnum):
    """Reason why the engine stopped the generation for a request."""

    STOP = "stop"  # an end-of-turn token or a stop string, at the end of ``token_ids``
    LENGTH = "length"  # the reply has ``max_tokens`` tokens
    ABORT = "abort"  # the engine aborted the request; ``token_ids`` may be empty


@dataclass(slots=True)
class SamplingRequest:
    """Request for one continuation of ``prompt_ids``.

    ``top_k=-1`` and ``top_p=1.0`` keep all tokens. ``temperature=0`` is greedy decoding.
    """

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()  # strings that end the generation; their tokens are in the result
    seed: int | None = None
    client: str = "default"  # process that receives the result
    model: str = POLICY_MODEL  # or "base", or a name of ``actor_rollout_ref.model.adapters``


@dataclass(slots=True)
class SamplingResult:
    """Sampled tokens and their log-probs in the distribution from which they were sampled.

    This distribution includes temperature, ``top_k`` and ``top_p``.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_version: int  # of the weights that sampled the tokens
    info: dict[str, Any] = field(default_factory=dict)
