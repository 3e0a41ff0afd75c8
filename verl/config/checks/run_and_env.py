"""Checks of Ray resources, run directories, checkpoints, trackers and RL environments."""

import os
from pathlib import Path

from verl.config import derive
from verl.config.plugins import collect_env_settings, find_env_section_class
from verl.config.problems import (
    CheckContext,
    Problems,
    build_conflict,
    build_problem,
    build_unknown_name_problem,
)
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import EnvSection, Problem, value_at_path
from verl.config.settings.hints import did_you_mean
from verl.config.settings.reading import convert_text_values, read_section
from verl.names import CHECKPOINT_MANIFEST, TRACKERS


def check_ray_resources(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Refuse ``ray_init`` resources if the run joins a running Ray cluster, which has its own."""
    if cfg.ray_init.address in (None, "local"):
        return
    for name in ("num_cpus", "num_gpus", "object_store_gb"):
        if getattr(cfg.ray_init, name) is not None:
            why = f"the cluster at ray_init.address={cfg.ray_init.address} sets its resources"
            fix = f"pass it to `ray start`, or ray_init.{name}=null"
            yield build_conflict(cfg, f"ray_init.{name}", why, "null", fix)


def check_run_settings(cfg: PPOConfig | SFTConfig, ctx: CheckContext) -> Problems:
    """Check the checkpoint to resume from, the run's names, trackers and reward function's file."""
    yield from _check_resume_checkpoint(cfg, ctx)
    yield from _check_run_names(cfg)
    for name in cfg.trainer.logger:
        if name not in TRACKERS:
            fix = did_you_mean(name, TRACKERS).removeprefix("; ") or "choose one of those"
            why = f"{name!r} is not a tracker"
            allowed = ", ".join(TRACKERS)
            yield build_problem(cfg, "trainer.logger", why, allowed, fix, "unknown_name")
    if isinstance(cfg, PPOConfig) and ctx.check_files:
        key = "custom_reward_function.path"
        path = value_at_path(cfg, key)
        if path is not None and not os.path.isfile(os.path.expanduser(path)):
            fix = "correct the path, or set it to null"
            yield build_problem(cfg, key, "no such file", "a Python file", fix, "missing_file")


def _check_run_names(cfg: PPOConfig | SFTConfig) -> Problems:
    for name in ("project_name", "experiment_name", "default_local_dir"):
        key = f"trainer.{name}"
        value = str(value_at_path(cfg, key))
        if not value.strip() or not value.isprintable():
            why = "it has unprintable characters" if value.strip() else "it is empty"
            allowed = "a name in one line"
            yield build_problem(cfg, key, why, allowed, f"{key}=NAME", "invalid_syntax")
        elif name != "default_local_dir" and {"", ".", ".."} & set(value.split("/")):
            why = "the run directory would be outside of runs/"
            fix = f"{key}=NAME, or trainer.default_local_dir=DIR"
            allowed = "a name, or names with / between them"
            yield build_problem(cfg, key, why, allowed, fix, "invalid_syntax")


def _check_resume_checkpoint(cfg: PPOConfig | SFTConfig, ctx: CheckContext) -> Problems:
    trainer = cfg.trainer
    key = "trainer.resume_from_path"
    allowed = "the directory of a checkpoint, .../global_step_N"
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        why = "resume_mode=resume_path needs a checkpoint"
        fix = "name a checkpoint, or trainer.resume_mode=auto"
        yield build_problem(cfg, key, why, allowed, fix, "missing_key")
    if not trainer.resume_from_path or not ctx.check_files:
        return
    directory = Path(trainer.resume_from_path)
    if not directory.is_dir():
        fix = "name an existing checkpoint"
        yield build_problem(cfg, key, "no such directory", allowed, fix, "missing_file")
    elif not (directory / CHECKPOINT_MANIFEST).is_file():
        checkpoints = [path.parent for path in directory.glob(f"**/{CHECKPOINT_MANIFEST}")]
        fix = "name a directory global_step_N of a run"
        if checkpoints:
            fix = f"{key}={max(checkpoints, key=lambda path: path.stat().st_mtime)}"
        why = f"it is not a checkpoint: there is no {CHECKPOINT_MANIFEST} in it"
        yield build_problem(cfg, key, why, allowed, fix, "no_checkpoint")


def _check_step_waits(cfg: PPOConfig | SFTConfig, name: str, settings: EnvSection) -> Problems:
    step_timeout_s = cfg.env.step_timeout_s
    key_by_setting = {}
    if isinstance(cfg, PPOConfig):
        key_by_setting = {name: key for key, name in settings.data_keys.items()}
    for setting, wait_s in settings.list_max_step_waits().items():
        if wait_s < step_timeout_s:
            continue
        key, value = f"env.{name.partition('/')[0]}.{setting}", getattr(settings, setting)
        if setting in key_by_setting and value_at_path(cfg, key_by_setting[setting]) == value:
            key = key_by_setting[setting]
        why = (
            f"a step can wait for {wait_s:g} s, and the worker process would be stopped first, "
            "with all its episodes"
        )
        allowed = f"waits of less than env.step_timeout_s ({step_timeout_s:g} s)"
        fix = f"env.step_timeout_s={wait_s + 10:g}, or a smaller value"
        message = f"{key}={value!r}: {why}; allowed: {allowed}; fix: {fix}"
        yield Problem(message, "conflicting_keys")


def _check_needed_turns(cfg: PPOConfig, name: str, settings: EnvSection) -> Problems:
    needed_turns = settings.count_needed_turns() or 1
    if needed_turns > cfg.env.max_steps:
        why = f"an episode of {name} needs {needed_turns} turns, so every reward would be 0"
        fix = f"env.max_steps={needed_turns}, or shorter episodes (env.{name.partition('/')[0]})"
        allowed = f"{needed_turns} or more"
        yield build_problem(cfg, "env.max_steps", why, allowed, fix, "does_not_fit")


def check_env(cfg: PPOConfig | SFTConfig, ctx: CheckContext) -> Problems:
    """Check that the environment exists and has enough tasks for a batch and for validation."""
    env = cfg.env
    registered_envs = ctx.names.environments
    if registered_envs is not None and env.name not in registered_envs and ":" not in env.env_name:
        yield build_unknown_name_problem(cfg, "env.env_name", env.env_name, registered_envs)
    section = find_env_section_class(env.name)
    if section is not None:
        read_result = read_section(section, convert_text_values(env.kwargs, section), "env.kwargs")
        yield from read_result.problems.values()
    for name, settings in collect_env_settings(env).items():
        yield from _check_step_waits(cfg, name, settings)
        # A reward model or function may reward episodes that do not reach their end.
        if isinstance(cfg, PPOConfig) and derive.find_post_rollout_reward_key(cfg) is None:
            yield from _check_needed_turns(cfg, name, settings)
    num_val_tasks = derive.count_tasks_of_env_section(env, "val")
    if num_val_tasks is not None and env.val_tasks is not None and env.val_tasks > num_val_tasks:
        why = f"the environment has only {num_val_tasks} validation tasks"
        fix = f"a smaller validation set, or more tasks (env.{env.name})"
        allowed = f"at most {num_val_tasks}"
        yield build_problem(cfg, "env.val_tasks", why, allowed, fix, "does_not_fit")
    num_train_tasks = derive.count_known_train_tasks(env)
    if num_train_tasks is None or not isinstance(cfg, PPOConfig):
        return
    if cfg.data.train_batch_size > num_train_tasks:
        why = f"there are {num_train_tasks} training tasks, and a batch contains a task only once"
        fix = f"a smaller batch, or more tasks (env.train_tasks, env.{env.name})"
        allowed = "at most the number of training tasks"
        yield build_problem(cfg, "data.train_batch_size", why, allowed, fix, "does_not_fit")
