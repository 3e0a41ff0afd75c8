"""Settings of the config section ``env.agent``."""

from typing import Annotated

from agent_system.environments.settings import EnvSettings
from verl.config.settings import NamesCode


class AgentSettings(EnvSettings):
    """Settings of a user-provided agent and its tasks."""

    path: Annotated[str, NamesCode()] = ""
    """agent function, FILE.py:NAME or MODULE:NAME, called with task, seed, base_url, api_key and
    model; returns its reward, or None if it has posted the reward"""
    tasks: Annotated[str, NamesCode()] = ""
    """function that returns the tasks, FILE.py:NAME or MODULE:NAME, called with the split (train
    or val); tasks are dictionaries with a task_id"""
