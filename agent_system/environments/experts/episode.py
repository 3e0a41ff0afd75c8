"""Episode of a scripted expert, and the lines of the demonstration file that are made from it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_system.environments.env import Env, Observation, Prompts, Task
from agent_system.environments.event_loop import await_if_needed
from agent_system.environments.expert_protocol import Decision, ExpertPolicy
from agent_system.memory import WindowMemory

COPIED_TASK_FIELDS = ("task_id", "data_source", "kind")  # fields of the task in a row


def compose_thought(level: int, decision: Decision) -> str:
    """Return the thought of ``level``: ``decision.thoughts[level]`` if the expert wrote it.

    Otherwise it consists of the first ``level`` - 1 of the parts situation, last action, plan::

        level 1: ""
        level 2: "at 4."
        level 3: "at 4. did left."
        level 4: "at 4. did left. plan right."
    """
    if level in decision.thoughts:
        return decision.thoughts[level].text
    # Index 0 is unused: level 1 has an empty thought.
    sentences = ("", decision.situation, decision.tried, f"plan {decision.plan}")
    return " ".join(f"{sentence}." for sentence in sentences[1:level])


def choose_action(level: int | None, decision: Decision) -> str:
    """Return the action of the thought that the expert wrote for ``level``, else the decision's."""
    if level is not None and level in decision.thoughts:
        return decision.thoughts[level].action
    return decision.action


def render_reply(level: int | None, decision: Decision) -> str:
    """Return the assistant message: level, thought and action in tags.

    If ``level`` is None, the message contains only the action.
    """
    action = f"<action>{choose_action(level, decision)}</action>"
    if level is None:
        return action
    return f"<level>{level}</level><think>{compose_thought(level, decision)}</think>{action}"


@dataclass(frozen=True, slots=True)
class LevelSampler:
    """Sampler of the thinking level of a turn.

    The level is ``decision.needed_level`` with probability ``needed_share``, otherwise uniform over
    ``levels``. It is independent of earlier turns. If ``levels`` is empty, the level is None.
    """

    levels: Sequence[int]
    rng: random.Random
    needed_share: float = 0.0

    def __call__(self, decision: Decision) -> int | None:
        if not self.levels:
            return None
        # With ``needed_share=0`` draw no random number: it would change all later draws, and so the
        # content of files from before this option existed.
        uses_needed_level = self.needed_share > 0 and self.rng.random() < self.needed_share
        if uses_needed_level and decision.needed_level in self.levels:
            return decision.needed_level
        return self.rng.choice(self.levels)


class ExpertEpisode:
    """Episode of an expert, and the rows (lines of the demonstration file) made from it.

    With ``window=None`` the episode is one row. Otherwise every turn is a row, and its prompt has
    the last ``window`` turns. If ``asks_for_levels`` is true, the prompts ask for thinking levels.
    """

    def __init__(
        self,
        env: Env,
        prompts: Prompts,
        task: Task,
        first_observation: Observation,
        asks_for_levels: bool,
        window: int | None = None,
    ) -> None:
        self.env = env
        self.prompts = prompts
        self.task = task
        self.first_observation = first_observation
        self.asks_for_levels = asks_for_levels
        # Past turns, from which prompts are built if every turn is a row.
        self.memory = None if window is None else WindowMemory(window)
        self.window_prompts: list[str] = []
        self.levels: list[int | None] = []
        self.decisions: list[Decision] = []
        system = prompts.system(asks_for_levels)
        self.messages = [{"role": "system", "content": system}] if system else []
        self._add_message("user", prompts.first(first_observation, asks_for_levels))

    def run(
        self, policy: ExpertPolicy, sample_level: Callable[[Decision], int | None], max_steps: int
    ) -> bool:
        """Run until the episode is done or has ``max_steps`` turns. Return True for a success."""
        observation = self.first_observation
        for _ in range(max_steps):
            decision = policy.act()
            # Draw the level after the expert has acted. Both use one random generator, so another
            # order would change the file.
            level = sample_level(decision)
            action = choose_action(level, decision)
            self.levels.append(level)
            self.decisions.append(decision)
            if self.memory is not None:
                past_turns = self.memory.stored_turns()
                self.window_prompts.append(
                    self.prompts.window(
                        self.first_observation, past_turns, observation, self.asks_for_levels
                    )
                )
                self.memory.add(observation.text, action)
            self._add_message("assistant", render_reply(level, decision))
            observation, _, done, info = await_if_needed(self.env.step(action))
            if done:
                return bool(info["won"])
            policy.observe(action, observation)
            self._add_message("user", self.prompts.turn(observation))
        return False

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the rows of the episode: one, or one per turn if ``window`` was given.

        The columns ``levels``, ``slack`` and ``slips`` have one entry per turn: the thinking level,
        True for a useless action, and True for an invalid action.
        """
        num_turns = len(self.decisions)
        if self.memory is None:
            return [self._build_row(slice(0, num_turns), self.messages)]
        system_messages = [message for message in self.messages if message["role"] == "system"]
        replies = [message for message in self.messages if message["role"] == "assistant"]
        return [
            self._build_row(
                slice(step, step + 1),
                [
                    *system_messages,
                    {"role": "user", "content": self.window_prompts[step]},
                    replies[step],
                ],
            )
            for step in range(num_turns)
        ]

    def _build_row(self, turn_slice: slice, messages: list[dict[str, str]]) -> dict[str, Any]:
        decisions = self.decisions[turn_slice]
        return {
            **{key: self.task[key] for key in COPIED_TASK_FIELDS if key in self.task},
            "levels": self.levels[turn_slice],
            "slack": [decision.is_useless for decision in decisions],
            "slips": [decision.is_invalid for decision in decisions],
            "messages": messages,
        }

    def _add_message(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})
