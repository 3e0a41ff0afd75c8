"""Messages about wrong values, and the context of a check."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from verl.config.settings import Problem, Section, value_at_path
from verl.config.settings.errors import ProblemCode
from verl.config.settings.hints import find_replacement_of_foreign_key, nearest_name

Problems = Iterator[Problem]


@dataclasses.dataclass(frozen=True)
class RegisteredNames:
    """Registered names, built-in and user-provided; None for a registry that was not read."""

    environments: Collection[str] | None = None
    estimators: Mapping[str, Collection[str]] | None = None  # name -> batch columns that it needs
    policy_losses: Collection[str] | None = None
    engines: Collection[str] | None = None


@dataclasses.dataclass(frozen=True)
class CheckContext:
    """Information that checks need in addition to the config: registered names and the device."""

    names: RegisteredNames
    check_files: bool  # True if paths must exist on this machine
    device: str  # cpu | cuda


def build_problem(
    cfg: Section, key: str, why: str, allowed: str, fix: str, code: ProblemCode
) -> Problem:
    """Return the error message about the value of ``key``: ``key=value: why; allowed; fix``."""
    message = f"{key}={value_at_path(cfg, key)!r}: {why}; allowed: {allowed}; fix: {fix}"
    return Problem(message, code)


def build_conflict(cfg: Section, key: str, why: str, allowed: str, fix: str) -> Problem:
    """Return the error message about a value of ``key`` that other keys or options exclude."""
    return build_problem(cfg, key, why, allowed, fix, "conflicting_keys")


def build_unknown_name_problem(
    cfg: Section, key: str, name: str, valid_names: Collection[str]
) -> Problem:
    """Return the error message about an unregistered ``name``; it suggests a similar name."""
    similar_name = nearest_name(name, valid_names)
    suggestion = f"did you mean {similar_name}?" if similar_name else "choose one of those"
    fix = find_replacement_of_foreign_key(f"{key}={name}") or suggestion
    allowed = ", ".join(sorted(valid_names))
    return build_problem(cfg, key, "unknown name", allowed, fix, "unknown_name")
