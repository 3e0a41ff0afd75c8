"""Environment names and where their packages live; a package is imported when it is first asked
for.

A name is a key of the registry (``alfworld``), a key with a variant after a slash
(``alfworld/AlfredTWEnv``), or the place of a package itself (``my_lab.gridworld:PACKAGE``), which
works in every process without registration.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings
from verl.config.settings import ConfigError, read_or_raise
from verl.config.settings.hints import did_you_mean

if TYPE_CHECKING:
    from verl.config.schema.env import EnvConfig

PACKAGES = "agent_system.environments.env_package"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a package lives (``module:attribute``), the extra of ``setup.py`` that installs what it
    needs, and where its settings class lives; empty: in the package, which is imported for it.
    """

    target: str
    extra: str | None = None
    settings: str = ""


def _shipped(name: str, settings: str, extra: str | None = None) -> Entry:
    """The entry of a package of this repository: its settings have a light module of their own."""
    home = f"{PACKAGES}.{name}"
    return Entry(f"{home}.package:PACKAGE", extra, f"{home}.settings:{settings}")


REGISTRY: dict[str, Entry] = {
    "agent": _shipped("agent", "AgentSettings"),
    "alfworld": _shipped("alfworld", "AlfworldSettings", extra="envs"),
    "dataset": _shipped("dataset", "DatasetSettings"),
    "frozen_lake": _shipped("frozen_lake", "LakeSettings", extra="envs"),
    "gymnasium": _shipped("gymnasium", "GymnasiumSettings", extra="envs"),
    "mixture": _shipped("mixture", "MixtureSettings"),
    "number_line": _shipped("number_line", "LineSettings"),
    "openenv": _shipped("openenv", "OpenEnvSettings", extra="envs"),
    "reasoning_gym": _shipped("reasoning_gym", "ReasoningGymSettings", extra="envs"),
    "relay": _shipped("relay", "RelaySettings"),
    "scienceworld": _shipped("scienceworld", "ScienceWorldSettings", extra="envs"),
    "search": _shipped("search", "SearchSettings", extra="envs"),
    "shop": _shipped("shop", "ShopSettings", extra="envs"),
    "sokoban": _shipped("sokoban", "SokobanSettings"),
    "textarena": _shipped("textarena", "TextArenaSettings", extra="envs"),
    "textworld": _shipped("textworld", "TextWorldSettings", extra="envs"),
    "textworld_express": _shipped("textworld_express", "TextWorldExpressSettings", extra="envs"),
    "tools": _shipped("tools", "ToolsSettings", extra="envs"),
    "twenty_questions": _shipped("twenty_questions", "GameSettings"),
    # The name that job scripts use for the shop.
    "webshop": _shipped("shop", "ShopSettings", extra="envs"),
}


class UnknownEnvironment(KeyError):
    """The name is not registered; the message lists the right ones and the nearest."""

    def __str__(self) -> str:
        return self.args[0]


class MissingExtra(ImportError):
    """The environment's dependencies are not installed; the message names the extra to install."""


class BrokenPackage(ValueError):
    """The module of an environment raises an error, or what it holds cannot make a package."""


def register_env(name: str, target: str | None = None, extra: str | None = None) -> Callable:
    """Register an environment under ``name``; later registrations replace earlier ones.

    ``register_env("grid", "my_lab.grid:PACKAGE")`` registers a place. As a decorator,
    ``@register_env("grid")`` marks a function without arguments that returns an ``EnvPackage``; it
    must live at the top of an importable module, because worker processes import it from there.
    """
    if target is not None:
        REGISTRY[name] = Entry(target, extra)

    def decorate(function: Callable[[], EnvPackage]) -> Callable[[], EnvPackage]:
        REGISTRY[name] = Entry(f"{function.__module__}:{function.__qualname__}", extra)
        return function

    return decorate


def canonical(env_name: str) -> str:
    """``env_name`` as the registry spells it, whatever its case (``Webshop``, ``AlfWorld/X``);
    names that nobody registered stay as they are.
    """
    # A place is taken as it is: it names a module that any process can import.
    if ":" in env_name:
        return env_name
    name, slash, variant = env_name.partition("/")
    if name in REGISTRY:
        return env_name
    spelled = {known.lower(): known for known in REGISTRY}.get(name.lower(), name)
    return f"{spelled}{slash}{variant}"


def resolve(env_name: str) -> Entry:
    """The entry of ``env_name``. Raises ``UnknownEnvironment``."""
    if ":" in env_name:
        return Entry(env_name)
    name = canonical(env_name).split("/", 1)[0]
    if name in REGISTRY:
        return REGISTRY[name]
    hint = did_you_mean(name.lower(), REGISTRY) or "."
    raise UnknownEnvironment(
        f"no environment is called {env_name!r}{hint} There are: {', '.join(sorted(REGISTRY))}; "
        f"one of your own is named by its place: {name}:PACKAGE"
    )


def get_package(env_name: str) -> EnvPackage:
    """Import and return the package of ``env_name``.

    Raises ``UnknownEnvironment``, also for a place that holds nothing of that name,
    ``MissingExtra`` when a dependency is not installed, ``BrokenPackage`` when its module raises an
    error, and ``TypeError`` when the place does not hold an ``EnvPackage``.
    """
    entry = resolve(env_name)
    module_name, _, attribute = entry.target.partition(":")
    module = _imported(env_name, module_name)
    attribute = attribute or "PACKAGE"
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, vars(module))
        raise UnknownEnvironment(f"{env_name!r}: the module {module_name} has no {attribute}{hint}")
    found = getattr(module, attribute)
    # A decorated function: it makes the package only when it is asked for.
    if inspect.isfunction(found):
        found = _made(env_name, found)
    if not isinstance(found, EnvPackage):
        raise TypeError(
            f"environment {env_name!r}: {entry.target} is a {type(found).__name__}, not an "
            f"EnvPackage; allowed: an EnvPackage, or a function without arguments that returns "
            f"one; fix: name it, as in {module_name}:PACKAGE"
        )
    return found


def _imported(env_name: str, module_name: str) -> ModuleType:
    is_file = module_name.endswith(".py")
    if is_file or not all(part.isidentifier() for part in module_name.split(".")):
        stem = module_name.removesuffix(".py").replace("/", ".").strip(".") or "my_lab.gridworld"
        raise UnknownEnvironment(
            f"{env_name!r}: {module_name!r} is no name of a module; allowed: MODULE:NAME; "
            f"fix: {stem}:PACKAGE"
        )
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise missing_extra(env_name, error) from error
    except (Exception, SystemExit) as error:  # the module may be the user's own
        raise BrokenPackage(
            f"environment {env_name!r}: the module {module_name} does not import: {error!r}; "
            "fix: the module"
        ) from error


def _made(env_name: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except ModuleNotFoundError:
        raise
    except (Exception, SystemExit) as error:  # the function may be the user's own
        raise BrokenPackage(
            f"environment {env_name!r}: {function.__name__}() raised {error!r}; allowed: a "
            "function without arguments that returns an EnvPackage; fix: the function"
        ) from error


def variants_of(name: str) -> list[str]:
    """What may follow the slash of the package ``name``.

    Raises what ``get_package`` raises, and ``MissingExtra`` where its variants need a module that
    is not installed.
    """
    try:
        return list(get_package(name).variants())
    except ModuleNotFoundError as error:
        raise missing_extra(name, error) from error


def playable_names(name: str) -> list[str]:
    """Every name that ``env.env_name`` may take of the package ``name``: ``NAME/VARIANT`` for each
    of its variants, or ``NAME`` where it has none. Raises what ``variants_of`` raises.
    """
    return [f"{name}/{variant}" for variant in variants_of(name)] or [name]


def settings_class(env_name: str) -> type[EnvSettings]:
    """The settings class of ``env_name``, without importing its package where the entry says where
    the class lives.

    Raises what ``get_package`` raises.
    """
    place = resolve(env_name).settings
    # Without a place for the settings alone, the whole package has to be there to check them.
    if not place:
        return get_package(env_name).settings
    module_name, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module_name), attribute)


def env_settings(env_config: "EnvConfig") -> EnvSettings:
    """The settings of the environment that ``env_config`` names, for all hooks of its package.

    ``env.<name>`` where the configuration has such a section, updated with ``env.kwargs``;
    ``max_steps`` and ``seed`` are taken from ``env`` where the settings leave them open, and the
    variant behind the name's slash where the environment has variants. Raises
    ``ConfigError`` for what the package does not know, and what ``get_package`` raises.
    """
    name, _, variant = canonical(env_config.env_name).partition("/")
    # The place of a package (``my_lab.grid:PACKAGE``) is no attribute: its keys come in ``kwargs``.
    own = getattr(env_config, name, None) if name.isidentifier() else None
    written = own.model_dump(exclude_unset=True) if isinstance(own, EnvSettings) else own
    # ``kwargs`` wins: it is the way that works whatever the section is called.
    section = {**(written or {}), **env_config.kwargs}
    label = f"env.{name}" if name.isidentifier() else "env.kwargs"
    settings_type = settings_class(env_config.env_name)
    if variant and ":" not in env_config.env_name:
        _choose_variant(section, env_config.env_name, settings_type)
    settings = read_or_raise(settings_type, section, label)
    handed_down = {"max_steps": env_config.max_steps, "seed": env_config.seed}
    left_open = {key: value for key, value in handed_down.items() if getattr(settings, key) is None}
    return settings.model_copy(update=left_open).completed(env_config)


def stand_in_for(env_config: "EnvConfig") -> str:
    """What is played in place of what ``env_config`` names; empty where it is what it says, and
    where nobody knows.
    """
    try:
        settings = env_settings(env_config)
        parts = getattr(settings, "weights", None) or {}
        said = [settings.stand_in_for(canonical(env_config.env_name))]
        for part in parts:
            written = getattr(settings, "kwargs", {}).get(part)
            own = read_or_raise(settings_class(part), written)
            said.append(own.stand_in_for(canonical(part)))
    except (ImportError, LookupError, TypeError, ValueError, AttributeError):
        return ""  # said by the checks
    return "; ".join(filter(None, said))


def _choose_variant(
    section: dict[str, Any], env_name: str, settings_type: type[EnvSettings]
) -> None:
    """Set the variant that ``env_name`` names in the section. Raises ``ConfigError`` if the section
    names another, or if the environment has none.
    """
    key = settings_type.variant_key
    name, _, variant = env_name.partition("/")
    if variant in settings_type.own_variants:
        return
    if not key:
        names = ", ".join([name, *(f"{name}/{own}" for own in settings_type.own_variants)])
        raise ConfigError(
            f"env.env_name={env_name!r}: the environment has no variant {variant!r}; allowed: "
            f"{names}; fix: env.env_name={name}"
        )
    # A loaded configuration holds every default, and nobody wrote those.
    default = settings_type.model_fields[key].default
    if section.get(key, default) not in (variant, default):
        raise ConfigError(
            f"env.env_name={env_name!r} and env.{name}.{key}={section[key]!r} name two variants; "
            f"fix: env.env_name={name} env.{name}.{key}={variant}"
        )
    section[key] = variant


def missing_extra(env_name: str, error: ModuleNotFoundError) -> ImportError:
    """The error to raise when playing ``env_name`` needs the module named in ``error``."""
    module = env_name.partition(":")[0]
    if ":" in env_name and error.name and f"{module}.".startswith(f"{error.name}."):
        return MissingExtra(
            f"environment {env_name!r}: no module {error.name!r} can be imported from here; "
            "fix: start in the directory that holds it, or name that in PYTHONPATH"
        )
    extra = resolve(env_name).extra
    how = f"install the extra: pip install -e '.[{extra}]'" if extra else "install it"
    return MissingExtra(
        f"environment {env_name!r} needs the module {error.name!r}, which is not installed; {how}"
    )
