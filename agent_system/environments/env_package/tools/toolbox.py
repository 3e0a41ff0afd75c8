"""Python functions as tools: their JSON schemas, and calls with a timeout."""

import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from agent_system.environments.env_package.tools.calls import BadCall, Call
from agent_system.environments.env_package.tools.settings import ToolsSettings
from agent_system.reward_manager.custom import load_import_path

FUNCTIONS_KEY = "env.tools.functions"


class Tool:
    """Tool that the model can call by name. ``parameters`` is the JSON schema of the arguments."""

    def __init__(self, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self.name = name
        function = {"name": name, "description": description, "parameters": dict(parameters)}
        self.openai_schema = {"type": "function", "function": function}

    def validate_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Validate ``arguments`` and convert them to the types of the function.

        Raises ``BadCall``.
        """
        return arguments

    def run(self, arguments: dict[str, Any]) -> Any:
        """Call the tool and return its JSON-able result. Raises the exceptions of the tool."""
        raise NotImplementedError


class PythonTool(Tool):
    """Tool made from a Python function.

    Its signature gives the types of the arguments, and its docstring the description.
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Any] | None) -> None:
        self._function = function
        self._model = _arguments_of(function)
        schema = parameters or _without_titles(self._model.model_json_schema())
        super().__init__(function.__name__, inspect.cleandoc(function.__doc__ or ""), schema)

    def validate_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            validated = self._model.model_validate(arguments)
        except ValidationError as error:
            problems = (
                f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors()
            )
            raise BadCall(f"arguments of {self.name}: {'; '.join(problems)}") from error
        # Arguments that were not given keep the defaults of the function.
        return {key: getattr(validated, key) for key in validated.model_fields_set}

    def run(self, arguments: dict[str, Any]) -> Any:
        return self._function(**arguments)


def _arguments_of(function: Callable[..., Any]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{FUNCTIONS_KEY}: {function.__name__} has the parameter {parameter}; allowed: "
                "parameters that can be passed by name; fix: replace it by such parameters"
            )
        hint = Any if parameter.annotation is parameter.empty else parameter.annotation
        fields[name] = (hint, ... if parameter.default is parameter.empty else parameter.default)
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def _without_titles(schema: Any) -> Any:
    """Return ``schema`` without pydantic's titles, which only repeat the keys."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema


def load_tool(import_path: str, settings: ToolsSettings) -> PythonTool:
    """Load the function at ``import_path`` as a tool.

    Raises the exceptions of ``load_import_path``, and ``ValueError`` for a module whose import
    fails or a signature that pydantic cannot read.
    """
    try:
        function = load_import_path(import_path, FUNCTIONS_KEY)
    except (AttributeError, OSError, TypeError, ValueError):
        raise
    except Exception as error:  # user-provided module
        raise ValueError(
            f"{FUNCTIONS_KEY}={import_path!r} cannot be imported: {error!r}; allowed: "
            "FILE.py:NAME, MODULE:NAME; fix: correct the import path or the module"
        ) from error
    name = getattr(function, "__name__", "")
    try:
        return PythonTool(function, settings.schemas.get(name))
    except TypeError:
        raise
    except Exception as error:  # undefined annotations, or types that pydantic does not support
        raise ValueError(
            f"{FUNCTIONS_KEY}={import_path!r}: its signature cannot be read: {error}; allowed: "
            "annotations of JSON-able types; fix: correct the annotations of its arguments"
        ) from error


@dataclass(slots=True)
class CallOutcome:
    """Outcome of a call: a value, or an error message for the model."""

    name: str | None
    value: Any = None
    error: str | None = None
    is_valid: bool = True  # False: the call itself was malformed


def run_calls(
    tools: Mapping[str, Tool], calls: Sequence[Call], timeout_s: float
) -> list[CallOutcome]:
    """Run all ``calls`` in parallel and return their outcomes in order.

    A call that takes longer than ``timeout_s`` seconds gives an error. Its thread stays until the
    function returns or the process ends.
    """
    outcomes = [CallOutcome(call.name, error=f"no answer within {timeout_s:g} s") for call in calls]

    def store_outcome(index: int, call: Call) -> None:
        outcomes[index] = _run_call(tools, call)

    threads = [
        threading.Thread(target=store_outcome, args=entry, daemon=True)
        for entry in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    # Copy: threads that are still running write to ``outcomes`` later.
    return list(outcomes)


def _run_call(tools: Mapping[str, Tool], call: Call) -> CallOutcome:
    tool = tools.get(call.name)
    if tool is None:
        tool_names = ", ".join(sorted(tools))
        return CallOutcome(
            call.name, error=f"there is no function {call.name!r}; {tool_names}", is_valid=False
        )
    try:
        arguments = tool.validate_arguments(call.arguments)
    except BadCall as error:
        return CallOutcome(call.name, error=str(error), is_valid=False)
    try:
        return CallOutcome(call.name, tool.run(arguments))
    except Exception as error:  # user-provided code: its errors are observations
        return CallOutcome(call.name, error=f"{type(error).__name__}: {error}")
