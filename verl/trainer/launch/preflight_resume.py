"""Check that the checkpoint from which a run would continue fits the models of its config."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from verl.config.checkpoint_paths import find_checkpoint_to_resume
from verl.config.cold_start import is_policy_missing
from verl.config.problems import build_conflict, build_problem
from verl.config.schema import PPOConfig
from verl.config.settings import Problem
from verl.models.hub import resolve_directory_without_weights
from verl.models.loader import build_meta_model, read_config
from verl.models.lora import add_lora
from verl.models.policy import LM_PREFIX
from verl.utils.checkpoint import is_complete_checkpoint
from verl.workers.engine_state import has_engine_state, read_tensor_metadata

LORA_A = ".lora_A."  # part of the names of matrices [rank, inputs]
NEW_RUN_FIX = "trainer.experiment_name=ANOTHER for a new run"


def find_resume_problems(cfg: PPOConfig) -> Iterator[Problem]:
    """Yield a problem if the checkpoint is of another policy, or has no critic.

    Digests are not verified, so the run may continue from an earlier checkpoint. A damaged
    checkpoint is not checked: the run skips or refuses it. The models of ``cfg`` must be valid.
    """
    checkpoint = find_checkpoint_to_resume(cfg.trainer)
    if checkpoint is None or not is_complete_checkpoint(checkpoint):
        return
    if cfg.critic.enable and not has_engine_state(checkpoint / "critic"):
        why = f"the run would continue from {checkpoint}, which has no critic"
        fix = f"critic.enable=false and an estimator without critic, or {NEW_RUN_FIX}"
        allowed = "false for this checkpoint"
        yield build_problem(cfg, "critic.enable", why, allowed, fix, "no_checkpoint")
    key = "actor_rollout_ref.model.path"
    if is_policy_missing(cfg) or not has_engine_state(checkpoint / "actor"):
        return
    try:
        stored_shapes = _read_policy_shapes(checkpoint / "actor")
    except Exception:  # headers of damaged files raise errors of many types
        return
    rank = cfg.actor_rollout_ref.model.lora_rank
    stored_rank = next((shape[0] for name, shape in stored_shapes.items() if LORA_A in name), 0)
    if bool(rank) != bool(stored_rank):
        key = "actor_rollout_ref.model.lora_rank"
        adapter = f"an adapter of rank {stored_rank}" if stored_rank else "no LoRA adapter"
        why = f"the run would continue from {checkpoint}, which has {adapter}"
        fix = f"{key}={stored_rank}, or {NEW_RUN_FIX}"
        yield build_conflict(cfg, key, why, str(stored_rank), fix)
        return
    difference = _find_shape_difference(cfg, stored_shapes)
    if difference:
        why = f"the run would continue from {checkpoint}, which is of another model: {difference}"
        allowed = "the model with which the run started"
        yield build_problem(cfg, key, why, allowed, NEW_RUN_FIX, "wrong_weights")


def _read_policy_shapes(directory: Path) -> dict[str, list[int]]:
    """Return the shapes of parameters and buffers of the policy stored in ``directory``."""
    return {
        name: list(entry.size)
        for name, entry in read_tensor_metadata(directory).items()
        if name.startswith(LM_PREFIX) and "|" not in name
    }


def _find_shape_difference(cfg: PPOConfig, stored_shapes: Mapping[str, list[int]]) -> str:
    """Return the first difference between the policy and the shapes of its weights, or ""."""
    model = cfg.actor_rollout_ref.model
    model_directory = resolve_directory_without_weights(str(model.path))
    config = read_config(Path(model_directory), model.trust_remote_code, model.override_config)
    meta_model = build_meta_model(config, model.trust_remote_code)
    if model.lora_rank:
        targets = model.target_modules
        add_lora(meta_model, rank=model.lora_rank, alpha=model.lora_alpha, target_modules=targets)
    model_shapes = {
        f"{LM_PREFIX}{name}": list(parameter.shape)
        for name, parameter in meta_model.named_parameters()
    }
    buffer_names = {f"{LM_PREFIX}{name}" for name, _ in meta_model.named_buffers()}
    for name in sorted(model_shapes.keys() | (stored_shapes.keys() - buffer_names)):
        stored, expected = stored_shapes.get(name), model_shapes.get(name)
        if stored != expected:
            return f"{name} has the shape {stored} there, and {expected} in the model"
    return ""
