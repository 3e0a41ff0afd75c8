"""Typed records that packages exchange in addition to ``DataProto``, without torch.

    collector ──StepRecord──▶ method ──StepRecord──▶ rewards, rollout log, report
    method ──Branch, Span──▶ training workers ──SegmentScore──▶ method
    method ──Choice──▶ actor
    training workers ──WrittenFiles──▶ checkpoints
    actor ──WeightFingerprints──▶ trainer

A method that records more about a turn derives a class from ``StepRecord``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

ANSWER = "answer"  # column [B]: answer that the environment parsed from the trajectory, or None
REWARD_PARTS = "reward_parts"  # column [B]: dict of named rewards of the trajectory, may be empty
INFO_NUMBERS = "info_numbers"  # column [B]: dict of the numbers in the environment's ``info``
MESSAGES = "messages"  # column [B]: the conversation of a trajectory, in its last row
MODEL_SCORES = "rm_scores"  # column [B]: score of the conversation by a reward model, else NaN
CORRECTION_WEIGHTS = "rollout_is_weights"  # column [B, R]: weight of a token in the loss
CHOICE_MASK = "choice_mask"  # column [B, R]: 1 at tokens that are a choice among K tokens
CHOICE_POSTERIOR = "choice_posterior"  # column [B, R, K]: see ``Choice``
CHOICE_CREDIT = "choice_credit"  # column [B, R, K]: see ``Choice``
CHOICE_OLD_LOG_PROBS = "choice_old_log_probs"  # column [B, R, K]: see ``Choice``
PRICE_MULTIPLIER = "price_multiplier"  # key of meta_info: factor of all token prices of the batch
BRANCHES = "branches"  # column [B]: the ``Branch`` objects to be scored for the row
SPANS = "spans"  # column [B]: the ``Span`` objects to be scored for the row
PROFILE = "profile"  # key of meta_info: the ``ProfileRequest`` of a call that is profiled


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """Files that one process wrote: size of each in bytes, by path.

    Example: ``WrittenFiles("actor rank 1 on node-2", {"/runs/a/rng_rank1.safetensors": 5112})``.
    """

    writer: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WeightFingerprints:
    """Fingerprints of a policy's weights at a weight sync, by the name of the tensor.

    ``master_weights`` are the trainer's float32 weights, which show the smallest update,
    ``sent_weights`` those sent to the engines. Both are empty on all ranks but the first.
    """

    master_weights: Mapping[str, int]
    sent_weights: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One turn of a trajectory.

    Example: ``StepRecord(step=0, action="go to desk 1", span=(12, 40), ...)``.

    ``span`` is ``[start, end)`` of the turn's tokens, counted from the first token of its row that
    is not padding. ``num_tokens`` counts the sampled tokens, ``reward`` is the environment's.
    """

    step: int
    observation: str
    response: str
    action: str
    is_action_valid: bool
    reward: float
    done: bool
    num_tokens: int
    stop_reason: str
    span: tuple[int, int]

    def to_json(self) -> dict[str, object]:
        """Return the record as a line of a rollout file: fields in order, tuples as lists."""
        line: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            # JSON has no tuples: without them, a line that is read back equals this one.
            line[field.name] = list(value) if isinstance(value, tuple) else value
        return line


@dataclass(frozen=True, slots=True)
class Span:
    """Request to score the tokens ``[start, end)`` of a row, given the tokens before them.

    ``step`` (number of the turn) and ``label`` (chosen by the method) are copied to the result.
    """

    start: int
    end: int
    step: int = 0
    label: int = 0

    @property
    def num_targets(self) -> int:
        """Return the number of tokens that are scored."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Branch:
    """Request to score ``token_ids[target_start:]`` after the first ``start`` tokens of a row.

    ``step`` (number of the turn) and ``label`` (chosen by the method) are copied to the result.
    """

    start: int
    token_ids: Sequence[int]
    target_start: int = 0
    step: int = 0
    label: int = 0

    @property
    def num_targets(self) -> int:
        """Return the number of tokens that are scored."""
        return len(self.token_ids) - self.target_start


@dataclass(frozen=True, slots=True)
class SegmentScore:
    """Means over the ``num_tokens`` scored tokens of a span or branch, at temperature 1.

    ``entropy`` is in nats. ``geometric_prob`` is the geometric mean of their probabilities.
    """

    step: int
    label: int
    logprob: float
    entropy: float
    mean_prob: float
    geometric_prob: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice among the K tokens ``token_ids``, made where ``choice_mask`` [B, R] is 1.

    The actor's loss subtracts ``weight`` times the entropy of the policy restricted to these
    tokens. The metric of that entropy is ``actor/<name>_entropy``.

    The columns ``choice_posterior``, ``choice_credit`` and ``choice_old_log_probs`` are optional.
    With r_k, the ratio of new to old probability of token k, they change the loss as follows.
    ``choice_posterior``: the ratio of the sampled token becomes ``sum_k posterior_k r_k`` where the
    posterior is not 0. ``choice_credit``: PPO's clipped loss of ``sum_k credit_k r_k`` is added.
    """

    token_ids: tuple[int, ...]
    weight: float
    name: str = "choice"


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Request to profile a call in training step ``step``, with the ranks and output directory."""

    directory: str
    ranks: tuple[int, ...]
    step: int
