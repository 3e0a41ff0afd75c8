"""Conversion of a configuration object to nested dictionaries, or to one dict with dotted keys."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_jsonable_python

from verl.config.settings.secret_values import mask_secrets
from verl.utils.jsonl import to_json_types


def config_to_dict(config: object) -> dict[str, Any]:
    """Convert a mapping, dataclass, pydantic model or OmegaConf node to nested dicts.

    Secrets are masked. Raises ``TypeError`` for anything else.
    """
    # Compare the module name, so that OmegaConf is imported only for a config that is its object.
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportArgumentType]
    values = to_jsonable_python(config, fallback=to_json_types)
    if not isinstance(values, dict):
        raise TypeError(f"a configuration is a mapping or a dataclass, not {type(config).__name__}")
    return mask_secrets(values)


def flatten_config(config: object, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Convert a configuration to ``{"a.b": value}``; lists and None become text."""
    values_by_path: dict[str, bool | int | float | str] = {}
    for key, value in config_to_dict(config).items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            values_by_path |= flatten_config(value, f"{name}.")
        else:
            is_simple = isinstance(value, bool | int | float | str)
            values_by_path[name] = value if is_simple else str(value)
    return values_by_path
