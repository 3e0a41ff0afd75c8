"""Typed records that packages exchange in addition to ``DataProto``, without torch.

    collector ──StepRecord──▶ method ──StepRecord──▶ rewards, rollout log, report
    method ──BranchRequest, SpanRequest──▶ training workers ──ScoreResult──▶ method
    method ──RestrictedTokenLoss──▶ actor
    training workers ──WrittenFiles──▶ checkpoints
    actor ──WeightFingerprints──▶ trainer

A method is a training method in another package, such as ``rlvcr``. If it records more about a
turn, it derives a class from ``StepRecord``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

ANSWER = "answer"  # column [B]: answer that the environment parsed from the trajectory, or None
REWARD_PARTS = "reward_parts"  # column [B]: dict of named rewards of the trajectory, may be empty
INFO_NUMBERS = "info_numbers"  # column [B]: dict of the numbers in the environment's ``info``
MESSAGES = "messages"  # column [B]: the conversation of a trajectory, in its last row
MODEL_SCORES = "rm_scores"  # column [B]: score of the conversation by a reward model, else NaN
CORRECTION_WEIGHTS = "rollout_is_weights"  # column [B, R]: importance weight of a token in the loss
CHOICE_MASK = "choice_mask"  # column [B, R]: 1 where ``RestrictedTokenLoss`` allows only K tokens
CHOICE_POSTERIOR = "choice_posterior"  # column [B, R, K]: posterior probability of the K tokens
CHOICE_CREDIT = "choice_credit"  # column [B, R, K]: advantage of each of the K allowed tokens
CHOICE_OLD_LOG_PROBS = "choice_old_log_probs"  # column [B, R, K]: old log-probs of the K tokens
PRICE_MULTIPLIER = "price_multiplier"  # key of meta_info: factor of the cost per thought token
BRANCHES = "branches"  # column [B]: list of ``BranchRequest``, alternative continuations to score
SUMMARY = "summary"  # column [B]: ``SummaryRecord`` at the end of a row, or None
SPANS = "spans"  # column [B]: list of ``SpanRequest``, token ranges of the row to score
NUM_RANKS = "num_ranks"  # key of meta_info: number of ranks for which the rows are ordered
PROFILE = "profile"  # key of meta_info: ``ProfileRequest``, present if the call is to be profiled


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """Files that the process ``writer`` wrote. ``sizes`` maps each path to its size in bytes.

    Example: ``WrittenFiles("actor rank 1 on node-2", {"/runs/a/rng_rank1.safetensors": 5112})``.
    """

    writer: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WeightFingerprints:
    """Fingerprints (checksums) of the policy's weights at a weight sync, by tensor name.

    They show that weights changed in an update, and that engines received them. ``master_weights``
    belong to the trainer's float32 weights, in which even a small update is visible.
    ``sent_weights`` belong to the (bfloat16) weights that were sent to the engines, which have
    ``num_bytes`` bytes. Only rank 0 fills the dicts; they are empty on other ranks.
    """

    master_weights: Mapping[str, int]
    sent_weights: Mapping[str, int]
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Record of one turn of a trajectory: the texts, tokens and reward that a report shows.

    Example: ``StepRecord(step=0, action="go to desk 1", span=(12, 40), ...)``.

    ``step`` is the number of the turn, from 0. ``span`` is the range ``[start, end)`` of the turn's
    tokens in its row, where position 0 is the first token that is not padding. ``num_tokens`` is
    the number of sampled tokens. ``reward`` is the reward of the environment for this turn.
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
        """Return a dict of all fields that can be written to a rollout file as JSON."""
        line: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            # JSON has no tuples. With lists, the dict equals the one that is read from the file.
            line[field.name] = list(value) if isinstance(value, tuple) else value
        return line


@dataclass(frozen=True, slots=True)
class SummaryRecord:
    """Summary of the episode so far, which the policy wrote before turn ``step``.

    It was written because the row had no space for another turn. The environment does not see it,
    so it is no turn. Its tokens are the last ones of a row, at ``span``. They are sampled and
    trained on, and their entry in ``step_ids`` is -1.
    """

    step: int
    response: str
    num_tokens: int
    stop_reason: str
    span: tuple[int, int]

    def to_json(self) -> dict[str, object]:
        """Return a dict of all fields that can be written to a rollout file as JSON."""
        return {**asdict(self), "span": list(self.span)}


# SpanRequest, BranchRequest and ScoreResult are named tuples, because a batch has thousands of
# them. Ray pickles named tuples several times as fast as dataclasses.
class SpanRequest(NamedTuple):
    """Request to compute log-probs of the tokens ``[start, end)`` of a row, given earlier tokens.

    ``step`` (number of the turn) and ``label`` (a number chosen by the method) identify the
    request and are copied to its ``ScoreResult``.
    """

    start: int
    end: int
    step: int = 0
    label: int = 0

    @property
    def num_targets(self) -> int:
        """Return the number of tokens that are scored."""
        return self.end - self.start


class BranchRequest(NamedTuple):
    """Request to compute log-probs of tokens that replace the rest of a row.

    The model reads the first ``start`` tokens of the row and then ``token_ids``. The log-probs of
    ``token_ids[target_start:]`` are computed. ``step`` (number of the turn) and ``label`` (a number
    chosen by the method) identify the request and are copied to its ``ScoreResult``.
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


class ScoreResult(NamedTuple):
    """Scores of a text requested by a ``SpanRequest`` or ``BranchRequest``: means over its
    ``num_tokens`` tokens.

    They are computed at temperature 1. ``logprob``, ``entropy`` (nats) and ``mean_prob`` are
    arithmetic means. ``geometric_prob`` is the geometric mean of the tokens' probabilities.
    """

    step: int
    label: int
    logprob: float
    entropy: float
    mean_prob: float
    geometric_prob: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RestrictedTokenLoss:
    """Extra loss terms at positions where the policy may only sample one of K ``token_ids``.

    An example is a digit that chooses one of K options. ``choice_mask`` [B, R] is 1 at these
    positions. The actor's loss subtracts ``weight`` times the entropy of the policy over the K
    tokens, which is logged as ``actor/<name>_entropy``.

    Optional columns [B, R, K] with a number for each token k; r_k is its new over its old
    probability:

    * ``choice_old_log_probs``: old log-probs, needed for r_k;
    * ``choice_posterior``: ``sum_k posterior_k r_k`` replaces the ratio of the sampled token where
      the posterior is not 0;
    * ``choice_credit``: advantages. The sum over k of PPO's clipped losses is added to the loss.
    """

    token_ids: tuple[int, ...]
    weight: float
    name: str = "choice"


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Request to profile a worker call in training step ``step`` on the given ``ranks``.

    The traces are written to ``directory``.
    """

    directory: str
    ranks: tuple[int, ...]
    step: int
