"""The forms in which children write ``_step_episode``, and callers call it.

    (session_id, action)                 today: the state is ``active_states[session_id]``
    (session_id, state, llm_action)      older: it is handed over

Either form of call reaches either form of hook.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from agent_system.agents import Message

StepResult = tuple[Any, float, bool, dict[str, Any]]
_ACTION_NAMES = ("action", "llm_action")
_MISSING = object()


class HasStates(Protocol):
    """An environment: the states of sessions under way."""

    active_states: MutableMapping[str, Any]


def either_form(hook: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """``hook``, an unbound ``_step_episode`` of either form, callable in both."""
    takes_state = _takes_state(hook)

    @functools.wraps(hook)
    def step(env: HasStates, session_id: str, *said: Any, **named: Any) -> StepResult:
        state, action = _told(said, named)
        if takes_state:
            known = env.active_states[session_id] if state is _MISSING else state
            return hook(env, session_id, known, action)
        if state is not _MISSING:
            env.active_states[session_id] = state
        return hook(env, session_id, action)

    return step


def _takes_state(hook: Callable[..., StepResult]) -> bool:
    """Whether the hook has a third argument, after itself and the session's id, beside the
    action.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(hook).parameters.values()
    required = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    return len(required) > 3


def _told(said: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """The state (``_MISSING`` where the caller left it out) and the action of a call."""
    state = named.pop("state", _MISSING)
    action = _MISSING
    for name in _ACTION_NAMES:
        action = named.pop(name, action)
    values = list(said)
    if action is _MISSING and values:
        action = values.pop()
    if state is _MISSING and values:
        state = values.pop()
    if action is _MISSING or values or named:
        raise TypeError(
            "_step_episode takes (session_id, action) or (session_id, state, llm_action); "
            f"got {len(said)} values after the session's id"
            + (f" and {', '.join(sorted(named))}" if named else "")
        )
    return state, action


def with_role(message: Mapping[str, Any] | str) -> Message:
    """A message that may lack its role, or be a bare text: then the user says it.

    Raises ``ValueError`` for one without content.
    """
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message.get("content"), str):
        raise ValueError(f"a message needs content, a text; got the keys {sorted(message)}")
    return {**message, "role": message.get("role") or "user"}


def opening_messages(entry: Sequence[Mapping[str, Any] | str] | str) -> list[Message]:
    """The messages of an input that is none of a dataset's rows: a text, or a list of messages."""
    return [with_role(message) for message in ([entry] if isinstance(entry, str) else entry)]
