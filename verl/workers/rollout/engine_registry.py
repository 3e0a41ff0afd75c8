"""Which engines there are, by name; each is imported when it is asked for."""

import importlib
from typing import Protocol

from verl.utils.hints import did_you_mean
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.sections import EngineSection

ENGINES = {
    "vllm": "verl.workers.rollout.vllm:VLLMEngine",
    "hf": "verl.workers.rollout.hf:HFEngine",
}


class EngineClass(Protocol):
    """What is registered: the class of a ``RolloutEngine``, made like this."""

    @property
    def gives_logprobs(self) -> bool:
        """Whether its results carry log-probs; without them nothing can be trained on."""
        ...

    def __call__(
        self,
        config: EngineSection,
        model_path: str,
        *,
        seed: int,
        num_threads: int | None,
        trust_remote_code: bool,
    ) -> RolloutEngine:
        """Load the model at ``model_path`` and be ready for requests."""
        ...


def register_engine(name: str, target: str) -> None:
    """Make the class at ``target`` (``module:Class``, an ``EngineClass``) available as
    ``rollout.name=<name>``.
    """
    ENGINES[name] = target


def engine_class(name: str) -> EngineClass:
    """The class of the engine ``name``: a key of ``ENGINES``, or the place of one's own as
    ``module:Class``.

    Raises ``ValueError`` for an unknown name, ``ImportError`` or ``AttributeError`` for a place
    that holds none.
    """
    if name not in ENGINES and ":" not in name:
        raise ValueError(
            f"actor_rollout_ref.rollout.name={name!r}: allowed are {', '.join(ENGINES)}"
            f"{did_you_mean(name, ENGINES)}"
        )
    module, _, cls = ENGINES.get(name, name).partition(":")
    return getattr(importlib.import_module(module), cls)


def create_engine(
    name: str,
    config: EngineSection,
    model_path: str,
    seed: int = 0,
    num_threads: int | None = None,
    trust_remote_code: bool = False,
) -> RolloutEngine:
    """Start the engine ``name``; ``config`` is the section ``actor_rollout_ref.rollout``.

    Raises ``ValueError`` for an unknown name and ``ImportError`` naming the extra where the engine
    is not installed.
    """
    make = engine_class(name)
    return make(
        config, model_path, seed=seed, num_threads=num_threads, trust_remote_code=trust_remote_code
    )
