"""One trajectory as a coroutine: budget check, sample, project, step the environment, note it down,
again.

    open_turn ──prompt──▶ agent ──tokens──▶ ledger ──text──▶ project ──action──▶ environment
        ▲                               └──▶ alternatives (RLVCR), while the environment steps      │
        └────────────────────────────── observation ◀───────────────────────────────────────────────┘

A turn cut by length never reaches the environment. Whatever breaks is noted in the trajectory: a
broken play is data.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from agent_system.agents import Action, EngineAgent
from agent_system.environments.base import EnvPackage, Observation, Prompts
from agent_system.environments.failure import EnvFailure
from agent_system.multi_turn_rollout.engine_client import EngineAborted
from agent_system.multi_turn_rollout.history import make_history
from agent_system.multi_turn_rollout.play_settings import PlaySettings
from agent_system.multi_turn_rollout.trajectory import Job, Trajectory, Turn
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.ledger import SegmentKind, TokenLedger
from rlvcr.alternatives import SEED_RANGE, AlternativeSampler
from rlvcr.levels import LEVELS, LevelCodec
from verl.utils.sampling import StopReason
from verl.utils.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class Stage:
    """What all trajectories of a batch share. ``agent(job)`` makes the agent that plays one of
    them.

    ``codec`` reads thinking levels and ``alternatives`` samples other thoughts; None where not
    asked for.
    """

    settings: PlaySettings
    package: EnvPackage
    prompts: Prompts
    bridge: ChatBridge
    agent: Callable[[Job], EngineAgent]
    codec: LevelCodec | None = None
    alternatives: AlternativeSampler | None = None


async def gather_or_cancel(coroutines: Iterable[Awaitable[Any]]) -> list[Any]:
    """Results of all ``coroutines`` in order; when one raises, the others are cancelled before it
    is raised on.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class TrajectoryPlayer:
    """Plays ``job`` on ``stage``; ``play`` returns the trajectory, broken or not."""

    def __init__(self, stage: Stage, job: Job) -> None:
        self.stage = stage
        self.trajectory = Trajectory(job)
        self._agent = stage.agent(job)
        self._thoughts: list[asyncio.Task] = []

    async def play(self, pool: Any) -> Trajectory:
        """Play on an environment of ``pool``; environment failures and given-up requests mark it
        ``aborted``.
        """
        try:
            await self._play(pool)
            await asyncio.gather(*self._thoughts)
        finally:
            for thought in self._thoughts:
                thought.cancel()
        return self.trajectory

    async def _play(self, pool: Any) -> None:
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

    async def _run(self, env: Any) -> None:
        stage, trajectory = self.stage, self.trajectory
        history = make_history(stage.settings, stage.bridge, stage.prompts)
        trajectory.ledgers = history.ledgers
        observation = await self._waiting_for_env(
            env.reset(trajectory.job.task, trajectory.job.env_seed)
        )
        trajectory.start_state = (observation.text, observation.state)
        for step in range(stage.settings.max_steps):
            ledger = history.open_turn(observation, step)
            if ledger is None:
                trajectory.truncated = "budget"
                return
            turn = await self._sample(ledger, observation, step)
            if turn.stop_reason is not StopReason.STOP:
                trajectory.truncated = "length"
                return
            observation = await self._step(env, turn)
            if turn.done:
                return
            history.close_turn(turn)
        trajectory.truncated = "steps"

    async def _sample(self, ledger: TokenLedger, observation: Observation, step: int) -> Turn:
        forced = self._forced_level(step)
        start = len(ledger)
        if forced:
            ledger.append(forced, SegmentKind.BRIDGE, turn=step)
        began = time.perf_counter()
        action: Action = await self._agent.act(ledger.ids)
        self.trajectory.engine_wait_s += time.perf_counter() - began
        segment = ledger.append(
            action.token_ids,
            SegmentKind.AGENT,
            logprobs=action.logprobs,
            turn=step,
            policy_version=action.policy_version,
            stop_reason=action.stop_reason,
        )
        turn = Turn(
            step=step,
            observation=observation.text,
            anchor=observation.state,
            ledger=len(self.trajectory.ledgers) - 1,
            start=start,
            end=segment.end,
            response=self.stage.bridge.decode(ledger.ids[start:]) if forced else action.text,
            stop_reason=action.stop_reason,
            image=observation.image,
            forced=len(forced),
        )
        self.trajectory.turns.append(turn)
        if self.stage.codec is not None:
            turn.parsed = self.stage.codec.parse_step(ledger.ids[start:])
        if self.stage.alternatives is not None and self.stage.settings.alternatives.expand == "all":
            self._thoughts.append(
                asyncio.create_task(expand_turn(self.stage, self.trajectory, turn))
            )
        return turn

    def _forced_level(self, step: int) -> list[int]:
        """With probability ``epsilon_levels`` the tokens of a level drawn uniformly, to begin the
        turn with; else none.

        Depends on seed, trajectory and step alone. The policy did not sample these tokens: nothing
        is learnt on them.
        """
        epsilon, traj_uid = self.stage.settings.epsilon_levels, self.trajectory.job.traj_uid
        draw = derive_seed(self.stage.settings.seed, "forced level", traj_uid, step) / SEED_RANGE
        if draw >= epsilon:
            return []
        # below epsilon the draw is uniform, so that its place there names the level
        return self.stage.codec.prefix_ids[LEVELS[int(len(LEVELS) * draw / epsilon)]]

    async def _step(self, env: Any, turn: Turn) -> Observation:
        turn.action, formed = self.stage.package.project(turn.response)
        observation, reward, done, info = await self._waiting_for_env(env.step(turn.action))
        turn.reward, turn.done = float(reward), bool(done)
        turn.is_action_valid = bool(formed and info.get("is_action_valid", True))
        self.trajectory.reward += turn.reward
        self.trajectory.won = bool(info.get("won", False))
        return observation

    async def _waiting_for_env(self, call: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        try:
            return await call
        finally:
            self.trajectory.env_wait_s += time.perf_counter() - began


async def expand_turn(stage: Stage, trajectory: Trajectory, turn: Turn) -> None:
    """Think at other levels before the action of ``turn`` and keep what came of it in the turn."""
    job = trajectory.job
    levels = stage.alternatives.levels_for(turn.parsed, job.traj_uid, turn.step)
    if levels:
        prompt = trajectory.ledgers[turn.ledger].ids[: turn.start]
        turn.alternatives = await stage.alternatives.think(
            prompt, turn.parsed, levels, job.traj_uid, turn.step, job.index
        )
