"""Rollout worker without a model: a script determines the samples, so a trajectory is known in
advance.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason

Script = Callable[[SamplingRequest, str], "str | list[int] | StopReason"]


class ScriptedEngine:
    """Worker whose ``script(request, prompt_text)`` returns a text, tokens or ``StopReason.ABORT``.

    A script that raises ends the trajectory. A turn longer than ``max_tokens`` is cut. Log-probs
    are -1/4, -2/4, ... in order, so that a misplaced one is detected. ``requests`` records the
    requests, ``submits`` the number of requests in each call, ``polls`` the number of running
    polls, and ``forgotten`` the aborted clients.
    """

    def __init__(self, tokenizer, script: Script, delay_s: float = 0.0, version: int = 0) -> None:
        self.tokenizer, self.script, self.delay_s, self.version = (
            tokenizer,
            script,
            delay_s,
            version,
        )
        self.requests: list[SamplingRequest] = []
        self.submits: list[int] = []
        self.forgotten: list[str] = []
        self.polls = 0
        self.most_polls = 0
        self._done: dict[str, asyncio.Queue] = defaultdict(asyncio.Queue)

    async def submit(self, requests: Sequence[SamplingRequest]) -> None:
        self.submits.append(len(requests))
        self.requests += requests
        for request in requests:
            asyncio.get_running_loop().call_later(self.delay_s, self._finish, request)

    async def poll(self, client: str) -> list[SamplingResult]:
        self.polls += 1
        self.most_polls = max(self.most_polls, self.polls)
        try:
            results = [await asyncio.wait_for(self._done[client].get(), 1.0)]
            while not self._done[client].empty():
                results.append(self._done[client].get_nowait())
            for failure in (result for result in results if isinstance(result, Exception)):
                raise AssertionError("the script raised an error") from failure
            return results
        except TimeoutError:
            return []
        finally:
            self.polls -= 1

    async def list_requests_and_aborts(self) -> tuple[list[str], list[str]]:
        """Return the ids of all requests and ``forgotten``, for an engine that is a Ray actor."""
        return [request.request_id for request in self.requests], self.forgotten

    async def abort(self, client: str) -> None:
        self.forgotten.append(client)
        self._done.pop(client, None)

    def _finish(self, request: SamplingRequest) -> None:
        try:
            self._done[request.client].put_nowait(self._result(request))
        except (
            Exception
        ) as failure:  # raised in a timer, it would be lost, and the trajectory would never end
            self._done[request.client].put_nowait(failure)

    def _result(self, request: SamplingRequest) -> SamplingResult:
        sample = self.script(request, self.tokenizer.decode(request.prompt_ids))
        if isinstance(sample, StopReason):
            result = SamplingResult(request.request_id, [], [], sample, self.version)
        else:
            ids = (
                self.tokenizer(sample, add_special_tokens=False)["input_ids"]
                if isinstance(sample, str)
                else list(sample)
            )
            reason = StopReason.LENGTH if len(ids) > request.max_tokens else StopReason.STOP
            ids = ids[: request.max_tokens]
            logprobs = [-(1 + i) / 4 for i in range(len(ids))]
            result = SamplingResult(request.request_id, ids, logprobs, reason, self.version)
        assert all(map(math.isfinite, result.logprobs))
        return result
