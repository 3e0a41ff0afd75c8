"""Sampling of alternative thoughts: thoughts at the other levels, after the same chat prompt.

    chat prompt ──sampled──▶ <level>3</level><think>z</think><action>...      the turn in the row
        │
        ├──forced──▶ <level>1</level><think></think><action>                        no generation
        ├──forced──▶ <level>2</level><think> ──sampled──▶ thought </think>|<action>
        └──forced──▶ <level>4</level><think> ──sampled──▶ thought </think>|<action>

Forced tokens have the format of the sampled turn, with the same white space between blocks. A
thought that ends with neither tag, or has an invalid format, is dropped and counted.
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
    ParsedTurn,
    TurnFormat,
)
from rlvcr.settings import RLVCRSettings
from verl.utils.sampling import SamplingResult, StopReason
from verl.utils.seeds import derive_seed

THOUGHT_STOPS = (THINK_END, ACTION_START)
SEED_RANGE = float(2**63)  # seeds are in [0, SEED_RANGE)

EncodeText = Callable[[str], Sequence[int]]
# (prompt_ids, max_tokens, stop, route, seed) -> sampled tokens, or None where the engine aborted
# the request. Requests of one ``route`` go to the same rollout worker.
SampleTokens = Callable[
    [list[int], int, tuple[str, ...], int, int], Awaitable[SamplingResult | None]
]


@dataclass(frozen=True, slots=True)
class AlternativeSettings:
    """Selection of the turns that get alternative thoughts, and number of thoughts per turn.

    ``levels_per_turn``: ``all`` three levels that were not chosen, or ``one`` of them, drawn
    uniformly. ``expanded_turns``: ``all`` turns, the turns of ``mixed_groups`` (groups whose
    returns differ), or the turns of ``successes`` (successful trajectories).
    ``shares_thoughts``: group members with equal prompts share one set of thoughts.
    ``step_fraction``: share of the turns that get thoughts. ``max_tokens``: longest thought, in
    tokens. With ``action_blind=False`` the prompt of a thought contains the action of the turn.
    All random draws are derived from ``seed``.
    """

    levels_per_turn: str = "all"
    expanded_turns: str = "all"
    shares_thoughts: bool = False
    step_fraction: float = 1.0
    max_tokens: int = 64
    action_blind: bool = True
    seed: int = 0

    @classmethod
    def from_config(
        cls, rlvcr: RLVCRSettings, seed: int, max_turn_tokens: int
    ) -> "AlternativeSettings":
        """Build the settings from ``algorithm.rlvcr``; ``max_turn_tokens`` limits a thought too."""
        return cls(
            levels_per_turn=rlvcr.alternatives,
            expanded_turns=rlvcr.expand,
            shares_thoughts=rlvcr.share_thoughts,
            step_fraction=rlvcr.step_fraction,
            max_tokens=min(rlvcr.max_alternative_tokens, max_turn_tokens),
            action_blind=rlvcr.action_blind,
            seed=seed,
        )

    @property
    def samples_after_rollout(self) -> bool:
        """True if thoughts are sampled only after the rollout of a group has ended."""
        return self.shares_thoughts or self.expanded_turns != "all"


@dataclass(slots=True)
class TurnAlternatives:
    """Alternative thoughts of one turn in order of level, and counts of dropped ones by reason.

    ``sampled_tokens`` includes the tokens of dropped thoughts.
    """

    thoughts: list[ForcedThought] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    sampled_tokens: int = 0


class AlternativeSampler:
    """Sampler of alternative thoughts, requested from the engine by calls of ``sample``."""

    def __init__(
        self,
        settings: AlternativeSettings,
        codec: LevelCodec,
        sample: SampleTokens,
        encode: EncodeText,
    ) -> None:
        self.settings = settings
        self._codec = codec
        self._sample = sample
        self._encode = encode

    def choose_levels(self, parsed: ParsedTurn, traj_uid: str, turn_number: int) -> list[int]:
        """Return the levels at which alternative thoughts of this turn are sampled.

        The list is empty for a turn that cannot be parsed. With ``step_fraction`` below 1 it is
        also empty for turns that are not drawn. The draw depends only on the seed, the trajectory
        and ``turn_number``.
        """
        if parsed.failure is not None or parsed.level is None:
            return []
        # Derive the draw from a seed: the order of episodes varies, so a shared generator would not
        # give reproducible draws.
        draw = derive_seed(self.settings.seed, "alternatives", traj_uid, turn_number)
        if draw / SEED_RANGE >= self.settings.step_fraction:
            return []
        other_levels = [level for level in LEVELS if level != parsed.level]
        if self.settings.levels_per_turn == "one":
            level_draw = derive_seed(self.settings.seed, "alternative level", traj_uid, turn_number)
            return [other_levels[level_draw % len(other_levels)]]
        return other_levels

    async def sample_thoughts(
        self,
        prompt_ids: list[int],
        parsed: ParsedTurn,
        levels: Sequence[int],
        traj_uid: str,
        turn_number: int,
        route: int = 0,
    ) -> TurnAlternatives:
        """Sample thoughts at ``levels`` after ``prompt_ids``, the prompt of turn ``turn_number``.

        The seed of a thought depends only on the base seed, the trajectory, the turn and the
        level. Requests with the same ``route`` go to the same rollout worker.
        """
        alternatives = TurnAlternatives()
        hint = [] if self.settings.action_blind else self._encode_action_hint(parsed)
        prefixes = self._codec.encode_format(parsed.turn_format).prefix_ids
        sampled_levels = [level for level in levels if level != 1]  # level 1 has an empty thought
        requests = []
        for level in sampled_levels:
            prompt = prompt_ids + hint + prefixes[level]
            seed = derive_seed(self.settings.seed, "thought", traj_uid, turn_number, level)
            requests.append(
                self._sample(prompt, self.settings.max_tokens, THOUGHT_STOPS, route, seed)
            )
        results = dict(zip(sampled_levels, await asyncio.gather(*requests), strict=True))
        for level in sorted(levels):
            if level == 1:
                alternatives.thoughts.append(self._codec.build_empty_thought(parsed.turn_format))
            else:
                self._add_result(level, results[level], parsed.turn_format, alternatives)
        return alternatives

    def _add_result(
        self,
        level: int,
        result: SamplingResult | None,
        turn_format: TurnFormat,
        alternatives: TurnAlternatives,
    ) -> None:
        """Add the thought in ``result`` to ``alternatives``, or count it as dropped."""
        if result is None:
            alternatives.dropped["engine"] += 1
            return
        alternatives.sampled_tokens += len(result.token_ids)
        thought = self._codec.build_forced_thought(level, result.token_ids, turn_format)
        if thought is not None:
            alternatives.thoughts.append(thought)
        elif result.stop_reason is StopReason.LENGTH:
            alternatives.dropped["length"] += 1
        else:
            alternatives.dropped["format"] += 1

    def _encode_action_hint(self, parsed: ParsedTurn) -> list[int]:
        return list(self._encode(f"The action will be: {parsed.action}\n"))
