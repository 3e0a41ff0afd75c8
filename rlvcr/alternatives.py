"""Sampling of alternative thoughts: what the policy would have thought at the other levels.

In each turn the policy chooses a thinking level (1 to 4) and writes a thought. Alternative thoughts
are sampled after the same chat prompt, with the tokens of another level forced:

    chat prompt ──sampled──▶ <level>3</level><think>z</think><action>...      the turn in the row
        │
        ├──forced──▶ <level>1</level><think></think><action>                        no generation
        ├──forced──▶ <level>2</level><think> ──sampled──▶ thought </think>|<action>
        └──forced──▶ <level>4</level><think> ──sampled──▶ thought </think>|<action>

Forced tokens have the format of the sampled turn, with the same white space between blocks. A
thought that ends with neither ``</think>`` nor ``<action>``, or that has an invalid format, is
dropped and counted.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rlvcr.levels import (
    ACTION_START,
    LEVELS,
    THINK_END,
    AlternativeThought,
    LevelCodec,
    ParsedTurn,
    TurnFormat,
)
from rlvcr.settings import RLVCRSettings
from verl.utils.sampling import SamplingResult, StopReason
from verl.utils.seeds import derive_seed

THOUGHT_STOPS = (THINK_END, ACTION_START)  # stop strings of a sampled thought
SEED_RANGE = float(2**63)  # seeds are in [0, SEED_RANGE)

EncodeText = Callable[[str], Sequence[int]]
# (prompt_ids, max_tokens, stop, routing_key, seed) -> sampled tokens, or None if the engine aborted
# the request. Requests of one ``routing_key`` go to the same rollout worker.
SampleTokens = Callable[
    [list[int], int, tuple[str, ...], int, int], Awaitable[SamplingResult | None]
]


@dataclass(slots=True)
class TurnAlternativeThoughts:
    """Alternative thoughts of one turn, in order of level.

    ``num_requested`` is the number of thoughts that the engine was asked for; level 1 needs none.
    ``dropped`` counts those that were dropped, by reason. Their tokens are included in
    ``sampled_tokens``. If several turns share thoughts, all three counts are in the first of these
    turns.
    """

    thoughts: list[AlternativeThought] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    sampled_tokens: int = 0
    num_requested: int = 0


class AlternativeThoughtSampler:
    """Sampler of alternative thoughts: thoughts of a turn at other thinking levels.

    It requests tokens from the rollout engine by calls of ``sample``.
    """

    def __init__(
        self,
        settings: RLVCRSettings,
        codec: LevelCodec,
        sample: SampleTokens,
        encode: EncodeText,
        max_turn_tokens: int,
        seed: int,
    ) -> None:
        self.settings = settings
        self._codec = codec
        self._sample = sample
        self._encode = encode
        # A thought is a part of a turn, so the token limit of a turn applies too.
        self._max_tokens = min(settings.max_alternative_tokens, max_turn_tokens)
        self._seed = seed

    def choose_levels(self, parsed: ParsedTurn, *draw_key: int | str) -> list[int]:
        """Return the thinking levels at which alternative thoughts of this turn are sampled.

        These are the three levels that the policy did not choose, or one of them at random
        (``alternatives="one"``). The list is empty for a turn that cannot be parsed, and for a
        random share ``1 - step_fraction`` of the turns. The draws depend only on the seed and
        ``draw_key``, which names a turn, or all turns that share thoughts.
        """
        if parsed.failure is not None or parsed.level is None:
            return []
        # Derive the draw from a seed: the order of episodes varies, so a shared generator would not
        # give reproducible draws.
        draw = derive_seed(self._seed, "alternatives", *draw_key)
        if draw / SEED_RANGE >= self.settings.step_fraction:
            return []
        other_levels = [level for level in LEVELS if level != parsed.level]
        if self.settings.alternatives == "one":
            # Take the first of the other levels in a random order of all levels. Turns with equal
            # keys then get the same level, unless the policy chose this level in one of them.
            get_random_rank = partial(derive_seed, self._seed, "alternative level", *draw_key)
            return [min(other_levels, key=get_random_rank)]
        return other_levels

    async def sample_thoughts(
        self,
        prompt_ids: list[int],
        parsed: ParsedTurn,
        levels: Sequence[int],
        traj_uid: str,
        turn_number: int,
        routing_key: int = 0,
    ) -> TurnAlternativeThoughts:
        """Sample a thought at each of ``levels`` after the prompt ``prompt_ids`` of the turn.

        ``parsed`` holds the level and thought that the policy sampled. The seed of a thought
        depends only on the base seed, the trajectory, the turn and the level. Requests with the
        same ``routing_key`` go to the same rollout worker.
        """
        sampled_levels = [level for level in levels if level != 1]  # level 1 has an empty thought
        alternatives = TurnAlternativeThoughts(num_requested=len(sampled_levels))
        action_hint_ids: list[int] = []
        if not self.settings.action_blind:
            action_hint_ids = list(self._encode(f"The action will be: {parsed.action}\n"))
        level_prefix_ids = self._codec.encode_format(parsed.turn_format).prefix_ids
        requests = []
        for level in sampled_levels:
            prompt = prompt_ids + action_hint_ids + level_prefix_ids[level]
            seed = derive_seed(self._seed, "thought", traj_uid, turn_number, level)
            requests.append(
                self._sample(prompt, self._max_tokens, THOUGHT_STOPS, routing_key, seed)
            )
        results = dict(zip(sampled_levels, await asyncio.gather(*requests), strict=True))
        for level in sorted(levels):
            if level == 1:
                alternatives.thoughts.append(self._codec.build_empty_thought(parsed.turn_format))
            else:
                self._add_sampled_thought(level, results[level], parsed.turn_format, alternatives)
        return alternatives

    def _add_sampled_thought(
        self,
        level: int,
        result: SamplingResult | None,
        turn_format: TurnFormat,
        alternatives: TurnAlternativeThoughts,
    ) -> None:
        """Add the thought that the engine sampled to ``alternatives``, or count it as dropped."""
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
