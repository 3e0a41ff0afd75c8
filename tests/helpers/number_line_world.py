"""Small test world: configuration, number-line tasks, and a policy that walks to the target."""

import re
from collections.abc import Sequence
from typing import Any

from agent_system.environments.manager import make_envs
from rlvcr.settings import get_rlvcr_settings
from tests.helpers.scripted_engine import ScriptedEngine
from verl.config.load import default_config
from verl.names import History

PLACE = re.compile(r"You are at (\d+)\. The target is (\d+)\.")
THOUGHTS = {2: "I see the target", 3: "I tried nothing yet", 4: "first right then left"}


class Group:
    """The part of the trainer's workers that the collector needs.

    ``score(data)`` replaces ``compute_log_prob``.
    """

    def __init__(self, engines: Sequence[ScriptedEngine], score: Any = None) -> None:
        self.rollout_workers = engines
        self.compute_log_prob = score


def make_config(
    env_name: str = "number_line",
    history: History = "append",
    n: int = 2,
    levels: bool = False,
    **env,
):
    config = default_config()
    config.env.env_name = env_name
    config.env.history = history
    config.env.rollout.n = n
    config.env.levels = levels
    config.env.max_turn_tokens = 48
    config.env.max_steps = 12
    config.env.envs_per_worker = 8
    config.env.kwargs = {"size": 6}
    config.data.max_prompt_length = 1024
    config.data.max_response_length = 1024
    get_rlvcr_settings(config.algorithm).enable = False
    for key, value in env.items():
        setattr(config.env, key, value)
    return config


def walk(text: str) -> str:
    """Return the move towards the target from the last position in ``text``."""
    position, target = map(int, PLACE.findall(text)[-1])
    return "right" if target > position else "left"


def walking_policy(levels: bool = False):
    """Return a script for ``ScriptedEngine`` that walks to the target.

    With levels, it uses level 1 + position % 4 and the thought of that level.
    """

    def script(_request: object, prompt: str) -> str:
        if prompt.endswith("<think>"):
            return THOUGHTS[int(re.findall(r"<level>(\d)</level>", prompt)[-1])] + "</think>"
        action = f"<action>{walk(prompt)}</action>"
        if not levels:
            return action
        level = 1 + int(PLACE.findall(prompt)[-1][0]) % 4
        return f"<level>{level}</level><think>{THOUGHTS.get(level, '')}</think>{action}"

    return script


def make_world(tokenizer, config, script=None, engines: int = 1, score=None, delay_s: float = 0.0):
    """Return ``(group, train_envs, engines)`` for ``TrajectoryCollector.multi_turn_loop``.

    Each episode has three turns or more.
    """
    script = script or walking_policy(bool(config.env.levels))
    workers = [ScriptedEngine(tokenizer, script, delay_s) for _ in range(engines)]
    envs = make_envs(config)[0]
    envs.replace_tasks(
        [task for task in envs.task_list if abs(task["start"] - task["target"]) >= 3]
    )
    return Group(workers, score), envs, workers
