"""Generation of one trajectory as a coroutine, turn by turn.

    open_turn ──prompt──▶ agent ──tokens──▶ ledger ──text──▶ projection ──action──▶ environment
        ▲                               └──▶ alternatives (RLVCR), in parallel          │
        └────────────────────────────── observation ◀───────────────────────────────────┘

Failures are recorded in the trajectory and not raised.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from agent_system.environments.env import EnvFailure, Observation, Prompts
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool.environment_pool import EnvironmentPool, PoolSession
from agent_system.multi_turn_rollout.engine_client import EngineAbortedError, PolicySampler
from agent_system.multi_turn_rollout.history import History, make_history
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import (
    RolloutSpec,
    Trajectory,
    Turn,
    extract_info_numbers,
)
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.dialogues import Dialogue
from agent_system.tokens.ledger import SUMMARY_STEP
from agent_system.tokens.replies import END_THINK
from rlvcr.alternatives import SEED_RANGE, AlternativeThoughtSampler, TurnAlternativeThoughts
from rlvcr.levels import LevelCodec, ParsedTurn
from verl.config.schema.env import EnvCompaction
from verl.records import ANSWER, REWARD_PARTS, SummaryRecord
from verl.utils.chat_template import UnsupportedTemplateError
from verl.utils.sampling import SamplingResult, StopReason
from verl.utils.seeds import derive_seed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Objects that all trajectories of one rollout share, such as prompts and the sampler.

    ``codec`` parses thinking levels. It is None if levels are not requested.
    ``alternative_sampler`` samples alternative thoughts. It is None if they are not requested.
    """

    settings: RolloutSettings
    package: EnvPackage
    prompts: Prompts
    bridge: ChatBridge
    sampler: PolicySampler
    codec: LevelCodec | None = None
    alternative_sampler: AlternativeThoughtSampler | None = None


class ReplayMismatchError(Exception):
    """Error of a replay whose observation differs, so the environment is not deterministic."""


async def gather_or_cancel(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of ``coroutines`` in order. If one raises, cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # Cancelled tasks are awaited too: they must release their environments before the return.
        await asyncio.gather(*tasks, return_exceptions=True)


class TrajectoryGenerator:
    """Generator of the trajectory that ``spec`` describes."""

    def __init__(self, context: RolloutContext, spec: RolloutSpec) -> None:
        self.context = context
        self.trajectory = Trajectory(spec)
        self._thought_tasks: list[asyncio.Task[None]] = []

    async def generate_trajectory(self, pool: EnvironmentPool) -> Trajectory:
        """Generate the trajectory in ``pool``. Failures mark it ``aborted``."""
        try:
            await self._generate_in_session(pool)
            # Wait for alternative thoughts only after the session has ended, so that other
            # trajectories can use the environment.
            await asyncio.gather(*self._thought_tasks)
        finally:
            for thought_task in self._thought_tasks:
                thought_task.cancel()
        return self.trajectory

    async def _generate_in_session(self, pool: EnvironmentPool) -> None:
        trajectory = self.trajectory
        try:
            async with pool.open_session(trajectory.spec.uid) as env:
                start_s = time.perf_counter()
                try:
                    await self._run_turns(env)
                finally:
                    trajectory.end_time_s = time.perf_counter()
                    trajectory.active_s = trajectory.end_time_s - start_s
        except EnvFailure as failure:
            trajectory.abort(f"env_{failure.kind}", failure.detail)
        except EngineAbortedError as failure:
            trajectory.abort("engine", str(failure))
        except ReplayMismatchError as failure:
            trajectory.abort("replay", str(failure))
        except UnsupportedTemplateError as failure:
            # With ``chat`` history the template also renders the replies, and may refuse some of
            # them.
            trajectory.abort("template", str(failure))

    async def _run_turns(self, env: PoolSession) -> None:
        context = self.context
        trajectory = self.trajectory
        history = make_history(context.settings, context.bridge, context.prompts)
        trajectory.ledgers = history.ledgers
        spec = trajectory.spec
        observation = await self._await_env(env.reset(spec.task, spec.env_seed))
        trajectory.start_state = (observation.text, observation.state)
        max_turns = spec.max_turns or context.settings.max_steps
        for step in range(min(max_turns, context.settings.max_steps)):
            dialogue = history.open_turn(observation, step)
            # Before the first turn there is nothing to summarise.
            if dialogue is None and context.settings.compact is not None and step > 0:
                dialogue = await self._compact_history(
                    context.settings.compact, history, observation, step
                )
            if dialogue is None:
                trajectory.truncated = "budget"
                return
            # Add the turn to the trajectory before the env step, which may fail.
            turn = await self._sample_policy_turn(dialogue, observation, step)
            if turn.stop_reason is not StopReason.STOP:
                trajectory.truncated = "length"
                # A turn that reached the token limit is trained on. Its action is executed only
                # if the whole turn is the answer, as in single-turn data.
                if context.package.package_for_task(spec.task).executes_cut_turns:
                    await self._step_env(env, turn, history.read_reply(turn))
                return
            observation = await self._step_env(env, turn, history.read_reply(turn))
            if turn.done:
                return
            history.close_turn(turn)
        trajectory.truncated = "steps"

    async def _sample_policy_turn(
        self, dialogue: Dialogue, observation: Observation, step: int
    ) -> Turn:
        context = self.context
        spec = self.trajectory.spec
        conversation = dialogue.conversation
        ledger = conversation.ledger
        self._check_replayed_observation(observation, step)
        is_repeated = step < len(spec.replayed_turns)
        forced_ids = (
            [] if is_repeated else self._get_forced_level_ids(step, observation.needed_level)
        )
        turn_start = len(ledger)
        conversation.add_forced_prefix(forced_ids, step)
        start_s = time.perf_counter()
        if is_repeated:
            sampling_result = _make_replayed_result(spec.replayed_turns[step])
        else:
            max_tokens = context.settings.max_turn_tokens - len(forced_ids)
            sampling_result = await context.sampler.sample_turn(
                conversation.prompt_ids, spec, step - len(spec.replayed_turns), max_tokens
            )
        self.trajectory.engine_wait_s += time.perf_counter() - start_s
        response = context.bridge.decode([*forced_ids, *sampling_result.token_ids])
        segment = dialogue.add_reply(sampling_result, step, response)
        self.trajectory.shown_messages = dialogue.shown_messages
        turn = Turn(
            step=step,
            observation=observation.text,
            anchor=observation.state,
            ledger=dialogue.ledger_index,
            start=turn_start,
            end=segment.end_position,
            response=response,
            stop_reason=sampling_result.stop_reason,
            image=observation.image,
            situation=observation.situation,
            needed_level=observation.needed_level,
            num_forced_tokens=len(forced_ids),
        )
        self.trajectory.turns.append(turn)
        if context.codec is not None:
            turn.parsed = context.codec.parse_turn(ledger.token_ids[turn_start:])
        # Do not wait here, so that thoughts are sampled while the environment steps.
        alternative_sampler = context.alternative_sampler
        if (
            alternative_sampler is not None
            and not alternative_sampler.settings.samples_thoughts_after_rollout
        ):
            coroutine = generate_alternative_thinking_levels(context, self.trajectory, turn)
            self._thought_tasks.append(asyncio.create_task(coroutine))
        return turn

    async def _compact_history(
        self, compaction: EnvCompaction, history: History, observation: Observation, step: int
    ) -> Dialogue | None:
        """Replace the turns of ``history`` by a summary of the policy, and open turn ``step``.

        Return None if the summary, or the turn after it, would exceed the token limits. A summary
        that was cut or is empty is used too.
        """
        dialogue = history.open_summary(compaction, step)
        if dialogue is None:
            return None
        spec, summaries = self.trajectory.spec, self.trajectory.summaries
        summary_number = len(summaries)
        start_s = time.perf_counter()
        if summary_number < len(spec.replayed_summaries):
            sampling_result = _make_replayed_result(spec.replayed_summaries[summary_number])
        else:
            sampling_result = await self.context.sampler.sample_summary(
                dialogue.conversation.prompt_ids,
                spec,
                summary_number - len(spec.replayed_summaries),
                compaction.max_summary_tokens,
            )
        self.trajectory.engine_wait_s += time.perf_counter() - start_s
        response = self.context.bridge.decode(sampling_result.token_ids)
        segment = dialogue.add_reply(sampling_result, SUMMARY_STEP, response)
        self.trajectory.shown_messages = dialogue.shown_messages
        summaries[dialogue.ledger_index] = SummaryRecord(
            step=step,
            response=response,
            num_tokens=len(segment.ids),
            stop_reason=sampling_result.stop_reason.value,
            span=(segment.start, segment.end_position),
        )
        # A thought in front of the summary is not part of it.
        summary_text = dialogue.answers[-1].message["content"].rpartition(END_THINK)[2].strip()
        history.replace_turns(compaction, summary_text)
        return history.open_turn(observation, step)

    def _check_replayed_observation(self, observation: Observation, step: int) -> None:
        expected_observations = self.trajectory.spec.expected_observations
        if step < len(expected_observations) and observation.text != expected_observations[step]:
            raise ReplayMismatchError(
                f"turn {step} of the replay: the observation is {observation.text[:200]!r}; "
                f"expected: {expected_observations[step][:200]!r}; make the environment "
                "deterministic for its seed"
            )

    def _get_forced_level_ids(self, step: int, required_level: int | None) -> list[int]:
        """Return the tokens that force a level at the beginning of turn ``step``; usually none.

        The level comes from the rollout spec or from ``level_rule``. Draws depend only on seed,
        trajectory and turn. Forced tokens are not trained on.
        """
        codec = self.context.codec
        if codec is None:
            return []
        spec = self.trajectory.spec
        if spec.forced_level is not None and step == len(spec.replayed_turns):
            return codec.prefix_ids[spec.forced_level]
        settings = self.context.settings
        uniform_number = (
            derive_seed(settings.seed, "forced level", spec.traj_uid, step) / SEED_RANGE
        )
        level = settings.level_rule.draw_level(uniform_number, required_level)
        return [] if level is None else codec.prefix_ids[level]

    async def _step_env(self, env: PoolSession, turn: Turn, text: str) -> Observation:
        """Execute the action in ``text``, record its result, and return the next observation."""
        package = self.context.package.package_for_task(self.trajectory.spec.task)
        turn.action, is_well_formed = package.project(text)
        observation, reward, done, info = await self._await_env(env.step(turn.action))
        turn.reward = float(reward)
        turn.done = bool(done)
        turn.is_action_valid = bool(is_well_formed and info.get("is_action_valid", True))
        self.trajectory.reward += turn.reward
        # Overwrite these values in each turn: only those at the end of the episode count.
        self.trajectory.won = bool(info.get("won", False))
        reward_parts = info.get(REWARD_PARTS) or {}
        self.trajectory.reward_parts = {name: float(part) for name, part in reward_parts.items()}
        self.trajectory.info_numbers |= extract_info_numbers(info)
        self.trajectory.answer = info.get(ANSWER)
        return observation

    async def _await_env(self, env_call: Awaitable[T]) -> T:
        start_s = time.perf_counter()
        try:
            return await env_call
        finally:
            self.trajectory.env_wait_s += time.perf_counter() - start_s


def _make_replayed_result(token_ids: Sequence[int]) -> SamplingResult:
    # NaN log-probs: replayed tokens come from an earlier trajectory and are not trained on.
    return SamplingResult("", [*token_ids], [math.nan] * len(token_ids), StopReason.STOP, -1)


async def generate_alternative_thinking_levels(
    context: RolloutContext, trajectory: Trajectory, turn: Turn
) -> None:
    """Sample thoughts at other thinking levels for ``turn``, and store them in the turn.

    They answer the same prompt. Do nothing if the turn could not be parsed into level, thought and
    action, or if the settings request no such thoughts.
    """
    alternative_sampler = context.alternative_sampler
    if alternative_sampler is None or turn.parsed is None:
        return
    spec = trajectory.spec
    levels = alternative_sampler.choose_levels(turn.parsed, spec.traj_uid, turn.step)
    if levels:
        prompt = trajectory.ledgers[turn.ledger].token_ids[: turn.start]
        turn.alternatives = await alternative_sampler.sample_thoughts(
            prompt, turn.parsed, levels, spec.traj_uid, turn.step, spec.index
        )


async def sample_alternative_thoughts_of_group(
    context: RolloutContext, trajectories: Sequence[Trajectory]
) -> None:
    """Sample thoughts at other levels for all turns of ``trajectories``, the members of one group.

    With ``share_thoughts``, turns with equal prompts and formats get the same thoughts, sampled
    with the seed of the first of these turns. With ``action_blind=false`` their actions must be
    equal too. ``step_fraction`` and ``alternatives="one"`` draw once for all turns with equal
    prompts.
    """
    alternative_sampler = context.alternative_sampler
    if alternative_sampler is None:
        return
    turns = [(trajectory, turn) for trajectory in trajectories for turn in trajectory.turns]
    if not alternative_sampler.settings.share_thoughts:
        await gather_or_cancel(
            generate_alternative_thinking_levels(context, trajectory, turn)
            for trajectory, turn in turns
        )
        return
    requests_by_prompt: dict[object, list[_AlternativeThoughtsRequest]] = {}
    for trajectory, turn in turns:
        if turn.parsed is None:
            continue
        prompt = trajectory.ledgers[turn.ledger].token_ids[: turn.start]
        levels = alternative_sampler.choose_levels(turn.parsed, trajectory.spec.uid, str(prompt))
        if levels:
            # A thought that sees the action of its turn suits only turns with the same action.
            shown_action = "" if alternative_sampler.settings.action_blind else turn.parsed.action
            key = (tuple(prompt), turn.parsed.turn_format, shown_action)
            requests_by_prompt.setdefault(key, []).append(
                _AlternativeThoughtsRequest(trajectory, turn, turn.parsed, levels)
            )
    await gather_or_cancel(
        _sample_shared_thoughts(alternative_sampler, requests)
        for requests in requests_by_prompt.values()
    )


@dataclass(frozen=True, slots=True)
class _AlternativeThoughtsRequest:
    """Turn for which thoughts at other thinking ``levels`` are to be sampled."""

    trajectory: Trajectory
    turn: Turn
    parsed: ParsedTurn
    levels: list[int]


async def _sample_shared_thoughts(
    alternative_sampler: AlternativeThoughtSampler, requests: Sequence[_AlternativeThoughtsRequest]
) -> None:
    """Sample one thought at each level in ``requests``, and store it in the turns that need it.

    All turns in ``requests`` have equal prompts, so they share the thoughts.
    """
    first_request = requests[0]
    spec = first_request.trajectory.spec
    shared_thoughts = await alternative_sampler.sample_thoughts(
        first_request.trajectory.ledgers[first_request.turn.ledger].token_ids[
            : first_request.turn.start
        ],
        first_request.parsed,
        sorted({level for request in requests for level in request.levels}),
        spec.traj_uid,
        first_request.turn.step,
        spec.index,
    )
    for request in requests:
        thoughts = [
            thought for thought in shared_thoughts.thoughts if thought.level in request.levels
        ]
        request.turn.alternatives = TurnAlternativeThoughts(thoughts)
        # Dropped thoughts and sampled tokens are counted once, in the first turn.
        if request is first_request:
            request.turn.alternatives = replace(shared_thoughts, thoughts=thoughts)
