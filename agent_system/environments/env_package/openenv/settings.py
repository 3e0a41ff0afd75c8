"""Settings of the config section ``env.openenv``."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Gt

from agent_system.environments.settings import EnvSettings
from verl.config.settings import PositiveInt, Seed


class OpenEnvSettings(EnvSettings):
    """Class or server URL of the environment, and the conversion of actions and observations."""

    url: str | None = None
    """server of the environment, such as http://127.0.0.1:8000"""
    environment: str | None = None
    """class of the environment, MODULE:CLASS, to run it in the environment process instead"""
    action: str | None = None
    """class of its actions, MODULE:CLASS; required with environment"""
    options: dict[str, Any] = {}
    """arguments of the environment's class"""
    reset_options: dict[str, Any] = {}
    """arguments of every reset in addition to seed"""
    action_field: str = "message"
    """field of an action that contains the text; empty: the text is a JSON object of all fields"""
    text_field: str | None = None
    """field of an observation that is its text; null: all fields, as JSON"""
    rules: str = "You act in an environment. Observations say what your last action did."
    """text of the system message"""
    example: str = "look"
    """example of an action in the system message"""
    reward: Literal["won", "openenv"] = "openenv"
    """openenv: reward of the environment; won: 1.0 for success, else 0.0"""
    timeout_s: Annotated[float, Gt(0)] = 20.0
    """timeout of the server's answers in seconds"""
    source: str = "openenv"
    """name under which results are reported"""
    train_tasks: PositiveInt = 1000
    """number of training seeds"""
    val_tasks: PositiveInt = 128
    """number of validation seeds"""
    task_seed: Seed = 0
    """seed from which the seeds of both splits are derived"""

    def count_configured_tasks(self, split: str) -> int | None:
        return self.val_tasks if split == "val" else self.train_tasks

    def list_max_step_waits(self) -> Mapping[str, float]:
        return {} if self.url is None else {"timeout_s": self.timeout_s}
