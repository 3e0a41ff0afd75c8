"""Configs by name: compose, type, derive, and say which keys change nothing here."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.compose import compose_tree
from verl.trainer.config.derive import derive
from verl.trainer.config.keys import schema_keys
from verl.trainer.config.schema import PPOConfig
from verl.trainer.config.typed import lookup, to_object, to_typed

logger = logging.getLogger(__name__)
Schema = TypeVar("Schema")


def load_tree(
    name: str,
    overrides: Sequence[str] = (),
    schema: type = PPOConfig,
    config_path: str | None = None,
) -> DictConfig:
    """The composed and typed config before derivation, interpolations kept: what ``--cfg job``
    prints.
    """
    return to_typed(compose_tree(name, overrides, schema, config_path), schema)


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
    return derive(to_object(load_tree(name, overrides, schema, config_path), schema))


def default_config(schema: type[Schema] = PPOConfig) -> Schema:
    """The schema's own defaults, resolved and derived, without reading any file."""
    return derive(to_object(OmegaConf.structured(schema), schema))


def without_effect(cfg: Any, device: str) -> dict[str, str]:
    """Keys that were set and change nothing on ``device``, each with the reason."""
    found = {}
    for key in schema_keys(type(cfg)).values():
        if key.is_section or lookup(cfg, key.path) == key.default:
            continue
        if key.unused:
            found[key.path] = key.unused
        elif key.gpu_only and device == "cpu":
            found[key.path] = "there is no GPU here"
    return found


def warn_without_effect(cfg: Any) -> None:
    """Log one warning that names every key which was set and changes nothing here."""
    found = without_effect(cfg, guess_device(cfg.trainer.device))
    if found:
        logger.warning(
            "set, but without effect here: %s",
            "; ".join(f"{key} ({why})" for key, why in found.items()),
        )


def guess_device(device: str) -> str:
    """``cpu`` or ``cuda`` as ``auto`` will most likely turn out, without importing torch."""
    if device != "auto":
        return device
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def to_dict(cfg: Any) -> dict[str, Any]:
    """``cfg`` as nested plain dictionaries."""
    return dataclasses.asdict(cfg)


def to_yaml(cfg: Any) -> str:
    """``cfg`` as YAML, as the run directory keeps it."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg)))
