"""Registry of rollout engines by name. An engine is imported when it is created."""

import importlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from verl.config.schema.actor_rollout_ref import ActorRolloutRefConfig, RolloutConfig
from verl.config.schema.model import ModelConfig
from verl.config.settings.errors import UserError
from verl.config.settings.hints import did_you_mean
from verl.models.config_values import replace_config_values
from verl.models.hub import model_directory
from verl.workers.rollout.base import RolloutEngine

ENGINES = {
    "vllm": "verl.workers.rollout.vllm:VLLMEngine",
    "hf": "verl.workers.rollout.hf:HFEngine",
}
_OVERRIDDEN_MODEL_DIRECTORIES: list[tempfile.TemporaryDirectory[str]] = []


class EngineClass(Protocol):
    """Interface of registered rollout engine classes: a call creates a ``RolloutEngine``."""

    gives_logprobs: bool

    def __call__(
        self,
        config: RolloutConfig,
        model_path: str,
        *,
        seed: int,
        num_threads: int | None,
        trust_remote_code: bool,
    ) -> RolloutEngine:
        """Load the model at ``model_path``; ``config`` is ``actor_rollout_ref.rollout``.

        An ``AdapterEngine`` also has the argument ``lora``, the section
        ``actor_rollout_ref.model``.
        """
        ...


def register_engine(name: str, import_path: str) -> None:
    """Register the ``EngineClass`` at ``import_path`` for ``rollout.name=<name>``.

    Example: ``register_engine("mine", "my_package.engine:MyEngine")``.
    """
    ENGINES[name] = import_path


def import_engine_class(name: str) -> EngineClass:
    """Import the engine class ``name``: a key of ``ENGINES`` or an import path ``module:Class``.

    Raises ``ValueError`` for an unknown name, and the errors of an import.
    """
    if name not in ENGINES and ":" not in name:
        raise UserError(
            f"actor_rollout_ref.rollout.name={name!r}; allowed: {', '.join(ENGINES)} and "
            f"import paths module:Class{did_you_mean(name, ENGINES)}",
            "unknown_name",
        )
    module_name, _, class_name = ENGINES.get(name, name).partition(":")
    return getattr(importlib.import_module(module_name), class_name)


def create_engine(
    name: str,
    config: RolloutConfig,
    model_path: str,
    seed: int = 0,
    num_threads: int | None = None,
    trust_remote_code: bool = False,
    lora: ModelConfig | None = None,
) -> RolloutEngine:
    """Start the rollout engine ``name`` with the model at ``model_path``.

    ``lora`` is the section ``actor_rollout_ref.model`` if LoRA adapters are sent to the engine.

    Raises ``ValueError`` for an unknown name, and ``ImportError`` with the extra to install if the
    engine is not installed.
    """
    engine_factory: Any = import_engine_class(name)
    if lora is not None:
        engine_factory = partial(engine_factory, lora=lora)
    return engine_factory(
        config, model_path, seed=seed, num_threads=num_threads, trust_remote_code=trust_remote_code
    )


def make_overridden_model_directory(directory: str, override_config: Mapping[str, Any]) -> str:
    """Return a model directory whose ``config.json`` has the values of ``override_config``.

    Without overrides the result is ``directory``. Otherwise it is a temporary directory with a new
    ``config.json`` and links to all other files, deleted when the process ends. So every engine
    loads the same model as the training worker, and needs no setting for overrides.
    """
    if not override_config:
        return directory
    temporary_directory = tempfile.TemporaryDirectory(prefix="overridden-model-")
    # The directory is deleted with this object.
    _OVERRIDDEN_MODEL_DIRECTORIES.append(temporary_directory)
    source, target = Path(directory).absolute(), Path(temporary_directory.name)
    for path in source.iterdir():
        if path.name != "config.json":
            (target / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config_text = json.dumps(replace_config_values(config, override_config))
    (target / "config.json").write_text(config_text, encoding="utf-8")
    return str(target)


def start_engine(
    config: ActorRolloutRefConfig | None,
    model_path: str,
    seed: int,
    num_threads: int | None,
    devices: Sequence[str],
) -> RolloutEngine:
    """Start the engine of ``config`` (the section ``actor_rollout_ref``) in a rollout worker.

    The process must not have loaded torch yet. The engine sees only ``devices``, if any.
    """
    if config is None:
        raise ValueError("a rollout worker needs either a config or an engine")
    if devices:
        # Replace the single device that Ray has set. CUDA reads the variable at its first use.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if config.model.external_lib:
        importlib.import_module(config.model.external_lib)  # it may register the engine
    rollout = config.rollout
    import_engine_class(rollout.name)  # raises for a wrong name before a model is downloaded
    # The hub name is resolved here, because it refers to the cache of this node.
    directory = make_overridden_model_directory(
        model_directory(model_path), config.model.override_config
    )
    trust_remote_code = config.model.trust_remote_code
    lora = config.model if rollout.lora_sync == "adapter" else None
    return create_engine(
        rollout.name, rollout, directory, seed, num_threads, trust_remote_code, lora
    )
