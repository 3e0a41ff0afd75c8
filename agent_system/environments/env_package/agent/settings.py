"""The ``env.agent`` section."""

from typing import Annotated

from agent_system.environments.settings import EnvSettings
from verl.config.settings import RunsCode


class AgentSettings(EnvSettings):
    """Which agent plays, and what."""

    path: Annotated[str, RunsCode()] = ""
    """the agent: a function by place, FILE.py:NAME or MODULE:NAME, called with task, seed,
    base_url, api_key and model; returns its reward, or None where it has posted one"""
    tasks: Annotated[str, RunsCode()] = ""
    """the agent's tasks: a function by place, called with the split (train or val); returns
    dictionaries with a task_id"""
