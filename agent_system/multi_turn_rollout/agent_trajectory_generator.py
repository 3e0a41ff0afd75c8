"""Trajectory of a user-provided agent, which requests its turns from the endpoint.

    environment worker: agent ──messages──▶ endpoint ──▶ dialogue ──prompt ids──▶ engine
                              ◀──text──────          ◀── ledger ◀──tokens────────
                              ──reward─────▶ end of the trajectory

Every request is a turn. Every dialogue (requests that continue each other) is a row. An agent that
fails before it posts a reward aborts the trajectory. If its last request was refused for a turn or
token limit, the episode counts as truncated instead.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict

from agent_system.endpoint.chat_completions import (
    ChatRequest,
    Reply,
    RequestRefusedError,
    SamplingRules,
)
from agent_system.endpoint.server import EndpointServer
from agent_system.environments.env import EnvFailure
from agent_system.environments.pool.environment_pool import PoolSession
from agent_system.multi_turn_rollout.engine_client import EngineAbortedError, RolloutWorkerFailed
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Turn
from agent_system.multi_turn_rollout.trajectory_generator import RolloutContext, TrajectoryGenerator
from agent_system.tokens.dialogues import Dialogue, EpisodeDialogues, list_tool_calls
from verl.names import POLICY_MODEL
from verl.utils.chat_template import Message, UnsupportedTemplateError
from verl.utils.sampling import SamplingResult, StopReason

TOO_LONG_CODE = "context_length_exceeded"  # OpenAI's code if a request leaves no space for a turn


class UserAgentTrajectoryGenerator(TrajectoryGenerator):
    """Generator of the trajectory of a user's agent, which requests turns at ``endpoint``."""

    def __init__(
        self, context: RolloutContext, spec: RolloutSpec, endpoint: EndpointServer
    ) -> None:
        super().__init__(context, spec)
        settings = context.settings
        self._endpoint = endpoint
        self._call_numbers = itertools.count()  # one counter for all models makes ids unique
        self._dialogues = EpisodeDialogues(
            context.bridge, settings.token_limits, settings.history, self._call_numbers
        )
        self.rules = SamplingRules(
            settings.temperature,
            settings.top_p,
            settings.top_k,
            settings.max_turn_tokens,
            settings.models,
            renders_tools=self._dialogues.tool_format is not None,
            renders_thoughts=self._dialogues.renders_thoughts,
            training_values=settings.training_values,
        )
        self._num_turns = 0
        self._num_cancelled_turns = 0
        self._num_untrained_replies = 0
        self._has_posted_reward = False
        self._has_ended = False
        self._engine_failure: EngineAbortedError | RolloutWorkerFailed | None = None
        self._engine_failed_event = asyncio.Event()

    async def _run_turns(self, env: PoolSession) -> None:
        trajectory = self.trajectory
        spec = trajectory.spec
        trajectory.ledgers = self._dialogues.ledgers
        observation = await self._await_env(env.reset(spec.task, spec.env_seed))
        trajectory.start_state = (observation.text, observation.state)
        async with self._endpoint.register_session(self) as endpoint_address:
            try:
                agent_call = env.step(json.dumps(asdict(endpoint_address)))
                await self._await_env(self._wait_for_agent(agent_call))
            except EnvFailure as failure:
                was_last_request_refused = (
                    self.trajectory.truncated is not None and failure.kind == "error"
                )
                # A failure of the agent after the end of its episode has no effect.
                if (
                    not self._has_posted_reward
                    and not was_last_request_refused
                    and self._engine_failure is None
                ):
                    raise
            finally:
                self._has_ended = True
        if self._engine_failure is not None:
            raise self._engine_failure
        if not self._has_posted_reward and trajectory.truncated is None:
            raise EnvFailure("error", "the agent ended without returning or posting a reward")
        self._finish_trajectory()

    async def _wait_for_agent(self, agent_call: Awaitable[object]) -> None:
        """Wait for the agent; raise ``RolloutWorkerFailed`` as soon as the engine fails."""
        agent_task = asyncio.ensure_future(agent_call)
        failure_wait_task = asyncio.ensure_future(self._engine_failed_event.wait())
        try:
            await asyncio.wait((agent_task, failure_wait_task), return_when=asyncio.FIRST_COMPLETED)
            if not agent_task.done() and self._engine_failure is not None:
                raise self._engine_failure
            await agent_task
        finally:
            for task in (agent_task, failure_wait_task):
                task.cancel()
            await asyncio.gather(agent_task, failure_wait_task, return_exceptions=True)

    # ---- methods that the endpoint calls ----

    async def chat(self, request: ChatRequest) -> Reply:
        """Sample the turn that answers ``request``. Raises ``RequestRefusedError``."""
        self._refuse_after_end()
        if request.model != POLICY_MODEL:
            return await self._answer_with_untrained_model(request)
        step = self._num_turns
        dialogue = self._open_turn_dialogue(request, step)
        self._num_turns += 1
        turn_start = len(dialogue.conversation.ledger)
        try:
            result = await self._sample_agent_turn(dialogue.conversation.prompt_ids, step, request)
        except asyncio.CancelledError:
            # The client has disconnected. Its next try continues the same row, as the same turn.
            dialogue.abandon_reply()
            self._num_cancelled_turns += 1
            raise
        self._refuse_after_end()
        full_text = self.context.bridge.decode(result.token_ids)
        segment = dialogue.add_reply(result, step, full_text, request.stop)
        observation = _join_last_messages(request.messages)
        turn = Turn(
            step=step,
            observation=observation,
            anchor=observation,
            ledger=dialogue.ledger_index,
            start=turn_start,
            end=segment.end_position,
            response=full_text,
            stop_reason=result.stop_reason,
            action=full_text,
            is_action_valid=True,
        )
        self.trajectory.turns.append(turn)
        return _make_reply(dialogue, result, turn_start, request)

    async def _answer_with_untrained_model(self, request: ChatRequest) -> Reply:
        """Sample the reply to a request that names a model that is not trained.

        The reply is sent to the agent, but it is not recorded in the trajectory.
        """
        reply_number = self._num_untrained_replies
        self._num_untrained_replies += 1
        context = self.context
        history = "chat" if self._dialogues.history == "chat" else "window"
        limits = context.settings.token_limits
        dialogues = EpisodeDialogues(context.bridge, limits, history, self._call_numbers)
        # Such a reply is no turn: it neither counts for env.max_steps nor ends the episode.
        dialogue = self._open_dialogue(dialogues, request, reply_number)
        prompt_ids = dialogue.conversation.prompt_ids
        result = await self._sample_agent_turn(prompt_ids, reply_number, request)
        self._refuse_after_end()
        text = context.bridge.decode(result.token_ids)
        dialogue.add_reply(result, reply_number, text, request.stop)
        return _make_reply(dialogue, result, len(prompt_ids), request)

    def finish(self, reward: float, won: bool) -> None:
        """Record the reward that the agent posted. Later requests are refused."""
        self._has_posted_reward = True
        self._has_ended = True
        self.trajectory.reward = reward
        self.trajectory.won = won

    # ---- turns ----

    def _refuse_after_end(self) -> None:
        """Raise ``RequestRefusedError`` after the end of the episode: its tokens are final."""
        if self._has_ended:
            raise RequestRefusedError(
                "the episode has ended; fix: post the reward last", status=401
            )

    def _open_turn_dialogue(self, request: ChatRequest, step: int) -> Dialogue:
        """Return the conversation in which the policy takes turn ``step``.

        Raises ``RequestRefusedError``. After a refusal for a turn or token limit the episode counts
        as truncated, unless the agent continues.
        """
        max_steps = self.context.settings.max_steps
        num_turns = step - self._num_cancelled_turns
        if num_turns >= max_steps:
            self.trajectory.truncated = "steps"
            raise RequestRefusedError(
                f"messages: this is turn {num_turns + 1}; allowed: env.max_steps={max_steps}; "
                "fix: end the episode, or raise that limit",
                code="max_steps_exceeded",
            )
        try:
            dialogue = self._open_dialogue(self._dialogues, request, step)
        except RequestRefusedError as refusal:
            if refusal.code == TOO_LONG_CODE:
                self.trajectory.truncated = "budget"
            raise
        # Reset: if the agent continues after a refused request, its episode is not truncated.
        self.trajectory.truncated = None
        return dialogue

    def _open_dialogue(
        self, dialogues: EpisodeDialogues, request: ChatRequest, step: int
    ) -> Dialogue:
        """Return the conversation that ``request`` continues, or a new one.

        Raises ``RequestRefusedError`` beyond the limit of tokens, and if the chat template does not
        support the messages.
        """
        try:
            dialogue = dialogues.open_request_dialogue(request.messages, step, request.tools)
        except UnsupportedTemplateError as error:
            message = (
                f"messages: {error}; fix: system, then user and assistant by turns, and results "
                "of tool calls after these calls"
            )
            raise RequestRefusedError(message, param="messages") from error
        if dialogue is None:
            raise RequestRefusedError(
                "messages: no turn fits after them; allowed: data.max_prompt_length tokens in a "
                "first prompt, data.max_response_length after it; fix: end the episode, or send "
                "shorter messages",
                param="messages",
                code=TOO_LONG_CODE,
            )
        return dialogue

    async def _sample_agent_turn(
        self, prompt_ids: list[int], step: int, request: ChatRequest
    ) -> SamplingResult:
        start_s = time.perf_counter()
        try:
            return await self.context.sampler.sample_turn(
                prompt_ids,
                self.trajectory.spec,
                step,
                request.max_tokens,
                request.stop,
                request.model,
            )
        except (EngineAbortedError, RolloutWorkerFailed) as failure:
            self._engine_failure = failure
            if isinstance(failure, RolloutWorkerFailed):
                self._engine_failed_event.set()
            raise RequestRefusedError(f"the engine failed: {failure}", status=500) from failure
        finally:
            self.trajectory.engine_wait_s += time.perf_counter() - start_s

    def _finish_trajectory(self) -> None:
        """Sort the turns in the order of requests, and give the reward to the last turn."""
        trajectory = self.trajectory
        # The agent's waiting time for tokens is counted as engine wait only.
        trajectory.env_wait_s = max(0.0, trajectory.env_wait_s - trajectory.engine_wait_s)
        turns = sorted(trajectory.turns, key=lambda turn: turn.step)
        trajectory.turns = turns
        if not turns:
            return
        self._renumber_turns(turns)
        last_turn = turns[-1]
        last_turn.reward = trajectory.reward
        last_turn.done = self._has_posted_reward
        if last_turn.stop_reason is StopReason.LENGTH and trajectory.truncated is None:
            trajectory.truncated = "length"
        ledger_indices = dict.fromkeys(turn.ledger for turn in turns)
        trajectory.shown_messages = self._dialogues[list(ledger_indices)[-1]].shown_messages

    def _renumber_turns(self, turns: Sequence[Turn]) -> None:
        """Number ``turns`` from 0 without gaps, which cancelled requests leave.

        Estimators read turns with consecutive numbers as consecutive states.
        """
        if len(turns) == self._num_turns:
            return
        number_by_step = {turn.step: number for number, turn in enumerate(turns)}
        for turn in turns:
            turn.step = number_by_step[turn.step]
        for ledger in self.trajectory.ledgers:
            ledger.renumber_turns(number_by_step)


def _make_reply(
    dialogue: Dialogue, result: SamplingResult, num_prompt_tokens: int, request: ChatRequest
) -> Reply:
    """Return the reply to ``request``: the last turn of ``dialogue``."""
    answer = dialogue.answers[-1]
    return Reply(
        answer.content,
        result.stop_reason,
        num_prompt_tokens,
        len(result.token_ids),
        request.model,
        list_tool_calls(answer.message),
        answer.thought,
    )


def _join_last_messages(messages: list[Message]) -> str:
    """Return the text that the policy answers: a user message, or all results of its tool calls."""
    tool_messages = list(itertools.takewhile(lambda m: m["role"] == "tool", reversed(messages)))
    return "\n".join(message["content"] for message in tool_messages[::-1] or messages[-1:])
