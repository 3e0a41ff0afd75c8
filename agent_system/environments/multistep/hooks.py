"""Two signatures of ``_step_episode``, for subclasses and for callers::

    (session_id, action)                 current: the state is ``active_states[session_id]``
    (session_id, state, llm_action)      earlier: the state is passed

A caller may use either signature, whichever one the subclass defines.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

StepResult = tuple[Any, float, bool, dict[str, Any]]
_ACTION_NAMES = ("action", "llm_action")
_MISSING = object()


def accept_both_forms(hook: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """Return a function that calls ``hook`` and accepts the arguments of both signatures.

    ``hook`` is an unbound ``_step_episode`` with one of the two signatures.
    """
    # Required parameters: self, session id and action, or a state in addition.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(hook).parameters.values()
    takes_state = len([p for p in parameters if p.kind in kinds and p.default is p.empty]) > 3

    @functools.wraps(hook)
    def step(env: Any, session_id: str, *positional: Any, **named: Any) -> StepResult:
        state, action = _parse_call(positional, named)
        if takes_state:
            current_state = env.active_states[session_id] if state is _MISSING else state
            return hook(env, session_id, current_state, action)
        if state is not _MISSING:
            env.active_states[session_id] = state
        return hook(env, session_id, action)

    return step


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
