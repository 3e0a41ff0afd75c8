"""Python functions as tools: their JSON schemas, and calls with a timeout."""

import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from agent_system.environments.env_package.tools.calls import Call, MalformedCallError, parse_call
from agent_system.environments.env_package.tools.settings import ToolsSettings
from agent_system.reward_manager.custom import load_import_path
from verl.utils.limits import USER_CODE_ERRORS, describe_error

FUNCTIONS_KEY = "env.tools.functions"


class ToolServerLostError(RuntimeError):
    """Error: the server of a tool has ended, so this environment cannot continue its episode."""


class Tool:
    """Tool that the model can call by name. ``parameters`` is the JSON schema of the arguments."""

    def __init__(self, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self.name = name
        function_schema = {"name": name, "description": description, "parameters": dict(parameters)}
        self.openai_schema = {"type": "function", "function": function_schema}

    def run(self, arguments: dict[str, Any]) -> Any:
        """Call the tool and return a result that JSON can encode.

        Raises ``MalformedCallError``, ``ToolServerLostError`` and the exceptions of the tool.
        """
        raise NotImplementedError


class PythonTool(Tool):
    """Tool made from the signature and the docstring of a Python function."""

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Any] | None) -> None:
        self._function = function
        self._arguments_model = _make_arguments_model(function)
        schema = parameters or _remove_schema_titles(self._arguments_model.model_json_schema())
        super().__init__(function.__name__, inspect.cleandoc(function.__doc__ or ""), schema)

    def run(self, arguments: dict[str, Any]) -> Any:
        try:
            validated_arguments = self._arguments_model.model_validate(arguments)
        except ValidationError as error:
            problem_texts = (
                f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors()
            )
            raise MalformedCallError(
                f"arguments of {self.name}: {'; '.join(problem_texts)}"
            ) from error
        # Pass only arguments of the call, so that the function applies its own defaults.
        argument_names = validated_arguments.model_fields_set
        return self._function(
            **{name: getattr(validated_arguments, name) for name in argument_names}
        )


def _make_arguments_model(function: Callable[..., Any]) -> type[BaseModel]:
    model_fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{FUNCTIONS_KEY}: {function.__name__} has the parameter {parameter}; allowed: "
                "parameters that can be passed by name; fix: replace it by such parameters"
            )
        annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
        model_fields[name] = (
            annotation,
            ... if parameter.default is parameter.empty else parameter.default,
        )
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **model_fields)


def _remove_schema_titles(schema: object) -> Any:
    """Return ``schema`` without the titles that pydantic adds: they only repeat the keys."""
    if isinstance(schema, dict):
        return {
            key: _remove_schema_titles(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_remove_schema_titles(item) for item in schema] if isinstance(schema, list) else schema


def load_tool(import_path: str, settings: ToolsSettings) -> PythonTool:
    """Load the function at ``import_path`` as a tool.

    Raises ``ValueError`` if importing the module fails, or if pydantic cannot read the signature,
    and the exceptions of ``load_import_path``.
    """
    try:
        function = load_import_path(import_path, FUNCTIONS_KEY)
    except (AttributeError, OSError, TypeError, ValueError):
        raise
    except USER_CODE_ERRORS as error:  # user-provided module
        raise ValueError(
            f"{FUNCTIONS_KEY}={import_path!r} cannot be imported: {describe_error(error)}; "
            "allowed: FILE.py:NAME, MODULE:NAME; fix: correct the import path or the module"
        ) from error
    function_name = getattr(function, "__name__", "")
    try:
        return PythonTool(function, settings.schemas.get(function_name))
    except TypeError:
        raise
    except Exception as error:  # undefined annotations, or types that pydantic does not support
        raise ValueError(
            f"{FUNCTIONS_KEY}={import_path!r}: its signature cannot be read: {error}; allowed: "
            "annotations of JSON-able types; fix: correct the annotations of its arguments"
        ) from error


@dataclass(slots=True)
class CallOutcome:
    """Outcome of a call: the value that the tool returned, or an error message for the model."""

    name: str | None  # name of the called function; None: the call cannot be parsed
    value: Any = None
    error: str | None = None
    is_valid: bool = True  # False if the call was malformed or refused


def run_calls(
    tools: Mapping[str, Tool], call_texts: Sequence[str], timeout_s: float
) -> list[CallOutcome]:
    """Parse ``call_texts``, run all calls in parallel and return their outcomes in order.

    The outcome of a call that takes longer than ``timeout_s`` seconds is an error. Its thread runs
    until the function returns or the process ends. Raises ``ToolServerLostError``.
    """
    outcomes: list[CallOutcome] = []
    server_errors: list[ToolServerLostError] = []
    threads = []

    def store_outcome(call_index: int, call: Call) -> None:
        try:
            outcomes[call_index] = _run_call(tools, call)
        except ToolServerLostError as error:
            server_errors.append(error)

    for call_index, text in enumerate(call_texts):
        try:
            call = parse_call(text)
        except MalformedCallError as error:
            outcomes.append(CallOutcome(None, error=str(error), is_valid=False))
            continue
        outcomes.append(CallOutcome(call.name, error=f"no answer within {timeout_s:g} s"))
        thread_arguments = (call_index, call)
        threads.append(threading.Thread(target=store_outcome, args=thread_arguments, daemon=True))
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if server_errors:
        raise server_errors[0]
    # Copy the list, because threads that still run write to ``outcomes`` later.
    return list(outcomes)


def _run_call(tools: Mapping[str, Tool], call: Call) -> CallOutcome:
    tool = tools.get(call.name)
    if tool is None:
        tool_names = ", ".join(sorted(tools))
        return CallOutcome(
            call.name, error=f"there is no function {call.name!r}; {tool_names}", is_valid=False
        )
    try:
        return CallOutcome(call.name, tool.run(call.arguments))
    except MalformedCallError as error:
        return CallOutcome(call.name, error=str(error), is_valid=False)
    except ToolServerLostError:  # not an error of the policy, so the trajectory fails
        raise
    except USER_CODE_ERRORS as error:  # user-provided code: its errors are observations
        return CallOutcome(call.name, error=f"{type(error).__name__}: {describe_error(error, str)}")
