"""Text version of OpenEnv environments.

A task is a seed, which is sent to the environment's ``reset``. It depends on the environment which
part of an episode the seed determines.
"""

import json
from collections.abc import Mapping
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, project_action
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.openenv.sessions import (
    NAME,
    InvalidAction,
    open_session,
)
from agent_system.environments.env_package.openenv.settings import OpenEnvSettings
from agent_system.environments.package import EnvPackage
from agent_system.environments.prompts import Prompts
from agent_system.environments.tasks import SEED_MASK
from verl.utils.seeds import derive_seed


class OpenEnvEnv:
    """Environment whose episodes are a success if they end with a reward above 0."""

    placement = "process"  # third-party code or a remote server

    def __init__(self, settings: OpenEnvSettings) -> None:
        self.settings = settings
        self._session = open_session(settings)
        self._last_text = ""

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode with the seed of ``task``."""
        del seed  # the seed of the task is used instead
        session_result = self._session.reset({**self.settings.reset_options, "seed": task["seed"]})
        self._last_text = self._observation_text(session_result.observation)
        return Observation(self._last_text)

    def step(self, action: str) -> Step:
        """Send ``action``. One with invalid fields changes nothing and is not valid."""
        try:
            session_result = self._session.step(self._action_fields(action))
        except InvalidAction as error:
            text = f"That is no action: {error}\n{self._last_text}"
            observation = Observation(text, anchor=self._last_text)
            return observation, 0.0, False, {"won": False, "is_action_valid": False}
        self._last_text = self._observation_text(session_result.observation)
        won = session_result.done and session_result.reward > 0
        reward = float(won) if self.settings.reward == "won" else session_result.reward
        return (
            Observation(self._last_text),
            reward,
            session_result.done,
            {"won": won, "is_action_valid": True},
        )

    def close(self) -> None:
        self._session.close()

    def _action_fields(self, action: str) -> Mapping[str, Any]:
        if self.settings.action_field:
            return {self.settings.action_field: action}
        try:
            fields = json.loads(action)
        except ValueError as error:
            raise InvalidAction(f"not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise InvalidAction("not a JSON object")
        return fields

    def _observation_text(self, fields: Mapping[str, Any]) -> str:
        key = self.settings.text_field
        if key is None:
            return json.dumps(fields, sort_keys=True)
        if key not in fields:
            raise KeyError(
                f"env.{NAME}.text_field={key!r}: the observation does not have this field; "
                f"allowed: {', '.join(sorted(fields))}; fix: set one of them, or null"
            )
        return str(fields[key])


def list_tasks(settings: OpenEnvSettings, split: str) -> list[Task]:
    """Return seeds by number. Validation has the first numbers, training those after them."""
    first_seed = 0 if split == "val" else settings.val_tasks
    count = settings.val_tasks if split == "val" else settings.train_tasks
    return [
        {
            "task_id": f"{NAME}/{settings.source}/{task_number}",
            "data_source": settings.source,
            "seed": derive_seed(NAME, settings.task_seed, task_number) & SEED_MASK,
        }
        for task_number in range(first_seed, first_seed + count)
    ]


def make_prompts(settings: OpenEnvSettings) -> Prompts:
    """Return prompts with the rules of the settings."""
    return ChatPrompts(settings.rules, settings.example, keep_first=True)


PACKAGE = EnvPackage(
    name=NAME,
    settings=OpenEnvSettings,
    make=OpenEnvEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    project=project_action,
    remarks=lambda: {
        "": "it needs env.openenv.url or env.openenv.environment, the server or class"
    },
)
