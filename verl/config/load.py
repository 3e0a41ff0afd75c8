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
from verl.config.derive import derive, fits_prompts, rules_of_no_weight
from verl.config.plugged import (
    EXTENSIONS,
    plugged_class,
    plugged_keys,
    plugged_names,
    schema_keys,
    sources,
)
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError, MissingKey, Section, keys_of, lookup
from verl.config.settings.keys import own_keys
from verl.config.settings.reading import from_text, read
from verl.config.settings.secret_values import masked
from verl.config.settings.section import OpenSection
from verl.config.settings.unknown import unknown
from verl.config.yaml_text import yaml_text

logger = logging.getLogger(__name__)
Schema = TypeVar("Schema", bound=Section)
Tree = dict[str, Any]
POLICY = "actor_rollout_ref.model.path"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass
class Draft(Generic[Schema]):
    """A config as far as it can be read: the refused keys are missing from it."""

    config: Schema
    problems: list[str] = field(default_factory=list)
    # Of keys that can be read and that a command line refuses, for nothing would read them.
    of_no_use: list[str] = field(default_factory=list)
    tree: Tree = field(default_factory=dict)  # every key, interpolations kept

    def sound(self) -> Schema:
        """The config. Raises ConfigError with every problem."""
        if self.problems:
            raise ConfigError(dict.fromkeys(self.problems))
        return self.config


def read_config(
    name: str,
    overrides: Sequence[str] = (),
    schema: type[Schema] = PPOConfig,
    config_path: str | None = None,
) -> Draft[Schema]:
    """Read the config called ``name`` with ``overrides``; what is wrong with it is in the draft.

    Raises ConfigError where there is nothing to read: no such config, or no such file.
    """
    tree, problems = compose_tree(name, overrides, schema, config_path)
    if _names_another_policy(tree, name, overrides, schema, config_path):
        tree.cold_start.enable = False
    # Unresolved: a reference may lead to a default, and the defaults are merged in below.
    written: Any = OmegaConf.to_container(tree, resolve=False)
    written, misplaced = _put_right(written, schema, schema)
    problems += misplaced
    for extension in EXTENSIONS.values():
        extension.settle(written, schema)
    said = _said_by_caller(name, overrides, config_path)
    draft = _draft(written, schema)
    draft.problems = [*problems, *draft.problems]
    for extension in EXTENSIONS.values():
        draft.of_no_use += extension.check_written(written, said)
    return draft


def _said_by_caller(name: str, overrides: Sequence[str], config_path: str | None) -> list[str]:
    """Dotted paths of what the command line and the caller's own files write."""
    said = [word.lstrip("+").partition("=")[0] for word in overrides]
    for file, content in own_files(name, config_path).items():
        # What a run has stored is what its start was composed of, whoever wrote that.
        if not (file.name == "config.yaml" and file.with_name("env.json").exists()):
            said += [path for path, _ in _leaves({str(key): content[key] for key in content})]
    return said


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
    return read_config(name, overrides, schema, config_path).sound()


def default_config(schema: type[Schema] = PPOConfig) -> Schema:
    """The schema's own defaults, resolved and derived, without reading any file."""
    return _draft({}, schema).sound()


def _draft(written: Tree, schema: type[Schema]) -> Draft[Schema]:
    """Read ``written``, which may hold interpolations, as ``schema``."""
    tree = merged(to_dict(schema()), written)
    # Before interpolations are resolved: these may refer to defaults of plugged sections.
    problems = _lift_plugged(tree, schema)
    plain, unresolved = _resolved(tree)
    reading = read(schema, from_text(_declared(plain, schema), schema))
    # Where nothing can be read the defaults stand in, so that plugged sections are still checked.
    config = reading.section if reading.section is not None else schema()
    found = dict(reading.problems) | _set_plugged_keys(config, plain, schema)
    for path, cls in _plugged_sections(tree, schema):
        values = lookup(plain, path)
        if not isinstance(values, Mapping):
            found[path] = f"{path}={values!r}: a section, not a value; set its keys: {path}.KEY=..."
            continue
        below = read(cls, from_text(values, cls), path)
        found |= below.problems
        above, _, name = path.partition(".")
        if below.section is not None and hasattr(config, above):
            setattr(getattr(config, above), name, below.section)
    for path in unresolved:
        _forget(config, path)
    problems += _own_mistakes(found | unresolved, tree)
    if not problems:
        # Before derive(): --cfg job shows null where null was meant, and --resolve what follows.
        tree = _with_interpolations(to_dict(config), tree)
    return Draft(derive(config), problems, tree=tree)


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


def _put_right(
    values: Tree, cls: type[Section], schema: type[Section], path: str = ""
) -> tuple[Tree, list[str]]:
    """``values`` of the section ``cls`` at ``path`` with every key where its dots say that it
    belongs, and the messages about keys that were none.

    Its value counts, so that nothing is said to be missing because of it.
    """
    made: Tree = {}
    problems = []
    for name, value in values.items():
        where = f"{path}{name}"
        if not isinstance(name, str):
            why = "a key that is no name"
            problems.append(f"{where}: {value!r}: {why}; allowed: names of keys; fix: leave it out")
            continue
        below = _section_below(cls, schema, where)
        if "." in name:
            nested = _nested(name, value)
            why = "a key with dots in it"
            above, _, last = name.rpartition(".")
            fix = f"nest it: {above.replace('.', ': {')}: {{{last}: {value}{'}' * name.count('.')}"
            allowed = "one section inside of the other, as dots are for command lines"
            problems.append(f"{where}: {value!r}: {why}; allowed: {allowed}; fix: {fix}")
            made = merged(nested, made)
        elif below is not None and isinstance(value, Mapping):
            found, more = _put_right(dict(value), below, schema, f"{where}.")
            made = merged(made, {name: found})
            problems += more
        else:
            made[name] = value
    return made, problems


def _section_below(cls: type[Section], schema: type[Section], path: str) -> type[Section] | None:
    """The class of the section at ``path``, which ``cls`` or a package declares; None for a
    value.
    """
    above, _, name = path.rpartition(".")
    keys = [own_keys(cls)]
    keys += [own_keys(plugged) for section, plugged in plugged_keys(schema) if section == above]
    found = next((declared[name] for declared in keys if name in declared), None)
    return plugged_class(schema, path) if found is None else found.section


# ---- sections that packages plug in ----------------------------------------------------------


def _lift_plugged(tree: Tree, schema: type[Section]) -> list[str]:
    """Give the plugged sections and keys of ``tree`` their defaults, and take out what nobody
    declares.

    Returns the messages about that.
    """
    problems = []
    keys = _names_of_keys(schema)
    for above, plugged in plugged_keys(schema):
        if isinstance(tree.get(above), dict):
            tree[above] = merged(plugged().model_dump(mode="json"), tree[above])
    for above, cls in _open_sections(schema):
        values = tree.get(above)
        if not isinstance(values, dict):
            continue
        names = plugged_names(schema, above)
        present = _present(schema, above, values)
        for name in [name for name in values if name not in cls.model_fields]:
            if name not in names | keys[above]:
                value = values.pop(name)
                problems += _unknown_leaves(f"{above}.{name}", value, schema)
        for name in [*present, *values]:
            section = plugged_class(schema, f"{above}.{name}")
            if section is not None and isinstance(values.get(name, {}), Mapping):
                defaults = section().model_dump(mode="json")
                values[name] = merged(defaults, values.get(name, {}))
    return problems


def _names_of_keys(schema: type[Section]) -> dict[str, set[str]]:
    """Names of the plugged keys, by open section."""
    names: dict[str, set[str]] = {above: set() for above, _ in _open_sections(schema)}
    for above, plugged in plugged_keys(schema):
        names[above] |= set(plugged.model_fields)
    return names


def _set_plugged_keys(config: Section, plain: Tree, schema: type[Section]) -> dict[str, str]:
    """Read the plugged keys of ``plain`` into ``config``; what is wrong with them, by path."""
    problems: dict[str, str] = {}
    for above, plugged in plugged_keys(schema):
        values = plain.get(above)
        if not isinstance(values, Mapping):
            continue  # the section itself is wrong, and that is said elsewhere
        own = {name: values[name] for name in plugged.model_fields if name in values}
        reading = read(plugged, from_text(own, plugged), above)
        problems |= reading.problems
        if hasattr(config, above):
            # vars() and not a dump: a refused key is missing there, and must be missing here.
            for name, value in vars(reading.section).items() if reading.section else ():
                setattr(getattr(config, above), name, value)
    return problems


def _open_sections(schema: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for key in keys_of(schema).values():
        if key.section is not None and issubclass(key.section, OpenSection):
            yield key.path, key.section


def _present(schema: type[Section], above: str, values: Tree) -> list[str]:
    return [
        name for path, source in sources(schema) if path == above for name in source.present(values)
    ]


def _unknown_leaves(path: str, value: object, schema: type[Section]) -> list[str]:
    if isinstance(value, Mapping) and value:
        below = [_unknown_leaves(f"{path}.{name}", item, schema) for name, item in value.items()]
        return [message for messages in below for message in messages]
    return [unknown(path, value, schema_keys(schema))]


def _plugged_sections(tree: Tree, schema: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for above, cls in _open_sections(schema):
        values = tree.get(above)
        for name in values if isinstance(values, Mapping) else ():
            found = None if name in cls.model_fields else plugged_class(schema, f"{above}.{name}")
            if found is not None:
                yield f"{above}.{name}", found


def _declared(values: Tree, schema: type[Section]) -> Tree:
    """``values`` without the plugged sections."""
    made = dict(values)
    for above, cls in _open_sections(schema):
        section = made.get(above)
        if isinstance(section, Mapping):
            made[above] = {name: section[name] for name in section if name in cls.model_fields}
    return made


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
    return found | rules_of_no_weight(cfg) if isinstance(cfg, PPOConfig) else found


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
