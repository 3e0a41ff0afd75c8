"""From a config name and overrides to one plain tree, by Hydra: defaults lists, search path,
override grammar.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.plugged import light_keys, plugged_class, schema_keys, sources
from verl.config.settings import ConfigError, Key, Section, keys_of
from verl.config.settings.hints import nearest_name
from verl.config.settings.unknown import owner, unknown
from verl.config.yaml_files import joined_files

BASE_DIR = Path(__file__).resolve().parent
# Beside the verl package, in a checkout and when installed.
EXPERIMENTS_DIR = BASE_DIR.parents[1] / "configs"
POLICIES_DIR = EXPERIMENTS_DIR / "policies"
# ${shipped_policy:NAME} in a config: the directory of a policy that is part of the package.
OmegaConf.register_new_resolver(
    "shipped_policy", lambda name: str(POLICIES_DIR / name), replace=True
)


def config_dirs(config_path: str | None = None) -> list[Path]:
    """Directories that are searched for configs: the caller's, then the experiments, then the
    bases.
    """
    own = [Path(config_path).expanduser().resolve()] if config_path else []
    for directory in own:
        if not directory.is_dir():
            raise ConfigError(f"--config-path {config_path}: no such directory")
    # The first match wins, so that a user's config may stand in for one that ships.
    return [*own, *(path for path in (EXPERIMENTS_DIR, BASE_DIR) if path.is_dir())]


def config_names(config_path: str | None = None) -> list[str]:
    """Names that ``--config-name`` accepts."""
    return sorted(
        {file.stem for directory in config_dirs(config_path) for file in directory.glob("*.yaml")}
    )


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse ``key=value`` words; raises ConfigError for one that is not in Hydra's override
    grammar.
    """
    parsed, problems = _parse(overrides)
    if problems:
        raise ConfigError(problems)
    return parsed


def _parse(overrides: Sequence[str]) -> tuple[list[Override], list[str]]:
    """The overrides that are overrides, and what is wrong with the other words."""
    parser = OverridesParser.create()
    parsed = []
    problems = []
    # Word by word: Hydra's parser stops at the first one it cannot read.
    for word in overrides:
        try:
            parsed += parser.parse_overrides([word])
        except (HydraException, RecursionError) as error:
            reason = str(error).splitlines()[0]
            problems.append(
                f"{word!r} is not an override ({reason}); write key=value, and quote a value that "
                "holds spaces, commas or brackets: key='\"a, b\"'"
            )
    return parsed, problems


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """All jobs of a multirun: the product of ``key=a,b``, ``choice``, ``range`` and the like, in
    order.
    """
    axes = []
    for override in parse_overrides(overrides):
        if override.is_sweep_override():
            name = override.get_key_element()
            axes.append([f"{name}={value}" for value in override.sweep_string_iterator()])
        else:
            axes.append([override.input_line])
    return [list(job) for job in itertools.product(*axes)]


def _prepare(
    overrides: Sequence[str], schema: type[Section], dirs: list[Path]
) -> tuple[list[str], list[str]]:
    """The words Hydra is given, and what is wrong with the others.

    Hydra is told to set every key whether or not a file mentions it: the schema says what exists.
    """
    parsed, problems = _parse(overrides)
    words = []
    for override in parsed:
        if _is_group(override, schema, dirs):
            words.append(override.input_line)
            continue
        refusal = _refusal(override, schema)
        if refusal:
            problems.append(refusal)
        else:
            words.append("++" + str(override.input_line).lstrip("+"))
    return words, problems


def _is_group(override: Override, schema: type[Section], dirs: list[Path]) -> bool:
    """Whether the key is a directory of configs, of which the value names one."""
    name = override.key_or_group
    # A key of the schema is a value, even where a directory has the same name.
    if "." in name or name in schema.model_fields:
        return False
    return any((directory / name).is_dir() for directory in dirs)


def _refusal(override: Override, schema: type[Section]) -> str | None:
    """Why ``override`` cannot be applied; None where it can."""
    path = override.key_or_group
    if override.is_sweep_override():
        return f"{override.input_line}: several values; add -m to run one job for each"
    if override.is_delete():
        return f"{override.input_line}: keys cannot be removed; set it to null instead"
    if not _exists(path, schema):
        return unknown(path, override.value(), schema_keys(schema))
    return None


def _exists(path: str, schema: type[Section]) -> bool:
    """Whether a value may be written at ``path``. Of the plugged sections, only the one that the
    path names is looked up, which imports little.
    """
    if owner(path, light_keys(schema)) is not None:
        return True
    above, _, rest = path.partition(".")
    name = rest.partition(".")[0]
    if not any(above == section and name in source.names() for section, source in sources(schema)):
        return False
    section = f"{above}.{name}"
    found = plugged_class(schema, section)
    # Where its package is missing nobody knows the keys; that it is missing is said elsewhere.
    return found is None or path == section or owner(path, _keys_below(found, section)) is not None


def _keys_below(section: type[Section], path: str) -> Mapping[str, Key]:
    return keys_of(section, f"{path}.")


def compose_tree(
    name: str,
    overrides: Sequence[str],
    schema: type[Section],
    config_path: str | None = None,
) -> tuple[DictConfig, list[str]]:
    """Compose config ``name`` with ``overrides`` into a plain tree (interpolations kept, types
    unchecked); also return what is wrong with overrides that were left out.

    Raises ConfigError for an unknown config and for files that cannot be joined.
    """
    dirs = config_dirs(config_path)
    name = name.removesuffix(".yaml")
    home = next((directory for directory in dirs if (directory / f"{name}.yaml").is_file()), None)
    words, problems = _prepare(overrides, schema, dirs)
    if home is None:
        known = config_names(config_path)
        guess = nearest_name(name, known)
        hint = f"; did you mean {guess}?" if guess else ""
        missing = f"no config is called {name!r}{hint} There are: {', '.join(known)}"
        raise ConfigError([missing, *problems])
    joined_files([name, *_group_files(words)], dirs)
    # Quoted: a comma or a space in a path would end the list item in Hydra's grammar.
    search = ", ".join(f'"file://{directory}"' for directory in dirs if directory != home)
    try:
        # Without version_base Hydra warns and behaves as an older release does.
        with initialize_config_dir(str(home), version_base="1.3"):
            tree = compose(config_name=name, overrides=[*words, f"hydra.searchpath=[{search}]"])
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([_unreadable(home / f"{name}.yaml", error), *problems]) from error
    # The last two are Hydra's, for defaults that are no list of names.
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, OSError) as error:
        raise ConfigError([_not_composed(home / f"{name}.yaml", error), *problems]) from error
    return tree, problems


def _group_files(words: Sequence[str]) -> list[str]:
    """The files that ``words`` for Hydra choose, each of a directory of configs."""
    chosen = [word.lstrip("+").partition("=") for word in words if not word.startswith("++")]
    return [f"{group.partition('@')[0]}/{name}" for group, _, name in chosen]


def _not_composed(file: Path, error: Exception) -> str:
    """The message about a ``file`` that Hydra cannot join with those of its defaults."""
    # Some of Hydra's errors say nothing themselves.
    lines = f"{error}\n{error.__cause__ or type(error).__name__}".splitlines()
    reason = next(line.strip() for line in lines if line.strip())
    return (
        f"config {file.stem!r}: {file} cannot be composed: {reason}; allowed: sections of keys, "
        "and a list of the names of configs as defaults; fix: mend the file"
    )


def own_files(name: str, config_path: str | None) -> dict[Path, dict[Any, Any]]:
    """The files of the caller's that config ``name`` is made of, with what they write."""
    dirs = config_dirs(config_path)
    found = joined_files([name.removesuffix(".yaml")], dirs)
    shipped = (EXPERIMENTS_DIR, BASE_DIR)
    return {file: written for file, written in found.items() if file.parent not in shipped}


def _unreadable(file: Path, error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """The message about a ``file`` that is no YAML, or that joins one which is none."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    what = getattr(error, "problem", None) or str(error)
    # Hydra does not say which of the files that this one joins could not be read.
    return (
        f"config {file.stem!r}: {file}, or a file of its defaults, is no YAML: {where}{what}; "
        "allowed: key: value, two spaces deeper for each section; fix: mend that line"
    )
