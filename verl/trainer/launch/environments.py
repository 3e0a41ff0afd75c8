"""The environments as an extension of the configuration: ``env.<name>`` is the section of each."""

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
from verl.config.derive import is_placeholder, plays_files
from verl.config.plugged import Extension
from verl.config.problems import Context, Problems
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import Section, lookup
from verl.config.settings.reading import from_text, read
from verl.records import REWARD_PARTS
from verl.trainer.launch.forks import FORK_KEYS

Tree = dict[str, Any]
DEFAULT = "alfworld"
MIXTURE = "mixture"
DATA = "dataset"  # plays the rows of files
FILES = ("data.train_files", "data.val_files")
GROUP = "actor_rollout_ref.rollout.n"


class EnvironmentSections:
    """``env.<name>`` for every registered environment."""

    def names(self) -> Collection[str]:
        """The registered names."""
        return list(REGISTRY)

    def section(self, name: str) -> type[EnvSettings] | None:
        """The settings of the package; None where a module that it needs is not installed."""
        try:
            return settings_class(name)
        except (ImportError, LookupError, TypeError):
            return None  # said by the checks, which look up the environment that is played

    def present(self, values: Mapping[str, Any]) -> Collection[str]:
        """The environment that is played."""
        # Variants (after the slash) share the section of their environment.
        name = canonical(str(values.get("env_name", ""))).split("/", 1)[0]
        return (name,) if name in REGISTRY else ()


def settle(tree: Tree, schema: type[Section]) -> None:
    """Choose the environment where none is named: a job that names files plays their rows, and what
    it says of them is handed on. Where every episode has one step, that is the limit.
    """
    if schema is not PPOConfig or not isinstance(tree.setdefault("env", {}), dict):
        return
    env = tree["env"]
    if not env.get("env_name"):
        env["env_name"] = DATA if _names_files(tree) else DEFAULT
    name = canonical(str(env["env_name"])).split("/", 1)[0]
    settings = EnvironmentSections().section(name) if name in REGISTRY else None
    if settings is None:
        return
    if settings.one_step:
        env.setdefault("max_steps", 1)
    if settings.data_keys:
        # All rows of the files are validated on.
        env.setdefault("val_tasks", None)
        _hand_on(tree, GROUP, "env.rollout.n")
    for source, target in settings.data_keys.items():
        _hand_on(tree, source, f"env.{name}.{target}")


def _names_files(tree: Tree) -> bool:
    return any(_written(tree, key) and not _is_placeholder(_written(tree, key)) for key in FILES)


def _is_placeholder(value: Any) -> bool:
    files = value if isinstance(value, list) else [value]
    return is_placeholder([str(file) for file in files])


def _written(tree: Mapping[str, Any], path: str) -> Any:
    """What is written at dotted ``path``; None where nothing is."""
    found: Any = tree
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _hand_on(tree: Tree, source: str, target: str) -> None:
    """Write at ``target`` what is written at ``source``, where nothing is written there."""
    value = _written(tree, source)
    if value is None or _written(tree, target) is not None:
        return
    if source in FILES and _is_placeholder(value):
        return
    *above, name = target.split(".")
    place = tree
    for section in above:
        place = place.setdefault(section, {})
        # Written as a value, which is refused when it is read.
        if not isinstance(place, dict):
            return
    place[name] = value


def derive(cfg: PPOConfig | SFTConfig) -> None:
    """Environments are called as the registry spells them."""
    cfg.env.env_name = canonical(cfg.env.env_name)


def check(cfg: PPOConfig | SFTConfig, _ctx: Context) -> Problems:
    """``env.kwargs`` holds keys of the environment that is played."""
    env = cfg.env
    cls = EnvironmentSections().section(env.name) if env.name in REGISTRY else None
    if cls is not None:
        yield from read(cls, from_text(env.kwargs, cls), "env.kwargs").problems.values()


def columns(cfg: PPOConfig) -> dict[str, str]:
    """Rewards by name, where a function of the user's own grades rows of files."""
    graded = plays_files(cfg) and lookup(cfg.env.settings, "reward.path")
    return {REWARD_PARTS: ""} if graded else {}


def stand_in(cfg: PPOConfig | SFTConfig) -> str:
    """What is played in place of what ``env.env_name`` names."""
    return stand_in_for(cfg.env)


def check_written(tree: Mapping[str, Any], written: Collection[str]) -> Problems:
    """No section is written of an environment that is not played."""
    env_name = str(_written(tree, "env.env_name") or "")
    # Of a name that nobody knows, its own mistake is said.
    if ":" not in env_name and canonical(env_name).split("/", 1)[0] not in REGISTRY:
        return
    played = {canonical(name).split("/", 1)[0] for name in (env_name, *_parts(tree, env_name))}
    foreign: dict[str, str] = {}
    for path in written:
        above, _, rest = path.partition(".")
        name = rest.partition(".")[0]
        if above == "env" and name in REGISTRY and name not in played:
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
    """The names of the environments of a mixture, which have their own sections."""
    if canonical(env_name).split("/", 1)[0] != MIXTURE:
        return []
    parts = _written(tree, f"env.{MIXTURE}.parts")
    return [str(part) for part in (DEFAULT_PARTS if parts is None else parts)]


ENVIRONMENTS = Extension(
    "environments",
    sources={"env": EnvironmentSections()},
    settle=settle,
    derive=derive,
    check=check,
    columns=columns,
    stand_in=stand_in,
    check_written=check_written,
    meanings=FORK_KEYS,
)
