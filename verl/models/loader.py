"""Load a causal language model from a local directory; nothing is fetched from a hub."""

import contextlib
import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.models.lora import add_lora
from verl.models.packed_attention import PACKED_ATTENTION, register_packed_attention


def check_model_dir(path: str | Path | None) -> Path:
    """The directory of a model, made sure of.

    Raises ``FileNotFoundError`` that says what is missing: the path, the directory, or its
    ``config.json``.
    """
    if not path:
        raise FileNotFoundError(
            "no model path is set; give actor_rollout_ref.model.path a local directory"
        )
    directory = Path(path)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"model path '{directory}' is not a directory; models are loaded from local directories in "
            "Hugging Face format, hub names are not resolved"
        )
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"'{directory}' has no config.json, so it is not a Hugging Face model directory"
        )
    return directory


def has_weights(directory: Path) -> bool:
    """Whether the directory holds safetensors or PyTorch weights."""
    return any(directory.glob("*.safetensors")) or any(directory.glob("pytorch_model*.bin"))


def load_causal_lm(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    external_lib: str | None = None,
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    lora_alpha: float = 16.0,
    target_modules: Any = "all-linear",
) -> nn.Module:
    """A ``transformers`` causal LM on the CPU, ready for packed rows.

    Weights are ``dtype`` (the master weights, float32 for training). With ``lora_rank > 0`` only
    the adapters require gradients. Raises ``FileNotFoundError`` for a missing path, config or
    weights, ``ValueError`` for attention that packed rows cannot compute.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = check_model_dir(path)
    if not has_weights(directory):
        raise FileNotFoundError(f"'{directory}' has a config.json but no weights (*.safetensors)")
    if external_lib:
        importlib.import_module(external_lib)
    local = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(directory, **local)
    _override(config, override_config or {})
    register_packed_attention()
    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, attn_implementation=PACKED_ATTENTION, **local
        )
    return prepare_for_training(
        model, gradient_checkpointing, lora_rank, lora_alpha, target_modules
    )


def prepare_for_training(
    model: nn.Module,
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    lora_alpha: float = 16.0,
    target_modules: Any = "all-linear",
) -> nn.Module:
    """Switch a causal LM to packed attention, and add checkpointing and LoRA where asked for."""
    register_packed_attention()
    if model.config._attn_implementation != PACKED_ATTENTION:
        model.set_attn_implementation(PACKED_ATTENTION)
    model.config.use_cache = False
    if lora_rank > 0:
        add_lora(model, rank=lora_rank, alpha=lora_alpha, target_modules=target_modules)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def new_causal_lm(config: Any, seed: int) -> nn.Module:
    """A causal LM of ``config`` with random weights that depend on ``seed`` alone, in float32, for
    packed rows.
    """
    from transformers import AutoModelForCausalLM

    register_packed_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed & 0x7FFFFFFF)
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=PACKED_ATTENTION
        )
    return prepare_for_training(model.float())


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar of transformers inside: every rank would draw one."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _override(config: Any, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if not hasattr(config, key):
            raise ValueError(f"override_config: {type(config).__name__} has no value '{key}'")
        setattr(config, key, value)
