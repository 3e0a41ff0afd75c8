"""Two signatures of ``_step_episode``, for subclasses and for callers::

    (session_id, action)                 current: the state is ``active_states[session_id]``
    (session_id, state, llm_action)      earlier: the state is passed

A caller may use either signature, whichever one the subclass defines.
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
    """Protocol of an environment with the states of its active sessions."""

    active_states: MutableMapping[str, Any]


def accept_both_forms(hook: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """Return a function that calls ``hook`` and accepts the arguments of both signatures.

    ``hook`` is an unbound ``_step_episode`` with one of the two signatures.
    """
    takes_state = _takes_state(hook)

    @functools.wraps(hook)
    def step(env: HasStates, session_id: str, *positional: Any, **named: Any) -> StepResult:
        state, action = _parse_call(positional, named)
        if takes_state:
            current_state = env.active_states[session_id] if state is _MISSING else state
            return hook(env, session_id, current_state, action)
        if state is not _MISSING:
            env.active_states[session_id] = state
        return hook(env, session_id, action)

    return step


def _takes_state(hook: Callable[..., StepResult]) -> bool:
    """Return True if ``hook`` requires a state in addition to self, session id and action."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(hook).parameters.values()
    required = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    return len(required) > 3


def _parse_call(positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """Return state and action from the arguments of a call; ``_MISSING`` as state if not given."""
    state = named.pop("state", _MISSING)
    action = _MISSING
    for name in _ACTION_NAMES:
        action = named.pop(name, action)
    values = list(positional)
    if action is _MISSING and values:
        action = values.pop()
    if state is _MISSING and values:
        state = values.pop()
    if action is _MISSING or values or named:
        raise TypeError(
            "_step_episode takes (session_id, action) or (session_id, state, llm_action); "
            f"got {len(positional)} values after session_id"
            + (f" and {', '.join(sorted(named))}" if named else "")
        )
    return state, action


def with_role(message: Mapping[str, Any] | str) -> Message:
    """Return ``message`` as a dict with a role. The default role is ``user``.

    Raises ``ValueError`` for a message without content.
    """
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message.get("content"), str):
        raise ValueError(
            f"a message has the keys {sorted(message)}; it needs content, which must be a string"
        )
    return {**message, "role": message.get("role") or "user"}


def opening_messages(entry: Sequence[Mapping[str, Any] | str] | str) -> list[Message]:
    """Return the messages of an input that is a text or a list of messages."""
    return [with_role(message) for message in ([entry] if isinstance(entry, str) else entry)]
