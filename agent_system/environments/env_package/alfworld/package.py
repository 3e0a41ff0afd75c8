"""The ALFWorld package as the agent system sees it."""

from collections.abc import Mapping
from typing import Any

from agent_system.environments.base import Env, EnvPackage, Prompts
from agent_system.environments.env_package.alfworld.env import AlfworldEnv
from agent_system.environments.env_package.alfworld.expert import EXPERT
from agent_system.environments.env_package.alfworld.projection import project
from agent_system.environments.env_package.alfworld.prompts import CompactPrompts, FullPrompts
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings
from agent_system.environments.env_package.alfworld.store import tasks


def make(section: Mapping[str, Any]) -> Env:
    """An environment of this process."""
    return AlfworldEnv(section)


def prompts(section: Mapping[str, Any]) -> Prompts:
    """The prompt style that ``env.alfworld.prompt`` names."""
    full = AlfworldSettings.from_section(section).prompt == "full"
    return FullPrompts(section.get("level_prompts")) if full else CompactPrompts()


PACKAGE = EnvPackage(
    name="alfworld", make=make, tasks=tasks, prompts=prompts, project=project, expert=EXPERT
)
