"""Load a causal language model from a local directory and prepare it for training.

Hub names are resolved to directories beforehand, on every node, by
``verl.models.hub.model_directory``.
"""

import copy
import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.config.settings.hints import did_you_mean
from verl.models.adapters import load_adapter
from verl.models.architecture import choose_forward_kind, is_packable
from verl.models.auto_class import choose_auto_class
from verl.models.config_values import replace_config_values
from verl.models.forward_kind import PackedForward, RowWiseForward, set_forward_kind
from verl.models.lora import add_lora
from verl.models.packed_attention import (
    FLEX_ATTENTION,
    PACKED_ATTENTION,
    register_packed_attention,
)
from verl.models.weights import (
    WeightPurpose,
    disable_weight_rescaling,
    load_weights,
    quiet_transformers,
)

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


def read_config(
    directory: str | Path,
    trust_remote_code: bool = False,
    override_config: Mapping[str, object] | None = None,
) -> "PreTrainedConfig":
    """Read the model config in ``directory`` and apply the values of ``override_config``.

    Raises ``OSError`` or ``ValueError`` for a file that transformers refuses, and ``ValueError``
    for a key that the config does not have.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
        config.to_dict()  # some invalid values are found only here
    except OSError:
        raise
    except Exception as error:  # validators of transformers raise errors of many types
        raise ValueError(f"config.json: {' '.join(str(error).split()) or repr(error)}") from error
    if not override_config:
        return config
    for key in find_unknown_overrides(config, directory, override_config):
        raise ValueError(
            f"override_config: {type(config).__name__} has no value '{key}'"
            f"{did_you_mean(key, config.to_dict())}"
        )
    return override_config_values(config, directory, override_config)


def find_unknown_overrides(
    config: "PreTrainedConfig", directory: str | Path, override: Mapping[str, object]
) -> list[str]:
    """Return the keys of ``override`` that neither ``config`` nor its ``config.json`` has."""
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    known_keys = {
        *_read_config_values(directory),
        *(["rope_theta"] if "rope_theta" in rope_parameters else []),
    }
    return [key for key in override if key not in known_keys and not hasattr(config, key)]


def override_config_values(
    config: "PreTrainedConfig", directory: str | Path, override: Mapping[str, object]
) -> "PreTrainedConfig":
    """Return the config of the model in ``directory``, with the values of ``override``.

    It is built again from the values of ``config.json``, as the rollout engine builds it, because
    some values are computed from others. ``config`` is the config without ``override``. Raises
    ``ValueError`` for values that the config refuses, and for another ``model_type``.
    """
    setting_text = f"override_config={dict(override)!r}"
    if len(override) == 1:
        setting_text = "".join(
            f"override_config.{key}={value!r}" for key, value in override.items()
        )
    try:
        values = replace_config_values(_read_config_values(directory), override)
        if override.get("model_type", config.model_type) != config.model_type:
            raise ValueError(f"config.json has {config.model_type!r}")
        overridden_config = type(config).from_dict(values, name_or_path=str(directory))
        overridden_config.to_dict()  # some invalid values are found only here
    except Exception as error:  # validators of transformers raise errors of many types
        for key in override if len(override) > 1 else ():
            override_config_values(config, directory, {key: override[key]})  # names a wrong value
        raise ValueError(f"{setting_text}: {' '.join(str(error).split())}") from error
    return overridden_config


def _read_config_values(directory: str | Path) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    return PreTrainedConfig.get_config_dict(directory, local_files_only=True)[0]


def load_causal_lm(
    path: str | Path,
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
    lora_adapter_path: str | None = None,
    without_weights: bool = False,
    purpose: WeightPurpose = "policy",
) -> "PreTrainedModel":
    """Load a ``transformers`` causal LM on the CPU and prepare it (``prepare_for_training``).

    ``dtype`` is that of the master weights. With ``lora_rank > 0`` only the adapters require
    gradients. They start from the adapter in ``lora_adapter_path``, if any. With
    ``without_weights`` the model is on ``meta`` and receives its weights from another rank later.
    With ``purpose="value"`` the output head may be missing.

    Raises ``UnusableWeightsError`` for weights that are missing, damaged or those of another model,
    and the errors of ``read_config`` and ``prepare_for_training``.
    """
    directory = Path(path)
    if external_lib:
        # The import may register models with transformers.
        importlib.import_module(external_lib)
    config = read_config(directory, trust_remote_code, override_config)
    disable_weight_rescaling(config)
    register_packed_attention()
    weights_directory = None if without_weights else directory
    attention_implementation = PACKED_ATTENTION if is_packable(config) else None
    try:
        model = _build_model(
            weights_directory, config, dtype, trust_remote_code, purpose, attention_implementation
        )
    except KeyError as error:
        # This KeyError means that the architecture has its own table of attention functions.
        if error.args != (PACKED_ATTENTION,):
            raise
        model = _build_model(weights_directory, config, dtype, trust_remote_code, purpose, None)
    prepare_for_training(
        model, gradient_checkpointing, lora_rank, lora_alpha, target_modules, attention
    )
    if lora_adapter_path and not without_weights:
        load_adapter(model, lora_adapter_path)
    return model


def build_meta_model(config: "PreTrainedConfig", trust_remote_code: bool) -> "PreTrainedModel":
    """Return the model of ``config`` on ``meta``, without weights."""
    with torch.device("meta"):
        return choose_auto_class(config).from_config(config, trust_remote_code=trust_remote_code)


def predict_packing_support(
    config: "PreTrainedConfig", trust_remote_code: bool = False
) -> tuple[str, int | None]:
    """Return why workers will not pack rows of a model with ``config``, or "" if they will.

    Also return the number of tokens up to which they will pack a row (None: any). The choice is
    made as at load, but for a model without weights. So only the comparison of log-probs at load
    can decide otherwise.
    """
    with quiet_transformers(show_warnings=False):
        model = build_meta_model(copy.deepcopy(config), trust_remote_code)
        _set_packed_attention(model)
        forward_kind = choose_forward_kind(model)
    if isinstance(forward_kind, RowWiseForward):
        return forward_kind.not_packed_reason, None
    return "", forward_kind.max_row_tokens


def _set_packed_attention(model: "PreTrainedModel") -> None:
    """Set packed attention in ``model``, unless its config has a feature that excludes it."""
    register_packed_attention()
    if is_packable(model.config) and model.config._attn_implementation != PACKED_ATTENTION:
        model.set_attn_implementation(PACKED_ATTENTION)


def _build_model(
    directory: Path | None,
    config: "PreTrainedConfig",
    dtype: torch.dtype,
    trust_remote_code: bool,
    purpose: WeightPurpose,
    attention_implementation: str | None,
) -> "PreTrainedModel":
    """Build the model of ``config`` with the weights in ``directory``, or on ``meta`` for None."""
    model_options = {
        "dtype": dtype,
        "attn_implementation": attention_implementation,
        "trust_remote_code": trust_remote_code,
    }
    if directory is None:
        with torch.device("meta"):
            return choose_auto_class(config).from_config(config, **model_options)
    return load_weights(directory, purpose, config=config, **model_options)


def prepare_for_training(
    model: "PreTrainedModel",
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    lora_alpha: float = 16.0,
    target_modules: str | Sequence[str] = "all-linear",
    attention: str = "sdpa",
) -> "PreTrainedModel":
    """Choose packed or row-wise forward passes; add LoRA and gradient checkpointing as configured.

    ``attention`` selects the kernels of packed attention: ``sdpa`` or ``flex``. Raises
    ``UnsupportedArchitectureError`` if neither kind of pass gives the log-probs of the model.
    """
    _set_packed_attention(model)
    model.config.use_cache = False  # training needs no cache: every forward gets whole rows
    # Compare log-probs before parameters are sharded. New LoRA adapters do not change log-probs.
    forward_kind = choose_forward_kind(model)
    if not isinstance(forward_kind, PackedForward):
        logger.info(
            "%s uses row-wise forward passes: %s",
            model.config.model_type,
            forward_kind.not_packed_reason,
        )
    elif attention == "flex":
        set_forward_kind(model, replace(forward_kind, attention=FLEX_ATTENTION))
    if lora_rank > 0:
        add_lora(model, rank=lora_rank, alpha=lora_alpha, target_modules=target_modules)
    if gradient_checkpointing:
        # Reentrant checkpointing needs an input that requires a gradient. With LoRA the embeddings
        # are frozen, so no input requires one.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
