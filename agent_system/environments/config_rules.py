"""Sections ``env.<name>`` of the registered environments, and the rules about them."""

from collections.abc import Collection, Mapping
from typing import Any

from agent_system.environments.env_package.mixture.settings import DEFAULT_PARTS
from agent_system.environments.env_registry import (
    REGISTRY,
    canonical,
    settings_class,
    stand_in_for,
)
from agent_system.environments.settings import EnvSettings
from verl.config.derive import is_placeholder
from verl.config.plugins import EnvironmentPlugin
from verl.config.problems import Problems
from verl.config.schema import PPOConfig
from verl.config.settings import Section

Tree = dict[str, Any]
DEFAULT = "alfworld"
MIXTURE = "mixture"
DATA = "dataset"  # its tasks are rows of files
FILES = ("data.train_files", "data.val_files")
GROUP = "actor_rollout_ref.rollout.n"


def section(name: str) -> type[EnvSettings] | None:
    """Return the settings of an environment; None where a module that it needs is missing."""
    try:
        return settings_class(name)
    except (ImportError, LookupError, TypeError):
        return None  # the checks refuse it, where it is the environment of the run


def preprocess(tree: Tree, schema: type[Section]) -> None:
    """Choose the environment where none is named, spell it as the registry does, and give its
    section the keys of the whole configuration that it reads.

    Of a job that names files, the environment is the one that reads their rows.
    """
    env = tree.setdefault("env", {})
    if not isinstance(env, dict):
        return
    is_ppo = issubclass(schema, PPOConfig)
    if is_ppo and not env.get("env_name"):
        env["env_name"] = DATA if _names_files(tree) else DEFAULT
    if isinstance(env.get("env_name"), str):
        env["env_name"] = canonical(env["env_name"])
    name = str(env.get("env_name", "")).split("/", 1)[0]
    settings = section(name) if name in REGISTRY else None
    if settings is None:
        return
    if is_ppo:
        if settings.one_step:
            env.setdefault("max_steps", 1)
        if settings.data_keys:
            # All rows of the files are validated on.
            env.setdefault("val_tasks", None)
            _copy_written(tree, GROUP, "env.rollout.n")
        for source, target in settings.data_keys.items():
            _copy_written(tree, source, f"env.{name}.{target}")
    # The defaults of its section are filled in where nothing is written below it.
    env.setdefault(name, {})


def _names_files(tree: Tree) -> bool:
    return any(_written(tree, key) and not _is_placeholder(_written(tree, key)) for key in FILES)


def _is_placeholder(value: Any) -> bool:
    files = value if isinstance(value, list) else [value]
    return is_placeholder([str(file) for file in files])


def _written(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value at dotted ``path``; None where nothing is written."""
    found: Any = tree
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _copy_written(tree: Tree, source: str, target: str) -> None:
    """Write the value at ``source`` to ``target``, where nothing is written there."""
    value = _written(tree, source)
    if value is None or _written(tree, target) is not None:
        return
    if source in FILES and _is_placeholder(value):
        return
    *above, name = target.split(".")
    place = tree
    for part in above:
        place = place.setdefault(part, {})
        # A value in place of a section is refused when it is read.
        if not isinstance(place, dict):
            return
    place[name] = value


def check_written(tree: Mapping[str, Any], written: Collection[str]) -> Problems:
    """Refuse sections of other environments than the one of the run."""
    env_name = str(_written(tree, "env.env_name") or "")
    # Another check refuses an unknown name.
    if ":" not in env_name and canonical(env_name).split("/", 1)[0] not in REGISTRY:
        return
    used = {canonical(name).split("/", 1)[0] for name in (env_name, *_parts(tree, env_name))}
    foreign: dict[str, str] = {}
    for path in written:
        above, _, rest = path.partition(".")
        name = rest.partition(".")[0]
        if above == "env" and name in REGISTRY and name not in used:
            foreign.setdefault(name, path)
    for name, path in foreign.items():
        why = f"a key of the environment {name}, and {env_name} is played"
        key = path.removeprefix(f"env.{name}").lstrip(".")
        fix = f"leave it out, or env.env_name={name}"
        if ":" in env_name:
            fix = f"env.kwargs.{key or 'KEY'}=..., where the keys of {env_name} stand"
        allowed = "sections of what is played"
        yield f"{path}={_written(tree, path)!r}: {why}; allowed: {allowed}; fix: {fix}"


def _parts(tree: Mapping[str, Any], env_name: str) -> list[str]:
    """Return the names of the environments of a mixture, which have sections too."""
    if canonical(env_name).split("/", 1)[0] != MIXTURE:
        return []
    parts = _written(tree, f"env.{MIXTURE}.parts")
    return [str(part) for part in (DEFAULT_PARTS if parts is None else parts)]


ENVIRONMENTS = EnvironmentPlugin(
    names=REGISTRY.keys,
    section=section,
    preprocess=preprocess,
    check_written=check_written,
    stand_in=lambda cfg: stand_in_for(cfg.env),
)
