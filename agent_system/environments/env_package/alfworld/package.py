"""ALFWorld as an environment package: ``env.env_name=alfworld``."""

from agent_system.environments.env import Env
from agent_system.environments.env_package.alfworld.demonstrated import EXPERT
from agent_system.environments.env_package.alfworld.env import AlfworldEnv
from agent_system.environments.env_package.alfworld.projection import project
from agent_system.environments.env_package.alfworld.prompts import (
    CompactAlfworldPrompts,
    FullPrompts,
    LogPrompts,
)
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings
from agent_system.environments.env_package.alfworld.store import tasks
from agent_system.environments.package import EnvPackage
from agent_system.environments.prompts import Prompts


def make(settings: AlfworldSettings) -> Env:
    """Return a new environment that runs in the calling process."""
    return AlfworldEnv(settings)


def prompts(settings: AlfworldSettings) -> Prompts:
    """Return the prompts that ``env.alfworld.prompt`` and ``env.alfworld.thoughts`` select."""
    if settings.prompt == "full":
        return FullPrompts(settings.level_prompts)
    return LogPrompts() if settings.thoughts == "carried" else CompactAlfworldPrompts()


PACKAGE = EnvPackage(
    name="alfworld",
    settings=AlfworldSettings,
    make=make,
    tasks=tasks,
    prompts=prompts,
    project=project,
    expert=EXPERT,
)
