"""Every name that can be played, and the one that was meant."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_system.environments.env_registry import (
    REGISTRY,
    UnknownEnvironment,
    canonical,
    get_package,
    resolve,
)
from verl.utils.hints import did_you_mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """An environment and what is set of it: what ``env_settings`` asks of an ``env`` section."""

    env_name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int = 50
    seed: int = 0


def every_name() -> list[str]:
    """All registered names in order, each followed by its variants (``NAME/VARIANT``)."""
    return [
        name
        for package in sorted(REGISTRY)
        for name in [package, *(f"{package}/{variant}" for variant in variants_of(package))]
    ]


def variants_of(package: str) -> tuple[str, ...]:
    """What can stand behind the slash; nothing where the library that knows is not installed."""
    try:
        return tuple(get_package(package).variants())
    except ImportError as error:
        logger.warning("%s: its variants are not known here: %s", package, error)
        return ()


def meant(name: str) -> str:
    """``name`` as it is spelled, whatever its case.

    Raises ``UnknownEnvironment`` that names the nearest one.
    """
    resolve(name)
    package, slash, variant = canonical(name).partition("/")
    known = variants_of(package) if slash else ()
    if variant in known or not known:
        return f"{package}{slash}{variant}"
    spelled = {one.lower(): one for one in known}
    if variant.lower() in spelled:
        return f"{package}/{spelled[variant.lower()]}"
    hint = did_you_mean(variant.lower(), spelled)
    raise UnknownEnvironment(
        f"{package} has no variant {variant!r}{hint} There are: {', '.join(known)}"
    )
