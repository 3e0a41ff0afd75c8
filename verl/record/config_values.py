"""A configuration as nested dictionaries and as flat names, whatever classes it is made of."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from verl.config.settings.secret_values import masked


def as_dict(config: object) -> dict[str, Any]:
    """A mapping, dataclass, pydantic model or OmegaConf node as nested dicts, secrets masked.

    Raises ``TypeError`` for anything else.
    """
    return masked(_as_dict(config))


def _as_dict(config: object) -> dict[str, Any]:
    if isinstance(config, BaseModel):
        return config.model_dump(mode="json")  # tuples are lists, as YAML has them
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    # Asked for by name: the file of a run is read where OmegaConf is not installed.
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        resolved = OmegaConf.to_container(config, resolve=True)
        return {str(key): value for key, value in dict(resolved).items()}  # pyright: ignore
    if isinstance(config, Mapping):
        return {str(key): value for key, value in config.items()}
    raise TypeError(f"a configuration is a mapping or a dataclass, not {type(config).__name__}")


def flatten(config: object, prefix: str = "") -> dict[str, bool | int | float | str]:
    """A configuration as ``{"a.b": value}`` with plain values; lists and None become text."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in as_dict(config).items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping | BaseModel) or dataclasses.is_dataclass(value):
            flat.update(flatten(value, f"{name}."))
        elif isinstance(value, bool | int | float | str):
            flat[name] = value
        else:
            flat[name] = str(value)
    return flat
