"""Import of user-provided functions, by file or module and name."""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.config.settings.errors import UserError
from verl.config.settings.hints import did_you_mean
from verl.utils.limits import USER_CODE_ERRORS, describe_raised_error


def load_function(path: str, name: str, key: str = "custom_reward_function") -> Callable[..., Any]:
    """Import the Python file ``path`` and return its function or class ``name``.

    ``key`` is the config section with ``path`` and ``name``, for error messages. Raises
    ``FileNotFoundError``, and ``ImportError`` if the file raised an error. Raises
    ``AttributeError`` for an unknown name, and ``TypeError`` for a value that is not callable.
    """
    fix = f"allowed: a function of a Python file; fix: {key}.path=FILE {key}.name=NAME"
    module = _import_file(path, f"{key}.path={path!r}", fix)
    return _get_callable(module, path, name, f"{key}.name={name!r}", fix)


def load_import_path(import_path: str, key: str) -> Any:
    """Return the function or class at ``import_path``: ``FILE.py:NAME`` or ``MODULE:NAME``.

    ``key`` is the config key with this value. Raises ``ValueError`` for another form, and the
    errors of ``load_function``.
    """
    source, _, name = import_path.rpartition(":")
    setting = f"{key}={import_path!r}"
    allowed_text = "allowed: FILE.py:NAME, MODULE:NAME"
    if not source or not name:
        raise UserError(
            f"{setting} is no import path; {allowed_text}; fix: {import_path.strip(':')}:NAME",
            "invalid_syntax",
        )
    fix = f"{allowed_text}; fix: name an existing function or class"
    is_file = source.endswith(".py")
    module = _import_file(source, setting, fix) if is_file else _import_module(source, setting, fix)
    return _get_callable(module, source, name, setting, fix)


def _import_module(name: str, setting: str, fix: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError):  # the messages of these errors name the module
        raise
    except USER_CODE_ERRORS as error:  # boundary to user code
        error_text = describe_raised_error(error)
        raise ImportError(f"{setting} cannot be imported: {error_text}; {fix}") from error


def _get_callable(
    module: ModuleType, source: str, name: str, setting: str, fix: str
) -> Callable[..., Any]:
    if not hasattr(module, name):
        public_names = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        hint = did_you_mean(name, public_names)
        raise AttributeError(f"{setting} is not defined in {source}{hint}; {fix}")
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{setting} in {source} is not callable; {fix}")
    return function


def check_arguments(
    function: Callable[..., Any], setting: str, argument_names: Sequence[str], remark: str = ""
) -> None:
    """Raise ``TypeError`` if ``function`` lacks some of ``argument_names``.

    ``setting`` is the key and value that name the function. ``remark`` explains the arguments.
    """
    try:
        # A decorator may take other arguments than the function that it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # some built-in functions have no signature
        return
    try:
        signature.bind(**dict.fromkeys(argument_names))
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"{setting} is {name}{signature}, and cannot be called: {error}; allowed: "
            f"{name}({', '.join(argument_names)}){remark}; fix: add these arguments, or **kwargs "
            "for unused ones"
        ) from error


def _import_file(path: str, setting: str, fix: str) -> ModuleType:
    """Import the file ``path`` and return its module. Each call executes the file again."""
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise FileNotFoundError(f"{setting}: no such file; {fix}")
    # Hash the whole path: files with equal names need separate entries of ``sys.modules``.
    path_hash = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    module_name = f"_custom_reward_function_{path_hash}"
    loader = importlib.machinery.SourceFileLoader(module_name, str(file))
    spec = importlib.util.spec_from_loader(module_name, loader)
    if spec is None:
        raise ImportError(f"{setting} is not a Python module; {fix}")
    module = importlib.util.module_from_spec(spec)
    # Register the module before its code runs, because dataclasses and pickle search for it there.
    sys.modules[module_name] = module
    # Modules in the directory of the file can be imported, as in a script that Python executes.
    directory = str(file.resolve().parent)
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        loader.exec_module(module)
    except USER_CODE_ERRORS as error:  # boundary to user code
        del sys.modules[module_name]
        error_text = describe_raised_error(error)
        raise ImportError(f"{setting} cannot be imported: {error_text}; {fix}") from error
    return module
