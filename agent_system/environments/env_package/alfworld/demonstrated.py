"""What is demonstrated of ALFWorld: who plays which games, and what its files hang on."""

from importlib import metadata
from typing import Any

from agent_system.environments.env import Task
from agent_system.environments.env_package.alfworld import games, layout
from agent_system.environments.env_package.alfworld.carried import CarriedPlayer
from agent_system.environments.env_package.alfworld.expert import AlfworldPlayer
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings
from agent_system.environments.env_package.alfworld.store import generated_tasks
from agent_system.environments.expert_protocol import EpisodeStart, Expert
from agent_system.environments.experts.demonstrations import MAX_STEPS

VERSION = 2  # of the demonstrations: raise it when the same settings would give other lines
CARRIED_VERSION = 1  # the same for env.alfworld.thoughts=carried
# Settings that shape an episode; the others say where games are kept and which are trained on.
SHAPING = {"task_types", "receptacles", "objects", "seed", "prompt"}
EPISODES_PER_GAME = 3  # translating a new game costs as much as playing ten episodes of it


def start(episode: EpisodeStart[AlfworldSettings]) -> AlfworldPlayer:
    """An expert that has read the first observation, and nothing else."""
    player = CarriedPlayer if carried(episode.settings) else AlfworldPlayer
    return player(episode.first.text, episode.rng, episode.noise)


def carried(settings: AlfworldSettings) -> bool:
    """Whether thoughts carry what the action needs, so that the needed level is known."""
    return settings.thoughts == "carried"


def demonstration_tasks(settings: AlfworldSettings, count: int) -> list[Task]:
    """``count`` generated games of their own, in training floor plans, whatever ``source`` says."""
    return generated_tasks(settings, "demo", count=count)


def demonstration_key(settings: AlfworldSettings) -> list[Any]:
    """What shapes an episode: not where games are stored, nor which ones are trained on."""
    shaping = settings.model_dump(mode="json", include=SHAPING)
    shaping["max_steps"] = settings.max_steps or MAX_STEPS
    versions = [VERSION, games.GENERATOR, EPISODES_PER_GAME, metadata.version("alfworld")]
    # Files that were written before there was a choice keep their names.
    if carried(settings):
        versions += ["carried", CARRIED_VERSION]
    return [*versions, shaping]


def symbols(settings: AlfworldSettings) -> list[str]:
    """Receptacles, each one token: to look a place up is then one comparison."""
    return layout.receptacle_names(settings.receptacles[1]) if carried(settings) else []


EXPERT = Expert(
    start,
    tasks=demonstration_tasks,
    episodes_per_task=EPISODES_PER_GAME,
    key=demonstration_key,
    words=layout.words,
    symbols=symbols,
    tells_needed_level=carried,
)
