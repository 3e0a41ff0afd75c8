"""Registry of environments: names and the import paths of their packages.

A name is a key of the registry (``alfworld``), a key with a variant after a slash
(``alfworld/AlfredTWEnv``), or an import path (``my_lab.gridworld:PACKAGE``). An import path works
in every process without registration. A package is imported on first use.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings
from verl.config.settings import ConfigError, read_section_or_raise
from verl.config.settings.hints import did_you_mean
from verl.utils.limits import USER_CODE_ERRORS, describe_raised_error

if TYPE_CHECKING:
    from verl.config.schema.env import EnvConfig

# Errors of ``read_env_settings`` that the config checks report.
UNREADABLE_SETTINGS_ERRORS = (ImportError, LookupError, TypeError, ValueError, AttributeError)
PACKAGES_MODULE = "agent_system.environments.env_package"


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """Registered environment: import path of its package, and extra of ``setup.py``.

    ``settings_import_path``: import path of the settings class. Empty: read it from the package.
    """

    import_path: str
    extra: str | None = None
    settings_import_path: str = ""


# Built-in packages: class of the settings, and extra of ``setup.py`` with the dependencies.
_BUILTIN_SETTINGS_AND_EXTRAS: dict[str, tuple[str, str | None]] = {
    "agent": ("AgentSettings", None),
    "alfworld": ("AlfworldSettings", "envs"),
    "dataset": ("DatasetSettings", None),
    "exam": ("ExamSettings", "envs"),
    "frozen_lake": ("LakeSettings", "envs"),
    "gymnasium": ("GymnasiumSettings", "envs"),
    "mixture": ("MixtureSettings", None),
    "number_line": ("LineSettings", None),
    "openenv": ("OpenEnvSettings", "envs"),
    "reasoning_gym": ("ReasoningGymSettings", "envs"),
    "recall": ("RecallSettings", None),
    "relay": ("RelaySettings", None),
    "scienceworld": ("ScienceWorldSettings", "envs"),
    "search": ("SearchSettings", "envs"),
    "shop": ("ShopSettings", "envs"),
    "sokoban": ("SokobanSettings", None),
    "textarena": ("TextArenaSettings", "envs"),
    "textworld": ("TextWorldSettings", "envs"),
    "textworld_express": ("TextWorldExpressSettings", "envs"),
    "tools": ("ToolsSettings", "envs"),
    "twenty_questions": ("TwentyQuestionsSettings", None),
}
REGISTRY: dict[str, RegistryEntry] = {
    name: RegistryEntry(
        f"{PACKAGES_MODULE}.{name}.package:PACKAGE",
        extra,
        f"{PACKAGES_MODULE}.{name}.settings:{settings}",
    )
    for name, (settings, extra) in _BUILTIN_SETTINGS_AND_EXTRAS.items()
}
# Name of the ``shop`` environment in job scripts of verl-agent.
REGISTRY["webshop"] = REGISTRY["shop"]


class UnknownEnvironmentError(KeyError):
    """Unknown environment name. The message lists the known names and the nearest one."""

    def __str__(self) -> str:
        return self.args[0]


class MissingExtraError(ImportError):
    """Missing dependency of an environment. The message names the extra to install."""


class InvalidPackageError(ValueError):
    """Error in the module of an environment, or in its function that returns the package."""


def register_env(name: str, target: str | None = None, extra: str | None = None) -> Callable:
    """Register an environment under ``name``. A later registration replaces an earlier one.

    ``register_env("grid", "my_lab.grid:PACKAGE")`` registers an import path. The decorator
    ``@register_env("grid")`` registers a function without arguments that returns an ``EnvPackage``.
    The function must be at module level, because worker processes import it by name.
    """
    if target is not None:
        REGISTRY[name] = RegistryEntry(target, extra)

    def register_function(function: Callable[[], EnvPackage]) -> Callable[[], EnvPackage]:
        REGISTRY[name] = RegistryEntry(f"{function.__module__}:{function.__qualname__}", extra)
        return function

    return register_function


def canonicalize_env_name(env_name: str) -> str:
    """Return ``env_name`` as registered: ``AlfWorld/X`` becomes ``alfworld/X``.

    Unknown names are returned unchanged.
    """
    # Import paths are case-sensitive.
    if ":" in env_name:
        return env_name
    name, slash, variant = env_name.partition("/")
    if name in REGISTRY:
        return env_name
    registered_name = {key.lower(): key for key in REGISTRY}.get(name.lower(), name)
    return f"{registered_name}{slash}{variant}"


def find_entry(env_name: str) -> RegistryEntry:
    """Return the registry entry of ``env_name``. Raises ``UnknownEnvironmentError``."""
    if ":" in env_name:
        return RegistryEntry(env_name)
    name = canonicalize_env_name(env_name).split("/", 1)[0]
    if name in REGISTRY:
        return REGISTRY[name]
    hint = did_you_mean(name.lower(), REGISTRY) or "."
    raise UnknownEnvironmentError(
        f"no environment is called {env_name!r}{hint} Allowed: {', '.join(sorted(REGISTRY))}, "
        f"or the import path of a package, such as {name}:PACKAGE"
    )


def get_package(env_name: str) -> EnvPackage:
    """Import and return the package of ``env_name``.

    Raises ``UnknownEnvironmentError``, ``MissingExtraError``, ``InvalidPackageError`` for an error
    of its module, and ``TypeError`` for an attribute that is no ``EnvPackage``.
    """
    registry_entry = find_entry(env_name)
    module_name, _, attribute_name = registry_entry.import_path.partition(":")
    module = _import_module(env_name, module_name)
    attribute_name = attribute_name or "PACKAGE"
    if not hasattr(module, attribute_name):
        hint = did_you_mean(attribute_name, vars(module))
        raise UnknownEnvironmentError(
            f"{env_name!r}: the module {module_name} has no {attribute_name}{hint}"
        )
    package = getattr(module, attribute_name)
    # A function registered with the decorator returns the package.
    if inspect.isfunction(package):
        try:
            package = package()
        except ModuleNotFoundError:
            raise
        except USER_CODE_ERRORS as error:  # boundary to user code
            raise InvalidPackageError(
                f"environment {env_name!r}: {package.__name__}() raised "
                f"{describe_raised_error(error)}; allowed: a function without arguments "
                "that returns an EnvPackage; fix: correct the function"
            ) from error
    if not isinstance(package, EnvPackage):
        raise TypeError(
            f"environment {env_name!r}: {registry_entry.import_path} is a "
            f"{type(package).__name__}, not an EnvPackage; allowed: an EnvPackage, or a function "
            f"without arguments that returns one; fix: name it, as in {module_name}:PACKAGE"
        )
    return package


def _import_module(env_name: str, module_name: str) -> ModuleType:
    is_file = module_name.endswith(".py")
    if is_file or not all(name_part.isidentifier() for name_part in module_name.split(".")):
        suggested_module = (
            module_name.removesuffix(".py").replace("/", ".").strip(".") or "my_lab.gridworld"
        )
        raise UnknownEnvironmentError(
            f"{env_name!r}: {module_name!r} is not a module name; allowed: MODULE:NAME; "
            f"fix: {suggested_module}:PACKAGE"
        )
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise build_missing_extra_error(env_name, error) from error
    except USER_CODE_ERRORS as error:  # boundary to user code
        raise InvalidPackageError(
            f"environment {env_name!r}: importing the module {module_name} raised "
            f"{describe_raised_error(error)}; fix: correct the module"
        ) from error


def list_package_variants(name: str) -> list[str]:
    """Return the variants of the package ``name``: names that may follow ``name/``.

    Raises the errors of ``get_package``.
    """
    try:
        return list(get_package(name).variants())
    except ModuleNotFoundError as error:
        raise build_missing_extra_error(name, error) from error


def list_selectable_names(name: str) -> list[str]:
    """Return ``NAME/VARIANT`` for each variant of a package, or ``NAME`` without variants."""
    return [f"{name}/{variant}" for variant in list_package_variants(name)] or [name]


def find_settings_class(env_name: str) -> type[EnvSettings]:
    """Return the settings class of ``env_name``. Raises the errors of ``get_package``.

    The package is imported only if the registry entry has no import path of the settings.
    """
    settings_path = find_entry(env_name).settings_import_path
    if not settings_path:
        return get_package(env_name).settings
    module_name, _, attribute_name = settings_path.partition(":")
    return getattr(importlib.import_module(module_name), attribute_name)


def read_env_settings(env_config: "EnvConfig") -> EnvSettings:
    """Return the settings of the environment that ``env_config`` names.

    They are the section ``env.<name>``, updated with ``env.kwargs``. ``max_steps`` and ``seed``
    default to the keys of the section ``env``. A variant is stored under the key ``variant_key``.
    Raises ``ConfigError`` for unknown or invalid keys, and all that ``get_package`` raises.
    """
    name, _, variant = canonicalize_env_name(env_config.env_name).partition("/")
    # An import path (``my_lab.grid:PACKAGE``) has no section: its keys are in ``kwargs``.
    section = getattr(env_config, name, None) if name.isidentifier() else None
    if isinstance(section, EnvSettings):
        section = section.model_dump(exclude_unset=True)
    # ``kwargs`` has precedence over the section.
    section = {**(section or {}), **env_config.kwargs}
    section_label = f"env.{name}" if name.isidentifier() else "env.kwargs"
    settings_type = find_settings_class(env_config.env_name)
    if variant and ":" not in env_config.env_name:
        _set_variant(section, env_config.env_name, settings_type)
    settings = read_section_or_raise(settings_type, section, section_label)
    default_values = {"max_steps": env_config.max_steps, "seed": env_config.seed}
    missing_values = {
        key: value for key, value in default_values.items() if getattr(settings, key) is None
    }
    return settings.model_copy(update=missing_values).with_derived_values(env_config)


def describe_substitute_data(env_config: "EnvConfig") -> str:
    """Return a sentence that says which data the environment uses instead of the configured data.

    Example: generated games replace ALFWorld's official games. Return "" if nothing is replaced, or
    if the settings cannot be read.
    """
    try:
        settings = read_env_settings(env_config)
        return settings.describe_substitute_data(canonicalize_env_name(env_config.env_name))
    except UNREADABLE_SETTINGS_ERRORS:
        return ""  # the config checks report the error


def _set_variant(section: dict[str, Any], env_name: str, settings_type: type[EnvSettings]) -> None:
    """Set the variant key of ``section`` to the variant in ``env_name``.

    Raises ``ConfigError`` if ``section`` names another variant, or if the environment has none.
    """
    key = settings_type.variant_key
    name, _, variant = env_name.partition("/")
    if variant in settings_type.variant_aliases:
        return
    if not key:
        allowed_names = ", ".join(
            [name, *(f"{name}/{alias}" for alias in settings_type.variant_aliases)]
        )
        raise ConfigError(
            f"env.env_name={env_name!r}: the environment has no variant {variant!r}; allowed: "
            f"{allowed_names}; fix: env.env_name={name}",
            "unknown_name",
        )
    # A loaded config contains all defaults, so a default value does not contradict the variant in
    # ``env_name``.
    default_variant = settings_type.model_fields[key].default
    if section.get(key, default_variant) not in (variant, default_variant):
        raise ConfigError(
            f"env.env_name={env_name!r} and env.{name}.{key}={section[key]!r} name two variants; "
            f"fix: env.env_name={name} env.{name}.{key}={variant}",
            "conflicting_keys",
        )
    section[key] = variant


def build_missing_extra_error(env_name: str, error: ModuleNotFoundError) -> ImportError:
    """Return an error that names the extra to install for the missing module of ``env_name``."""
    module = env_name.partition(":")[0]
    if ":" in env_name and error.name and f"{module}.".startswith(f"{error.name}."):
        return MissingExtraError(
            f"environment {env_name!r}: no module {error.name!r} can be imported; "
            "fix: start in the directory that contains it, or add that to PYTHONPATH"
        )
    extra = find_entry(env_name).extra
    fix = f"install the extra: pip install -e '.[{extra}]'" if extra else "install it"
    return MissingExtraError(
        f"environment {env_name!r} needs the module {error.name!r}, which is not installed; {fix}"
    )
