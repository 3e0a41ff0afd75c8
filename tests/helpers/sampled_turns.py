"""A sampled turn in the form that conversations accept."""

from dataclasses import dataclass, field

from verl.utils.sampling import StopReason


@dataclass
class ScriptedTurn:
    """Sampled turn. Without log-probs every token has -0.5."""

    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason = StopReason.STOP
    policy_version: int = 4

    def __post_init__(self):
        self.logprobs = self.logprobs or [-0.5] * len(self.token_ids)
