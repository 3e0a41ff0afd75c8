"""Plugins: config sections and checks that ``verl.trainer.launch.extensions`` registers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.config.problems import CheckContext, Problems
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.schema.env import EnvConfig
from verl.config.settings import Key, Section, collect_section_keys, make_section_key
from verl.config.settings.section import EnvSection

Schema = TypeVar("Schema", bound=Section)


@dataclass(frozen=True)
class EnvironmentPlugin:
    """Functions that add the sections ``env.<name>`` of registered environments, and check them."""

    list_names: Callable[[], Collection[str]]
    # The class of a section; None if its package cannot be imported.
    find_section_class: Callable[[str], type[Section] | None]
    # Changes the composed config tree before it is validated.
    preprocess: Callable[[dict[str, Any], type[Section]], None]
    # Refuses keys without effect; arguments: config tree, dotted paths of keys that the user set.
    check_set_keys: Callable[[Mapping[str, Any], Collection[str]], Problems]
    # Settings by name, of the environment or of each environment of a mixture.
    settings: Callable[[EnvConfig], Mapping[str, EnvSection]]
    # Description of the simulation that replaces an environment that is not installed, or "".
    stand_in: Callable[[PPOConfig | SFTConfig], str]


@dataclass(frozen=True)
class MethodPlugin:
    """Config keys and checks that a training method (such as ``rlvcr``) adds."""

    schemas: Mapping[type[Section], type[Section]]  # config class -> subclass with further keys
    derive: Callable[[PPOConfig | SFTConfig], None]
    check: Callable[[PPOConfig | SFTConfig, CheckContext], Problems]
    # Batch column -> override with which the run produces it; "" if it does so anyway.
    columns: Callable[[PPOConfig], Mapping[str, str]]
    # Purpose of additional samples -> their maximum number of tokens; arguments: config, turns.
    sampled_tokens: Callable[[PPOConfig, int], Mapping[str, int]]


ENVIRONMENT_PLUGINS: list[EnvironmentPlugin] = []
METHOD_PLUGINS: list[MethodPlugin] = []


def extend_schema(schema: type[Schema]) -> type[Schema]:
    """Return the subclass of ``schema`` that has the keys of all registered methods."""
    extended_schema: Any = schema
    for plugin in METHOD_PLUGINS:
        extended_schema = plugin.schemas.get(extended_schema, extended_schema)
    return extended_schema


def env_names() -> list[str]:
    """Return the names of the registered environments."""
    return [name for plugin in ENVIRONMENT_PLUGINS for name in plugin.list_names()]


def find_env_section_class(name: str) -> type[Section] | None:
    """Return the class of ``env.<name>``; None if it is not registered or cannot be imported."""
    section_classes = (
        plugin.find_section_class(name)
        for plugin in ENVIRONMENT_PLUGINS
        if name in plugin.list_names()
    )
    return next(section_classes, None)


def collect_env_settings(env: EnvConfig) -> Mapping[str, EnvSection]:
    """Return the settings of the run's environments by name, except those that cannot be read."""
    return {
        name: settings
        for plugin in ENVIRONMENT_PLUGINS
        for name, settings in plugin.settings(env).items()
    }


def describe_stand_in(cfg: PPOConfig | SFTConfig) -> str:
    """Describe the simulation that replaces the environment of ``cfg``; "" if there is none."""
    return "; ".join(filter(None, (plugin.stand_in(cfg) for plugin in ENVIRONMENT_PLUGINS)))


def collect_all_keys(schema: type[Section]) -> Mapping[str, Key]:
    """Return all keys and sections by dotted path, including those of every environment."""
    extended_schema = extend_schema(schema)
    keys = dict(collect_section_keys(extended_schema))
    for name in env_names() if "env" in extended_schema.model_fields else ():
        section = find_env_section_class(name)
        if section is not None:
            keys[f"env.{name}"] = make_section_key(f"env.{name}", section)
            keys.update(collect_section_keys(section, f"env.{name}."))
    return keys
