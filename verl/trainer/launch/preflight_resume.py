"""Check that the checkpoint from which a run would continue fits the models of its config."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from verl.config.adapter_files import read_saved_adapter
from verl.config.checkpoint_paths import find_checkpoint_to_resume, suggest_export
from verl.config.derive import is_policy_missing
from verl.config.problems import build_conflict, build_problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import Problem, value_at_path
from verl.config.yaml_files import parse_yaml
from verl.models.hub import resolve_directory_without_weights
from verl.models.loader import build_meta_model, read_config
from verl.models.lora import add_lora
from verl.models.policy import PolicyModel, ValueModel
from verl.trainer.launch.preflight_lora import find_adapter_mismatch_problems
from verl.utils.checkpoint import is_complete_checkpoint
from verl.workers.engine_state import has_engine_state, read_weight_shapes

LORA_A = ".lora_A."  # part of the names of matrices [rank, inputs]
CRITIC_SECTION = "critic.model"
NEW_RUN_FIX = "trainer.experiment_name=ANOTHER for a new run"
CONTINUE_FIX = "trainer.resume_mode=resume_path trainer.resume_from_path"
KEYS_OF_THE_TASK = ("env.env_name", "algorithm.adv_estimator", "trainer.seed", "env.seed")
# Keys of files that can move between two starts. Other values give only a warning.
MOVABLE_KEYS = ("data.train_files", "actor_rollout_ref.model.path")
logger = logging.getLogger(__name__)


def find_resume_problems(cfg: PPOConfig | SFTConfig) -> Iterator[Problem]:
    """Yield problems if the checkpoint to resume from does not fit the models of the run.

    It does not fit if the policy or critic is missing, or has other shapes or another LoRA rank.
    An incomplete checkpoint is not checked.
    """
    checkpoint = find_checkpoint_to_resume(cfg.trainer)
    if checkpoint is None or not is_complete_checkpoint(checkpoint):
        return
    directory_by_section = {"model": checkpoint}
    if isinstance(cfg, PPOConfig):
        directory_by_section = {"actor_rollout_ref.model": checkpoint / "actor"}
        if cfg.critic.enable:
            directory_by_section[CRITIC_SECTION] = checkpoint / "critic"
    is_model_missing = isinstance(cfg, PPOConfig) and is_policy_missing(cfg)
    for section, directory in directory_by_section.items():
        if not has_engine_state(directory):
            yield _build_missing_model_problem(cfg, section, checkpoint)
            return
        # The sizes of a new policy are known after its tokenizer is built.
        if not is_model_missing and value_at_path(cfg, section).path is not None:
            yield from _find_mismatch_problems(cfg, section, directory, checkpoint)


def find_changed_task_problems(cfg: PPOConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that differs from that of the run to continue.

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
    except (OSError, ValueError, yaml.YAMLError):  # unreadable: the run writes it again
        return
    for key in (*KEYS_OF_THE_TASK, *MOVABLE_KEYS):
        try:
            stored_value = value_at_path(stored_config, key)
        except (AttributeError, KeyError):
            continue
        if value_at_path(cfg, key) == stored_value:
            continue
        if key in MOVABLE_KEYS:
            logger.warning(
                "%s=%r: the run in %s, which continues from %s, has %r; for a new run, set "
                "trainer.experiment_name=ANOTHER",
                key,
                value_at_path(cfg, key),
                config_file.parent,
                checkpoint.name,
                stored_value,
            )
            continue
        why = f"the run in {config_file.parent}, which would continue, has {stored_value!r}"
        fix = f"{NEW_RUN_FIX}, or {CONTINUE_FIX}={checkpoint}"
        yield build_conflict(cfg, key, why, "the value of that run", fix)


def _build_missing_model_problem(
    cfg: PPOConfig | SFTConfig, section: str, checkpoint: Path
) -> Problem:
    if section == CRITIC_SECTION:
        why = f"the run would continue from {checkpoint}, which has no critic"
        fix = f"critic.enable=false and an estimator without critic, or {NEW_RUN_FIX}"
        allowed = "false for this checkpoint"
        return build_problem(cfg, "critic.enable", why, allowed, fix, "no_checkpoint")
    program, other_program = "main_ppo", "main_sft"
    if isinstance(cfg, SFTConfig):
        program, other_program = other_program, program
    key, new_run_fix = "trainer.default_local_dir", NEW_RUN_FIX
    if cfg.trainer.resume_mode == "resume_path":
        key, new_run_fix = "trainer.resume_from_path", "trainer.resume_mode=disable"
    why = f"the run would continue from {checkpoint}, which {program} cannot read"
    allowed = f"checkpoints of {program}, not of {other_program}"
    fix = f"{new_run_fix}; to start from its policy, "
    fix += suggest_export(checkpoint, f"{section}.path", f"set {section}.path=DIR")
    return build_problem(cfg, key, why, allowed, fix, "no_checkpoint")


def _find_mismatch_problems(
    cfg: PPOConfig | SFTConfig, section: str, directory: Path, checkpoint: Path
) -> Iterator[Problem]:
    try:
        stored_shapes = read_weight_shapes(directory)
    except Exception:  # headers of damaged files raise errors of many types
        return
    model_settings = value_at_path(cfg, section)
    stored_rank = next((shape[0] for name, shape in stored_shapes.items() if LORA_A in name), 0)
    if bool(model_settings.lora_rank) != bool(stored_rank):
        key = f"{section}.lora_rank"
        adapter_text = f"an adapter of rank {stored_rank}" if stored_rank else "no LoRA adapter"
        why = f"the run would continue from {checkpoint}, which has {adapter_text}"
        fix = f"{key}={stored_rank}, or {NEW_RUN_FIX}"
        yield build_conflict(cfg, key, why, str(stored_rank), fix)
        return
    model_config = read_config(
        Path(resolve_directory_without_weights(str(model_settings.path))),
        model_settings.trust_remote_code,
        model_settings.override_config,
    )
    meta_model = build_meta_model(model_config, model_settings.trust_remote_code)
    if model_settings.lora_rank:
        # A critic has no output head of a language model.
        adapted_model: Any = meta_model.base_model if section == CRITIC_SECTION else meta_model
        saved_adapter = read_saved_adapter(directory)
        problems = saved_adapter and list(
            find_adapter_mismatch_problems(
                section, model_settings, adapted_model, saved_adapter, str(checkpoint)
            )
        )
        if problems:
            yield from problems
            return
        target_modules = model_settings.target_modules
        add_lora(
            meta_model,
            rank=model_settings.lora_rank,
            alpha=model_settings.lora_alpha,
            target_modules=target_modules,
        )
    model_class = ValueModel if section == CRITIC_SECTION else PolicyModel
    differences = list_shape_differences(model_class(meta_model), stored_shapes)
    if differences:
        name, stored_shape, model_shape = differences[0]
        difference = f"{name} has the shape {stored_shape} there, and {model_shape} in the model"
        why = f"the run would continue from {checkpoint}, which is of another model: {difference}"
        allowed = "the model with which the run started"
        yield build_problem(cfg, f"{section}.path", why, allowed, NEW_RUN_FIX, "wrong_weights")


def list_shape_differences(
    model: PolicyModel | ValueModel, stored_shapes: Mapping[str, list[int]]
) -> list[tuple[str, list[int] | None, list[int] | None]]:
    """Return name, stored shape and model shape of each differing weight (None: no weight)."""
    model_shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    buffer_names = {name for name, _ in model.named_buffers()}
    weight_names = sorted(model_shapes.keys() | (stored_shapes.keys() - buffer_names))
    shape_pairs = [(name, stored_shapes.get(name), model_shapes.get(name)) for name in weight_names]
    return [
        (name, stored_shape, model_shape)
        for name, stored_shape, model_shape in shape_pairs
        if stored_shape != model_shape
    ]
