"""Names of environments and their variants."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from agent_system.environments.env_registry import (
    REGISTRY,
    UnknownEnvironment,
    canonical_name,
    find_entry,
    get_package,
    variants_of,
)
from agent_system.environments.package import EnvPackage
from verl.config.settings.hints import did_you_mean

logger = logging.getLogger(__name__)


def list_names() -> list[str]:
    """Return all registered names in order, each followed by its variants (``NAME/VARIANT``)."""
    return [
        name
        for package in sorted(REGISTRY)
        for name in [package, *(f"{package}/{variant}" for variant in known_variants(package))]
    ]


def known_variants(package: str) -> tuple[str, ...]:
    """Return the variants of ``package``. Log a warning and return () if its library is missing."""
    try:
        return tuple(variants_of(package))
    except ImportError as error:
        logger.warning("the variants of %s cannot be listed: %s", package, error)
        return ()


def unlisted_names() -> dict[str, str]:
    """Return the names that can be used but are not listed, each with the reason."""
    return _collect_texts(lambda package: package.unlisted())


def name_remarks() -> dict[str, str]:
    """Return the remarks about listed names."""
    return _collect_texts(lambda package: package.remarks())


def _collect_texts(texts: Callable[[EnvPackage[Any]], Mapping[str, str]]) -> dict[str, str]:
    return {
        f"{package}/{variant}" if variant else package: text
        for package in sorted(REGISTRY)
        for variant, text in _package_texts(package, texts).items()
    }


def _package_texts(
    name: str, texts: Callable[[EnvPackage[Any]], Mapping[str, str]]
) -> Mapping[str, str]:
    try:
        return texts(get_package(name))
    except ImportError:
        return {}


def names_with_oracle() -> tuple[list[str], list[str]]:
    """Return the listed names that have an oracle, and all listed names.

    An oracle knows a solution of every task. It is an expert of the package, or the method
    ``gold_path`` of the environment.
    """
    names = list_names()
    return [name for name in names if _has_oracle(*name.partition("/")[::2])], names


def _has_oracle(package: str, variant: str) -> bool:
    try:
        loaded = get_package(package)
    except (ImportError, LookupError):
        return False
    has_solution = loaded.expert is not None or hasattr(loaded.make, "gold_path")
    return has_solution and variant not in loaded.without_oracle


def resolve_name(name: str) -> str:
    """Return ``name`` in the spelling of the registry and of its variants.

    Log a warning for an unlisted variant. Raises ``UnknownEnvironment``, which names the nearest
    variant.
    """
    find_entry(name)
    package, slash, variant = canonical_name(name).partition("/")
    variants = known_variants(package) if slash else ()
    listed_elsewhere = slash and ":" not in name
    unlisted = _package_texts(package, lambda loaded: loaded.unlisted()) if listed_elsewhere else {}
    if variant in unlisted:
        logger.warning("%s is not listed: %s", f"{package}/{variant}", unlisted[variant])
        return f"{package}/{variant}"
    if variant in variants or not variants:
        return f"{package}{slash}{variant}"
    spelled = {known_variant.lower(): known_variant for known_variant in variants}
    if variant.lower() in spelled:
        return f"{package}/{spelled[variant.lower()]}"
    hint = did_you_mean(variant.lower(), spelled)
    raise UnknownEnvironment(
        f"{package} has no variant {variant!r}{hint} Allowed: {', '.join(variants)}"
    )
