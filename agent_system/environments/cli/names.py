"""Names of environments and of their variants (``NAME/VARIANT``), for the command line."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from agent_system.environments import env_registry
from agent_system.environments.package import EnvPackage
from verl.config.settings.hints import did_you_mean

logger = logging.getLogger(__name__)


def list_names() -> list[str]:
    """Return all registered names in order, each followed by its variants (``NAME/VARIANT``)."""
    return [
        name
        for package in sorted(env_registry.REGISTRY)
        for name in [package, *(f"{package}/{variant}" for variant in list_known_variants(package))]
    ]


def list_known_variants(package: str) -> tuple[str, ...]:
    """Return the variants of the environment ``package``.

    If the library that defines them is missing, log a warning and return ().
    """
    try:
        return tuple(env_registry.list_package_variants(package))
    except ImportError as error:
        logger.warning("the variants of %s cannot be listed: %s", package, error)
        return ()


def collect_unlisted_names() -> dict[str, str]:
    """Return usable environment names that the command ``list`` omits, each with the reason."""
    return _merge_texts_of_packages(lambda package: package.unlisted())


def collect_name_remarks() -> dict[str, str]:
    return _merge_texts_of_packages(lambda package: package.remarks())


def _merge_texts_of_packages(
    get_texts_by_variant: Callable[[EnvPackage[Any]], Mapping[str, str]],
) -> dict[str, str]:
    texts_by_name: dict[str, str] = {}
    for name in sorted(env_registry.REGISTRY):
        with contextlib.suppress(ImportError):
            package_texts = get_texts_by_variant(env_registry.get_package(name))
            texts_by_name |= {
                f"{name}/{variant}" if variant else name: text
                for variant, text in package_texts.items()
            }
    return texts_by_name


def list_names_with_oracle() -> tuple[list[str], list[str]]:
    """Return the names with an oracle, then all names that the command ``list`` prints."""
    names = list_names()
    return [name for name in names if _has_oracle(*name.partition("/")[::2])], names


def _has_oracle(package: str, variant: str) -> bool:
    try:
        env_package = env_registry.get_package(package)
    except (ImportError, LookupError):
        return False
    has_solver = env_package.expert is not None or hasattr(env_package.make, "gold_path")
    return has_solver and variant not in env_package.without_oracle


def resolve_name(name: str) -> str:
    """Return the registered spelling of ``name``.

    Example: ``AlfWorld/alfredtwenv`` becomes ``alfworld/AlfredTWEnv``. Log a warning for a variant
    that the command ``list`` omits. Raises ``UnknownEnvironmentError``.
    """
    env_registry.find_entry(name)
    package, slash, variant = env_registry.canonicalize_env_name(name).partition("/")
    variants = list_known_variants(package) if slash else ()
    unlisted_reasons: Mapping[str, str] = {}
    if slash and ":" not in name:
        with contextlib.suppress(ImportError):
            unlisted_reasons = env_registry.get_package(package).unlisted()
    if variant in unlisted_reasons:
        logger.warning("%s is not listed: %s", f"{package}/{variant}", unlisted_reasons[variant])
        return f"{package}/{variant}"
    if variant in variants or not variants:
        return f"{package}{slash}{variant}"
    variants_by_lower_case = {known_variant.lower(): known_variant for known_variant in variants}
    if variant.lower() in variants_by_lower_case:
        return f"{package}/{variants_by_lower_case[variant.lower()]}"
    hint = did_you_mean(variant.lower(), variants_by_lower_case)
    raise env_registry.UnknownEnvironmentError(
        f"{package} has no variant {variant!r}{hint} Allowed: {', '.join(variants)}"
    )
