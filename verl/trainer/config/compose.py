"""From a config name and overrides to one plain tree, by Hydra: defaults lists, search path,
override grammar.
"""

import difflib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl.trainer.config.errors import ConfigError
from verl.trainer.config.keys import Key, owner, schema_keys, unknown

BASE_DIR = Path(__file__).resolve().parent
EXPERIMENTS_DIR = (
    BASE_DIR.parents[2] / "configs"
)  # beside the verl package, in a checkout and when installed


def config_dirs(config_path: str | None = None) -> list[Path]:
    """Directories that are searched for configs: the caller's, then the experiments, then the
    bases.
    """
    own = [Path(config_path).expanduser().resolve()] if config_path else []
    for directory in own:
        if not directory.is_dir():
            raise ConfigError(f"--config-path {config_path}: no such directory")
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
    parser = OverridesParser.create()
    parsed, problems = [], []
    for word in overrides:
        try:
            parsed += parser.parse_overrides([word])
        except HydraException as error:
            reason = str(error).splitlines()[0]
            problems.append(
                f"{word!r} is not an override ({reason}); write key=value, and quote a value that holds "
                "spaces, commas or brackets: key='\"a, b\"'"
            )
    if problems:
        raise ConfigError(problems)
    return parsed


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


def _prepare(overrides: Sequence[str], schema: type, dirs: list[Path]) -> list[str]:
    """Check override keys against ``schema`` and let Hydra set them whether or not a file mentions
    them.
    """
    keys, parsed = schema_keys(schema), parse_overrides(overrides)
    names = {override.key_or_group for override in parsed} - set(keys)
    groups = {
        name
        for name in names
        if "." not in name and any((directory / name).is_dir() for directory in dirs)
    }
    problems = [refusal for override in parsed if (refusal := _refusal(override, keys, groups))]
    if problems:
        raise ConfigError(problems)
    return [
        override.input_line
        if override.key_or_group in groups
        else "++" + override.input_line.lstrip("+")
        for override in parsed
    ]


def _refusal(override: Override, keys: Mapping[str, Key], groups: set[str]) -> str | None:
    """Why ``override`` cannot be applied; None where it can."""
    key = override.key_or_group
    if override.is_sweep_override():
        return f"{override.input_line}: several values; add -m to run one job for each"
    if override.is_delete():
        return f"{override.input_line}: keys cannot be removed; set it to null instead"
    if key not in groups and owner(key, keys) is None:
        return unknown(key, override.value(), keys)
    return None


def compose_tree(
    name: str, overrides: Sequence[str], schema: type, config_path: str | None = None
) -> DictConfig:
    """Compose config ``name`` with ``overrides`` into a plain tree (interpolations kept, types
    unchecked).

    Raises ConfigError for an unknown config, an override that is no override and an unknown
    override key.
    """
    dirs = config_dirs(config_path)
    name = name.removesuffix(".yaml")
    home = next((directory for directory in dirs if (directory / f"{name}.yaml").is_file()), None)
    if home is None:
        known = config_names(config_path)
        guess = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {guess[0]}?" if guess else ""
        raise ConfigError(f"no config is called {name!r}{hint} There are: {', '.join(known)}")
    words = _prepare(overrides, schema, dirs)
    search = ", ".join(f'"file://{directory}"' for directory in dirs if directory != home)
    try:
        with initialize_config_dir(str(home), version_base="1.3"):
            return compose(config_name=name, overrides=[*words, f"hydra.searchpath=[{search}]"])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"config {name!r} cannot be composed: {error}") from error
