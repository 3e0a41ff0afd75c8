"""What thinking adds to the record of a step: its level, the four contexts, and the credit.

packing ──ThinkingStep without contexts──▶ scoring ──credited()──▶ rewards, rollout log, report
"""

from dataclasses import dataclass, replace

from verl.records import SegmentScore, StepRecord

# score of an action -> its name in a rollout file
MEASURES = {
    "logprob": "score_logprob",
    "entropy": "score_entropy",
    "mean_prob": "score_mean_prob",
    "geometric_prob": "score_geometric_prob",
}


@dataclass(frozen=True, slots=True)
class ThoughtContext:
    """A thought at one level before the step's own action, and what the action scored after it.

    ``tokens`` is the length of the thought, ``cost`` its price, ``original`` says that the policy
    took this one.
    """

    level: int
    thought: str
    tokens: int
    cost: float
    original: bool
    scores: SegmentScore

    def to_json(self) -> dict[str, object]:
        """The context as a line of a rollout file holds it."""
        line: dict[str, object] = {
            "level": self.level,
            "thought": self.thought,
            "tokens": self.tokens,
            "cost": self.cost,
            "original": self.original,
        }
        for measure, name in MEASURES.items():
            line[name] = float(getattr(self.scores, measure))
        return line


@dataclass(frozen=True, slots=True)
class ThinkingStep(StepRecord):
    """A step of a policy that chooses how much to think.

    ``level`` is None where it could not be read, and ``parse_failure`` says why there is no
    thinking credit. ``level_forced``: the level was not the policy's choice. ``contexts`` are in
    order of level. ``think_advantage`` contains ``think_cost``, the share that is due to the price.
    ``situation`` is the kind of state, empty where the environment names no kinds, ``needed_level``
    the lowest level that suffices there, None where the environment cannot tell.
    """

    level: int | None = None
    level_forced: bool = False
    parse_failure: str | None = None
    thought_tokens: int = 0
    contexts: tuple[ThoughtContext, ...] = ()
    think_advantage: float = 0.0
    think_cost: float = 0.0
    situation: str = ""
    needed_level: int | None = None

    def credited(
        self, contexts: tuple[ThoughtContext, ...], advantage: float, cost: float
    ) -> "ThinkingStep":
        """This step with what scoring found out about it."""
        return replace(self, contexts=contexts, think_advantage=advantage, think_cost=cost)

    def to_json(self) -> dict[str, object]:
        """The record as a line of a rollout file holds it."""
        # Not super(): a class with slots is made twice, and super() would look at the first one.
        line = StepRecord.to_json(self)
        line["contexts"] = [context.to_json() for context in self.contexts]
        # Only environments that say what a state is like have these two.
        for name in ("situation", "needed_level"):
            if not line[name]:
                del line[name]
        return line
