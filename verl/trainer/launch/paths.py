"""Paths that mean the same to every process of a run, whatever directory it was started in."""

from pathlib import Path
from typing import Any

from agent_system.environments.env_package.agent.settings import AgentSettings
from agent_system.environments.env_package.mixture.settings import MixtureSettings
from agent_system.environments.env_registry import settings_class
from agent_system.environments.settings import EnvSettings, FunctionFromFile
from verl.config.schema import PPOConfig
from verl.config.settings import Section, lookup

PLACES = (
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.resume_from_path",
    "custom_reward_function.path",
)
# What settings of environments call a directory, lists of files, and functions by place.
DIRECTORY = "data_dir"
FILES = ("train_files", "val_files")
FUNCTIONS = "functions"
AGENT = ("path", "tasks")


def make_absolute(cfg: PPOConfig) -> None:
    """Make the paths of ``cfg`` absolute, seen from the directory of this process: Ray may start
    its workers in another one. Models have their own way (``verl.models.hub.pinned``).
    """
    for key in PLACES:
        above, _, name = key.rpartition(".")
        section = lookup(cfg, above)
        place = getattr(section, name)
        if place:
            setattr(section, name, absolute(place))
    env = cfg.env
    if env.kwargs:
        env.kwargs = _written_places(env.env_name, env.kwargs)
    mixture = env.settings
    parts = list(mixture.weights) if isinstance(mixture, MixtureSettings) else []
    for name in (env.name, *(part.split("/", 1)[0] for part in parts)):
        settings = getattr(env, name, None) if name.isidentifier() else None
        if isinstance(settings, EnvSettings):
            setattr(env, name, settings.model_copy(update=_settings_places(settings)))
    if isinstance(mixture, MixtureSettings) and mixture.kwargs:
        kwargs = {part: _written_places(part, written) for part, written in mixture.kwargs.items()}
        setattr(env, env.name, mixture.model_copy(update={"kwargs": kwargs}))


def absolute(path: str) -> str:
    """``path`` from the root, with the home directory filled in."""
    return str(Path(path).expanduser().absolute())


def _written_places(env_name: str, written: dict[str, Any]) -> dict[str, Any]:
    """``written`` keys of the section of an environment, with its paths absolute."""
    settings = settings_class(env_name).model_validate(written)
    places = settings.model_copy(update=_settings_places(settings))
    found = places.model_dump(mode="json", include=set(written), exclude_unset=True)
    return {**written, **found}


def _settings_places(settings: Section) -> dict[str, Any]:
    """The settings of an environment that are paths, absolute."""
    found: dict[str, Any] = {}
    # vars(): they are frozen, and those of most environments have none of these.
    for name, value in vars(settings).items():
        if name == DIRECTORY and value:
            found[name] = absolute(value)
        if name in FILES:
            found[name] = [absolute(file) for file in value]
        if name in AGENT and isinstance(settings, AgentSettings):
            found[name] = _absolute_function(value)
        if name == FUNCTIONS and value:
            found[name] = [_absolute_function(place) for place in value]
        if isinstance(value, FunctionFromFile) and value.path:
            found[name] = value.model_copy(update={"path": absolute(value.path)})
    return found


def _absolute_function(place: str) -> str:
    """``FILE.py:NAME`` with an absolute file; ``MODULE:NAME`` as it is."""
    file, colon, name = place.rpartition(":")
    return f"{absolute(file)}{colon}{name}" if file.endswith(".py") else place
