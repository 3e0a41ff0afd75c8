"""Paths that mean the same to every process of a run, whatever directory it was started in."""

from pathlib import Path

from verl.trainer.config.schema import PPOConfig
from verl.utils.settings import Section, lookup

PLACES = (
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.resume_from_path",
    "custom_reward_function.path",
)
# What settings of environments call a directory, a file, and lists of files.
DIRECTORY = "data_dir"
FILES = ("train_files", "val_files")


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
    settings = cfg.env.settings
    if settings is not None:
        setattr(cfg.env, cfg.env.name, settings.model_copy(update=_settings_places(settings)))


def absolute(path: str) -> str:
    """``path`` from the root, with the home directory filled in."""
    return str(Path(path).expanduser().absolute())


def _settings_places(settings: Section) -> dict[str, str | list[str]]:
    """The settings of an environment that are paths, absolute."""
    found: dict[str, str | list[str]] = {}
    # vars(): they are frozen, and those of most environments have none of these.
    for name, value in vars(settings).items():
        if name == DIRECTORY and value:
            found[name] = absolute(value)
        if name in FILES:
            found[name] = [absolute(file) for file in value]
    return found
