"""A function of the user's own, by path and name."""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.config.settings.hints import did_you_mean


def _fix(key: str) -> str:
    return f"allowed: what a Python file defines; fix: {key}.path=FILE {key}.name=NAME"


def load_function(path: str, name: str, key: str = "custom_reward_function") -> Callable[..., Any]:
    """Import the Python file ``path`` and return its function or class ``name``; both are values of
    the section ``key``.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: The file raised an error.
        AttributeError: The file defines no such function; the message names the nearest one.
        TypeError: It is not callable.
    """
    module = _import(path, f"{key}.path={path!r}", _fix(key))
    return _member(module, path, name, f"{key}.name={name!r}", _fix(key))


def load_place(place: str, key: str) -> Any:
    """The function or class at ``place``, FILE.py:NAME or MODULE:NAME, the value of ``key``.

    Raises ``ValueError`` where it is no place, and else what ``load_function`` raises.
    """
    where, _, name = place.rpartition(":")
    said = f"{key}={place!r}"
    allowed = "allowed: FILE.py:NAME, MODULE:NAME"
    if not where or not name:
        raise ValueError(f"{said} is no place; {allowed}; fix: {place.strip(':')}:NAME")
    fix = f"{allowed}; fix: name what is there"
    own_file = where.endswith(".py")
    module = _import(where, said, fix) if own_file else importlib.import_module(where)
    return _member(module, where, name, said, fix)


def _member(module: ModuleType, where: str, name: str, said: str, fix: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        hint = did_you_mean(name, public)
        raise AttributeError(f"{said} is not defined in {where}{hint}; {fix}")
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{said} in {where} is not a function; {fix}")
    return function


def check_arguments(function: Callable[..., Any], path: str, names: Sequence[str]) -> None:
    """Raise ``TypeError`` where ``function`` of the file ``path`` cannot be called with keyword
    arguments of these ``names``.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some built-in functions nobody knows it
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"custom_reward_function.name={name!r} in {path} is {name}{signature}, and cannot be "
            f"called: {error}; allowed: {name}({', '.join(names)}), which is handed the steps of a "
            f"whole play; fix: give it these arguments, or **kwargs for those it does not need"
        ) from error


def _import(path: str, said: str, fix: str) -> ModuleType:
    """The module, anew at each call; ``sys.modules`` knows it, since dataclasses and pickle look
    for it there.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"{said}: no such file; {fix}")
    # The whole path: two files of the same name must not share an entry of ``sys.modules``.
    place = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    name = f"_custom_reward_function_{place}"
    loader = importlib.machinery.SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_loader(name, loader)
    if spec is None:
        raise ImportError(f"{said} is no module; {fix}")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: a dataclass looks its module up while it is being defined.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except Exception as error:  # the user's own code
        del sys.modules[name]
        raise ImportError(f"{said} does not import: {error!r}; {fix}") from error
    return module
