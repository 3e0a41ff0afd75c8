"""Every name that can be played, and the one that was meant."""

import logging

from agent_system.environments.env_registry import (
    REGISTRY,
    UnknownEnvironment,
    canonical,
    resolve,
    variants_of,
)
from verl.utils.hints import did_you_mean

logger = logging.getLogger(__name__)


def every_name() -> list[str]:
    """All registered names in order, each followed by its variants (``NAME/VARIANT``)."""
    return [
        name
        for package in sorted(REGISTRY)
        for name in [package, *(f"{package}/{variant}" for variant in known_variants(package))]
    ]


def known_variants(package: str) -> tuple[str, ...]:
    """What can stand behind the slash; nothing where the library that knows is not installed."""
    try:
        return tuple(variants_of(package))
    except ImportError as error:
        logger.warning("%s: its variants are not known here: %s", package, error)
        return ()


def meant(name: str) -> str:
    """``name`` as it is spelled, whatever its case.

    Raises ``UnknownEnvironment`` that names the nearest one.
    """
    resolve(name)
    package, slash, variant = canonical(name).partition("/")
    known = known_variants(package) if slash else ()
    if variant in known or not known:
        return f"{package}{slash}{variant}"
    spelled = {one.lower(): one for one in known}
    if variant.lower() in spelled:
        return f"{package}/{spelled[variant.lower()]}"
    hint = did_you_mean(variant.lower(), spelled)
    raise UnknownEnvironment(
        f"{package} has no variant {variant!r}{hint} There are: {', '.join(known)}"
    )
