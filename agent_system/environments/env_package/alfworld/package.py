"""ALFWorld as an environment package: ``env.env_name=alfworld``."""

from importlib import metadata
from typing import Any

from agent_system.environments.env import Prompts
from agent_system.environments.env_package.alfworld import games, layout, prompts
from agent_system.environments.env_package.alfworld.derived_thoughts import DerivedThoughtsExpert
from agent_system.environments.env_package.alfworld.env import AlfworldEnv
from agent_system.environments.env_package.alfworld.expert import AlfworldExpert
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings
from agent_system.environments.env_package.alfworld.store import list_generated_tasks, list_tasks
from agent_system.environments.expert_protocol import EpisodeStart, Expert
from agent_system.environments.experts.demonstrations import DEFAULT_MAX_STEPS
from agent_system.environments.package import EnvPackage

# Increase a version when the code makes other demonstrations than before from the same settings.
DEMONSTRATION_VERSION = 2
DERIVED_THOUGHTS_VERSION = 1  # version for env.alfworld.thoughts=carried
# Settings in the cache key of demonstrations, which also contains ``max_steps`` and versions.
EPISODE_SETTINGS = {"task_types", "receptacles", "objects", "seed", "prompt"}
# Run several episodes per game, because to translate a new game takes as long as ten episodes.
EPISODES_PER_GAME = 3


def make_prompts(settings: AlfworldSettings) -> Prompts:
    if settings.prompt == "full":
        return prompts.FullAlfworldPrompts(settings.level_prompts)
    if settings.thoughts == "carried":
        return prompts.ObservationLogPrompts()
    return prompts.CompactAlfworldPrompts()


def uses_derived_thoughts(settings: AlfworldSettings) -> bool:
    """Return True if the expert derives thoughts from the prompt and reports ``needed_level``."""
    return settings.thoughts == "carried"


def start_expert(episode: EpisodeStart[AlfworldSettings]) -> AlfworldExpert:
    """Return an expert, which gets only the first observation of the game, not its files."""
    derives_thoughts = uses_derived_thoughts(episode.settings)
    expert_class = DerivedThoughtsExpert if derives_thoughts else AlfworldExpert
    return expert_class(episode.first.text, episode.rng, episode.noise)


def make_demonstration_cache_key(settings: AlfworldSettings) -> list[Any]:
    """Return the values that determine the demonstrations (``Expert.key``)."""
    episode_settings = settings.model_dump(mode="json", include=EPISODE_SETTINGS)
    episode_settings["max_steps"] = settings.max_steps or DEFAULT_MAX_STEPS
    versions = [
        DEMONSTRATION_VERSION,
        games.GENERATOR_VERSION,
        EPISODES_PER_GAME,
        metadata.version("alfworld"),
    ]
    # Extend the key only for ``env.alfworld.thoughts=carried``. With the default, ``announced``,
    # existing demonstration files keep their names.
    if uses_derived_thoughts(settings):
        versions += ["carried", DERIVED_THOUGHTS_VERSION]
    return [*versions, episode_settings]


def list_single_token_receptacles(settings: AlfworldSettings) -> list[str]:
    """Return receptacle names that a new tokenizer encodes as one token each.

    The policy can then find a receptacle in the prompt by matching a single token. The list is
    empty unless ``env.alfworld.thoughts=carried``, where thoughts list receptacles.
    """
    if not uses_derived_thoughts(settings):
        return []
    return layout.list_receptacle_names(settings.receptacles[1])


EXPERT = Expert(
    start_expert,
    # Generated games that are not among the training tasks, for any ``source``.
    tasks=lambda settings, count: list_generated_tasks(settings, "demo", count=count),
    episodes_per_task=EPISODES_PER_GAME,
    key=make_demonstration_cache_key,
    words=layout.list_object_name_words,
    symbols=list_single_token_receptacles,
    names_needed_level=uses_derived_thoughts,
)
PACKAGE = EnvPackage(
    name="alfworld",
    settings=AlfworldSettings,
    make=AlfworldEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    project=prompts.parse_game_command,
    expert=EXPERT,
)
