"""Python functions as tools: their JSON schemas, and how they are called within a time limit."""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from agent_system.environments.env_package.tools.calls import BadCall, Call
from agent_system.environments.env_package.tools.settings import ToolsSettings
from agent_system.reward_manager.custom import load_place

KEY = "env.tools.functions"


class Tool(Protocol):
    """Something to call."""

    @property
    def name(self) -> str:
        """What the model calls it."""
        ...

    @property
    def schema(self) -> dict[str, Any]:
        """``{"type": "function", "function": {"name", "description", "parameters"}}``."""
        ...

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments in the types that the function takes. Raises ``BadCall``."""
        ...

    def run(self, arguments: dict[str, Any]) -> Any:
        """The result, which JSON can write. Raises what the function raises."""
        ...


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A function in the OpenAI format."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


class PythonTool:
    """A function whose signature says the types of its arguments, and whose docstring what it
    does.
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Any] | None) -> None:
        self.name = function.__name__
        self._function = function
        self._model = _arguments_of(function)
        description = inspect.cleandoc(function.__doc__ or "")
        shown = parameters or _without_titles(self._model.model_json_schema())
        self.schema = function_schema(self.name, description, shown)

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """See ``Tool``."""
        try:
            read = self._model.model_validate(arguments)
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise BadCall(f"arguments of {self.name}: {'; '.join(wrong)}") from error
        # Defaults are the function's own.
        return {key: getattr(read, key) for key in read.model_fields_set}

    def run(self, arguments: dict[str, Any]) -> Any:
        """See ``Tool``."""
        return self._function(**arguments)


def _arguments_of(function: Callable[..., Any]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{KEY}: {function.__name__} takes {parameter}; allowed: arguments with a name; "
                "fix: name them"
            )
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        fields[name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def _without_titles(schema: Any) -> Any:
    """Without the names that pydantic makes up: they say what the keys say."""
    if isinstance(schema, dict):
        kept = schema.items()
        return {
            key: _without_titles(value)
            for key, value in kept
            if not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema


def load_tools(settings: ToolsSettings) -> list[PythonTool]:
    """The functions that ``settings`` name.

    Raises what ``load_place`` raises, and ``ValueError`` for a module that does not import or a
    signature that cannot be read.
    """
    return [_load_tool(place, settings) for place in settings.functions]


def _load_tool(place: str, settings: ToolsSettings) -> PythonTool:
    try:
        function = load_place(place, KEY)
    except (AttributeError, OSError, TypeError, ValueError):
        raise
    except Exception as error:  # the module may be the user's own
        raise ValueError(
            f"{KEY}={place!r} does not import: {error!r}; allowed: FILE.py:NAME, MODULE:NAME; "
            "fix: the name, or the module"
        ) from error
    name = getattr(function, "__name__", "")
    try:
        return PythonTool(function, settings.schemas.get(name))
    except TypeError:
        raise
    except Exception as error:  # annotations that nothing defines, or that pydantic does not know
        raise ValueError(
            f"{KEY}={place!r}: its signature cannot be read: {error}; allowed: annotations that "
            "JSON can write; fix: annotate its arguments"
        ) from error


@dataclass(slots=True)
class Outcome:
    """What came of a call: a value or an error, in words for the model."""

    name: str | None
    value: Any = None
    error: str | None = None
    valid: bool = True  # False: the call itself was wrong


def run_all(tools: Mapping[str, Tool], calls: Sequence[Call], timeout_s: float) -> list[Outcome]:
    """Make all ``calls`` at once; those that take longer than ``timeout_s`` end as errors.

    A function that does not return keeps its thread until the process ends.
    """
    outcomes = [Outcome(call.name, error=f"no answer within {timeout_s:g} s") for call in calls]
    threads = [
        threading.Thread(target=_into, args=(outcomes, place, tools, call), daemon=True)
        for place, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    done = threading.Event()
    waiter = threading.Thread(target=_join_all, args=(threads, done), daemon=True)
    waiter.start()
    done.wait(timeout_s)
    # What comes later must not change what was said.
    return list(outcomes)


def _join_all(threads: Sequence[threading.Thread], done: threading.Event) -> None:
    for thread in threads:
        thread.join()
    done.set()


def _into(outcomes: list[Outcome], place: int, tools: Mapping[str, Tool], call: Call) -> None:
    outcomes[place] = _outcome(tools, call)


def _outcome(tools: Mapping[str, Tool], call: Call) -> Outcome:
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(sorted(tools))
        return Outcome(call.name, error=f"there is no function {call.name!r}; {known}", valid=False)
    try:
        arguments = tool.check(call.arguments)
    except BadCall as error:
        return Outcome(call.name, error=str(error), valid=False)
    try:
        return Outcome(call.name, tool.run(arguments))
    except Exception as error:  # the user's own code: its errors are observations
        return Outcome(call.name, error=f"{type(error).__name__}: {error}")
