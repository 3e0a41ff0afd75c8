"""Alternatives: what the policy would have thought at the levels it did not choose, before the same
action.

    chat prompt ──sampled──▶ <level>3</level><think>own</think><action>...      the step, in the row
        │
        ├──forced──▶ <level>1</level><think></think><action>                        no generation
        ├──forced──▶ <level>2</level><think> ──sampled──▶ thought </think>|<action>
        └──forced──▶ <level>4</level><think> ──sampled──▶ thought </think>|<action>

What is forced is written as the step itself was, white space between its blocks included. A thought
that never ends, or that breaks the format, is dropped and counted; none is made up.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rlvcr.levels import (
    ACTION_START,
    LEVELS,
    THINK_END,
    ForcedThought,
    LevelCodec,
    ParsedStep,
    StepForm,
)
from rlvcr.settings import RLVCRSettings
from verl.utils.sampling import SamplingResult, StopReason
from verl.utils.seeds import derive_seed

STOP = (THINK_END, ACTION_START)
SEED_RANGE = float(2**63)  # seeds lie in [0, SEED_RANGE)

Encode = Callable[[str], Sequence[int]]
# (prompt_ids, max_tokens, stop, route, seed) -> what was sampled; None where the engine gave the
# request up
Sample = Callable[[list[int], int, tuple[str, ...], int, int], Awaitable[SamplingResult | None]]


@dataclass(frozen=True, slots=True)
class AlternativeSettings:
    """Which steps get alternatives, and how many.

    ``which``: ``all`` three other levels or ``one`` drawn uniformly. ``expand``: steps of ``all``
    groups or of ``mixed_groups`` (whose returns differ). ``step_fraction``: share of the steps.
    ``max_tokens``: longest thought. ``action_blind`` False tells the thought which action follows.
    ``seed`` is the base of the draws.
    """

    which: str = "all"
    expand: str = "all"
    step_fraction: float = 1.0
    max_tokens: int = 64
    action_blind: bool = True
    seed: int = 0

    @classmethod
    def from_config(
        cls, rlvcr: RLVCRSettings, seed: int, max_turn_tokens: int
    ) -> "AlternativeSettings":
        """Read ``algorithm.rlvcr``; a thought is never longer than a turn may be."""
        return cls(
            which=rlvcr.alternatives,
            expand=rlvcr.expand,
            step_fraction=rlvcr.step_fraction,
            max_tokens=min(rlvcr.max_alternative_tokens, max_turn_tokens),
            action_blind=rlvcr.action_blind,
            seed=seed,
        )


@dataclass(slots=True)
class StepAlternatives:
    """What became of one step's alternatives: the thoughts in order of level, and why others were
    dropped.
    """

    thoughts: list[ForcedThought] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    sampled_tokens: int = 0


class AlternativeSampler:
    """Samples alternatives through ``sample``, with the settings that sampled the step itself."""

    def __init__(
        self, settings: AlternativeSettings, codec: LevelCodec, sample: Sample, encode: Encode
    ) -> None:
        self.settings = settings
        self._codec = codec
        self._sample = sample
        self._encode = encode

    def levels_for(self, parsed: ParsedStep, traj_uid: str, step: int) -> list[int]:
        """The levels to think at; none for a step that cannot be scored or was not drawn.

        Depends on the seed, the trajectory and the step alone.
        """
        if parsed.failure is not None or parsed.level is None:
            return []
        # A draw by name and not from one generator: episodes end in another order every time.
        draw = derive_seed(self.settings.seed, "alternatives", traj_uid, step)
        if draw / SEED_RANGE >= self.settings.step_fraction:
            return []
        others = [level for level in LEVELS if level != parsed.level]
        if self.settings.which == "one":
            pick = derive_seed(self.settings.seed, "alternative level", traj_uid, step)
            return [others[pick % len(others)]]
        return others

    async def think(
        self,
        prompt_ids: list[int],
        parsed: ParsedStep,
        levels: Sequence[int],
        traj_uid: str,
        step: int,
        route: int = 0,
    ) -> StepAlternatives:
        """Think at ``levels`` after ``prompt_ids``, the tokens that step ``step`` itself followed.

        What is drawn depends on the seed, the trajectory, the step and the level, not on what else
        is sampled.
        """
        found = StepAlternatives()
        hint = [] if self.settings.action_blind else self._hint(parsed)
        prefixes = self._codec.tokens_of(parsed.form).prefix_ids
        asked = [level for level in levels if level != 1]  # level 1 has nothing to say
        waiting = []
        for level in asked:
            prompt = prompt_ids + hint + prefixes[level]
            seed = derive_seed(self.settings.seed, "thought", traj_uid, step, level)
            waiting.append(self._sample(prompt, self.settings.max_tokens, STOP, route, seed))
        results = dict(zip(asked, await asyncio.gather(*waiting), strict=True))
        for level in sorted(levels):
            if level == 1:
                found.thoughts.append(self._codec.empty_thought(parsed.form))
            else:
                self._read(level, results[level], parsed.form, found)
        return found

    def _read(
        self, level: int, result: SamplingResult | None, form: StepForm, found: StepAlternatives
    ) -> None:
        """Add what was sampled at ``level`` to ``found``: a thought, or why there is none."""
        if result is None:
            found.dropped["engine"] += 1
            return
        # Dropped thoughts cost as much as others.
        found.sampled_tokens += len(result.token_ids)
        thought = self._codec.forced_thought(level, result.token_ids, form)
        if thought is not None:
            found.thoughts.append(thought)
        elif result.stop_reason is StopReason.LENGTH:
            found.dropped["length"] += 1
        else:
            found.dropped["format"] += 1

    def _hint(self, parsed: ParsedStep) -> list[int]:
        return list(self._encode(f"The action will be: {parsed.action}\n"))
