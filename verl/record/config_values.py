"""Conversion of a configuration object to nested dictionaries, or to one dict with dotted keys."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from verl.config.settings.secret_values import mask_secrets


def config_to_dict(config: object) -> dict[str, Any]:
    """Convert a mapping, dataclass, pydantic model or OmegaConf node to nested dicts.

    Secrets are masked. Raises ``TypeError`` for anything else.
    """
    return mask_secrets(_as_dict(config))


def _as_dict(config: object) -> dict[str, Any]:
    if isinstance(config, BaseModel):
        return config.model_dump(mode="json")  # tuples become lists, because YAML has no tuples
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    # Compare the module name, so that OmegaConf is imported only for a config that is its object.
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        resolved_config = OmegaConf.to_container(config, resolve=True)
        return {str(key): value for key, value in dict(resolved_config).items()}  # pyright: ignore
    if isinstance(config, Mapping):
        return {str(key): value for key, value in config.items()}
    raise TypeError(f"a configuration is a mapping or a dataclass, not {type(config).__name__}")


def flatten_config(config: object, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Convert a configuration to ``{"a.b": value}``; lists and None become text."""
    values_by_path: dict[str, bool | int | float | str] = {}
    for key, value in config_to_dict(config).items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping | BaseModel) or dataclasses.is_dataclass(value):
            values_by_path |= flatten_config(value, f"{name}.")
        else:
            values_by_path[name] = (
                value if isinstance(value, bool | int | float | str) else str(value)
            )
    return values_by_path
