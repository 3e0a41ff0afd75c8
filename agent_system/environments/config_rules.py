"""Config sections ``env.<name>`` of the registered environments, and the rules about them."""

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from agent_system.environments.env_package.mixture.settings import DEFAULT_PARTS, MixtureSettings
from agent_system.environments.env_registry import (
    REGISTRY,
    UNREADABLE_SETTINGS_ERRORS,
    canonicalize_env_name,
    describe_substitute_data,
    find_settings_class,
    read_env_settings,
)
from agent_system.environments.settings import EnvSettings
from verl.config.derive import are_placeholder_files
from verl.config.plugins import EnvironmentPlugin
from verl.config.problems import Problems
from verl.config.schema import PPOConfig
from verl.config.schema.env import EnvConfig
from verl.config.settings import Problem, Section, read_section

Tree = dict[str, Any]
DEFAULT_ENVIRONMENT = "alfworld"
MIXTURE_ENVIRONMENT = "mixture"
DATASET_ENVIRONMENT = "dataset"  # environment whose tasks are the rows of data files
DATA_FILE_KEYS = ("data.train_files", "data.val_files")
GROUP_SIZE_KEY = "actor_rollout_ref.rollout.n"


def find_settings_class_or_none(name: str) -> type[EnvSettings] | None:
    """Return the settings class of an environment; None if it cannot be imported."""
    try:
        return find_settings_class(name)
    except (ImportError, LookupError, TypeError):
        return None  # later checks report the error if the run uses this environment


def complete_env_section(tree: Tree, schema: type[Section]) -> None:
    """Complete the environment's keys in the config ``tree`` before ``schema`` validates it.

    Choose ``env.env_name`` if it is not set: ``dataset`` for a config that names data files, else
    ``alfworld``. Spell the name as the registry does. Copy the values of other sections that the
    environment uses (listed in ``data_keys`` of its settings class) into ``env.<name>``.
    """
    env_section = tree.setdefault("env", {})
    if not isinstance(env_section, dict):
        return
    is_ppo = issubclass(schema, PPOConfig)
    if is_ppo and not env_section.get("env_name"):
        env_section["env_name"] = (
            DATASET_ENVIRONMENT if _has_data_files(tree) else DEFAULT_ENVIRONMENT
        )
    if isinstance(env_section.get("env_name"), str):
        env_section["env_name"] = canonicalize_env_name(env_section["env_name"])
    name = str(env_section.get("env_name", "")).split("/", 1)[0]
    settings = find_settings_class_or_none(name) if name in REGISTRY else None
    if settings is None:
        return
    if is_ppo:
        if settings.is_single_turn:
            env_section.setdefault("max_steps", 1)
        if settings.data_keys:
            # None: the validation set contains all rows of the files.
            env_section.setdefault("val_tasks", None)
            _copy_config_value(tree, GROUP_SIZE_KEY, "env.rollout.n")
        for source_key, target_key in settings.data_keys.items():
            _copy_config_value(tree, source_key, f"env.{name}.{target_key}")
    # An empty section makes the schema fill in the defaults.
    env_section.setdefault(name, {})


def _has_data_files(tree: Tree) -> bool:
    return any(
        _get_config_value(tree, key) and not _is_placeholder_file(_get_config_value(tree, key))
        for key in DATA_FILE_KEYS
    )


def _is_placeholder_file(value: object) -> bool:
    files = value if isinstance(value, list) else [value]
    return are_placeholder_files([str(file) for file in files])


def _get_config_value(tree: Mapping[str, Any], dotted_key: str) -> Any:
    """Return the value of the dotted key ``dotted_key`` in ``tree``; None if it is not set."""
    value: Any = tree
    for name in dotted_key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _copy_config_value(tree: Tree, source_key: str, target_key: str) -> None:
    """Copy the value of ``source_key`` to ``target_key`` (dotted keys), unless that key is set."""
    value = _get_config_value(tree, source_key)
    if value is None or _get_config_value(tree, target_key) is not None:
        return
    if source_key in DATA_FILE_KEYS and _is_placeholder_file(value):
        return
    *section_names, name = target_key.split(".")
    section = tree
    for section_name in section_names:
        section = section.setdefault(section_name, {})
        # A plain value instead of a section is an error, which the validation reports later.
        if not isinstance(section, dict):
            return
    section[name] = value


def check_unused_env_sections(tree: Mapping[str, Any], written_keys: Collection[str]) -> Problems:
    """Yield a problem for each config section of an environment that the run does not use.

    Only sections with ``written_keys``, which the user has set, are reported.
    """
    env_name = str(_get_config_value(tree, "env.env_name") or "")
    # Another check reports an unknown name.
    if ":" not in env_name and canonicalize_env_name(env_name).split("/", 1)[0] not in REGISTRY:
        return
    used_names = {canonicalize_env_name(env_name).split("/", 1)[0]}
    if MIXTURE_ENVIRONMENT in used_names:
        mixture_parts = _get_config_value(tree, f"env.{MIXTURE_ENVIRONMENT}.parts")
        part_names = map(str, DEFAULT_PARTS if mixture_parts is None else mixture_parts)
        used_names |= {canonicalize_env_name(name).split("/", 1)[0] for name in part_names}
    first_key_by_env: dict[str, str] = {}
    for written_key in written_keys:
        top_section, _, subpath = written_key.partition(".")
        name = subpath.partition(".")[0]
        if top_section == "env" and name in REGISTRY and name not in used_names:
            first_key_by_env.setdefault(name, written_key)
    for name, written_key in first_key_by_env.items():
        reason = f"a key of the environment {name}, and the run uses {env_name}"
        key_in_section = written_key.removeprefix(f"env.{name}").lstrip(".")
        fix_text = f"remove it, or set env.env_name={name}"
        if ":" in env_name:
            fix_text = (
                f"set env.kwargs.{key_in_section or 'KEY'}=..., which has the keys of {env_name}"
            )
        allowed_text = "allowed: sections of the environment of the run"
        problem_text = (
            f"{written_key}={_get_config_value(tree, written_key)!r}: {reason}; {allowed_text}; "
            f"fix: {fix_text}"
        )
        yield Problem(problem_text, "no_effect")


def collect_env_settings(env: EnvConfig) -> dict[str, EnvSettings]:
    """Return the settings of the environments in the run by name: one, or those of a mixture.

    Environments with an import path are omitted, because reading them would import user code.
    Settings that cannot be read are omitted too: other checks report them.
    """
    kwargs_by_name: Mapping[str, Mapping[str, Any]] = {env.env_name: env.kwargs}
    if isinstance(env.active_section, MixtureSettings):
        mixture_values = {**env.active_section.model_dump(exclude_unset=True), **env.kwargs}
        mixture = read_section(MixtureSettings, mixture_values).section or MixtureSettings()
        kwargs_by_name = {
            part_name: mixture.kwargs.get(part_name, {}) for part_name in mixture.part_weights
        }
    settings_by_name = {}
    for name, kwargs in kwargs_by_name.items():
        part_env = env.model_copy(update={"env_name": name, "kwargs": dict(kwargs)})
        section = part_env.active_section
        if ":" in name or (section and type(section).model_fields.keys() - vars(section).keys()):
            continue
        with contextlib.suppress(*UNREADABLE_SETTINGS_ERRORS):
            settings_by_name[name] = read_env_settings(part_env)
    return settings_by_name


ENVIRONMENTS = EnvironmentPlugin(
    list_names=REGISTRY.keys,
    find_section_class=find_settings_class_or_none,
    preprocess=complete_env_section,
    check_set_keys=check_unused_env_sections,
    settings=collect_env_settings,
    stand_in=lambda cfg: describe_substitute_data(cfg.env),
)
