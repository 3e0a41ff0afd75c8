"""The ``env.openenv`` section."""

from typing import Annotated, Any, Literal

from annotated_types import Gt

from agent_system.environments.settings import EnvSettings
from verl.config.settings import PositiveInt, Seed


class OpenEnvSettings(EnvSettings):
    """Where the environment is, and how its actions and observations become text."""

    url: str | None = None
    """server of the environment, such as http://127.0.0.1:8000"""
    environment: str | None = None
    """class of the environment, MODULE:CLASS, to play it in the environment's process instead"""
    action: str | None = None
    """class of its actions, MODULE:CLASS; needed with environment"""
    options: dict[str, Any] = {}
    """arguments of the class"""
    reset_options: dict[str, Any] = {}
    """further arguments of every reset, beside seed"""
    action_field: str = "message"
    """field of an action that takes the text; empty: the text is a JSON object with all fields"""
    text_field: str | None = None
    """field of an observation that is its text; null: all fields, as JSON"""
    rules: str = "You act in an environment. Observations say what your last action did."
    """what the system message says"""
    example: str = "look"
    """an action that may be written, for the system message"""
    reward: Literal["won", "openenv"] = "openenv"
    """openenv: what the environment pays; won: 1.0 for winning, else 0.0"""
    timeout_s: Annotated[float, Gt(0)] = 20.0
    """seconds for an answer of the server"""
    source: str = "openenv"
    """name under which results are reported"""
    train_tasks: PositiveInt = 1000
    """seeds to train on"""
    val_tasks: PositiveInt = 128
    """seeds held out"""
    task_seed: Seed = 0
    """seed of the seeds, of both splits"""

    def known_tasks(self, split: str) -> int | None:
        """How many seeds ``split`` has."""
        return self.val_tasks if split == "val" else self.train_tasks
