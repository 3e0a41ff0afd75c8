"""The composition root of an export: from a checkpoint and the configuration of its run to a
directory that other programs load.

    RUN/config.yaml ─▶ model section ─▶ the model it started from ─┐
    RUN/checkpoints/global_step_N[/actor]/shard-*.safetensors ─────┴─▶ names, shapes checked ─▶ HF
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from verl.config.run_code import refuse_stored_code
from verl.config.schema.tools import ExportConfig
from verl.config.settings import ConfigError
from verl.models.export import hf_names, save_adapters, save_hf, tied_names
from verl.models.hub import model_directory
from verl.models.loader import load_causal_lm
from verl.models.lora import UnsupportedTargets, lora_scales
from verl.models.policy import PolicyModel
from verl.models.weights import UnusableWeights, non_finite
from verl.utils.checkpoint import CheckpointError, verify_checkpoint
from verl.utils.files import publish_directory, require_replaceable
from verl.workers.actor import PREFIX
from verl.workers.engine_state import holds_engine, read_weights

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """How the policy of a run was loaded."""

    path: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def lora_rank(self) -> int:
        """Rank of its adapters; 0 without."""
        return int(self.options.get("lora_rank", 0))


def export_checkpoint(cfg: ExportConfig) -> Path:
    """Write the policy of ``cfg.checkpoint`` to ``cfg.target`` and return that.

    Raises ``ConfigError`` where the checkpoint is torn, does not fit the model, or has no adapters
    though they are asked for.
    """
    target = Path(cfg.target)
    policy = find_policy(Path(cfg.checkpoint))
    origin = origin_of(cfg)
    _require_target(target, cfg, origin)
    lm = _load(origin)
    # Both before the weights are read: they are asked of the parameters as they were made.
    tied, scales = tied_names(lm), lora_scales(lm)
    state = _read(policy, cfg)
    _require_fit(state, PolicyModel(lm), cfg)
    with publish_directory(target, cfg.overwrite) as directory:
        if cfg.lora == "adapters":
            _require_adapters(origin)
            save_adapters(lm, _converted(state, cfg), PREFIX, directory, origin.path)
        else:
            if cfg.dtype:
                lm.config.dtype = getattr(torch, cfg.dtype)
            weights = _converted(hf_names(state, PREFIX, scales, tied), cfg)
            save_hf(lm, weights, directory, origin.path)
    sys.stdout.write(f"{target}\n")
    return target


def _require_target(target: Path, cfg: ExportConfig, origin: Origin) -> None:
    """Raise ``ConfigError`` for a target that would delete or alter a run, or what is foreign."""
    checkpoint = Path(cfg.checkpoint).resolve()
    keep = [checkpoint, *([Path(origin.path)] if Path(origin.path).exists() else [])]
    require_replaceable(target, "target", cfg.overwrite, keep)
    # Where there is no run above it, the checkpoint alone.
    runs = [parent for parent in checkpoint.parents if (parent / "config.yaml").is_file()]
    inside = next((above for above in (*runs[:1], checkpoint) if _is_in(target, above)), None)
    if inside is not None:
        raise ConfigError(
            f"target={cfg.target!r}: is inside {inside}, which belongs to the run; allowed: a "
            "directory outside of it; fix: target=DIR"
        )


def _is_in(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory)


def find_policy(checkpoint: Path) -> Path:
    """Where the policy is in a checkpoint of ``main_ppo`` or ``main_sft``, or in its folder
    ``actor``.

    Raises ``ConfigError`` for a directory without it or whose files are not what was written.
    """
    for directory in (checkpoint / "actor", checkpoint):
        if holds_engine(directory):
            _verify(checkpoint)
            return directory
    raise ConfigError(
        f"checkpoint={str(checkpoint)!r}: holds no policy; allowed: a checkpoint of a run; "
        "fix: checkpoint=runs/PROJECT/EXPERIMENT/checkpoints/global_step_N"
    )


def _verify(checkpoint: Path) -> None:
    # The folder of one role has no manifest of its own: its parent's names its files.
    whole = checkpoint.parent if checkpoint.name == "actor" else checkpoint
    try:
        verify_checkpoint(whole)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint={str(whole)!r}: {error}") from error


def origin_of(cfg: ExportConfig) -> Origin:
    """The model that the run of ``cfg.checkpoint`` started from, as its ``config.yaml`` says.

    Raises ``ConfigError`` where neither that file nor ``model_path`` tells.
    """
    section = _model_section(Path(cfg.checkpoint))
    path = cfg.model_path or section.get("path") or section.get("save_path")
    if path is None:
        raise ConfigError(
            f"model_path: there is no config.yaml of a run above {cfg.checkpoint!r} that names the "
            "model it started from; fix: model_path=DIR"
        )
    if not cfg.trust_run_code:
        refuse_stored_code(
            {"actor_rollout_ref": {"model": section}}, f"checkpoint={cfg.checkpoint!r}"
        )
    wanted = ("trust_remote_code", "override_config", "external_lib")
    lora = ("lora_rank", "lora_alpha", "target_modules")
    options = {name: section[name] for name in (*wanted, *lora) if section.get(name) is not None}
    try:
        return Origin(model_directory(str(path)), options)
    except FileNotFoundError as error:
        raise ConfigError(f"model_path={str(path)!r}: {error}; fix: model_path=DIR") from error


def _model_section(checkpoint: Path) -> Mapping[str, Any]:
    """The section of the policy in the configuration of the run that ``checkpoint`` lies in."""
    for directory in checkpoint.resolve().parents:
        file = directory / "config.yaml"
        if file.is_file():
            tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
            policy = tree.get("actor_rollout_ref", tree)
            return policy.get("model") or {}
    return {}


def _load(origin: Origin) -> "PreTrainedModel":
    try:
        return load_causal_lm(origin.path, **origin.options)
    except (UnusableWeights, UnsupportedTargets, FileNotFoundError) as error:
        fix = "fix: model_path=DIR, the model that the run started from"
        raise ConfigError(f"model_path={origin.path!r}: {error}; {fix}") from error


def _read(policy: Path, cfg: ExportConfig) -> dict[str, torch.Tensor]:
    try:
        return read_weights(policy)
    except ValueError as error:
        raise ConfigError(f"checkpoint={cfg.checkpoint!r}: {error}") from error


def _require_fit(state: Mapping[str, torch.Tensor], model: PolicyModel, cfg: ExportConfig) -> None:
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    extra = found.keys() - shapes.keys() - {name for name, _ in model.named_buffers()}
    odd = sorted({name for name, shape in shapes.items() if found.get(name) != shape} | extra)
    if odd:
        raise ConfigError(
            f"checkpoint={cfg.checkpoint!r}: its weights do not fit the model that the run started "
            f"from; {len(odd)} of {len(shapes)} are missing, unexpected or of another "
            f"shape ({odd[0]}, ...); fix: model_path=DIR, the model of that run"
        )
    odd = non_finite(state.items())
    if odd:
        raise ConfigError(
            f"checkpoint={cfg.checkpoint!r}: {len(odd)} of its tensors are NaN or infinite "
            f"({odd[0]}, ...); allowed: finite weights; fix: an earlier checkpoint of the run"
        )


def _converted(state: Mapping[str, torch.Tensor], cfg: ExportConfig) -> dict[str, torch.Tensor]:
    """``state`` with its floating-point tensors in ``cfg.dtype``."""
    if cfg.dtype is None:
        return dict(state)
    dtype = getattr(torch, cfg.dtype)
    made = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    odd = non_finite(made.items())
    if odd:
        raise ConfigError(
            f"dtype={cfg.dtype!r}: {len(odd)} tensors have values beyond its range ({odd[0]}, "
            "...); allowed: float32, bfloat16; fix: dtype=bfloat16"
        )
    return made


def _require_adapters(origin: Origin) -> None:
    if not origin.lora_rank:
        raise ConfigError(
            "lora='adapters': the run trained all weights (lora_rank=0); allowed: merged; "
            "fix: lora=merged"
        )
