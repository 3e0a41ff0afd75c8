"""Which engines there are, by name; each is imported when it is asked for."""

import importlib
from difflib import get_close_matches
from typing import Any

from verl.workers.rollout.base import RolloutEngine

ENGINES = {
    "vllm": "verl.workers.rollout.vllm:VLLMEngine",
    "hf": "verl.workers.rollout.hf:HFEngine",
}


def register_engine(name: str, target: str) -> None:
    """Make the class at ``target`` (``module:Class``, a ``RolloutEngine``) available as
    ``rollout.name=<name>``.

    Its constructor takes the arguments that ``create_engine`` hands on.
    """
    ENGINES[name] = target


def engine_class(name: str) -> type:
    """The class of the engine ``name``: a key of ``ENGINES``, or the place of one's own as
    ``module:Class``.

    Raises ``ValueError`` for an unknown name, ``ImportError`` or ``AttributeError`` for a place
    that holds none.
    """
    if name not in ENGINES and ":" not in name:
        near = get_close_matches(name, ENGINES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"actor_rollout_ref.rollout.name={name!r}: allowed are {', '.join(ENGINES)}{hint}"
        )
    module, _, cls = ENGINES.get(name, name).partition(":")
    return getattr(importlib.import_module(module), cls)


def create_engine(
    name: str,
    config: Any,
    model_path: str,
    seed: int = 0,
    num_threads: int | None = None,
    trust_remote_code: bool = False,
) -> RolloutEngine:
    """Start the engine ``name``; ``config`` is the section ``actor_rollout_ref.rollout``.

    Raises ``ValueError`` for an unknown name and ``ImportError`` naming the extra where the engine
    is not installed.
    """
    engine_cls = engine_class(name)
    return engine_cls(
        config, model_path, seed=seed, num_threads=num_threads, trust_remote_code=trust_remote_code
    )
