"""Typed records that packages exchange besides ``DataProto``, without torch.

    collector ──StepRecord──▶ method ──StepRecord──▶ rewards, rollout log, report
    method ──Branch, Span──▶ training workers ──SegmentScore──▶ method
    method ──ChoiceBonus──▶ actor
    training workers ──WrittenFiles──▶ checkpoints
    actor ──WeightSketch──▶ trainer

A method that knows more of a step than this derives its own record from ``StepRecord``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

ANSWER = "answer"  # column [B]: what the environment took from the trajectory's text; None: nothing
REWARD_PARTS = "reward_parts"  # column [B]: rewards of the row's trajectory by name, or none
INFO_NUMBERS = "info_numbers"  # column [B]: numbers of the environment's info by name, or none
MESSAGES = "messages"  # column [B]: the conversation of a trajectory, in its last row
MODEL_SCORES = "rm_scores"  # column [B]: what a reward model says of the conversation, else NaN
CORRECTION_WEIGHTS = "rollout_is_weights"  # column [B, R]: what a token's loss weighs
BRANCHES = "branches"  # column [B]: the ``Branch`` objects of the row
SPANS = "spans"  # column [B]: the ``Span`` objects of the row
PROFILE = "profile"  # in meta_info: the ProfileOrder of a call, where there is one


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What one process wrote: bytes of each file, by its path.

    Example: ``WrittenFiles("actor rank 1 on node-2", {"/runs/a/rng_rank1.safetensors": 5112})``.
    """

    writer: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WeightSketch:
    """The weights of a policy at a hand-over: name of each and its fingerprint
    (``verl.utils.fingerprint``). Empty on all ranks but the first.

    ``held`` are the master weights of the trainer, in which the smallest step shows; ``sent`` is
    what was made of them for engines, which may compute in less.
    """

    held: Mapping[str, int]
    sent: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a trajectory as it was played.

    Example: ``StepRecord(step=0, action="go to desk 1", span=(12, 40), ...)``.

    ``span`` is ``[start, end)`` of the turn's tokens, counted from the first real token of its row.
    ``num_tokens`` counts the tokens the policy sampled, ``reward`` is the environment's.
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
        """The record as a line of a rollout file holds it: fields in order, tuples as lists."""
        line: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            # JSON has no tuples: a line that is read back equals this one only if there are none in
            # it.
            line[field.name] = list(value) if isinstance(value, tuple) else value
        return line


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of a row, to be scored under what stands before them in the row.

    ``step`` and ``label`` come back with the score.
    """

    start: int
    end: int
    step: int = 0
    label: int = 0

    @property
    def num_targets(self) -> int:
        """Tokens that are scored."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Branch:
    """``token_ids`` in place of what follows the first ``start`` tokens of a row.

    Scored are ``token_ids[target_start:]``; ``step`` and ``label`` come back with the score.
    """

    start: int
    token_ids: Sequence[int]
    target_start: int = 0
    step: int = 0
    label: int = 0

    @property
    def num_targets(self) -> int:
        """Tokens that are scored."""
        return len(self.token_ids) - self.target_start


@dataclass(frozen=True, slots=True)
class SegmentScore:
    """What a span or branch scored, at temperature 1 over its ``num_tokens`` targets.

    ``logprob``, ``entropy`` (nats) and ``mean_prob`` are means over the targets; ``geometric_prob``
    is the exponential of the mean log-prob, the geometric mean of the targets' probabilities.
    """

    step: int
    label: int
    logprob: float
    entropy: float
    mean_prob: float
    geometric_prob: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ChoiceBonus:
    """A bonus on the entropy of a choice among a few tokens, in the actor's loss.

    Where ``choice_mask`` [B, R] of the batch is 1, the policy's distribution restricted to
    ``token_ids`` counts, with ``weight``. ``name`` says what is chosen: the metric is
    ``actor/<name>_entropy``.
    """

    token_ids: tuple[int, ...]
    weight: float
    name: str = "choice"


@dataclass(frozen=True, slots=True)
class ProfileOrder:
    """Which ``ranks`` trace a call of iteration ``step``, and into which ``directory``."""

    directory: str
    ranks: tuple[int, ...]
    step: int
