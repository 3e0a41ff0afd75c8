"""What an agent returns."""

from dataclasses import dataclass

from verl.utils.sampling import StopReason


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of an agent: its text and the tokens that were sampled for it, with one log-prob per token."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_version: int
