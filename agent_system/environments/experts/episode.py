"""An expert's episode: what its thoughts and actions read like, and the rows an episode becomes."""

import asyncio
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_system.environments.env import Env, Observation, Task
from agent_system.environments.expert_protocol import Decision, ExpertPlayer
from agent_system.environments.prompts import Prompts
from agent_system.memory import WindowMemory

FACTS = ("task_id", "data_source", "kind")  # of a task that a row repeats


def thought(level: int, decision: Decision) -> str:
    """The thought of ``level`` about a decision: the expert's own, or one that says all that the
    level below says, and more.
    """
    own = decision.thoughts.get(level)
    if own is not None:
        return own.text
    # Level 1 thinks nothing: place 0 is a stand-in that no level takes.
    parts = ("", decision.situation, decision.tried, f"plan {decision.plan}")
    return " ".join(f"{part}." for part in parts[1:level])


def action_of(level: int | None, decision: Decision) -> str:
    """The action that follows from the thought of ``level``."""
    own = None if level is None else decision.thoughts.get(level)
    return decision.action if own is None else own.action


def render(level: int | None, decision: Decision) -> str:
    """The assistant message: exactly what a rollout's response looks like.

    Without a level, the action alone.
    """
    action = f"<action>{action_of(level, decision)}</action>"
    if level is None:
        return action
    return f"<level>{level}</level><think>{thought(level, decision)}</think>{action}"


@dataclass(frozen=True, slots=True)
class LevelDraw:
    """Draws a level for every decision: the needed one with probability ``needed_share``, else one
    of ``levels`` uniformly, whatever went before, so that the policy learns the odds and no order.

    Without levels, ``None`` for ever.
    """

    levels: Sequence[int]
    rng: random.Random
    needed_share: float = 0.0

    def __call__(self, decision: Decision) -> int | None:
        """The level of ``decision``."""
        if not self.levels:
            return None
        # No draw where nothing hangs on it: every further one would change all files.
        prefers = self.needed_share > 0 and self.rng.random() < self.needed_share
        if prefers and decision.needed_level in self.levels:
            return decision.needed_level
        return self.rng.choice(self.levels)


class ExpertEpisode:
    """One expert episode as it is played, and the rows it becomes: one where ``window`` is None, as
    with ``append`` history; else one for each step, whose prompt shows so many past steps.
    """

    def __init__(
        self,
        env: Env,
        prompts: Prompts,
        task: Task,
        first: Observation,
        asks: bool,
        window: int | None = None,
    ) -> None:
        self.env = env
        self.prompts = prompts
        self.task = task
        self.first = first
        self.asks = asks
        # What the policy reads at each step, where a step stands alone.
        self.memory = None if window is None else WindowMemory(window)
        self.asked: list[str] = []
        self.levels: list[int | None] = []
        self.decisions: list[Decision] = []
        system = prompts.system(asks)
        self.messages = [{"role": "system", "content": system}] if system else []
        self._say("user", prompts.first(first, asks))

    def run(
        self, player: ExpertPlayer, draw: Callable[[Decision], int | None], max_steps: int
    ) -> bool:
        """Play to the end, or for ``max_steps`` steps, on levels that ``draw`` chooses; whether it
        was won.
        """
        observation = self.first
        for _ in range(max_steps):
            decision = player.act()
            # After the expert's own draws: the order decides what every file holds.
            level = draw(decision)
            action = action_of(level, decision)
            self.levels.append(level)
            self.decisions.append(decision)
            self._remember(observation, action)
            self._say("assistant", render(level, decision))
            observation, _, done, info = now(self.env.step(action))
            if done:
                return bool(info["won"])
            player.observe(action, observation)
            self._say("user", self.prompts.turn(observation))
        return False

    def rows(self) -> list[dict[str, Any]]:
        """The episode as lines of a file; see ``demonstrations``."""
        steps = len(self.decisions)
        if self.memory is None:
            return [self._row(slice(0, steps), self.messages)]
        opening = [message for message in self.messages if message["role"] == "system"]
        said = [message for message in self.messages if message["role"] == "assistant"]
        return [
            self._row(
                slice(step, step + 1),
                [*opening, {"role": "user", "content": self.asked[step]}, said[step]],
            )
            for step in range(steps)
        ]

    def _row(self, steps: slice, messages: list[dict[str, str]]) -> dict[str, Any]:
        decisions = self.decisions[steps]
        return {
            **{key: self.task[key] for key in FACTS if key in self.task},
            "levels": self.levels[steps],
            "slack": [decision.slack for decision in decisions],
            "slips": [decision.slip for decision in decisions],
            "messages": messages,
        }

    def _remember(self, observation: Observation, action: str) -> None:
        if self.memory is None:
            return
        turns = self.memory.turns()
        self.asked.append(self.prompts.window(self.first, turns, observation, self.asks))
        self.memory.add(observation.text, action)

    def _say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


def now(value: object) -> Any:
    """What an environment returned, awaited where it is a coroutine."""
    if not inspect.isawaitable(value):
        return value

    # ``run`` takes coroutines only, and any awaitable may come back.
    async def waited() -> Any:
        return await value

    return asyncio.run(waited())
