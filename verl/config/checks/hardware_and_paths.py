"""Checks of devices, Ray resources, run directories, checkpoints, trackers and RL environments."""

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


def check_devices(cfg: PPOConfig, ctx: CheckContext) -> Problems:
    """Check that training ranks and rollout engines fit on the devices."""
    trainer = cfg.trainer
    num_ranks = trainer.n_gpus_per_node * trainer.nnodes
    # A cluster that the run joins may have GPUs although this machine has none.
    cluster_address = cfg.ray_init.address or os.environ.get("RAY_ADDRESS")
    if ctx.device == "cuda":
        yield from check_engine_devices(cfg)
    elif cluster_address and trainer.device == "auto":
        yield from _check_tensor_parallel(cfg)
    else:
        yield from check_cpu_settings(cfg)
    yield from _check_sequence_parallel(cfg)
    for section_path in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model"):
        key = f"{section_path}.fsdp_config.fsdp_size"
        fsdp_size = value_at_path(cfg, key)
        if fsdp_size != -1 and (fsdp_size < 1 or num_ranks % fsdp_size):
            why = f"does not divide the {num_ranks} ranks"
            yield build_conflict(cfg, key, why, "-1 or a divisor of the ranks", f"{key}=-1")


def check_engine_devices(cfg: PPOConfig) -> Problems:
    """Check that the engines fit on the GPUs of the training ranks or on separate GPUs."""
    yield from _check_tensor_parallel(cfg)
    yield from _check_weight_transfer(cfg, "cuda")
    key = "actor_rollout_ref.rollout.num_workers"
    num_devices = sum(derive.count_engine_gpus_by_node(cfg))
    gpus_per_engine = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    num_engines = derive.count_engines(cfg, "cuda")
    if num_engines * gpus_per_engine > num_devices:
        max_engines = num_devices // gpus_per_engine
        engine_size_text = f" of {gpus_per_engine} devices" if gpus_per_engine > 1 else ""
        why = (
            f"{num_engines} engines{engine_size_text} on {num_devices} devices, "
            "and a device can hold one engine"
        )
        fix = f"{key}={max_engines}, or more devices" if max_engines else "more devices"
        yield build_problem(cfg, key, why, f"{max_engines} or fewer", fix, "does_not_fit")


def check_cpu_settings(cfg: PPOConfig) -> Problems:
    """Refuse settings that need GPUs in a run on CPU."""
    for key in ("actor_rollout_ref.model.attn_implementation", "critic.model.attn_implementation"):
        if value_at_path(cfg, key) == "flex":
            why = "FlexAttention has no gradient on a CPU"
            yield build_conflict(cfg, key, why, "sdpa without a GPU", f"{key}=sdpa")
    yield from _check_weight_transfer(cfg, "cpu")


def _check_sequence_parallel(cfg: PPOConfig) -> Problems:
    num_ranks = cfg.trainer.n_gpus_per_node
    for section_path in ("actor_rollout_ref.actor", "critic"):
        key = f"{section_path}.ulysses_sequence_parallel_size"
        sequence_parallel_size = value_at_path(cfg, key)
        if num_ranks % sequence_parallel_size:
            why = f"does not divide the {num_ranks} ranks of a node, which compute a row together"
            yield build_conflict(cfg, key, why, f"divisors of {num_ranks}", f"{key}=1")
    actor = cfg.actor_rollout_ref.actor
    if actor.ulysses_sequence_parallel_size > 1 and actor.use_torch_compile:
        compile_key = "actor_rollout_ref.actor.use_torch_compile"
        why = "layers in which ranks exchange activations are not compiled"
        fix = f"{compile_key}=false, or actor_rollout_ref.actor.ulysses_sequence_parallel_size=1"
        yield build_conflict(cfg, compile_key, why, "false", fix)


def _check_tensor_parallel(cfg: PPOConfig) -> Problems:
    rollout = cfg.actor_rollout_ref.rollout
    key = "actor_rollout_ref.rollout.n_gpus_per_node"
    if rollout.n_gpus_per_node and not rollout.nnodes:
        why = "engines share the GPUs of the training ranks (actor_rollout_ref.rollout.nnodes=0)"
        fix = f"actor_rollout_ref.rollout.nnodes=1, or {key}=null"
        yield build_conflict(cfg, key, why, "null", fix)
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    gpus_per_engine = rollout.tensor_model_parallel_size
    if gpus_per_engine == 1:
        return
    num_devices = derive.count_engine_gpus_by_node(cfg)[0]
    if rollout.name == "hf":
        fix = f"{key}=1, or actor_rollout_ref.rollout.name=vllm"
        yield build_conflict(cfg, key, "the hf engine uses one device", "1", fix)
    elif num_devices % gpus_per_engine:
        why = f"a node has {num_devices} devices, and all devices of an engine are on one node"
        yield build_conflict(cfg, key, why, f"a divisor of {num_devices}", f"{key}=1")
    elif rollout.name == "vllm" and rollout.weight_transfer == "store":
        transfer_key = "actor_rollout_ref.rollout.weight_transfer"
        why = f"an engine of {gpus_per_engine} devices gets its weights by a transport of vLLM"
        allowed = ", ".join(["auto", *_list_gpu_weight_transfers(cfg)])
        yield build_conflict(cfg, transfer_key, why, allowed, f"{transfer_key}=auto, or {key}=1")


def _check_weight_transfer(cfg: PPOConfig, device: str) -> Problems:
    key = "actor_rollout_ref.rollout.weight_transfer"
    weight_transfer = value_at_path(cfg, key)
    engine_name = cfg.actor_rollout_ref.rollout.name
    is_vllm_on_gpu = device == "cuda" and engine_name == "vllm"
    supported_transfers = _list_gpu_weight_transfers(cfg) if is_vllm_on_gpu else ["store"]
    if weight_transfer in ("auto", "store", *supported_transfers):
        return
    if device != "cuda":
        why = "it sends weights from GPU to GPU, and trainer.device is cpu"
    elif engine_name != "vllm":
        why = f"only vLLM supports it, and the engine is {engine_name}"
    elif weight_transfer == "ipc":
        why = "engines have separate GPUs (actor_rollout_ref.rollout.nnodes)"
    else:
        why = (
            "NCCL does not allow two processes on a GPU, and engines share those of ranks "
            "(rollout.nnodes=0)"
        )
    yield build_conflict(cfg, key, why, ", ".join(["auto", *supported_transfers]), f"{key}=auto")


def _list_gpu_weight_transfers(cfg: PPOConfig) -> list[str]:
    engine_has_one_gpu = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size == 1
    return [derive.choose_vllm_transfer_backend(cfg), *(["store"] if engine_has_one_gpu else [])]


def check_ray_resources(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Refuse ``ray_init`` resources if the run joins a running Ray cluster, which has its own."""
    if cfg.ray_init.address is None:
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
