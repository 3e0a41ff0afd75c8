"""How a problem is said, and what a check may know besides the config."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from verl.config.settings import Problem, Section, lookup
from verl.config.settings.hints import nearest_name
from verl.config.settings.unknown import meaning

Problems = Iterator[str]


@dataclasses.dataclass(frozen=True)
class Names:
    """What this process has registered, modules of the user's own included; None where it has not
    been looked up.

    ``estimators`` maps a name to the batch columns it cannot do without.
    """

    environments: Collection[str] | None = None
    estimators: Mapping[str, Collection[str]] | None = None
    policy_losses: Collection[str] | None = None
    engines: Collection[str] | None = None


@dataclasses.dataclass(frozen=True)
class Context:
    """What a check may know besides the config."""

    names: Names
    check_files: bool  # whether paths must exist on this machine
    device: str  # cpu | cuda


def problem(cfg: Section, key: str, why: str, allowed: str, fix: str, code: str = "") -> Problem:
    """Return the message about the value of ``key``. ``code`` tells the mistakes of a key apart."""
    return Problem(f"{key}={lookup(cfg, key)!r}: {why}; allowed: {allowed}; fix: {fix}", code)


def unknown_name(cfg: Section, key: str, name: str, known: Collection[str]) -> Problem:
    """Return the message about a ``name`` that no registry has, with the nearest one."""
    guess = nearest_name(name, known)
    near = f"did you mean {guess}?" if guess else "take one of those"
    fix = meaning(f"{key}={name}") or near
    return problem(cfg, key, "unknown name", ", ".join(sorted(known)), fix, "unknown_name")
