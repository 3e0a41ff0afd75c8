"""ALFWorld as an environment package: ``env.env_name=alfworld``."""

from agent_system.environments.env import Env
from agent_system.environments.env_package.alfworld.demonstrations import EXPERT
from agent_system.environments.env_package.alfworld.env import AlfworldEnv
from agent_system.environments.env_package.alfworld.projection import project_command
from agent_system.environments.env_package.alfworld.prompts import (
    CompactAlfworldPrompts,
    FullAlfworldPrompts,
    ObservationLogPrompts,
)
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings
from agent_system.environments.env_package.alfworld.store import list_tasks
from agent_system.environments.package import EnvPackage
from agent_system.environments.prompts import Prompts


def make_env(settings: AlfworldSettings) -> Env:
    """Return a new environment that runs in the calling process."""
    return AlfworldEnv(settings)


def make_prompts(settings: AlfworldSettings) -> Prompts:
    """Return the prompts that ``env.alfworld.prompt`` and ``env.alfworld.thoughts`` select."""
    if settings.prompt == "full":
        return FullAlfworldPrompts(settings.level_prompts)
    return ObservationLogPrompts() if settings.thoughts == "carried" else CompactAlfworldPrompts()


PACKAGE = EnvPackage(
    name="alfworld",
    settings=AlfworldSettings,
    make=make_env,
    tasks=list_tasks,
    prompts=make_prompts,
    project=project_command,
    expert=EXPERT,
)
