"""Agent of the collector: awaits a rollout engine and returns its unchanged output."""

from collections.abc import Awaitable, Callable, Sequence

from agent_system.agents.base import Action
from verl.utils.sampling import SamplingResult


class EngineAgent:
    """Agent that samples one turn per action with a rollout engine.

    ``sample(prompt_ids, forced)`` awaits a continuation from the policy. ``decode(token_ids)``
    converts it to text.
    """

    def __init__(
        self,
        sample: Callable[[list[int], int], Awaitable[SamplingResult]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._sample = sample
        self._decode = decode

    async def sample_action(self, prompt_ids: list[int], forced: int = 0) -> Action:
        """Sample one turn after ``prompt_ids``, whose last ``forced`` tokens begin the turn.

        Errors of ``sample`` propagate.
        """
        result = await self._sample(prompt_ids, forced)
        return Action(
            text=self._decode(result.token_ids),
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            stop_reason=result.stop_reason,
            policy_version=result.policy_version,
        )
