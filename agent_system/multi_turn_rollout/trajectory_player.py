"""Generation of one trajectory as a coroutine, turn by turn.

    open_turn ──prompt──▶ agent ──tokens──▶ ledger ──text──▶ project ──action──▶ environment
        ▲                               └──▶ alternatives (RLVCR), while it steps    │
        └────────────────────────────── observation ◀────────────────────────────────┘

A turn cut by its length limit is not sent to the environment, unless the package grades cut turns.
Failures are recorded in the trajectory and not raised.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from agent_system.agents import Action
from agent_system.environments.env import Observation
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool.environment_pool import EnvironmentPool, PoolSession
from agent_system.environments.pool.failure import EnvFailure
from agent_system.environments.prompts import Prompts
from agent_system.multi_turn_rollout.engine_client import EngineAborted
from agent_system.multi_turn_rollout.history import make_history
from agent_system.multi_turn_rollout.play_settings import PlaySettings
from agent_system.multi_turn_rollout.policy_sampler import PolicySampler
from agent_system.multi_turn_rollout.trajectory import Job, Trajectory, Turn, numbers_in
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import TokenConversation
from rlvcr.alternatives import SEED_RANGE, AlternativeSampler
from rlvcr.levels import LevelCodec
from verl.utils.sampling import StopReason
from verl.utils.seeds import derive_seed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Objects that all trajectories of one call share.

    ``codec`` reads thinking levels, ``alternatives`` samples alternative thoughts; None where not
    requested.
    """

    settings: PlaySettings
    package: EnvPackage
    prompts: Prompts
    bridge: ChatBridge
    sampler: PolicySampler
    codec: LevelCodec | None = None
    alternatives: AlternativeSampler | None = None


class ReplayDiffers(Exception):
    """Different observation for the same task, seed and actions: the environment is not
    deterministic.
    """


async def gather_or_cancel(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all ``coroutines`` in order. If one raises, cancel the others and
    re-raise.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # Cancelled tasks are awaited too: they must release their environments before the return.
        await asyncio.gather(*tasks, return_exceptions=True)


class TrajectoryPlayer:
    """Generator of the trajectory of one rollout spec."""

    def __init__(self, context: RolloutContext, job: Job) -> None:
        self.context = context
        self.trajectory = Trajectory(job)
        self._agent = context.sampler.agent(job)
        self._thoughts: list[asyncio.Task[None]] = []

    async def play(self, pool: EnvironmentPool) -> Trajectory:
        """Generate the trajectory in an environment of ``pool``.

        Environment failures and aborted requests mark it ``aborted``.
        """
        try:
            await self._play(pool)
            # After the session: other trajectories can use the environment meanwhile.
            await asyncio.gather(*self._thoughts)
        finally:
            for thought in self._thoughts:
                thought.cancel()
        return self.trajectory

    async def _play(self, pool: EnvironmentPool) -> None:
        trajectory = self.trajectory
        try:
            async with pool.session(trajectory.job.uid) as env:
                began = time.perf_counter()
                try:
                    await self._run(env)
                finally:
                    trajectory.ended_at = time.perf_counter()
                    trajectory.active_s = trajectory.ended_at - began
        except EnvFailure as failure:
            trajectory.abort(f"env_{failure.kind}", failure.detail)
        except EngineAborted as failure:
            trajectory.abort("engine", str(failure))
        except ReplayDiffers as failure:
            trajectory.abort("replay", str(failure))

    async def _run(self, env: PoolSession) -> None:
        context = self.context
        trajectory = self.trajectory
        history = make_history(context.settings, context.bridge, context.prompts)
        trajectory.ledgers = history.ledgers
        trajectory.heard = history.heard
        job = trajectory.job
        observation = await self._waiting_for_env(env.reset(job.task, job.env_seed))
        trajectory.start_state = (observation.text, observation.state)
        for step in range(context.settings.max_steps):
            conversation = history.open_turn(observation, step)
            if conversation is None:
                trajectory.truncated = "budget"
                return
            # The turn is added to the trajectory before the env step, so a failure there keeps it.
            turn = await self._sample(conversation, observation, step)
            if turn.stop_reason is not StopReason.STOP:
                trajectory.truncated = "length"
                # A cut turn has no valid action, but it is in the trajectory and trained on.
                if context.package.for_task(job.task).plays_cut_turns:
                    await self._step(env, turn)
                return
            observation = await self._step(env, turn)
            if turn.done:
                return
            history.close_turn(turn)
        trajectory.truncated = "steps"

    async def _sample(
        self, conversation: TokenConversation, observation: Observation, step: int
    ) -> Turn:
        context = self.context
        ledger = conversation.ledger
        self._compare(observation, step)
        repeats = step < len(self.trajectory.job.replay)
        forced = [] if repeats else self._forced_level(step, observation.needed_level)
        start = len(ledger)
        conversation.force(forced, step)
        began = time.perf_counter()
        if repeats:
            action = self._repeat(step)
        else:
            action = await self._agent.act(conversation.prompt_ids, len(forced))
        self.trajectory.engine_wait_s += time.perf_counter() - began
        segment = conversation.say(action, step)
        turn = Turn(
            step=step,
            observation=observation.text,
            anchor=observation.state,
            ledger=len(self.trajectory.ledgers) - 1,
            start=start,
            end=segment.end,
            response=context.bridge.decode(ledger.ids[start:]) if forced else action.text,
            stop_reason=action.stop_reason,
            image=observation.image,
            situation=observation.situation,
            needed_level=observation.needed_level,
            forced=len(forced),
        )
        self.trajectory.turns.append(turn)
        if context.codec is not None:
            turn.parsed = context.codec.parse_step(ledger.ids[start:])
        # Not awaited here, so that thoughts are sampled while the environment steps.
        if context.alternatives is not None and context.alternatives.settings.expand == "all":
            thinking = generate_alternative_thinking_levels(context, self.trajectory, turn)
            self._thoughts.append(asyncio.create_task(thinking))
        return turn

    def _compare(self, observation: Observation, step: int) -> None:
        """Raise ``ReplayMismatch`` where the observation is not the expected one of a replay."""
        seen = self.trajectory.job.seen
        if step < len(seen) and observation.text != seen[step]:
            raise ReplayDiffers(
                f"turn {step} of the replay: the observation is {observation.text[:200]!r}; "
                f"expected: {seen[step][:200]!r}; make the environment deterministic for its seed"
            )

    def _repeat(self, step: int) -> Action:
        """Return turn ``step`` as it was sampled in the repeated trajectory."""
        ids = list(self.trajectory.job.replay[step])
        return Action(
            text=self.context.bridge.decode(ids),
            token_ids=ids,
            # These tokens are repeated, not sampled, and not trained on.
            logprobs=[math.nan] * len(ids),
            stop_reason=StopReason.STOP,
            policy_version=-1,
        )

    def _forced_level(self, step: int, needed: int | None) -> list[int]:
        """Return the tokens of the forced level at the beginning of this turn. Empty: the policy
        chooses.

        The level comes from the rollout spec or from ``level_rule``, which may use
        ``required_level``. Draws depend only on seed, trajectory and turn. Forced tokens are not
        trained on.
        """
        codec = self.context.codec
        if codec is None:
            return []
        job = self.trajectory.job
        if job.level is not None and step == len(job.replay):
            if job.opening is not None:
                return [*job.opening, codec.digit_ids[job.level - 1]]
            return codec.prefix_ids[job.level]
        settings = self.context.settings
        draw = derive_seed(settings.seed, "forced level", job.traj_uid, step) / SEED_RANGE
        level = settings.level_rule.level(draw, needed)
        return [] if level is None else codec.prefix_ids[level]

    async def _step(self, env: PoolSession, turn: Turn) -> Observation:
        package = self.context.package.for_task(self.trajectory.job.task)
        turn.action, formed = package.project(turn.response)
        observation, reward, done, info = await self._waiting_for_env(env.step(turn.action))
        turn.reward = float(reward)
        turn.done = bool(done)
        turn.is_action_valid = bool(formed and info.get("is_action_valid", True))
        self.trajectory.reward += turn.reward
        # Overwritten in each turn: only the end of the episode counts.
        self.trajectory.won = bool(info.get("won", False))
        self.trajectory.reward_parts = info.get("reward_parts", {})
        self.trajectory.info_numbers |= numbers_in(info)
        self.trajectory.answer = info.get("answer")
        return observation

    async def _waiting_for_env(self, call: Awaitable[T]) -> T:
        began = time.perf_counter()
        try:
            return await call
        finally:
            self.trajectory.env_wait_s += time.perf_counter() - began


async def generate_alternative_thinking_levels(
    context: RolloutContext, trajectory: Trajectory, turn: Turn
) -> None:
    """Sample alternative thoughts for ``turn`` and store them in the turn.

    Does nothing where the turn was not parsed or no alternatives are requested.
    """
    sampler = context.alternatives
    if sampler is None or turn.parsed is None:
        return
    job = trajectory.job
    levels = sampler.levels_for(turn.parsed, job.traj_uid, turn.step)
    if levels:
        prompt = trajectory.ledgers[turn.ledger].ids[: turn.start]
        turn.alternatives = await sampler.think(
            prompt, turn.parsed, levels, job.traj_uid, turn.step, job.index
        )
