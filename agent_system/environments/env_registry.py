"""Environment names and where their packages live; a package is imported when it is first asked
for.

A name is a key of the registry (``alfworld``), a key with a variant after a slash
(``alfworld/AlfredTWEnv``), or the place of a package itself (``my_lab.gridworld:PACKAGE``), which
works in every process without registration.
"""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from agent_system.environments.base import EnvPackage

PACKAGES = "agent_system.environments.env_package"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a package lives (``module:attribute``) and the extra of ``setup.py`` that installs what
    it needs.
    """

    target: str
    extra: str | None = None


REGISTRY: dict[str, Entry] = {
    "alfworld": Entry(f"{PACKAGES}.alfworld.package:PACKAGE", extra="envs"),
    "frozen_lake": Entry(f"{PACKAGES}.frozen_lake.package:PACKAGE", extra="envs"),
    "number_line": Entry(f"{PACKAGES}.number_line.package:PACKAGE"),
    "scienceworld": Entry(f"{PACKAGES}.scienceworld.package:PACKAGE", extra="envs"),
    "search": Entry(f"{PACKAGES}.search.package:PACKAGE", extra="envs"),
    "shop": Entry(f"{PACKAGES}.shop.package:PACKAGE", extra="envs"),
    "sokoban": Entry(f"{PACKAGES}.sokoban.package:PACKAGE"),
    "textarena": Entry(f"{PACKAGES}.textarena.package:PACKAGE", extra="envs"),
    "textworld": Entry(f"{PACKAGES}.textworld.package:PACKAGE", extra="envs"),
    "textworld_express": Entry(f"{PACKAGES}.textworld_express.package:PACKAGE", extra="envs"),
    "twenty_questions": Entry(f"{PACKAGES}.twenty_questions.package:PACKAGE"),
    "webshop": Entry(
        f"{PACKAGES}.shop.package:PACKAGE", extra="envs"
    ),  # the name that job scripts use
}


class UnknownEnvironment(KeyError):
    """The name is not registered; the message lists the right ones and the nearest."""

    def __str__(self) -> str:
        return self.args[0]


class MissingExtra(ImportError):
    """The environment's dependencies are not installed; the message names the extra to install."""


def register_env(name: str, target: str | None = None, extra: str | None = None) -> Callable:
    """Register an environment under ``name``; later registrations replace earlier ones.

    ``register_env("grid", "my_lab.grid:PACKAGE")`` registers a place. As a decorator,
    ``@register_env("grid")`` marks a function without arguments that returns an ``EnvPackage``; it
    must live at the top of an importable module, because worker processes import it from there.
    """
    if target is not None:
        REGISTRY[name] = Entry(target, extra)

    def decorate(function: Callable[[], EnvPackage]) -> Callable[[], EnvPackage]:
        REGISTRY[name] = Entry(f"{function.__module__}:{function.__qualname__}", extra)
        return function

    return decorate


def resolve(env_name: str) -> Entry:
    """The entry of ``env_name``. Raises ``UnknownEnvironment``."""
    if ":" in env_name:
        return Entry(env_name)
    name = env_name.split("/", 1)[0]
    if name in REGISTRY:
        return REGISTRY[name]
    nearest = difflib.get_close_matches(name.lower(), REGISTRY, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise UnknownEnvironment(
        f"no environment is called {env_name!r}{hint} There are: {', '.join(sorted(REGISTRY))}"
    )


def get_package(env_name: str) -> EnvPackage:
    """Import and return the package of ``env_name``.

    Raises ``UnknownEnvironment``, ``MissingExtra`` when a dependency is not installed, and
    ``TypeError`` when the place does not hold an ``EnvPackage``.
    """
    entry = resolve(env_name)
    module_name, _, attribute = entry.target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute or "PACKAGE")
    except ModuleNotFoundError as error:
        raise missing_extra(env_name, error) from error
    if callable(found) and not isinstance(found, EnvPackage):
        found = found()
    if not isinstance(found, EnvPackage):
        raise TypeError(
            f"environment {env_name!r}: {entry.target} is a {type(found).__name__}, not an EnvPackage"
        )
    return found


def missing_extra(env_name: str, error: ModuleNotFoundError) -> ImportError:
    """The error to raise when playing ``env_name`` needs the module named in ``error``."""
    extra = resolve(env_name).extra
    how = f"install the extra: pip install -e '.[{extra}]'" if extra else "install it"
    return MissingExtra(
        f"environment {env_name!r} needs the module {error.name!r}, which is not installed; {how}"
    )
