"""Which engines there are, by name; each is imported when it is asked for."""

import importlib
import os
from collections.abc import Sequence
from typing import Protocol

from verl.config.schema.actor import ActorRolloutRefConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.settings.hints import did_you_mean
from verl.models.hub import model_directory
from verl.workers.rollout.base import RolloutEngine

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
        config: RolloutConfig,
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
    config: RolloutConfig,
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


def start_engine(
    config: ActorRolloutRefConfig | None,
    model_path: str,
    seed: int,
    num_threads: int | None,
    devices: Sequence[str],
) -> RolloutEngine:
    """The engine that ``config``, the section ``actor_rollout_ref``, describes, in a process that
    has not loaded torch yet; it sees ``devices``, where any are named.

    Raises ``ValueError`` without a config, and what ``create_engine`` does.
    """
    if config is None:
        raise ValueError("a rollout worker needs a config, or an engine in its place")
    if devices:
        # Ray has named the one that this process has a share of; read when CUDA is first used.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if config.model.external_lib:
        importlib.import_module(config.model.external_lib)  # it may register the engine
    rollout = config.rollout
    engine_class(rollout.name)  # a wrong name is said before anything is fetched
    # On this node: a hub name leads to a directory of its own cache.
    directory = model_directory(model_path)
    trust = config.model.trust_remote_code
    return create_engine(
        rollout.name, rollout, directory, seed, num_threads, trust_remote_code=trust
    )
