"""Configs by name: compose, read, derive, and say which keys change nothing here.

files and overrides ─▶ one tree ─▶ settled ─▶ interpolations ─▶ sections, checked ─▶ derived values
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.compose import compose_tree, own_files
from verl.config.derive import derive, fits_prompts, unused_rule_reward_keys
from verl.config.plugins import ENVIRONMENTS, env_names, env_section, full_schema, schema_keys
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError, MissingKey, Section, keys_of, lookup
from verl.config.settings.keys import own_keys
from verl.config.settings.reading import from_text, read
from verl.config.settings.secret_values import masked
from verl.config.settings.unknown import unknown
from verl.config.yaml_text import yaml_text

logger = logging.getLogger(__name__)
Schema = TypeVar("Schema", bound=Section)
Tree = dict[str, Any]
POLICY = "actor_rollout_ref.model.path"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass
class ParsedConfig(Generic[Schema]):
    """A config as far as it can be read: the refused keys are missing from it."""

    config: Schema
    problems: list[str] = field(default_factory=list)
    # Keys that can be read and have no effect; a command line refuses them.
    unused_keys: list[str] = field(default_factory=list)
    tree: Tree = field(default_factory=dict)  # every key, interpolations kept

    def require_valid(self) -> Schema:
        """Return the config. Raises ConfigError with every problem."""
        if self.problems:
            raise ConfigError(dict.fromkeys(self.problems))
        return self.config


def read_config(
    name: str,
    overrides: Sequence[str] = (),
    schema: type[Schema] = PPOConfig,
    config_path: str | None = None,
) -> ParsedConfig[Schema]:
    """Read the config called ``name`` with ``overrides``; the result holds its problems.

    Raises ConfigError where there is nothing to read: no such config, or no such file.
    """
    schema = full_schema(schema)
    tree, problems = compose_tree(name, overrides, schema, config_path)
    if _names_another_policy(tree, name, overrides, schema, config_path):
        tree.cold_start.enable = False
    # Unresolved: a reference may lead to a default, and the defaults are merged in below.
    written: Any = OmegaConf.to_container(tree, resolve=False)
    written, misplaced = _nest_dotted_keys(written, schema)
    problems += misplaced
    for plugin in ENVIRONMENTS:
        plugin.preprocess(written, schema)
    paths = _written_by_caller(name, overrides, config_path)
    parsed = _parse(written, schema)
    parsed.problems = [*problems, *parsed.problems]
    for plugin in ENVIRONMENTS:
        parsed.unused_keys += plugin.check_written(written, paths)
    return parsed


def _written_by_caller(name: str, overrides: Sequence[str], config_path: str | None) -> list[str]:
    """Return the dotted paths that the command line and the files of the caller write."""
    paths = [word.lstrip("+").partition("=")[0] for word in overrides]
    for file, content in own_files(name, config_path).items():
        # What a run has stored is what its start was composed of, whoever wrote that.
        if not (file.name == "config.yaml" and file.with_name("env.json").exists()):
            paths += [path for path, _ in _leaves({str(key): content[key] for key in content})]
    return paths


def _names_another_policy(
    tree: DictConfig,
    name: str,
    overrides: Sequence[str],
    schema: type[Section],
    config_path: str | None,
) -> bool:
    """Whether the words name a policy that is not the config's own, and ask for no cold start.

    The config would make its own where it is missing, and must not make another under that name.
    """
    keys = [word.lstrip("+").partition("=")[0] for word in overrides]
    asked = any(key == "cold_start" or key.startswith("cold_start.") for key in keys)
    if POLICY not in keys or asked or not OmegaConf.select(tree, "cold_start.enable"):
        return False
    others = [word for key, word in zip(keys, overrides, strict=True) if key != POLICY]
    own, _ = compose_tree(name, others, schema, config_path)
    return OmegaConf.select(own, POLICY) != OmegaConf.select(tree, POLICY)


def load_config(
    name: str = "ppo_trainer",
    overrides: Sequence[str] = (),
    schema: type[Schema] = PPOConfig,
    config_path: str | None = None,
) -> Schema:
    """The config called ``name`` with ``overrides`` as an instance of ``schema``, derived values
    filled in.

    Raises ConfigError, which lists every unknown key, wrong type and value out of bounds.
    Cross-field checks are ``validate``'s.
    """
    return read_config(name, overrides, schema, config_path).require_valid()


def default_config(schema: type[Schema] = PPOConfig) -> Schema:
    """The schema's own defaults, resolved and derived, without reading any file."""
    return _parse({}, full_schema(schema)).require_valid()


def _parse(written: Tree, schema: type[Schema]) -> ParsedConfig[Schema]:
    """Read ``written``, which may hold interpolations, as ``schema``."""
    tree = merged(to_dict(schema()), written)
    # Before interpolations are resolved: these may refer to defaults of environments.
    problems = _fill_env_defaults(tree, schema)
    plain, unresolved = _resolved(tree)
    sections = _env_sections(plain, schema)
    declared = dict(plain)
    if sections:
        declared["env"] = {
            name: value for name, value in plain["env"].items() if name not in sections
        }
    reading = read(schema, from_text(declared, schema))
    # Where nothing can be read the defaults stand in, so that environments are still checked.
    config = reading.section if reading.section is not None else schema()
    found = dict(reading.problems)
    for name, cls in sections.items():
        path, values = f"env.{name}", plain["env"][name]
        if not isinstance(values, Mapping):
            found[path] = f"{path}={values!r}: a section, not a value; set its keys: {path}.KEY=..."
            continue
        below = read(cls, from_text(values, cls), path)
        found |= below.problems
        if below.section is not None and hasattr(config, "env"):
            setattr(lookup(config, "env"), name, below.section)
    for path in unresolved:
        _forget(config, path)
    problems += _own_mistakes(found | unresolved, tree)
    if not problems:
        # Before derive(): --cfg job shows null where null was meant, and --resolve what follows.
        tree = _with_interpolations(to_dict(config), tree)
    return ParsedConfig(derive(config), problems, tree=tree)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Tree:
    """``base`` with ``changes`` written over it, dictionaries joined key by key."""
    made = dict(base)
    for name, value in changes.items():
        old = made.get(name)
        # Lists are values: an override replaces a list whole, as in Hydra.
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value)
        made[name] = value
    return made


def _nest_dotted_keys(values: Tree, cls: type[Section], path: str = "") -> tuple[Tree, list[str]]:
    """Return ``values`` of the section ``cls`` at ``path`` with keys such as ``a.b`` nested, and
    the messages about these keys.

    The nested value is kept, so that no further check finds the key missing.
    """
    made: Tree = {}
    problems = []
    for name, value in values.items():
        where = f"{path}{name}"
        if not isinstance(name, str):
            why = "a key that is no name"
            problems.append(f"{where}: {value!r}: {why}; allowed: names of keys; fix: leave it out")
            continue
        below = _section_below(cls, where)
        if "." in name:
            nested = _nested(name, value)
            why = "a key with dots in it"
            above, _, last = name.rpartition(".")
            fix = f"nest it: {above.replace('.', ': {')}: {{{last}: {value}{'}' * name.count('.')}"
            allowed = "one section inside of the other, as dots are for command lines"
            problems.append(f"{where}: {value!r}: {why}; allowed: {allowed}; fix: {fix}")
            made = merged(nested, made)
        elif below is not None and isinstance(value, Mapping):
            found, more = _nest_dotted_keys(dict(value), below, f"{where}.")
            made = merged(made, {name: found})
            problems += more
        else:
            made[name] = value
    return made, problems


def _section_below(cls: type[Section], path: str) -> type[Section] | None:
    """Return the class of the section at ``path``, in ``cls`` or of an environment; None for a
    value.
    """
    above, _, name = path.rpartition(".")
    key = own_keys(cls).get(name)
    if key is not None:
        return key.section
    return env_section(name) if above == "env" else None


# ---- environments ----------------------------------------------------------------------------


def _env_sections(tree: Tree, schema: type[Section]) -> dict[str, type[Section]]:
    """Return the classes of the environments that have a section in ``tree``, by name."""
    env = tree.get("env") if "env" in schema.model_fields else None
    names = [name for name in env if name in env_names()] if isinstance(env, Mapping) else []
    found = {name: env_section(name) for name in names}
    return {name: section for name, section in found.items() if section is not None}


def _fill_env_defaults(tree: Tree, schema: type[Section]) -> list[str]:
    """Fill in the defaults of the environments in ``tree`` and remove keys that nothing declares.

    Returns the problems of the removed keys.
    """
    env = tree.get("env")
    if "env" not in schema.model_fields or not isinstance(env, dict):
        return []
    known = {*own_keys(keys_of(schema)["env"].section or schema), *env_names()}
    problems = []
    for name in [name for name in env if name not in known]:
        problems += _unknown_leaves(f"env.{name}", env.pop(name), schema)
    for name, section in _env_sections(tree, schema).items():
        if isinstance(env[name], Mapping):
            env[name] = merged(section().model_dump(mode="json"), env[name])
    return problems


def _unknown_leaves(path: str, value: object, schema: type[Section]) -> list[str]:
    if isinstance(value, Mapping) and value:
        below = [_unknown_leaves(f"{path}.{name}", item, schema) for name, item in value.items()]
        return [message for messages in below for message in messages]
    return [unknown(path, value, schema_keys(schema))]


# ---- interpolations --------------------------------------------------------------------------


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _interpolated(tree: Tree) -> list[str]:
    """Paths of the values that refer to others."""
    return [path for path, value in _leaves(tree) if "${" in str(value)]


def _resolved(tree: Tree) -> tuple[Tree, dict[str, str]]:
    """``tree`` with every interpolation filled in, and what is wrong with those that cannot be, by
    path.
    """
    paths = _interpolated(tree)
    problems = _circles(paths, tree)
    plain = tree
    if not paths:
        return plain, problems
    conf = OmegaConf.create(tree)
    # One by one: resolving the whole tree would stop at the first reference that leads nowhere.
    for path in paths:
        if path in problems:
            continue
        try:
            # Without throw_on_missing a "???" would come back as None, as if it had been set to
            # null.
            value = OmegaConf.select(conf, path, throw_on_missing=True)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            problems[path] = f"{path}={lookup(tree, path)!r}: {str(error).splitlines()[0]}"
        else:
            plain = merged(plain, _nested(path, value))
    return plain, problems


def _circles(paths: Sequence[str], tree: Tree) -> dict[str, str]:
    """The values among ``paths`` that refer to themselves, directly or through others: a message
    about the first of each circle, and an empty one about the others.
    """
    leads_to = {
        path: [
            other
            for name in REFERENCE.findall(str(lookup(tree, path)))
            for other in paths
            if _is_below(other, name) or _is_below(name, other)
        ]
        for path in paths
    }
    found: dict[str, str] = {}
    for path in paths:
        circle = [name for name in _reach(path, leads_to) if path in _reach(name, leads_to)]
        if path in found or path not in circle:
            continue
        found |= dict.fromkeys(circle, "")
        why = f"it refers to itself ({' and '.join(sorted(circle))})"
        fix = f"write a value for {path}"
        found[path] = (
            f"{path}={lookup(tree, path)!r}: {why}; allowed: a reference that ends; fix: {fix}"
        )
    return found


def _reach(path: str, leads_to: Mapping[str, Sequence[str]]) -> list[str]:
    reached = list(leads_to[path])
    for place in reached:
        reached += [other for other in leads_to[place] if other not in reached]
    return reached


def _forget(config: Section, path: str) -> None:
    """Take the value at ``path`` out: no check must complain about what stands there instead."""
    above, _, name = path.rpartition(".")
    try:
        section = lookup(config, above) if above else config
    except (MissingKey, KeyError):
        return
    if isinstance(section, Section):
        vars(section).pop(name, None)
        (section.__pydantic_extra__ or {}).pop(name, None)


def _nested(path: str, value: object) -> Tree:
    *above, name = path.split(".")
    made: Tree = {name: value}
    for section in reversed(above):
        made = {section: made}
    return made


def _own_mistakes(problems: Mapping[str, str], tree: Tree) -> list[str]:
    """The messages, without those about values that only repeat a mistake made elsewhere."""
    paths = _interpolated(tree)
    circles = _circles(paths, tree)
    repeated = {path for path, message in problems.items() if not message}
    for path in paths:
        if path in circles:
            continue
        references = REFERENCE.findall(str(lookup(tree, path)))
        if any(_is_below(name, wrong) for name in references for wrong in problems):
            repeated.add(path)
    return [message for path, message in problems.items() if path not in repeated]


def _is_below(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")


def _with_interpolations(values: Tree, tree: Tree) -> Tree:
    for path in _interpolated(tree):
        values = merged(values, _nested(path, lookup(tree, path)))
    return values


# ---- what a config says ----------------------------------------------------------------------


def without_effect(cfg: Section, device: str) -> dict[str, str]:
    """Keys that were set and change nothing on ``device``, each with the reason."""
    found = {}
    for key in keys_of(type(cfg)).values():
        if key.is_section or not (key.unused or key.gpu_only):
            continue
        if key.unused and key.unused.instead:
            continue  # refused by the checks
        # A default that is written out changes nothing either, and needs no warning.
        if lookup(cfg, key.path) == key.default:
            continue
        if key.unused:
            found[key.path] = key.unused.why
        elif device == "cpu":
            found[key.path] = "there is no GPU here"
    if isinstance(cfg, PPOConfig) and not fits_prompts(cfg):
        keys = ("data.filter_overlong_prompts", "data.truncation")
        why = "prompts come from the environment, and one that is too long is refused"
        defaults = keys_of(PPOConfig)
        found |= {key: why for key in keys if lookup(cfg, key) != defaults[key].default}
    return found | unused_rule_reward_keys(cfg) if isinstance(cfg, PPOConfig) else found


def warn_without_effect(cfg: PPOConfig | SFTConfig) -> None:
    """Log one warning that names every key which was set and changes nothing here."""
    found = without_effect(cfg, guess_device(cfg.trainer.device))
    if found:
        named = "; ".join(f"{key} ({why})" for key, why in found.items())
        logger.warning("set, but without effect here: %s", named)


def guess_device(device: str) -> str:
    """``cpu`` or ``cuda`` as ``auto`` will most likely turn out, without importing torch."""
    if device != "auto":
        return device
    # The NVIDIA driver makes this file; asking torch would be certain, but takes seconds.
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def to_dict(cfg: Section) -> Tree:
    """``cfg`` as nested plain dictionaries and lists."""
    # mode="json" makes lists of tuples: OmegaConf and YAML know no others.
    return cfg.model_dump(mode="json")


def to_yaml(cfg: Section | Tree) -> str:
    """``cfg`` as YAML, as the run directory keeps it: secrets are masked."""
    return yaml_text(masked(to_dict(cfg) if isinstance(cfg, Section) else cfg))
