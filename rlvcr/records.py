"""Record of a turn with its thinking level, scored thoughts and credit for the level.

packing ──record without scores──▶ scoring ──record with credit──▶ rewards, rollout log, report
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.records import ScoreResult, StepRecord

# Columns [B, R]. Their values are the public names, which differ from what the columns hold.
THINKING_ADVANTAGES = "thinking_level_entropies"  # credit for the chosen thinking levels
PRICE_SHARES = "thinking_token_costs"  # the part of this credit that is due to token costs
# attribute of ``ScoreResult`` -> key in a rollout file
SCORE_KEYS = {
    "logprob": "score_logprob",
    "entropy": "score_entropy",
    "mean_prob": "score_mean_prob",
    "geometric_prob": "score_geometric_prob",
}


@dataclass(frozen=True, slots=True)
class ScoredThought:
    """Thought at one thinking level, with the scores of the turn's action after this thought.

    ``tokens``: length of the thought. ``cost``: its token cost, which is subtracted from the score.
    ``original``: true for the thought of the sampled turn.
    """

    level: int
    thought: str
    tokens: int
    cost: float
    original: bool
    scores: ScoreResult

    def to_json(self) -> dict[str, object]:
        """Return the fields and the scores as a dict, as a rollout file stores them."""
        json_fields: dict[str, object] = {
            "level": self.level,
            "thought": self.thought,
            "tokens": self.tokens,
            "cost": self.cost,
            "original": self.original,
        }
        for attribute, name in SCORE_KEYS.items():
            json_fields[name] = float(getattr(self.scores, attribute))
        return json_fields


@dataclass(frozen=True, slots=True)
class ThinkingTurnRecord(StepRecord):
    """Record of a turn of a policy that chooses its thinking level.

    ``level`` is None where it could not be read; ``parse_failure`` then gives the reason.
    ``level_forced``: the policy did not choose the level. ``contexts``: scored thoughts in order of
    level. ``think_advantage``: credit for the chosen level. ``think_cost``: the part of it due to
    token costs. ``situation``: kind of state, empty if the environment names none.
    ``needed_level``: lowest level that suffices, None if it is unknown.
    """

    level: int | None = None
    level_forced: bool = False
    parse_failure: str | None = None
    thought_tokens: int = 0
    contexts: tuple[ScoredThought, ...] = ()
    think_advantage: float = 0.0
    think_cost: float = 0.0
    situation: str = ""
    needed_level: int | None = None

    def with_credit(
        self, scored_thoughts: tuple[ScoredThought, ...], advantage: float, price_share: float
    ) -> "ThinkingTurnRecord":
        """Return a copy of this record with scored thoughts and the credit for the level."""
        return replace(
            self, contexts=scored_thoughts, think_advantage=advantage, think_cost=price_share
        )

    def to_json(self) -> dict[str, object]:
        """Return the record as a dict, as a rollout file stores it."""
        # super() would fail, because dataclass(slots=True) replaces the class by a new one.
        json_fields = StepRecord.to_json(self)
        json_fields["contexts"] = [context.to_json() for context in self.contexts]
        # Omit these two keys if the environment does not name the situation of a turn.
        for name in ("situation", "needed_level"):
            if not json_fields[name]:
                del json_fields[name]
        return json_fields


# Arguments of ``ThinkingTurnRecord.with_credit``: thoughts, thinking advantage, its price share.
TurnCredit = tuple[tuple[ScoredThought, ...], float, float]


class TurnRecords(Sequence[ThinkingTurnRecord]):
    """Sequence of the turn records of a row, which ``make_records`` builds at each access."""

    def make_records(self) -> Sequence[ThinkingTurnRecord]:
        """Build the turn records of the row. Subclasses define this method."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[ThinkingTurnRecord]:
        return iter(self.make_records())

    def __getitem__(self, index: Any) -> Any:
        return self.make_records()[index]

    def __len__(self) -> int:
        return len(self.make_records())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


@dataclass(frozen=True, eq=False)
class CreditedTurns(TurnRecords):
    """Sequence of the turn records of a row, with scores and credit for the thinking levels.

    ``credit`` is added to ``records`` when they are read, because ``records`` may be stored in
    another process.
    """

    records: Sequence[ThinkingTurnRecord]
    credit: Sequence[TurnCredit]

    def make_records(self) -> list[ThinkingTurnRecord]:
        """Return the turn records with their scores and thinking advantages."""
        record_credit_pairs = zip(self.records, self.credit, strict=True)
        return [record.with_credit(*credit) for record, credit in record_credit_pairs]
