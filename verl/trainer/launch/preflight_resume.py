"""Check that the checkpoint from which a run would continue fits the models of its config."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from verl.config.checkpoint_paths import find_checkpoint_to_resume
from verl.config.cold_start import is_policy_missing
from verl.config.problems import build_conflict, build_problem
from verl.config.schema import PPOConfig
from verl.config.settings import Problem, value_at_path
from verl.config.yaml_files import parse_yaml
from verl.models.hub import resolve_directory_without_weights
from verl.models.loader import build_meta_model, read_config
from verl.models.lora import add_lora
from verl.models.policy import LM_PREFIX
from verl.utils.checkpoint import is_complete_checkpoint
from verl.workers.engine_state import has_engine_state, read_tensor_metadata

LORA_A = ".lora_A."  # part of the names of matrices [rank, inputs]
NEW_RUN_FIX = "trainer.experiment_name=ANOTHER for a new run"
CONTINUE_FIX = "trainer.resume_mode=resume_path trainer.resume_from_path"
KEYS_OF_THE_TASK = ("env.env_name", "algorithm.adv_estimator", "trainer.seed", "env.seed")
DATA_KEY = "data.train_files"
logger = logging.getLogger(__name__)


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


def find_changed_task_problems(cfg: PPOConfig) -> Iterator[Problem]:
    """Yield a problem for each setting in which a run that would continue is another run.

    With ``resume_mode=resume_path`` the user has named the checkpoint, so settings may change.
    """
    trainer = cfg.trainer
    can_continue = trainer.resume_mode == "auto" and not trainer.val_only
    checkpoint = find_checkpoint_to_resume(trainer) if can_continue else None
    config_file = Path(trainer.default_local_dir).expanduser() / "config.yaml"
    if checkpoint is None or not config_file.is_file():
        return
    try:
        stored_config = parse_yaml(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # the config is written again
        return
    for key in (*KEYS_OF_THE_TASK, DATA_KEY):
        try:
            stored_value = value_at_path(stored_config, key)
        except (AttributeError, KeyError):
            continue
        if value_at_path(cfg, key) == stored_value:
            continue
        if key == DATA_KEY:  # files can move between two starts
            logger.warning("%s differs from that of the run in %s", key, config_file.parent)
            continue
        why = f"the run in {config_file.parent}, which would continue, has {stored_value!r}"
        fix = f"{NEW_RUN_FIX}, or {CONTINUE_FIX}={checkpoint}"
        yield build_conflict(cfg, key, why, "the value of that run", fix)


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
