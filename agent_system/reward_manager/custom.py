"""A function of the user's own, by path and name."""

import difflib
import importlib.util
from collections.abc import Callable
from pathlib import Path


def load_function(path: str, name: str) -> Callable:
    """Import the Python file ``path`` and return its function ``name``.

    Raises:
        FileNotFoundError: There is no such file.
        AttributeError: The file defines no such function; the message names the nearest one.
        TypeError: It is not callable.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"custom_reward_function.path={path!r}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"custom_reward_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        nearest = difflib.get_close_matches(name, public, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise AttributeError(f"custom_reward_function.name={name!r} is not defined in {path}{hint}")
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"custom_reward_function.name={name!r} in {path} is not a function")
    return function
