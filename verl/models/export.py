"""Convert weights to their Hugging Face names and write directories for ``from_pretrained``."""

import copy
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import nn

from verl.config.adapter_files import PEFT_PREFIX, WEIGHTS_FILE
from verl.models.checkpoint_format import convert_to_checkpoint
from verl.models.lora import ADAPTER_NAME, adapter_config, drop_lora, lora_scales, merge_lora

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
EXPERT_LAYER_NAMES = {"gate_proj", "up_proj", "down_proj"}
# Names and patterns of the files, next to weights and config, that a tokenizer or engine may read.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "*.model",  # SentencePiece
    "*.tiktoken",
    "tokenization_*.py",
    "generation_config.json",
    "*processor_config.json",
)


def convert_to_hf_weights(
    lm: "PreTrainedModel",
    state: dict[str, torch.Tensor],
    prefix: str,
    scales: dict[str, float] | None,
    tied_weight_names: set[str],
) -> dict[str, torch.Tensor]:
    """Convert the unsharded weights of a ``PolicyModel`` to those of a Hugging Face checkpoint.

    ``lm`` is the language model in the ``PolicyModel``. See ``merge_weights`` for the other
    arguments.
    """
    return convert_to_checkpoint(lm, merge_weights(state, prefix, scales, tied_weight_names))


def merge_weights(
    state: dict[str, torch.Tensor],
    prefix: str,
    scales: dict[str, float] | None,
    tied_weight_names: set[str],
) -> dict[str, torch.Tensor]:
    """Convert the unsharded weights of a ``PolicyModel`` to those of its language model.

    ``prefix`` ("lm.") is removed from the names. ``scales`` maps each adapted module to the scale
    with which its LoRA adapter is merged. With ``scales=None`` adapters are omitted. Names in
    ``tied_weight_names`` are omitted, as in ``save_pretrained``: these weights are the same tensors
    as other weights. Raises ``ValueError`` for a name without ``prefix``, and for adapters that
    cannot be merged.
    """
    unprefixed_names = [name for name in state if not name.startswith(prefix)]
    if unprefixed_names:
        raise ValueError(
            f"the names of {len(unprefixed_names)} weights do not start with {prefix!r}; "
            f"the first is {unprefixed_names[0]}"
        )
    model_state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    merged_state = drop_lora(model_state) if scales is None else merge_lora(model_state, scales)
    return {name: tensor for name, tensor in merged_state.items() if name not in tied_weight_names}


def tied_names(lm: nn.Module) -> set[str]:
    """Return the names of weights that are the same parameter as an earlier one."""
    all_parameter_names = {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    return all_parameter_names - {name for name, _ in lm.named_parameters()}


def save_hf(
    lm: "PreTrainedModel",
    state: dict[str, torch.Tensor],
    directory: str | Path,
    source: str | Path | None,
) -> None:
    """Write the config, the weights ``state`` of the checkpoint and the tokenizer of ``source``."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _save_config(lm, directory)
    _save_tensors(state, directory / "model.safetensors")
    if source:
        _copy_new_files(Path(source), directory, TOKENIZER_FILES)


def save_adapters(
    lm: "PreTrainedModel",
    state: dict[str, torch.Tensor],
    prefix: str,
    directory: str | Path,
    source: str | Path,
    value_head: str | None = None,
) -> None:
    """Write only the LoRA adapters of ``lm``, in the format of peft and vLLM.

    ``source`` is the base model, whose tokenizer files are copied. ``state`` holds the unsharded
    weights of the ``PolicyModel``, whose names start with ``prefix``. Weights of the module
    ``value_head``, if any, are written too, for models for token classification. Raises
    ``ValueError`` if the model has no adapters.
    """
    peft_config = adapter_config(lm)
    if peft_config is None:
        raise ValueError("the model has no LoRA adapters to save")
    _warn_about_fused_experts(lm)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    peft_config.base_model_name_or_path = str(source)
    peft_config.inference_mode = True
    peft_config.task_type = "TOKEN_CLS" if value_head else "CAUSAL_LM"
    peft_config.modules_to_save = [value_head] if value_head else None
    peft_config.save_pretrained(str(directory))
    # In files of peft, tensor names lack the adapter name and start with the prefix of a wrapper.
    adapter_tensors = {
        f"{PEFT_PREFIX}{name.removeprefix(prefix).replace(f'.{ADAPTER_NAME}.', '.')}": tensor
        for name, tensor in state.items()
        if ".lora_" in name or (value_head and name.startswith(f"{value_head}."))
    }
    _save_tensors(adapter_tensors, directory / WEIGHTS_FILE)
    _copy_new_files(Path(source), directory, TOKENIZER_FILES)


def _warn_about_fused_experts(lm: "PreTrainedModel") -> None:
    """Warn if peft would apply the adapters of dense layers of ``lm`` to its experts."""
    has_fused_experts = any(
        ".experts." in name and weight.ndim == 3 for name, weight in lm.named_parameters()
    )
    adapted_layers = {name.rpartition(".")[2] for name in lora_scales(lm)} & EXPERT_LAYER_NAMES
    if has_fused_experts and adapted_layers:
        logger.warning(
            "peft loads the adapters of %s in %s models into the experts, without an error; this "
            "framework loads them correctly; fix: use the merged weights in other programs",
            ", ".join(sorted(adapted_layers)),
            lm.config.model_type,
        )


def _save_tensors(state: dict[str, torch.Tensor], path: Path) -> None:
    # Tensors are cloned, because safetensors refuses tensors that share memory.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes the file readable for its owner only


def _save_config(lm: "PreTrainedModel", directory: Path) -> None:
    """Write the config with ``sdpa`` attention, and the code that the config names."""
    config = copy.deepcopy(lm.config)
    config._attn_implementation = "sdpa"  # other programs do not know packed attention
    config.use_cache = True
    # The config of a text model in a model for images and text names no class. vLLM needs the name.
    config.architectures = config.architectures or [type(lm).__name__]
    config.save_pretrained(directory)
    if lm.generation_config is not None:
        # ``save_pretrained`` would refuse values that transformers loads with a warning only.
        lm.generation_config.to_json_file(
            directory / "generation_config.json", keys_to_pop=["compile_config"]
        )
    if getattr(config, "auto_map", None) and config.name_or_path:
        _copy_new_files(Path(config.name_or_path), directory, ("*.py",))


def _copy_new_files(source: Path, directory: Path, patterns: Iterable[str]) -> None:
    """Copy files of ``source`` that match ``patterns``, except files that ``directory`` has."""
    for pattern in patterns:
        for file in source.glob(pattern):
            target_file = directory / file.relative_to(source)
            if file.is_file() and not target_file.exists():
                target_file.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target_file)
