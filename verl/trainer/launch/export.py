"""Export of a checkpoint, with the config of its run, to a Hugging Face directory.

RUN/config.yaml ─▶ model section ─▶ the model it started from ─┐
RUN/checkpoints/global_step_N[/actor]/shard-*.safetensors ─────┴─▶ names, shapes checked ─▶ HF
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from verl.config.adapter_files import read_saved_adapter
from verl.config.checkpoint_paths import find_related_checkpoint
from verl.config.run_code import refuse_code_in_stored_config
from verl.config.schema.tools import ExportConfig
from verl.config.settings import ConfigError
from verl.models.backbone import find_backbone
from verl.models.export import convert_to_hf_weights, save_adapters, save_hf, tied_names
from verl.models.hub import model_directory
from verl.models.loader import load_causal_lm
from verl.models.lora import UnsupportedTargetsError, lora_scales
from verl.models.policy import LM_PREFIX, PolicyModel, ValueModel
from verl.models.weights import WeightPurpose, find_non_finite
from verl.record.run_dir import RunDirectory
from verl.trainer.launch.preflight_machine import find_write_problem
from verl.trainer.launch.preflight_resume import list_shape_differences
from verl.utils.checkpoint import CheckpointError, verify_checkpoint
from verl.utils.commands import read_yaml_mapping
from verl.utils.files import publish_directory, require_replaceable_directory
from verl.workers.engine_state import has_engine_state, read_weights

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
EXPORT_COMMAND = "main_export"  # name of this command in the file list of its output
EXAMPLE_CHECKPOINT = "runs/PROJECT/EXPERIMENT/checkpoints/global_step_N"
VALUE_HEAD = "score"  # name of the head in the classes of transformers for token classification


@dataclass(frozen=True)
class StartingModel:
    """Path and load options of the model with which the training of a run started."""

    path: str
    options: dict[str, Any] = field(default_factory=dict)


def export_checkpoint(cfg: ExportConfig) -> Path:
    """Write the policy or critic of ``cfg.checkpoint`` to ``cfg.target`` and return its path.

    Raises ``ConfigError`` if the checkpoint is incomplete, does not fit the model, or lacks the
    adapters that ``cfg.lora=adapters`` requires.
    """
    target = Path(cfg.target)
    is_critic = cfg.role == "critic"
    weights_directory = find_weights_directory(Path(cfg.checkpoint), cfg.role)
    starting_model = find_starting_model(cfg, weights_directory)
    _check_lora_choice(cfg, starting_model)
    _check_target(target, cfg, starting_model)
    try:
        weight_purpose: WeightPurpose = "value" if is_critic else "policy"
        language_model = load_causal_lm(
            starting_model.path, purpose=weight_purpose, **starting_model.options
        )
    # TypeError, AttributeError: a value in the run's config.yaml has a wrong type.
    except (UnsupportedTargetsError, OSError, TypeError, AttributeError, ValueError) as error:
        fix = "fix: set model_path=DIR to the model from which the run started"
        message = f"model_path={starting_model.path!r}: {error}; {fix}"
        raise ConfigError(message, "unsupported_model") from error
    # Find tied parameters and LoRA scales before the weights of the checkpoint are loaded.
    tied_parameters, adapter_scales = tied_names(language_model), lora_scales(language_model)
    try:
        stored_weights = read_weights(weights_directory)
    except ValueError as error:
        raise ConfigError(f"checkpoint={cfg.checkpoint!r}: {error}", "altered_file") from error
    model = ValueModel(language_model) if is_critic else PolicyModel(language_model)
    _check_shapes_and_values(stored_weights, model, cfg)
    with (
        _convert_write_errors(cfg),
        publish_directory(target, cfg.overwrite, EXPORT_COMMAND) as directory,
    ):
        if cfg.lora == "adapters":
            value_head_name = VALUE_HEAD if is_critic else None
            if is_critic:
                stored_weights = _rename_critic_weights(stored_weights, language_model)
            weights = _convert_dtype(stored_weights, cfg)
            save_adapters(
                language_model, weights, LM_PREFIX, directory, starting_model.path, value_head_name
            )
        else:
            if cfg.dtype:
                language_model.config.dtype = getattr(torch, cfg.dtype)
            weights = convert_to_hf_weights(
                language_model, stored_weights, LM_PREFIX, adapter_scales, tied_parameters
            )
            weights = _convert_dtype(weights, cfg)
            save_hf(language_model, weights, directory, starting_model.path)
    sys.stdout.write(f"{target}\n")
    return target


def _check_lora_choice(cfg: ExportConfig, starting_model: StartingModel) -> None:
    if cfg.lora == "merged" and cfg.role == "critic":
        why = "a causal language model in Hugging Face format has no value head"
        message = f"lora='merged': {why}; allowed: adapters; fix: set lora=adapters"
        raise ConfigError(message, "conflicting_keys")
    if cfg.lora == "adapters" and not starting_model.options.get("lora_rank"):
        raise ConfigError(
            "lora='adapters': the run trained all weights (lora_rank=0) and has no adapters; "
            "allowed: merged; fix: set lora=merged",
            "conflicting_keys",
        )


def _rename_critic_weights(
    stored_weights: Mapping[str, torch.Tensor], language_model: "PreTrainedModel"
) -> dict[str, torch.Tensor]:
    """Return the critic's ``stored_weights``, named as in transformers' token classification."""
    backbone = find_backbone(language_model)
    backbone_name = next(
        name for name, module in language_model.named_modules() if module is backbone
    )
    new_prefixes = {"backbone": backbone_name, "value_head": VALUE_HEAD}
    renamed_weights = {}
    for name, tensor in stored_weights.items():
        prefix, _, name_in_module = name.partition(".")
        renamed_weights[f"{new_prefixes.get(prefix, prefix)}.{name_in_module}"] = tensor
    return renamed_weights


@contextlib.contextmanager
def _convert_write_errors(cfg: ExportConfig) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"target={cfg.target!r}: cannot be written: {error}; allowed: a directory on a disk "
            "with free space; fix: free disk space, or set target=DIR",
            "not_writable",
        ) from error


def _check_target(target: Path, cfg: ExportConfig, starting_model: StartingModel) -> None:
    """Raise ``ConfigError`` if ``target`` must not be written.

    It must not be in the run directory. It must not contain files of other programs unless
    ``cfg.overwrite`` is set. ``starting_model`` is the model with which the training started; its
    directory is never overwritten.
    """
    why = find_write_problem(target.parent)
    if not os.path.lexists(target):  # returns False for a too long name; Path.exists() raises
        why = why or find_write_problem(target)
    if why:
        allowed = "allowed: a directory that can be created and written"
        message = f"target={cfg.target!r}: {why}; {allowed}; fix: set target=DIR"
        raise ConfigError(message, "not_writable")
    checkpoint = Path(cfg.checkpoint).resolve()
    protected_paths = [
        checkpoint,
        *([Path(starting_model.path)] if Path(starting_model.path).exists() else []),
    ]
    require_replaceable_directory(target, "target", cfg.overwrite, protected_paths, EXPORT_COMMAND)
    # Protect the run directory above the checkpoint too, if there is one.
    run_directories = [path for path in checkpoint.parents if (path / "config.yaml").is_file()]
    for directory in (*run_directories[:1], checkpoint):
        if target.resolve().is_relative_to(directory):
            raise ConfigError(
                f"target={cfg.target!r}: the directory is inside {directory}, which belongs to the "
                "run; allowed: a directory outside of it; fix: set target=DIR",
                "file_exists",
            )


def find_weights_directory(checkpoint: Path, role: str) -> Path:
    """Return the directory with the model ``role`` (``actor``, ``critic``) in a checkpoint.

    ``checkpoint`` may also be the directory of the role. Raises ``ConfigError`` if there is no such
    model, or if the files differ from the manifest.
    """
    candidate_directories = [checkpoint / role]
    if role == "actor" or checkpoint.name == role:
        candidate_directories.append(checkpoint)
    weights_directory = next(
        (path for path in candidate_directories if has_engine_state(path)), None
    )
    if weights_directory is None:
        model = "policy" if role == "actor" else role
        problem = f"contains no {model}" if checkpoint.is_dir() else "does not exist"
        raise ConfigError(
            f"checkpoint={str(checkpoint)!r}: the directory {problem}; allowed: a checkpoint of a "
            "run; fix: set checkpoint="
            f"{find_related_checkpoint(checkpoint) or EXAMPLE_CHECKPOINT}",
            "no_checkpoint",
        )
    # The directory of a role (actor) has no manifest. The manifest of its parent lists its files.
    checkpoint_root = checkpoint.parent if checkpoint.name == role else checkpoint
    try:
        verify_checkpoint(checkpoint_root)
    except CheckpointError as error:
        message = f"checkpoint={str(checkpoint_root)!r}: {error}"
        raise ConfigError(message, "altered_file") from error
    return weights_directory


def find_starting_model(cfg: ExportConfig, weights_directory: Path) -> StartingModel:
    """Return the model of ``cfg.model_path``, or that with which the training started.

    Rank and alpha of its adapter are those in ``weights_directory``: a later start of the run
    replaces ``config.yaml``.
    """
    section = _read_model_section(Path(cfg.checkpoint), cfg.role)
    path = cfg.model_path or section.get("path") or section.get("save_path")
    if path is None:
        raise ConfigError(
            f"model_path: no config.yaml above {cfg.checkpoint!r} names the model from which the "
            "run started; fix: set model_path=DIR",
            "missing_key",
        )
    if not cfg.trust_run_code:
        run_config = {"actor_rollout_ref": {"model": section}}
        refuse_code_in_stored_config(run_config, f"checkpoint={cfg.checkpoint!r}")
    option_keys = ("trust_remote_code", "override_config", "external_lib")
    option_keys += ("lora_rank", "lora_alpha", "target_modules")
    load_options = {name: section[name] for name in option_keys if section.get(name) is not None}
    if adapter := read_saved_adapter(weights_directory):
        load_options |= {"lora_rank": adapter.rank, "lora_alpha": adapter.alpha}
        load_options.setdefault("target_modules", list(adapter.modules))
    try:
        return StartingModel(model_directory(str(path)), load_options)
    except FileNotFoundError as error:
        message = f"model_path={str(path)!r}: {error}; fix: set model_path=DIR"
        raise ConfigError(message, "missing_file") from error


def _read_model_section(checkpoint: Path, role: str) -> Mapping[str, Any]:
    """Return the config section of the model ``role``; {} if there is none.

    It is read from the ``config.yaml`` of the run that wrote ``checkpoint``. A path in its
    ``run_plan.yaml`` has priority.
    """
    for directory in checkpoint.resolve().parents:
        config_file = directory / "config.yaml"
        if config_file.is_file():
            config_tree = read_yaml_mapping(config_file)
            parent_key = "critic" if role == "critic" else "actor_rollout_ref"
            section = config_tree.get(parent_key, config_tree)
            section = section.get("model") if isinstance(section, Mapping) else section
            if section is not None and not isinstance(section, Mapping):
                message = f"{config_file}: model={section!r}; allowed: a section; fix: correct it"
                raise ConfigError(message, "wrong_type")
            return {**(section or {}), **_read_pinned_path(directory, f"{parent_key}.model.path")}
    return {}


def _read_pinned_path(run_directory: Path, key: str) -> dict[str, str]:
    """Return ``{"path": value}`` with the value of ``key`` in ``run_plan.yaml``; {} if unusable.

    The value is an absolute directory or has the commit of the hub model. ``config.yaml`` may have
    a relative directory, or a name for which the hub has another commit now. A directory that this
    machine lacks is not usable.
    """
    plan_path = RunDirectory(run_directory).plan_path
    path = read_yaml_mapping(plan_path).get(key) if plan_path.is_file() else None
    if not isinstance(path, str) or (Path(path).is_absolute() and not Path(path).is_dir()):
        return {}
    return {"path": path}


def _check_shapes_and_values(
    stored_weights: Mapping[str, torch.Tensor], model: PolicyModel | ValueModel, cfg: ExportConfig
) -> None:
    stored_shapes = {name: list(tensor.shape) for name, tensor in stored_weights.items()}
    differences = list_shape_differences(model, stored_shapes)
    if differences:
        raise ConfigError(
            f"checkpoint={cfg.checkpoint!r}: its weights do not fit the model from which the run "
            f"started; {len(differences)} of {len(list(model.parameters()))} are missing, "
            f"unexpected or of another shape ({differences[0][0]}, ...); fix: set model_path=DIR "
            "to the model of that run",
            "wrong_weights",
        )
    invalid_names = find_non_finite(stored_weights.items())
    if invalid_names:
        raise ConfigError(
            f"checkpoint={cfg.checkpoint!r}: {len(invalid_names)} of its tensors are NaN or "
            f"infinite ({invalid_names[0]}, ...); allowed: finite weights; fix: use an earlier "
            "checkpoint of the run",
            "wrong_weights",
        )


def _convert_dtype(
    stored_weights: Mapping[str, torch.Tensor], cfg: ExportConfig
) -> dict[str, torch.Tensor]:
    if cfg.dtype is None:
        return dict(stored_weights)
    dtype = getattr(torch, cfg.dtype)
    converted_weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in stored_weights.items()
    }
    invalid_names = find_non_finite(converted_weights.items())
    if invalid_names:
        raise ConfigError(
            f"dtype={cfg.dtype!r}: {len(invalid_names)} tensors have values beyond its range "
            f"({invalid_names[0]}, ...); allowed: float32, bfloat16; fix: set dtype=bfloat16",
            "wrong_weights",
        )
    return converted_weights
