"""How a collector worker asks the policy for tokens: turns and thoughts, each with its own seed."""

import itertools
from collections.abc import Awaitable, Callable, Sequence

from agent_system.agents import EngineAgent
from agent_system.multi_turn_rollout.engine_client import EngineAborted, Sampling, TokenSource
from agent_system.multi_turn_rollout.play_settings import PlaySettings
from agent_system.multi_turn_rollout.trajectory import Job
from verl.utils.sampling import SamplingResult
from verl.utils.seeds import derive_seed


class PolicySampler:
    """Samples from ``engine`` as ``settings`` say; ``decode`` turns a turn's tokens into text.

    A turn is at most ``settings.max_turn_tokens`` long, with what it is forced to begin with.
    """

    def __init__(
        self,
        engine: TokenSource,
        settings: PlaySettings,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._decode = decode
        self._sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)

    def agent(self, job: Job) -> EngineAgent:
        """The agent that plays ``job``; its calls are the turns of the trajectory, in order."""
        turns = itertools.count()

        def sample(prompt_ids: list[int], forced: int) -> Awaitable[SamplingResult]:
            most = self._settings.max_turn_tokens - forced
            return self.turn(prompt_ids, job, next(turns), most)

        return EngineAgent(sample, self._decode)

    async def turn(
        self,
        prompt_ids: list[int],
        job: Job,
        number: int,
        max_tokens: int,
        stop: tuple[str, ...] = (),
    ) -> SamplingResult:
        """Turn ``number`` that the trajectory ``job`` samples; ``stop`` ends it beside the strings
        of the settings. Raises what ``EngineClient.sample`` raises.
        """
        return await self._engine.sample(
            prompt_ids,
            max_tokens=max_tokens,
            sampling=self._sampling,
            stop=(*self._settings.stop, *stop),
            route=job.index,
            # Of the trajectory, not of its group: members of a group differ by nothing else.
            seed=derive_seed(self._settings.seed, "turn", job.traj_uid, number),
        )

    async def thought(
        self, prompt_ids: list[int], max_tokens: int, stop: tuple[str, ...], route: int, seed: int
    ) -> SamplingResult | None:
        """A thought at another level (``rlvcr.alternatives.Sample``); None where the engine gave
        the request up.
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
        # A turn without one of its thoughts can still be learnt from; without a token it cannot.
        except EngineAborted:
            return None
