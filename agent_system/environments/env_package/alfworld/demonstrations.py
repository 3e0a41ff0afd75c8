"""Demonstrations of ALFWorld: the expert, its games, and the key of the demonstration files."""

from importlib import metadata
from typing import Any

from agent_system.environments.env import Task
from agent_system.environments.env_package.alfworld import games, layout
from agent_system.environments.env_package.alfworld.derived_thoughts import DerivedThoughtsExpert
from agent_system.environments.env_package.alfworld.expert import AlfworldExpert
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings
from agent_system.environments.env_package.alfworld.store import list_generated_tasks
from agent_system.environments.expert_protocol import EpisodeStart, Expert
from agent_system.environments.experts.demonstrations import MAX_STEPS

VERSION = 2  # of the demonstrations: increase it when the code changes them for equal settings
DERIVED_THOUGHTS_VERSION = 1  # as ``VERSION``, for env.alfworld.thoughts=carried
# Settings that change an episode. The others set folders and the numbers of games.
EPISODE_SETTINGS = {"task_types", "receptacles", "objects", "seed", "prompt"}
EPISODES_PER_GAME = 3  # several, because translating a new game takes as long as ten episodes


def start_expert(episode: EpisodeStart[AlfworldSettings]) -> AlfworldExpert:
    """Return an expert for one episode. It knows only the first observation of the game."""
    expert_class = (
        DerivedThoughtsExpert if uses_derived_thoughts(episode.settings) else AlfworldExpert
    )
    return expert_class(episode.first.text, episode.rng, episode.noise)


def uses_derived_thoughts(settings: AlfworldSettings) -> bool:
    """Return True if ``env.alfworld.thoughts=carried``. Decisions then have a ``needed_level``."""
    return settings.thoughts == "carried"


def demonstration_tasks(settings: AlfworldSettings, count: int) -> list[Task]:
    """Return ``count`` tasks with generated games of the split ``demo``, for any value of
    ``settings.source``.

    The games use training floor plans, but they are not among the training tasks.
    """
    return list_generated_tasks(settings, "demo", count=count)


def demonstration_key(settings: AlfworldSettings) -> list[Any]:
    """Return the versions and the settings that change a demonstration episode.

    Folders and the sizes of the training and validation splits are not part of it.
    """
    episode_settings = settings.model_dump(mode="json", include=EPISODE_SETTINGS)
    episode_settings["max_steps"] = settings.max_steps or MAX_STEPS
    versions = [VERSION, games.GENERATOR_VERSION, EPISODES_PER_GAME, metadata.version("alfworld")]
    # Appended only for ``carried``, so that the names of ``announced`` files stay valid.
    if uses_derived_thoughts(settings):
        versions += ["carried", DERIVED_THOUGHTS_VERSION]
    return [*versions, episode_settings]


def list_receptacle_tokens(settings: AlfworldSettings) -> list[str]:
    """Return receptacle names for the tokenizer, one token each, if ``thoughts=carried``.

    To find a receptacle in the prompt, the policy then has to match a single token.
    """
    return (
        layout.list_receptacle_names(settings.receptacles[1])
        if uses_derived_thoughts(settings)
        else []
    )


EXPERT = Expert(
    start_expert,
    tasks=demonstration_tasks,
    episodes_per_task=EPISODES_PER_GAME,
    key=demonstration_key,
    words=layout.list_words,
    symbols=list_receptacle_tokens,
    names_needed_level=uses_derived_thoughts,
)
