"""A function of the user's own, by path and name."""

import hashlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.utils.hints import did_you_mean

FIX = (
    "allowed: a function that the file defines; "
    "fix: custom_reward_function.path=FILE custom_reward_function.name=NAME"
)


def load_function(path: str, name: str) -> Callable[..., Any]:
    """Import the Python file ``path`` and return its function ``name``.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: The file raised an error.
        AttributeError: The file defines no such function; the message names the nearest one.
        TypeError: It is not callable.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"custom_reward_function.path={path!r}: no such file; {FIX}")
    module = _import(file)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        hint = did_you_mean(name, public)
        raise AttributeError(
            f"custom_reward_function.name={name!r} is not defined in {path}{hint}; {FIX}"
        )
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"custom_reward_function.name={name!r} in {path} is not a function; {FIX}")
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


def _import(file: Path) -> ModuleType:
    """The module, anew at each call; ``sys.modules`` knows it, since dataclasses and pickle look
    for it there.
    """
    # The whole path: two files of the same name must not share an entry of ``sys.modules``.
    place = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    name = f"_custom_reward_function_{place}"
    loader = importlib.machinery.SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_loader(name, loader)
    if spec is None:
        raise ImportError(f"custom_reward_function.path={str(file)!r} is no module; {FIX}")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: a dataclass looks its module up while it is being defined.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except Exception as error:  # the user's own code
        del sys.modules[name]
        raise ImportError(
            f"custom_reward_function.path={str(file)!r} does not import: {error!r}; {FIX}"
        ) from error
    return module
