"""Loading of configs by name: compose, resolve interpolations, validate and derive values.

files and overrides ─▶ one tree ─▶ plugins ─▶ interpolations ─▶ sections, checked ─▶ derived values
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config import derive
from verl.config.compose import compose_tree, list_override_keys, read_user_config_files
from verl.config.plugins import (
    ENVIRONMENT_PLUGINS,
    collect_all_keys,
    env_names,
    extend_schema,
    find_env_section_class,
)
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError, Problem, Section, collect_section_keys, value_at_path
from verl.config.settings.hints import build_unknown_key_problem
from verl.config.settings.keys import collect_direct_keys
from verl.config.settings.reading import convert_text_values, delete_key, read_section
from verl.config.settings.secret_values import mask_secrets
from verl.config.yaml_files import format_yaml

logger = logging.getLogger(__name__)
Schema = TypeVar("Schema", bound=Section)
Tree = dict[str, Any]
POLICY_PATH_KEY = "actor_rollout_ref.model.path"
INTERPOLATION_PATTERN = re.compile(r"\$\{([\w.]+)\}")


@dataclass
class ParsedConfig(Generic[Schema]):
    """A config from which invalid keys were removed, and a message for each of these keys."""

    config: Schema
    problems: list[Problem] = field(default_factory=list)
    # Messages about valid keys without effect. The command line refuses such a config.
    unused_keys: list[Problem] = field(default_factory=list)
    tree: Tree = field(default_factory=dict)  # values of all keys; interpolations are not resolved

    def require_valid(self) -> Schema:
        """Return the config; raise ``ConfigError`` with all problems if there are any."""
        if self.problems:
            raise ConfigError(dict.fromkeys(self.problems))
        return self.config


def read_config(
    name: str,
    overrides: Sequence[str] = (),
    schema: type[Schema] = PPOConfig,
    config_path: str | None = None,
) -> ParsedConfig[Schema]:
    """Read the config called ``name`` with ``overrides``.

    Invalid keys do not raise an error: their messages are in ``problems`` of the result. Raises
    ``ConfigError`` if there is no such config or its files cannot be composed.
    """
    schema = extend_schema(schema)
    tree, problems = compose_tree(name, overrides, schema, config_path)
    if _should_disable_cold_start(tree, name, overrides, schema, config_path):
        tree.cold_start.enable = False
    # Do not resolve interpolations here: they may refer to defaults, which _parse_tree adds.
    config_values: Any = OmegaConf.to_container(tree, resolve=False)
    config_values, dotted_key_problems = _nest_dotted_keys(config_values, schema)
    problems += dotted_key_problems
    for plugin in ENVIRONMENT_PLUGINS:
        plugin.preprocess(config_values, schema)
    keys_set_in_files = _list_keys_set_in_files(name, config_path)
    # An unknown key of the command line is reported already.
    _drop_retired_keys(config_values, schema, keys_set_in_files)
    parsed_config = _parse_tree(config_values, schema)
    parsed_config.problems = [*problems, *parsed_config.problems]
    keys_set_by_user = [*list_override_keys(overrides), *keys_set_in_files]
    for plugin in ENVIRONMENT_PLUGINS:
        parsed_config.unused_keys += plugin.check_set_keys(config_values, keys_set_by_user)
    return parsed_config


def _list_keys_set_in_files(name: str, config_path: str | None) -> list[str]:
    key_paths: list[str] = []
    for file, content in read_user_config_files(name, config_path).items():
        # Skip the stored config of a run. It has all keys, not only those that the user set.
        if not (file.name == "config.yaml" and file.with_name("env.json").exists()):
            key_paths += [path for path, value in _iterate_leaves(content) if value != {}]
    return key_paths


def _should_disable_cold_start(
    tree: DictConfig,
    name: str,
    overrides: Sequence[str],
    schema: type[Section],
    config_path: str | None,
) -> bool:
    """Return True if ``overrides`` change the policy path and set no key of ``cold_start``.

    The cold start would write the missing policy of the config file to the path in ``overrides``.
    """
    keys = list_override_keys(overrides)
    sets_cold_start = any(_is_at_or_below(key, "cold_start") for key in keys)
    is_cold_start_enabled = OmegaConf.select(tree, "cold_start.enable")
    if POLICY_PATH_KEY not in keys or sets_cold_start or not is_cold_start_enabled:
        return False
    other_overrides = [
        override for key, override in zip(keys, overrides, strict=True) if key != POLICY_PATH_KEY
    ]
    config_tree, _ = compose_tree(name, other_overrides, schema, config_path)
    return OmegaConf.select(config_tree, POLICY_PATH_KEY) != OmegaConf.select(tree, POLICY_PATH_KEY)


def load_config(
    name: str = "ppo_trainer",
    overrides: Sequence[str] = (),
    schema: type[Schema] = PPOConfig,
    config_path: str | None = None,
) -> Schema:
    """Return the config called ``name`` with ``overrides``, with derived values.

    Raises ``ConfigError`` that lists every unknown key, wrong type and value out of bounds.
    """
    return read_config(name, overrides, schema, config_path).require_valid()


def default_config(schema: type[Schema] = PPOConfig) -> Schema:
    """Return the defaults of the schema with derived values, without reading a file."""
    return _parse_tree({}, extend_schema(schema)).require_valid()


def _parse_tree(config_values: Tree, schema: type[Schema]) -> ParsedConfig[Schema]:
    tree = merge_config_trees(to_dict(schema()), config_values)
    # Add the defaults of environments first: interpolations may refer to them.
    problems = _fill_env_defaults(tree, schema)
    resolved_tree, interpolation_problems = _resolve_interpolations(tree)
    env_classes = _find_env_section_classes(resolved_tree, schema)
    tree_without_env_sections = dict(resolved_tree)
    if env_classes:
        tree_without_env_sections["env"] = {
            name: value for name, value in resolved_tree["env"].items() if name not in env_classes
        }
    read_result = read_section(schema, convert_text_values(tree_without_env_sections, schema))
    # If the section cannot be read, use the defaults, so that environments are still checked.
    config = read_result.section if read_result.section is not None else schema()
    problems_by_path = dict(read_result.problems)
    for name, cls in env_classes.items():
        path, values = f"env.{name}", resolved_tree["env"][name]
        if not isinstance(values, Mapping):
            message = f"{path}={values!r}: a section, not a value; set its keys: {path}.KEY=..."
            problems_by_path[path] = Problem(message, "wrong_type")
            continue
        env_read_result = read_section(cls, convert_text_values(values, cls), path)
        problems_by_path |= env_read_result.problems
        if env_read_result.section is not None and hasattr(config, "env"):
            setattr(value_at_path(config, "env"), name, env_read_result.section)
    for path in interpolation_problems:
        # No check may report the text of an unresolved interpolation.
        delete_key(config, path)
    problems += _select_root_problems(problems_by_path | interpolation_problems, tree)
    if not problems:
        # Copy the tree before derived values are filled in: --cfg job prints null for them, and
        # only --resolve prints their values.
        values = to_dict(config)
        for path in _list_interpolated_paths(tree):
            values = merge_config_trees(values, _nest_value(path, value_at_path(tree, path)))
        tree = values
    return ParsedConfig(derive.derive_values(config), problems, tree=tree)


def merge_config_trees(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Tree:
    """Return ``base`` with the values of ``changes``; dictionaries are merged key by key."""
    merged_tree = dict(base)
    for name, value in changes.items():
        base_value = merged_tree.get(name)
        # A list is replaced as a whole, as in Hydra.
        if isinstance(base_value, Mapping) and isinstance(value, Mapping):
            value = merge_config_trees(base_value, value)
        merged_tree[name] = value
    return merged_tree


def _nest_dotted_keys(
    values: Tree, cls: type[Section], path: str = ""
) -> tuple[Tree, list[Problem]]:
    """Replace keys that contain dots, such as ``a.b: 1``, by nested keys, ``a: {b: 1}``.

    ``values`` belong to the section of class ``cls`` at ``path``. Also return a message about each
    key that contains dots or is not text. The values of keys with dots are still checked.
    """
    nested_values: Tree = {}
    problems = []
    for name, value in values.items():
        key_path = f"{path}{name}"
        if not isinstance(name, str):
            why = "the key is not a text; allowed: names of keys; fix: delete it"
            problems.append(Problem(f"{key_path}: {value!r}: {why}", "invalid_syntax"))
            continue
        subsection_class = _find_section_class(cls, key_path)
        if "." in name:
            nested_tree = _nest_value(name, value)
            fix = f"nest it: {name.replace('.', ': {')}: {value}{'}' * name.count('.')}"
            why = "a key with dots in it; allowed: nested sections (dots are for command lines)"
            problems.append(Problem(f"{key_path}: {value!r}: {why}; fix: {fix}", "invalid_syntax"))
            nested_values = merge_config_trees(nested_tree, nested_values)
        elif subsection_class is not None and isinstance(value, Mapping):
            nested_tree, nested_problems = _nest_dotted_keys(
                dict(value), subsection_class, f"{key_path}."
            )
            nested_values = merge_config_trees(nested_values, {name: nested_tree})
            problems += nested_problems
        else:
            nested_values[name] = value
    return nested_values, problems


def _drop_retired_keys(
    values: Tree, cls: type[Section], keys_set_by_user: Sequence[str], path: str = ""
) -> None:
    """Remove keys of earlier versions from ``values``, except those in ``keys_set_by_user``."""
    for name in cls.retired_keys:
        if f"{path}{name}" not in keys_set_by_user:
            values.pop(name, None)
    for name, key in collect_direct_keys(cls).items():
        section_values = values.get(name)
        if key.section is not None and isinstance(section_values, dict):
            _drop_retired_keys(section_values, key.section, keys_set_by_user, f"{path}{name}.")


def _find_section_class(cls: type[Section], path: str) -> type[Section] | None:
    parent_path, _, name = path.rpartition(".")
    key = collect_direct_keys(cls).get(name)
    if key is not None:
        return key.section
    return find_env_section_class(name) if parent_path == "env" else None


# ---- environments ----------------------------------------------------------------------------


def _find_env_section_classes(tree: Tree, schema: type[Section]) -> dict[str, type[Section]]:
    env = tree.get("env") if "env" in schema.model_fields else None
    names = [name for name in env if name in env_names()] if isinstance(env, Mapping) else []
    sections = {name: find_env_section_class(name) for name in names}
    return {name: section for name, section in sections.items() if section is not None}


def _fill_env_defaults(tree: Tree, schema: type[Section]) -> list[Problem]:
    """Add the defaults of environments to ``tree``, and remove undeclared keys of ``env``.

    Return a message for each removed key.
    """
    env = tree.get("env")
    if "env" not in schema.model_fields or not isinstance(env, dict):
        return []
    known_names = {
        *collect_direct_keys(collect_section_keys(schema)["env"].section or schema),
        *env_names(),
    }
    unknown_names = [name for name in env if name not in known_names]
    unknown_values = {f"env.{name}": env.pop(name) for name in unknown_names}
    problems = [
        build_unknown_key_problem(path, value, collect_all_keys(schema))
        for path, value in _iterate_leaves(unknown_values)
    ]
    for name, section in _find_env_section_classes(tree, schema).items():
        if isinstance(env[name], Mapping):
            env[name] = merge_config_trees(section().model_dump(mode="json"), env[name])
    return problems


# ---- interpolations --------------------------------------------------------------------------


def _iterate_leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _iterate_leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _list_interpolated_paths(tree: Tree) -> list[str]:
    return [path for path, value in _iterate_leaves(tree) if "${" in str(value)]


def _resolve_interpolations(tree: Tree) -> tuple[Tree, dict[str, Problem]]:
    """Return ``tree`` with interpolations resolved, and a message (by path) for each failure."""
    problems: dict[str, Problem] = {}
    resolved_tree = tree
    omega_config = OmegaConf.create(tree)
    # Resolve values one by one: resolving the whole tree stops at the first invalid reference.
    for path in _list_interpolated_paths(tree):
        try:
            # Without throw_on_missing, select returns None for "???", as if it were null.
            value = OmegaConf.select(omega_config, path, throw_on_missing=True)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            text = f"{path}={value_at_path(tree, path)!r}: {str(error).splitlines()[0]}"
            problems[path] = Problem(text, "invalid_syntax")
        else:
            resolved_tree = merge_config_trees(resolved_tree, _nest_value(path, value))
    return resolved_tree, problems


def _nest_value(path: str, value: object) -> Tree:
    *section_names, name = path.split(".")
    nested_tree: Tree = {name: value}
    for section in reversed(section_names):
        nested_tree = {section: nested_tree}
    return nested_tree


def _select_root_problems(problems: Mapping[str, Problem], tree: Tree) -> list[Problem]:
    """Return the messages about values that are themselves invalid.

    Messages about interpolations that refer to an invalid value are omitted. If interpolations
    refer to each other in a circle, one of them is reported.
    """
    invalid_references = {
        path: invalid_path
        for path in _list_interpolated_paths(tree)
        for name in INTERPOLATION_PATTERN.findall(str(value_at_path(tree, path)))
        for invalid_path in problems
        if _is_at_or_below(name, invalid_path)
    }
    root_cause_paths = {_find_cause(path, invalid_references) for path in problems}
    return [message for path, message in problems.items() if path in root_cause_paths]


def _find_cause(path: str, invalid_references: Mapping[str, str]) -> str:
    visited_paths: list[str] = []
    while path not in visited_paths:
        visited_paths.append(path)
        path = invalid_references.get(path, path)
    # The references form a circle from the first visit of ``path`` on, mostly of one path.
    return min(visited_paths[visited_paths.index(path) :])


def _is_at_or_below(path: str, other_path: str) -> bool:
    return path == other_path or path.startswith(f"{other_path}.")


# ---- keys without effect, and output -----------------------------------------------------------


def find_keys_without_effect(cfg: Section, device: str) -> dict[str, str]:
    """Return the non-default keys that have no effect on ``device``, each with the reason."""
    keys = collect_section_keys(type(cfg))
    reasons = {}
    for path, key in keys.items():
        unused_annotation = key.unused_annotation
        # Keys with ``Unused.instead`` are refused by ``refuse_keys_without_effect``.
        if unused_annotation and not unused_annotation.instead:
            reasons[path] = unused_annotation.why
        elif key.is_gpu_only and device == "cpu":
            reasons[path] = "there is no GPU here"
    if isinstance(cfg, PPOConfig) and not derive.can_drop_or_truncate_prompts(cfg):
        why = "prompts come from the environment, and one that is too long is refused"
        reasons |= {"data.filter_overlong_prompts": why, "data.truncation": why}
    reasons = {
        path: why
        for path, why in reasons.items()
        if value_at_path(cfg, path) != keys[path].default_value
    }
    if isinstance(cfg, PPOConfig):
        reasons |= derive.find_keys_ignored_with_rule_weight_0(cfg)
        reasons |= derive.find_unused_discounts(cfg)
    return reasons


def warn_without_effect(cfg: PPOConfig | SFTConfig) -> None:
    """Log one warning that names every key which was set and has no effect."""
    reasons = find_keys_without_effect(cfg, guess_device(cfg.trainer.device))
    if reasons:
        keys_text = "; ".join(f"{key} ({why})" for key, why in reasons.items())
        logger.warning("set, but without effect here: %s", keys_text)


def guess_device(device: str) -> str:
    """Return ``device``; for ``auto`` the likely device (``cpu``, ``cuda``), without torch."""
    if device != "auto":
        return device
    # The NVIDIA driver makes this file. torch.cuda would be exact, but its import takes seconds.
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def to_dict(cfg: Section) -> Tree:
    """Return ``cfg`` as nested plain dictionaries and lists; tuples become lists."""
    return cfg.model_dump(mode="json")


def to_yaml(cfg: Section | Tree) -> str:
    """Return ``cfg`` as YAML with masked secrets, as it is stored in the run directory."""
    return format_yaml(mask_secrets(to_dict(cfg) if isinstance(cfg, Section) else cfg))
