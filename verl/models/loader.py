"""Load a causal language model from a local directory.

A hub name becomes a directory before, by ``verl.models.hub.model_directory``, on every node.
"""

import copy
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from verl.config.settings.hints import did_you_mean
from verl.models.architecture import (
    NOT_REACHED,
    check_architecture,
    config_reasons,
    refusal,
)
from verl.models.flex_attention import FLEX_ATTENTION, register_flex_attention
from verl.models.lora import add_lora
from verl.models.packed_attention import PACKED_ATTENTION, register_packed_attention
from verl.models.weights import Use, load_weights

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel


def check_model_dir(path: str | Path | None) -> Path:
    """The directory of a model, made sure of.

    Raises ``FileNotFoundError`` that says what is missing: the path, the directory, or its
    ``config.json``.
    """
    if not path:
        raise FileNotFoundError(
            "no model path is set; give actor_rollout_ref.model.path a directory or a hub name"
        )
    directory = Path(path)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"model path '{directory}' is not a directory; a worker loads from a local directory "
            "in Hugging Face format: a hub name is turned into one when a run starts"
        )
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"'{directory}' has no config.json, so it is not a Hugging Face model directory"
        )
    return directory


def has_weights(directory: Path) -> bool:
    """Whether the directory holds safetensors or PyTorch weights."""
    return any(directory.glob("*.safetensors")) or any(directory.glob("pytorch_model*.bin"))


def read_config(
    directory: str | Path,
    trust_remote_code: bool = False,
    override_config: Mapping[str, object] | None = None,
) -> "PreTrainedConfig":
    """The configuration of the model in ``directory`` with values of ``override_config`` in place.

    Raises ``ValueError`` for a key that it does not have.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        directory, local_files_only=True, trust_remote_code=trust_remote_code
    )
    for key, value in (override_config or {}).items():
        if not hasattr(config, key):
            raise ValueError(
                f"override_config: {type(config).__name__} has no value '{key}'"
                f"{did_you_mean(key, config.to_dict())}"
            )
        setattr(config, key, value)
    return config


def load_causal_lm(
    path: str | Path | None,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    override_config: Mapping[str, object] | None = None,
    external_lib: str | None = None,
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    lora_alpha: float = 16.0,
    target_modules: str | Sequence[str] = "all-linear",
    attention: str = "sdpa",
    empty: bool = False,
    use: Use = "policy",
) -> "PreTrainedModel":
    """A ``transformers`` causal LM on the CPU, ready for packed rows.

    Weights are ``dtype`` (the master weights, float32 for training). With ``lora_rank > 0`` only
    the adapters require gradients. With ``empty`` no weights are read: the model is on ``meta``,
    and another rank has what it will hold. Raises ``FileNotFoundError`` for a missing path, config
    or weights, ``UnusableWeights`` for those of another model, ``UnsupportedArchitecture`` for a
    model that packed rows would score wrong. With ``use="value"`` the output head may be missing.
    """
    directory = check_model_dir(path)
    if not (empty or has_weights(directory)):
        raise FileNotFoundError(f"'{directory}' has a config.json but no weights (*.safetensors)")
    if external_lib:
        # Imported for what it registers with transformers.
        importlib.import_module(external_lib)
    config = read_config(directory, trust_remote_code, override_config)
    for reason in config_reasons(config):  # before the weights are read
        raise refusal(config, reason)
    register_packed_attention()
    try:
        model = _built(None if empty else directory, config, dtype, trust_remote_code, use)
    except KeyError as error:
        # Some architectures look their attention up by name in a table of their own.
        if error.args != (PACKED_ATTENTION,):
            raise
        raise refusal(config, NOT_REACHED) from error
    return prepare_for_training(
        model, gradient_checkpointing, lora_rank, lora_alpha, target_modules, attention
    )


def _built(
    directory: Path | None,
    config: "PreTrainedConfig",
    dtype: torch.dtype,
    trust_remote_code: bool,
    use: Use,
) -> "PreTrainedModel":
    """The model of ``config`` with the weights in ``directory``; None: on ``meta``, without any."""
    from transformers import AutoModelForCausalLM

    options = {
        "dtype": dtype,
        "attn_implementation": PACKED_ATTENTION,
        "trust_remote_code": trust_remote_code,
    }
    if directory is None:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **options)
    return load_weights(directory, use, config=config, **options)


def prepare_for_training(
    model: "PreTrainedModel",
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    lora_alpha: float = 16.0,
    target_modules: str | Sequence[str] = "all-linear",
    attention: str = "sdpa",
) -> "PreTrainedModel":
    """Switch a causal LM to packed attention, make sure that it computes the same in it as in its
    own, and add checkpointing and LoRA where asked for. ``attention`` says which kernels compute
    packed attention: those of ``sdpa``, or ``flex``.

    Raises ``UnsupportedArchitecture`` where it does not.
    """
    register_packed_attention()
    if model.config._attn_implementation != PACKED_ATTENTION:
        model.set_attn_implementation(PACKED_ATTENTION)
    model.config.use_cache = False  # nothing is decoded: every forward sees whole rows
    # Before adapters, which start without effect, and before the parameters are sharded.
    check_architecture(model)
    if attention == "flex":
        register_flex_attention()
        model.set_attn_implementation(FLEX_ATTENTION)
    if lora_rank > 0:
        add_lora(model, rank=lora_rank, alpha=lora_alpha, target_modules=target_modules)
    if gradient_checkpointing:
        # The reentrant kind needs an input with a gradient; below LoRA's adapters all is frozen.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def new_causal_lm(config: "PreTrainedConfig", seed: int) -> "PreTrainedModel":
    """A causal LM of ``config`` with random weights that depend on ``seed`` alone, in float32, for
    packed rows.
    """
    from transformers import AutoModelForCausalLM

    register_packed_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed & 0x7FFFFFFF)  # CUDA's generator takes no wider ones
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=PACKED_ATTENTION
        )
    return prepare_for_training(model.float())
