"""Checks of devices, Ray, directories and files, and of the environment."""

import os
from pathlib import Path

from verl.config.derive import (
    declared_tasks,
    engine_count,
    engine_gpus,
    have_own_gpus,
    known_tasks,
    vllm_transfer_backend,
)
from verl.config.plugins import env_section
from verl.config.problems import Context, Problems, problem, unknown_name
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import lookup
from verl.config.settings.hints import did_you_mean
from verl.config.settings.reading import from_text, read
from verl.names import CHECKPOINT_MANIFEST, TRACKERS


def check_devices(cfg: PPOConfig, ctx: Context) -> Problems:
    """Ranks and engines fit the devices."""
    trainer = cfg.trainer
    ranks = trainer.n_gpus_per_node * trainer.nnodes
    # A cluster may have the GPUs that this machine lacks.
    joins = cfg.ray_init.address or os.environ.get("RAY_ADDRESS")
    if ctx.device == "cuda":
        yield from engine_problems(cfg)
    elif joins and trainer.device == "auto":
        yield from _parallel_problems(cfg)
    else:
        yield from cpu_problems(cfg)
    yield from _joint_problems(cfg)
    for where in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model"):
        key = f"{where}.fsdp_config.fsdp_size"
        size = lookup(cfg, key)
        # Every fsdp_size ranks share one copy of the parameters: a remainder would have none.
        if size != -1 and (size < 1 or ranks % size):
            yield problem(
                cfg,
                key,
                f"does not divide the {ranks} ranks",
                "-1 or a divisor of the ranks",
                f"{key}=-1",
            )


def engine_problems(cfg: PPOConfig) -> Problems:
    """What keeps the engines from being placed on the GPUs of the training ranks, or on theirs."""
    yield from _parallel_problems(cfg)
    yield from _transfer_problems(cfg, "cuda")
    key = "actor_rollout_ref.rollout.num_workers"
    devices = sum(engine_gpus(cfg))
    each = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    engines = engine_count(cfg, "cuda")
    if engines * each > devices:
        room = devices // each
        of = f" of {each} devices" if each > 1 else ""
        why = f"{engines} engines{of} on {devices} devices, and a device has room for one"
        fix = f"{key}={room}, or more devices" if room else "more devices"
        yield problem(cfg, key, why, f"{room} or fewer", fix)


def cpu_problems(cfg: PPOConfig) -> Problems:
    """What only GPUs can do."""
    yield from _attention_problems(cfg)
    yield from _transfer_problems(cfg, "cpu")


def _joint_problems(cfg: PPOConfig) -> Problems:
    """Ranks that compute a row together are of one node."""
    ranks = cfg.trainer.n_gpus_per_node
    for where in ("actor_rollout_ref.actor", "critic"):
        key = f"{where}.ulysses_sequence_parallel_size"
        size = lookup(cfg, key)
        if ranks % size:
            why = f"it does not divide the {ranks} ranks of a node, which compute a row together"
            yield problem(cfg, key, why, f"divisors of {ranks}", f"{key}=1")
    compiled = "actor_rollout_ref.actor.use_torch_compile"
    if cfg.actor_rollout_ref.actor.ulysses_sequence_parallel_size > 1 and lookup(cfg, compiled):
        why = "layers in which ranks exchange what they have are not compiled"
        fix = f"{compiled}=false, or actor_rollout_ref.actor.ulysses_sequence_parallel_size=1"
        yield problem(cfg, compiled, why, "false", fix)


def _attention_problems(cfg: PPOConfig) -> Problems:
    for key in ("actor_rollout_ref.model.attn_implementation", "critic.model.attn_implementation"):
        if lookup(cfg, key) == "flex":
            why = "FlexAttention has no gradient on a CPU"
            yield problem(cfg, key, why, "sdpa without a GPU", f"{key}=sdpa")


def _parallel_problems(cfg: PPOConfig) -> Problems:
    yield from _node_problems(cfg)
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    each = lookup(cfg, key)
    if each == 1:
        return
    rollout = cfg.actor_rollout_ref.rollout
    devices = engine_gpus(cfg)[0]
    if rollout.name == "hf":
        fix = f"{key}=1, or actor_rollout_ref.rollout.name=vllm"
        yield problem(cfg, key, "the hf engine is on one device", "1", fix)
    elif devices % each:
        why = f"a node has {devices} devices, and those of an engine are on one node"
        yield problem(cfg, key, why, f"a divisor of {devices}", f"{key}=1")
    elif rollout.name == "vllm" and rollout.weight_transfer == "store":
        where = "actor_rollout_ref.rollout.weight_transfer"
        why = f"an engine of {each} devices gets its weights by vLLM's own ways"
        allowed = ", ".join(["auto", *_ways_on_gpus(cfg)])
        yield problem(cfg, where, why, allowed, f"{where}=auto, or {key}=1")


def _node_problems(cfg: PPOConfig) -> Problems:
    rollout = cfg.actor_rollout_ref.rollout
    key = "actor_rollout_ref.rollout.n_gpus_per_node"
    if rollout.n_gpus_per_node and not rollout.nnodes:
        why = "engines share the GPUs of the training ranks (actor_rollout_ref.rollout.nnodes=0)"
        fix = f"actor_rollout_ref.rollout.nnodes=1, or {key}=null"
        yield problem(cfg, key, why, "null", fix)


def _transfer_problems(cfg: PPOConfig, device: str) -> Problems:
    key = "actor_rollout_ref.rollout.weight_transfer"
    way = lookup(cfg, key)
    if way in ("auto", "store"):
        return
    name = cfg.actor_rollout_ref.rollout.name
    own = have_own_gpus(cfg, device)
    if device != "cuda":
        why = "it goes from GPU to GPU, and trainer.device is cpu"
    elif name != "vllm":
        why = f"it is vLLM's way, and the engine is {name}"
    elif way == "ipc" and own:
        why = "engines have GPUs of their own (actor_rollout_ref.rollout.nnodes)"
    elif way == "nccl" and not own:
        why = "it takes a GPU once, and engines share those of ranks (rollout.nnodes=0)"
    else:
        return
    ways = _ways_on_gpus(cfg) if device == "cuda" and name == "vllm" else ["store"]
    yield problem(cfg, key, why, ", ".join(["auto", *ways]), f"{key}=auto")


def _ways_on_gpus(cfg: PPOConfig) -> list[str]:
    """How vLLM gets weights on the GPUs that it has."""
    each = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    return [vllm_transfer_backend(cfg)] if each > 1 else [vllm_transfer_backend(cfg), "store"]


def check_ray(cfg: PPOConfig, _ctx: Context) -> Problems:
    """What only a Ray that is started here can be told."""
    if cfg.ray_init.address is None:
        return
    for name in ("num_cpus", "num_gpus", "object_store_gb"):
        if getattr(cfg.ray_init, name) is not None:
            why = f"the cluster at ray_init.address={cfg.ray_init.address} has its own"
            yield problem(
                cfg,
                f"ray_init.{name}",
                why,
                "null",
                f"give it to `ray start`, or ray_init.{name}=null",
            )


def check_run(cfg: PPOConfig | SFTConfig, ctx: Context) -> Problems:
    """Where the run starts from and what it loads."""
    yield from _checkpoint_problems(cfg, ctx)
    yield from _name_problems(cfg)
    for name in cfg.trainer.logger:
        if name not in TRACKERS:
            fix = did_you_mean(name, TRACKERS).removeprefix("; ") or "take one of those"
            yield problem(
                cfg, "trainer.logger", f"{name!r} is no tracker", ", ".join(TRACKERS), fix
            )
    if isinstance(cfg, PPOConfig) and ctx.check_files:
        key = "custom_reward_function.path"
        path = lookup(cfg, key)
        if path is not None and not Path(path).expanduser().is_file():
            fix = "mend the path, or set it to null"
            yield problem(cfg, key, "no such file", "a Python file", fix, "missing_file")


def _name_problems(cfg: PPOConfig | SFTConfig) -> Problems:
    """Names make a directory below ``runs/``, and the run directory is one that can be named."""
    for name in ("project_name", "experiment_name", "default_local_dir"):
        key = f"trainer.{name}"
        value = str(lookup(cfg, key))
        parts = value.split("/")
        if not value.strip() or not value.isprintable():
            why = "nothing can be called that" if value.strip() else "it is empty"
            yield problem(cfg, key, why, "a name in one line", f"{key}=NAME")
        elif name != "default_local_dir" and {"", ".", ".."} & set(parts):
            why = "the run directory would lie outside of runs/"
            allowed = "a name, or names with / between them"
            yield problem(cfg, key, why, allowed, f"{key}=NAME, or trainer.default_local_dir=DIR")


def _checkpoint_problems(cfg: PPOConfig | SFTConfig, ctx: Context) -> Problems:
    trainer = cfg.trainer
    key = "trainer.resume_from_path"
    allowed = "the directory of a checkpoint, .../global_step_N"
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        why = "resume_mode=resume_path continues from it"
        yield problem(cfg, key, why, allowed, "name a checkpoint, or trainer.resume_mode=auto")
    if not trainer.resume_from_path or not ctx.check_files:
        return
    directory = Path(trainer.resume_from_path)
    if not directory.is_dir():
        fix = "name an existing checkpoint"
        yield problem(cfg, key, "no such directory", allowed, fix, "missing_directory")
    elif not (directory / CHECKPOINT_MANIFEST).is_file():
        below = sorted(found.parent for found in directory.glob(f"**/{CHECKPOINT_MANIFEST}"))
        newest = max(below, key=lambda place: place.stat().st_mtime, default=None)
        fix = f"{key}={newest}" if newest else "name a directory global_step_N of a run"
        why = f"it is no checkpoint: there is no {CHECKPOINT_MANIFEST} in it"
        yield problem(cfg, key, why, allowed, fix, "no_checkpoint")


def check_env(cfg: PPOConfig | SFTConfig, ctx: Context) -> Problems:
    """The environment exists and has enough tasks for a batch and for the panel."""
    env = cfg.env
    known = ctx.names.environments
    if known is not None and env.name not in known and ":" not in env.env_name:
        yield unknown_name(cfg, "env.env_name", env.env_name, known)
    section = env_section(env.name)
    if section is not None:
        yield from read(section, from_text(env.kwargs, section), "env.kwargs").problems.values()
    for key in ("env.reset_timeout_s", "env.step_timeout_s"):
        if lookup(cfg, key) <= 0:
            yield problem(cfg, key, "every call would be late", "more than 0", f"{key}=30")
    held_out = declared_tasks(env, "val")
    if held_out is not None and env.val_tasks is not None and env.val_tasks > held_out:
        why = f"only {held_out} tasks are held out"
        fix = f"a smaller panel, or more tasks (env.{env.name})"
        yield problem(cfg, "env.val_tasks", why, f"at most {held_out}", fix)
    tasks = known_tasks(env)
    if isinstance(cfg, PPOConfig) and tasks is not None and cfg.data.train_batch_size > tasks:
        why = f"there are {tasks} training tasks, and a batch holds a task once"
        fix = f"a smaller batch, or more tasks (env.train_tasks, env.{env.name})"
        allowed = "at most the number of training tasks"
        yield problem(cfg, "data.train_batch_size", why, allowed, fix)
