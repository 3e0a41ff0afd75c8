"""Composition of a named config and overrides to one nested dictionary, with Hydra."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.plugins import collect_all_keys, env_names, find_env_section_class
from verl.config.settings import ConfigError, Key, Problem, Section, collect_section_keys
from verl.config.settings.hints import build_unknown_key_problem, find_containing_key, nearest_name
from verl.config.settings.keys import format_default, make_section_key
from verl.config.yaml_files import read_included_files

BASE_DIR = Path(__file__).resolve().parent
# The directory configs/ is next to the verl package, both in a checkout and when installed.
EXPERIMENTS_DIR = BASE_DIR.parents[1] / "configs"
POLICIES_DIR = EXPERIMENTS_DIR / "policies"
# Hydra raises ValueError and TypeError for defaults that are not a list of names. OmegaConf raises
# RecursionError for aliases that nest too deeply.
OTHER_COMPOSITION_ERRORS = (ValueError, TypeError, OSError, RecursionError)
# ${shipped_policy:NAME} in a config: the directory of a policy that is part of the package.
OmegaConf.register_new_resolver(
    "shipped_policy", lambda name: str(POLICIES_DIR / name), replace=True
)


def list_config_dirs(config_path: str | None = None) -> list[Path]:
    """Return the search path of configs: ``config_path``, then experiments, then base configs."""
    builtin_dirs = [path for path in (EXPERIMENTS_DIR, BASE_DIR) if path.is_dir()]
    if not config_path:
        return builtin_dirs
    user_dir = Path(config_path).expanduser().resolve()
    if not user_dir.is_dir():
        raise ConfigError(
            f"--config-path {config_path}: no such directory; "
            "allowed: a directory of configs; fix: correct the path",
            "missing_file",
        )
    # The user's directory is the first one, so that a user's config can replace a built-in one.
    return [user_dir, *builtin_dirs]


def list_config_names(config_path: str | None = None) -> list[str]:
    """Return the config names that ``--config-name`` accepts, sorted."""
    files = (file for path in list_config_dirs(config_path) for file in path.glob("*.yaml"))
    return sorted({file.stem for file in files})


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides ``key=value``; raise ``ConfigError`` for those outside Hydra's grammar."""
    parsed_overrides, problems = _parse_valid_overrides(overrides)
    if problems:
        raise ConfigError(problems)
    return parsed_overrides


def _parse_valid_overrides(overrides: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    parser = OverridesParser.create()
    parsed_overrides = []
    problems = []
    # Parse overrides one by one: Hydra's parser stops at the first override that it cannot read.
    for override in overrides:
        try:
            name, separator, value = override.partition("=")
            if not name.strip("+~"):
                raise HydraException("no key")
            parsed_overrides += parser.parse_overrides([name + separator + _quote_paths(value)])
        except (HydraException, RecursionError) as error:
            reason = str(error).splitlines()[0]
            text = (
                f"{override!r} is not an override ({reason}); write key=value, and quote a value "
                "that contains spaces, commas or brackets: key='\"a, b\"'"
            )
            problems.append(Problem(text, "invalid_syntax"))
    return parsed_overrides, problems


def _quote_paths(value: str) -> str:
    """Quote ``~/DIR`` (also in lists and sweeps) and ``runs/seed=1``: Hydra needs the quotes."""
    if value.startswith("~/"):
        paths = re.split(r",(?=~?/)", value)
        return ",".join(f'"{path}"' if path.startswith("~/") else path for path in paths)
    if re.search(r"""['"(){}\\$]""", value):
        return value
    if value.startswith("["):
        return re.sub(r"(?<=[\[,])(\s*)(~/[^,\]]*)", r'\1"\2"', value)
    return f'"{value}"' if "=" in value and "," not in value else value


def list_override_keys(overrides: Sequence[str]) -> list[str]:
    """Return the keys of ``overrides`` (``key=value``, ``+key=value``) in order."""
    return [override.lstrip("+").partition("=")[0] for override in overrides]


def quote_override(key: str, value: object) -> str:
    """Return the override ``key='value'``, in which ``value`` may have any characters but ``${``.

    Without quotes, a path such as ``runs/lr=1e-4`` or ``runs/a,b`` is invalid or a sweep.
    """
    return f"{key}='" + str(value).replace("'", "\\'") + "'"


@dataclass(frozen=True)
class SweepJob:
    """Overrides of one job of a multirun. ``swept_overrides`` are those that differ by job."""

    overrides: list[str]
    swept_overrides: list[str]


def expand_sweep(overrides: Sequence[str]) -> list[SweepJob]:
    """Return the jobs of a multirun: the product of all values ``key=a,b``, ``range(...)`` etc."""
    parsed_overrides = parse_overrides(overrides)
    is_swept = [override.is_sweep_override() for override in parsed_overrides]
    return [
        SweepJob(list(job_overrides), list(itertools.compress(job_overrides, is_swept)))
        for job_overrides in itertools.product(*map(_list_sweep_values, parsed_overrides))
    ]


def _list_sweep_values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key_text = override.get_key_element()
    values_text = str(override.input_line).partition("=")[2]
    # Keep the digits of numbers: Hydra reads 1.10 as 1.1.
    if override.value_type is ValueType.SIMPLE_CHOICE_SWEEP and not re.search(
        r"""['"()\[\]{}\\$]""", values_text
    ):
        return [f"{key_text}={value.strip()}" for value in values_text.split(",")]
    try:
        return [f"{key_text}={value}" for value in override.sweep_string_iterator()]
    except HydraException as error:  # glob(...) lists files of config groups
        message = (
            f"{override.input_line}: not supported in a multirun ({error}); allowed: key=a,b, "
            "choice(a, b), range(0, 3); fix: list the values"
        )
        raise ConfigError(message, "invalid_syntax") from error


def _prepare_overrides(
    overrides: Sequence[str], schema: type[Section], directories: list[Path]
) -> tuple[list[str], list[Problem]]:
    parsed_overrides, problems = _parse_valid_overrides(overrides)
    accepted_overrides = []
    for override in parsed_overrides:
        problem = None
        if _selects_config_group(override, schema, directories):
            accepted_overrides.append(override.input_line)
        elif problem := _find_override_problem(override, schema):
            problems.append(problem)
        else:
            # With ++ Hydra also sets keys that no config file has.
            accepted_overrides.append("++" + _format_override(override, schema))
    return accepted_overrides, problems


def _selects_config_group(
    override: Override, schema: type[Section], directories: list[Path]
) -> bool:
    """Return True for ``GROUP=NAME``, which selects a config file of a config group."""
    name = override.key_or_group
    # A key of the schema is not a config group, even if a directory has the same name.
    if "." in name or name in schema.model_fields:
        return False
    return any((directory / name).is_dir() for directory in directories)


def _format_override(override: Override, schema: type[Section]) -> str:
    """Return ``override`` for Hydra. A number is quoted if the key has values of type text."""
    path = override.key_or_group
    number_text = read_number_as_text(override, _find_key(path, schema))
    override_text = str(override.input_line).lstrip("+")
    return override_text if number_text is None else quote_override(path, number_text)


def read_number_as_text(override: Override, key: Key | None) -> str | None:
    """Return the number in ``override`` as text if ``key`` has values of type text, else None.

    Hydra reads 1.10 as 1.1.
    """
    if key is None or key.path != override.key_or_group or key.is_section:
        return None
    # type() and not isinstance(), because bool is a subclass of int.
    is_number = not override.is_delete() and type(override.value()) in (int, float)
    if not is_number or not key.value_type.is_text or key.value_type.is_list:
        return None
    return str(override.input_line).partition("=")[2].strip()


def _find_override_problem(override: Override, schema: type[Section]) -> Problem | None:
    path = override.key_or_group
    key = _find_key(path, schema)
    if override.is_sweep_override():
        fix = "add -m to run one job for each"
        if key is not None and not key.is_section and key.value_type.is_list:
            value = str(override.input_line).partition("=")[2]
            fix = f"{path}=[{value}] for one list, or {fix}"
        return Problem(f"{override.input_line}: several values; fix: {fix}", "invalid_syntax")
    if override.is_delete():
        fix = "leave it out"
        if key is not None and not key.is_section:
            fix = f"{key.path}={format_default(key)} sets the default"
        return Problem(
            f"{override.input_line}: keys cannot be removed; fix: {fix}", "invalid_syntax"
        )
    if key is None and not _is_key_of_missing_package(path):
        return build_unknown_key_problem(path, override.value(), collect_all_keys(schema))
    return None


def _find_key(path: str, schema: type[Section]) -> Key | None:
    """Return the declared key or section at ``path``, or the dictionary key that contains it.

    None for an unknown path. For a path ``env.NAME...`` only the environment NAME is imported.
    """
    key = find_containing_key(path, collect_section_keys(schema))
    name = _get_env_name(path)
    section = find_env_section_class(name) if key is None and name else None
    if section is None:
        return key
    section_key = make_section_key(f"env.{name}", section)
    keys = collect_section_keys(section, f"env.{name}.")
    return section_key if path == section_key.path else find_containing_key(path, keys)


def _is_key_of_missing_package(path: str) -> bool:
    """Return True for a key of an environment whose package is missing, so its keys are unknown."""
    name = _get_env_name(path)
    return bool(name) and find_env_section_class(name) is None  # check_env refuses the environment


def _get_env_name(path: str) -> str:
    """Return the registered environment to whose section ``path`` belongs, or ""."""
    section, _, path_in_section = path.partition(".")
    name = path_in_section.partition(".")[0]
    return name if section == "env" and name in env_names() else ""


def _strip_config_suffix(name: str, directories: Sequence[Path]) -> str:
    """Return the config name without the suffix .yaml. Raise ``ConfigError`` if it is a path."""
    name = name.removesuffix(".yaml")
    file_path = Path(name).expanduser()
    is_in_directory = any((directory / f"{name}.yaml").is_file() for directory in directories)
    is_file_elsewhere = not is_in_directory and Path(f"{file_path}.yaml").is_file()
    # A name may contain folders, as sub/NAME, but it is relative to a directory of configs.
    if is_file_elsewhere or {"", ".", "..", "~"} & set(name.split("/")):
        raise ConfigError(
            f"--config-name {name}: a path; allowed: the name of a config; "
            f"fix: --config-path {file_path.parent} --config-name {file_path.name}",
            "unknown_name",
        )
    return name


def compose_tree(
    name: str,
    overrides: Sequence[str],
    schema: type[Section],
    config_path: str | None = None,
) -> tuple[DictConfig, list[Problem]]:
    """Compose config ``name`` with ``overrides``; do not resolve its interpolations.

    Also return a message for each override that was not applied. Raise ``ConfigError`` for an
    unknown config and for files that cannot be composed.
    """
    directories = list_config_dirs(config_path)
    name = _strip_config_suffix(name, directories)
    config_dir = next((path for path in directories if (path / f"{name}.yaml").is_file()), None)
    accepted_overrides, problems = _prepare_overrides(overrides, schema, directories)
    if config_dir is None:
        known_names = list_config_names(config_path)
        similar_name = nearest_name(name, known_names)
        hint = f"; did you mean {similar_name}?" if similar_name else ""
        message = f"no config is called {name!r}{hint} There are: {', '.join(known_names)}"
        raise ConfigError([Problem(message, "unknown_name"), *problems])
    read_included_files([name, *_list_group_files(accepted_overrides)], directories)
    config_file = config_dir / f"{name}.yaml"
    # Quote the paths: a comma or a space in a path would end the list item in Hydra's grammar.
    search_path = ", ".join(
        f'"file://{directory}"' for directory in directories if directory != config_dir
    )
    try:
        # Without version_base Hydra warns and behaves like an older release.
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            tree = compose(
                config_name=name,
                overrides=[*accepted_overrides, f"hydra.searchpath=[{search_path}]"],
            )
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([_format_unreadable_file_error(config_file, error), *problems]) from error
    except (HydraException, OmegaConfBaseException, *OTHER_COMPOSITION_ERRORS) as error:
        raise ConfigError([_format_composition_error(config_file, error), *problems]) from error
    return tree, problems


def _list_group_files(overrides: Sequence[str]) -> list[str]:
    """Return the config files ``GROUP/NAME`` that overrides of the form ``GROUP=NAME`` select."""
    pairs = [override.partition("=") for override in overrides if not override.startswith("++")]
    return [f"{group.lstrip('+').partition('@')[0]}/{name}" for group, _, name in pairs]


def _format_composition_error(config_file: Path, error: Exception) -> Problem:
    """Return the message about a file that Hydra cannot merge with its ``defaults`` list."""
    # Some errors of Hydra have an empty message. For those, use the message of their cause.
    message_lines = f"{error}\n{error.__cause__ or type(error).__name__}".splitlines()
    reason = next(line.strip() for line in message_lines if line.strip())
    return Problem(
        f"config {config_file.stem!r}: {config_file} cannot be composed: {reason}; allowed: "
        "sections of keys, and a list of the names of configs as defaults; fix: correct the file",
        "unreadable_file",
    )


def read_user_config_files(name: str, config_path: str | None) -> dict[Path, dict[Any, Any]]:
    """Return the contents, by path, of the YAML files of config ``name`` that are not built in."""
    directories = list_config_dirs(config_path)
    files = read_included_files([_strip_config_suffix(name, directories)], directories)
    builtin_dirs = (EXPERIMENTS_DIR, BASE_DIR)
    return {file: content for file, content in files.items() if file.parent not in builtin_dirs}


def _format_unreadable_file_error(
    config_file: Path, error: yaml.YAMLError | UnicodeDecodeError
) -> Problem:
    """Return the message about a ``config_file`` that is not YAML, or that includes such a file."""
    error_mark = getattr(error, "problem_mark", None)
    position = f"line {error_mark.line + 1}, column {error_mark.column + 1}: " if error_mark else ""
    parser_message = getattr(error, "problem", None) or str(error)
    # Hydra does not report which file of the defaults list could not be read.
    return Problem(
        f"config {config_file.stem!r}: {config_file}, or a file of its defaults, is not YAML: "
        f"{position}{parser_message}; "
        "allowed: key: value, indented by two more spaces in each section; fix: correct that line",
        "unreadable_file",
    )
