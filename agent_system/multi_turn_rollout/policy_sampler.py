"""How a collector worker asks the policy for tokens: turns and thoughts, each with its own seed."""

import itertools
from collections.abc import Callable, Sequence

from agent_system.agents import EngineAgent
from agent_system.multi_turn_rollout.engine_client import EngineAborted, Sampling, TokenSource
from agent_system.multi_turn_rollout.play_settings import PlaySettings
from agent_system.multi_turn_rollout.trajectory import Job
from verl.utils.sampling import SamplingResult
from verl.utils.seeds import derive_seed


class PolicySampler:
    """Samples from ``engine`` as ``settings`` say; ``decode`` turns a turn's tokens into text.

    A turn is at most ``turn_tokens`` long.
    """

    def __init__(
        self,
        engine: TokenSource,
        settings: PlaySettings,
        decode: Callable[[Sequence[int]], str],
        turn_tokens: int,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._decode = decode
        self._turn_tokens = turn_tokens
        self._sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)

    def agent(self, job: Job) -> EngineAgent:
        """The agent that plays ``job``; its calls are the turns of the trajectory, in order."""
        turns = itertools.count()
        return EngineAgent(lambda prompt_ids: self.turn(prompt_ids, job, next(turns)), self._decode)

    async def turn(self, prompt_ids: list[int], job: Job, number: int) -> SamplingResult:
        """Turn ``number`` of the trajectory ``job``. Raises what ``EngineClient.sample`` raises."""
        return await self._engine.sample(
            prompt_ids,
            max_tokens=self._turn_tokens,
            sampling=self._sampling,
            stop=self._settings.stop,
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
