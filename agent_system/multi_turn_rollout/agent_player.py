"""Trajectory of a user-provided agent, which requests its turns from the endpoint.

    environment worker: agent ──messages──▶ endpoint ──▶ dialogue ──prompt ids──▶ engine
                              ◀──text──────          ◀── ledger ◀──tokens────────
                              ──reward─────▶ end of the trajectory

Every request is a turn, every dialogue a row. An agent that fails before it posts a reward aborts
the trajectory. There is one exception: if its last request was refused for a turn or token limit,
the episode counts as truncated.
"""

import asyncio
import json
import time
from collections.abc import Awaitable
from dataclasses import asdict

from agent_system.endpoint.chat_request import ChatRequest, SamplingRules
from agent_system.endpoint.dialogues import Dialogue, Dialogues
from agent_system.endpoint.forms import Refused, Reply
from agent_system.endpoint.server import EndpointServer
from agent_system.environments.pool.environment_pool import PoolSession
from agent_system.environments.pool.failure import EnvFailure
from agent_system.multi_turn_rollout.engine_client import EngineAborted, RolloutWorkerFailed
from agent_system.multi_turn_rollout.trajectory import Job, Turn
from agent_system.multi_turn_rollout.trajectory_player import (
    RolloutContext,
    TrajectoryPlayer,
)
from agent_system.tokens.template import TemplateUnsupported
from verl.utils.sampling import SamplingResult, StopReason


class AgentPlayer(TrajectoryPlayer):
    """Trajectory generator for a user-provided agent, which gets an API key of ``endpoint``."""

    def __init__(self, context: RolloutContext, job: Job, endpoint: EndpointServer) -> None:
        super().__init__(context, job)
        settings = context.settings
        self.rules = SamplingRules(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_turn_tokens,
        )
        self._endpoint = endpoint
        self._dialogues = Dialogues(
            context.bridge, settings.limits, extends=settings.history == "append"
        )
        self._steps = 0
        self._rewarded = False
        self._ended = False
        self._failure: EngineAborted | RolloutWorkerFailed | None = None
        self._engine_died = asyncio.Event()

    async def _run(self, env: PoolSession) -> None:
        trajectory = self.trajectory
        job = trajectory.job
        trajectory.ledgers = self._dialogues.ledgers
        observation = await self._waiting_for_env(env.reset(job.task, job.env_seed))
        trajectory.start_state = (observation.text, observation.state)
        async with self._endpoint.admitted(self) as door:
            try:
                playing = env.step(json.dumps(asdict(door)))
                await self._waiting_for_env(self._while_engine_lives(playing))
            except EnvFailure as failure:
                cut = self.trajectory.truncated is not None and failure.kind == "error"
                # A failure of the agent after the end of its episode has no effect.
                if not self._rewarded and not cut and self._failure is None:
                    raise
            finally:
                self._ended = True
        if self._failure is not None:
            raise self._failure
        if not self._rewarded and trajectory.truncated is None:
            raise EnvFailure("error", "the agent ended without returning or posting a reward")
        self._conclude()

    async def _while_engine_lives(self, playing: Awaitable[object]) -> None:
        """Wait for the agent; raise ``RolloutWorkerFailed`` as soon as the engine fails."""
        agent = asyncio.ensure_future(playing)
        death = asyncio.ensure_future(self._engine_died.wait())
        try:
            await asyncio.wait((agent, death), return_when=asyncio.FIRST_COMPLETED)
            if not agent.done() and self._failure is not None:
                raise self._failure
            await agent
        finally:
            for task in (agent, death):
                task.cancel()
            await asyncio.gather(agent, death, return_exceptions=True)

    # ---- methods that the endpoint calls ----

    async def chat(self, request: ChatRequest) -> Reply:
        """Sample the turn that answers ``request``. Raises ``RequestRefused``."""
        self._refuse_what_is_late()
        step = self._steps
        dialogue = self._open(request, step)
        self._steps += 1
        start = len(dialogue.conversation.ledger)
        result = await self._turn(dialogue.conversation.prompt_ids, step, request)
        self._refuse_what_is_late()
        said = self.context.bridge.decode(result.token_ids)
        shown = _until(said, request.stop)
        segment = dialogue.answer(result, step, replies=(shown, said))
        heard = request.messages[-1]["content"]
        turn = Turn(
            step=step,
            observation=heard,
            anchor=heard,
            ledger=dialogue.number,
            start=start,
            end=segment.end,
            response=said,
            stop_reason=result.stop_reason,
            action=said,
            is_action_valid=True,
        )
        self.trajectory.turns.append(turn)
        return Reply(shown, result.stop_reason, start, len(result.token_ids))

    def finish(self, reward: float, won: bool) -> None:
        """Record the reward that the agent posted. Later requests are refused."""
        self._rewarded = True
        self._ended = True
        self.trajectory.reward = reward
        self.trajectory.won = won

    # ---- turns ----

    def _refuse_what_is_late(self) -> None:
        """Raise ``RequestRefused`` after the end of the episode, when the rows are final."""
        if self._ended:
            raise Refused("the episode has ended; fix: post the reward last", status=401)

    def _open(self, request: ChatRequest, step: int) -> Dialogue:
        """Return the dialogue that ``request`` continues. Raises ``RequestRefused`` for a limit or
        a bad template.
        """
        most = self.context.settings.max_steps
        if step >= most:
            self.trajectory.truncated = "steps"
            raise Refused(
                f"messages: this is turn {step + 1}; allowed: env.max_steps={most}; "
                "fix: end the episode, or raise that limit",
                code="max_steps_exceeded",
            )
        try:
            dialogue = self._dialogues.open(request.messages, step)
        except TemplateUnsupported as error:
            fix = "fix: system, then user and assistant by turns"
            raise Refused(f"messages: {error}; {fix}", param="messages") from error
        if dialogue is None:
            self.trajectory.truncated = "budget"
            raise Refused(
                "messages: no turn fits after them; allowed: data.max_prompt_length tokens in a "
                "first prompt, data.max_response_length after it; fix: end the episode, or send "
                "shorter messages",
                param="messages",
                code="context_length_exceeded",
            )
        # An earlier refusal did not end the episode: the agent continued.
        self.trajectory.truncated = None
        return dialogue

    async def _turn(self, prompt_ids: list[int], step: int, request: ChatRequest) -> SamplingResult:
        began = time.perf_counter()
        try:
            return await self.context.sampler.turn(
                prompt_ids,
                self.trajectory.job,
                step,
                request.max_tokens,
                request.stop,
            )
        except (EngineAborted, RolloutWorkerFailed) as failure:
            self._failure = failure
            if isinstance(failure, RolloutWorkerFailed):
                self._engine_died.set()
            raise Refused(f"the engine failed: {failure}", status=500) from failure
        finally:
            self.trajectory.engine_wait_s += time.perf_counter() - began

    def _conclude(self) -> None:
        """Sort turns by request order; the last turn gets the reward."""
        trajectory = self.trajectory
        # The agent's waiting time for tokens is counted as engine wait only.
        trajectory.env_wait_s = max(0.0, trajectory.env_wait_s - trajectory.engine_wait_s)
        turns = sorted(trajectory.turns, key=lambda turn: turn.step)
        trajectory.turns = turns
        if not turns:
            return
        last = turns[-1]
        last.reward = trajectory.reward
        last.done = self._rewarded
        if last.stop_reason is StopReason.LENGTH and trajectory.truncated is None:
            trajectory.truncated = "length"
        rows = dict.fromkeys(turn.ledger for turn in turns)
        trajectory.heard = self._dialogues[list(rows)[-1]].heard


def _until(text: str, stops: tuple[str, ...]) -> str:
    """Return ``text`` up to the first of ``stops``, like the OpenAI API."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text
