"""The ALFWorld package as the agent system sees it."""

from agent_system.environments.base import Env, EnvPackage, Prompts
from agent_system.environments.env_package.alfworld.env import AlfworldEnv
from agent_system.environments.env_package.alfworld.expert import EXPERT
from agent_system.environments.env_package.alfworld.projection import project
from agent_system.environments.env_package.alfworld.prompts import CompactPrompts, FullPrompts
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings
from agent_system.environments.env_package.alfworld.store import tasks


def make(settings: AlfworldSettings) -> Env:
    """An environment of this process."""
    return AlfworldEnv(settings)


def prompts(settings: AlfworldSettings) -> Prompts:
    """The prompt style that ``env.alfworld.prompt`` names."""
    return FullPrompts(settings.level_prompts) if settings.prompt == "full" else CompactPrompts()


PACKAGE = EnvPackage(
    name="alfworld",
    settings=AlfworldSettings,
    make=make,
    tasks=tasks,
    prompts=prompts,
    project=project,
    expert=EXPERT,
)
