"""Sampling of turns and thoughts from the policy, each with its own seed."""

import itertools
from collections.abc import Awaitable, Callable, Sequence

from agent_system.agents import EngineAgent
from agent_system.multi_turn_rollout.engine_client import EngineAborted, TokenSampling, TokenSource
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import RolloutSpec
from verl.utils.sampling import SamplingResult
from verl.utils.seeds import derive_seed


class PolicySampler:
    """Sampler of turns and thoughts from ``engine`` with the parameters of ``settings``.

    ``decode`` converts a turn's tokens to text. A turn has at most ``settings.max_turn_tokens``
    tokens, including forced ones.
    """

    def __init__(
        self,
        engine: TokenSource,
        settings: RolloutSettings,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._decode = decode
        self._sampling = TokenSampling(settings.temperature, settings.top_p, settings.top_k)

    def make_agent(self, spec: RolloutSpec) -> EngineAgent:
        """Return the agent for the trajectory ``spec``; its calls sample the turns in order."""
        turns = itertools.count()

        def sample(prompt_ids: list[int], num_forced: int) -> Awaitable[SamplingResult]:
            max_tokens = self._settings.max_turn_tokens - num_forced
            return self.sample_turn(prompt_ids, spec, next(turns), max_tokens)

        return EngineAgent(sample, self._decode)

    async def sample_turn(
        self,
        prompt_ids: list[int],
        spec: RolloutSpec,
        number: int,
        max_tokens: int,
        stop: tuple[str, ...] = (),
    ) -> SamplingResult:
        """Sample turn ``number`` of the trajectory ``spec``.

        ``stop`` are strings that end the turn, in addition to those of the settings. Raises the
        errors of ``EngineClient.sample``.
        """
        return await self._engine.sample(
            prompt_ids,
            max_tokens=max_tokens,
            sampling=self._sampling,
            stop=(*self._settings.stop, *stop),
            route=spec.index,
            # Derived from the trajectory, not from its group: members of a group have equal
            # prompts, and only the seed makes them differ.
            seed=derive_seed(self._settings.seed, "turn", spec.traj_uid, number),
        )

    async def sample_thought(
        self, prompt_ids: list[int], max_tokens: int, stop: tuple[str, ...], route: int, seed: int
    ) -> SamplingResult | None:
        """Sample an alternative thought (see ``rlvcr.alternatives``); None where the engine aborted
        it.
        """
        try:
            return await self._engine.sample(
                prompt_ids,
                max_tokens=max_tokens,
                sampling=self._sampling,
                stop=stop,
                route=route,
                seed=seed,
            )
        # A turn can be trained on without an alternative thought, so the failure is not raised.
        except EngineAborted:
            return None
