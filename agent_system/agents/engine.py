"""The agent of the collector: it asks a rollout engine, without blocking, and says what was
sampled, as it is.
"""

from collections.abc import Awaitable, Callable, Sequence

from agent_system.agents.base import Action
from verl.utils.sampling import SamplingResult


class EngineAgent:
    """One sampled turn per action.

    ``sample(prompt_ids, forced)`` asks a policy for a continuation; ``decode(token_ids)`` turns it
    into text. Both are bound to their settings by whoever makes the agent.
    """

    def __init__(
        self,
        sample: Callable[[list[int], int], Awaitable[SamplingResult]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._sample = sample
        self._decode = decode

    async def act(self, prompt_ids: list[int], forced: int = 0) -> Action:
        """Sample one turn after ``prompt_ids``, whose last ``forced`` tokens begin it already.

        Raises what ``sample`` raises when it gives up.
        """
        result = await self._sample(prompt_ids, forced)
        return Action(
            text=self._decode(result.token_ids),
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            stop_reason=result.stop_reason,
            policy_version=result.policy_version,
        )
