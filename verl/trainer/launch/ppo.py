"""Construction of a PPO run: the module that imports the concrete classes of all packages.

    environments ─▶ policy ─▶ tokenizer ─▶ checks ─▶ Ray ─▶ worker groups and engines
        ─▶ collector ─▶ trainer.fit()

All checks that do not need the cluster run before Ray starts.
"""

import contextlib
import gc
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from transformers import AutoTokenizer

import rlvcr.core_rlvcr  # noqa: F401  (registers the estimators rlvcr and copo)
from agent_system.environments import EnvironmentManagerBase
from agent_system.multi_turn_rollout import TrajectoryCollector
from agent_system.multi_turn_rollout.first_prompts import limit_first_prompts
from agent_system.reward_manager import load_reward_manager
from verl.config.adapter_files import SYNC_KEY
from verl.config.derive import (
    compute_max_rows,
    count_engines,
    count_max_engines_per_node,
    is_policy_missing,
    resolve_weight_transfer,
)
from verl.config.memory import (
    estimate_object_store_gb,
    has_reference,
    has_reference_copy,
    read_policy_size,
)
from verl.config.plugins import describe_stand_in
from verl.config.problems import build_problem
from verl.config.schema import PPOConfig
from verl.config.schema.critic import RewardNetworkConfig
from verl.config.schema.model import TrainedModelConfig
from verl.config.settings import ConfigError, Problem, Section
from verl.config.settings.errors import get_problem_code
from verl.models.hub import model_directory, pin_revision
from verl.models.weights import WeightPurpose
from verl.record.journal import Journal
from verl.record.run_dir import RunDirectory
from verl.single_controller.ray import RayClassWithInitArgs, create_colocated_worker_cls
from verl.single_controller.ray.local import init_ray, limit_object_store_size, stop_ray
from verl.single_controller.ray.nodes import add_lost_nodes_to_errors, collect_stacks_of_other_nodes
from verl.single_controller.ray.worker_group import make_loopback_environment
from verl.trainer.launch.preflight_lora import resolve_lora_sync
from verl.trainer.launch.preflight_prompts import find_prompt_problems, open_task_environments
from verl.trainer.launch.preflight_weights import find_weight_problems
from verl.trainer.launch.run_plan import (
    RunPlan,
    build_adapter_resume_overrides,
    choose_device,
    collect_absolute_paths,
    count_optimizer_steps,
    create_pools,
    find_placement_problems,
    get_worker_cpus,
    list_live_nodes,
)
from verl.trainer.ppo.credit import CombinedRewards
from verl.trainer.ppo.interfaces import RewardFunction
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.resources import ResourcePoolManager, Role, TrainingWorkers
from verl.utils.checkpoint import CheckpointManager
from verl.utils.logging import setup_logging
from verl.utils.processes import count_threads_per_process
from verl.utils.watchdog import Watchdog
from verl.workers.actor import ActorWorker
from verl.workers.collectives import resolve_device
from verl.workers.critic import CriticWorker
from verl.workers.reward_model import RewardModelWorker
from verl.workers.rollout import RolloutWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Trainer and collector of a started run."""

    trainer: RayPPOTrainer[EnvironmentManagerBase]
    collector: TrajectoryCollector


def run_ppo(cfg: PPOConfig) -> None:
    """Run the training of ``cfg`` and write its report.

    If the policy does not exist, first create it by supervised training (cold start).
    """
    with open_run(cfg) as run:
        # Exclude existing objects from garbage collection, which would search them at each step.
        gc.collect()
        gc.freeze()
        run.trainer.fit()


@contextlib.contextmanager
def open_run(cfg: PPOConfig) -> Iterator[OpenRun]:
    """Yield the started run of ``cfg``. At the end of the context stop it and write the report."""
    start_time = time.perf_counter()
    cfg = cfg.as_frozen()
    seeds = {"trainer": cfg.trainer.seed, "env": cfg.env.seed}
    simulation_text = describe_stand_in(cfg)
    directory = RunDirectory(cfg.trainer.default_local_dir)
    with (
        directory.open(cfg, seeds, simulation_text) as run,
        run.log_resume_hint_on_interrupt(cfg.trainer.resume_mode),
    ):
        setup_logging(run.logs / "driver.log")
        if simulation_text:
            logger.warning("%s: not comparable with published numbers", simulation_text)
        watchdog = Watchdog(
            run.logs,
            cfg.trainer.waiting_log_s,
            cfg.trainer.stall_timeout_s,
            collect_remote_stacks=collect_stacks_of_other_nodes,
        )
        # The exit stack closes in reverse order: it finishes the journal first, and ends Ray last.
        with watchdog, contextlib.ExitStack() as stack:
            watchdog.enter_stage("tasks")
            envs, val_envs = open_environments(cfg)
            watchdog.enter_stage("policy")
            plan, tokenizer = prepare_plan(cfg, envs, val_envs)
            watchdog.enter_stage("start")
            started_run = start_run(plan, run, envs, val_envs, tokenizer, stack)
            startup_seconds = time.perf_counter() - start_time
            logger.info("ready after %.1f s; run directory %s", startup_seconds, run.path)
            watchdog.follow_stopwatch(started_run.trainer.clock)
            watchdog.enter_stage("run")
            stack.callback(watchdog.enter_stage, "shutdown")
            yield started_run


def prepare_plan(
    cfg: PPOConfig, envs: EnvironmentManagerBase, val_envs: EnvironmentManagerBase
) -> tuple[RunPlan, Any]:
    """Return the run's plan before the devices of Ray are known, and the policy's tokenizer."""
    needs_cold_start = is_policy_missing(cfg)
    if needs_cold_start:
        # Import only if needed: no other part of a PPO run uses supervised training.
        from verl.trainer.launch.sft import create_policy

        create_policy(cfg)
    pinned_models = pin_model_paths(cfg)
    policy_config = cfg.actor_rollout_ref.model
    tokenizer = AutoTokenizer.from_pretrained(
        model_directory(pinned_models["actor_rollout_ref.model.path"]),
        trust_remote_code=policy_config.trust_remote_code,
    )
    if needs_cold_start:
        raise_problems(find_prompt_problems(cfg, tokenizer))
    for env_manager in dict.fromkeys((envs, val_envs)):
        limit_first_prompts(cfg, tokenizer, env_manager)
    # Count the steps after limit_first_prompts, which may drop tasks.
    steps_by_key = count_optimizer_steps(cfg, len(envs.task_list))
    plan_values = {
        **collect_absolute_paths(cfg),
        **pinned_models,
        **steps_by_key,
        **build_adapter_resume_overrides(cfg),
    }
    return RunPlan(cfg, {**plan_values, SYNC_KEY: resolve_lora_sync(cfg)[0]}), tokenizer


def start_run(
    plan: RunPlan,
    run: RunDirectory,
    envs: EnvironmentManagerBase,
    val_envs: EnvironmentManagerBase,
    tokenizer: Any,
    stack: contextlib.ExitStack,
) -> OpenRun:
    """Start Ray, workers, collector and trainer; ``stack`` ends them in reverse order."""
    is_cluster_joined = start_ray(plan.config, stack)
    plan = resolve_device_settings(plan, is_cluster_joined)
    run.write_plan(plan.written_config, plan.config)
    cfg = plan.config
    collector = TrajectoryCollector(cfg, tokenizer)
    workers = start_workers(cfg, stack, collector, is_cluster_joined)
    stack.callback(collector.close)
    checkpoint_manager = CheckpointManager(
        run.checkpoints, cfg.trainer.max_actor_ckpt_to_keep, background=cfg.trainer.async_save
    )
    stack.callback(checkpoint_manager.close)
    journal = Journal(run, cfg, tokenizer, collector.encode_rows)
    stack.callback(journal.close)
    reward_fn: RewardFunction = load_reward_manager(cfg)
    if workers.reward_group is not None:
        reward_fn = CombinedRewards(reward_fn, workers.reward_group, cfg.reward_model)
    trainer = RayPPOTrainer(
        cfg, workers, collector, envs, val_envs, reward_fn, journal, checkpoint_manager
    )
    return OpenRun(trainer, collector)


def open_environments(cfg: PPOConfig) -> tuple[EnvironmentManagerBase, EnvironmentManagerBase]:
    """Return environment managers for training and validation, or raise ``ConfigError``."""
    try:
        return open_task_environments(cfg)
    except (ImportError, OSError, ValueError) as error:
        logger.debug("no tasks", exc_info=error)
        raise ConfigError(
            f"env.env_name={cfg.env.env_name!r} has no tasks: {error}",
            get_problem_code(error, "no_rows"),
        ) from error


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise ``ConfigError`` with ``problems`` if there are any."""
    problem_list = list(problems)
    if problem_list:
        raise ConfigError(problem_list)


def pin_model_paths(cfg: PPOConfig) -> dict[str, str]:
    """Return a fixed path for each model key of ``cfg``, so that all nodes load the same weights.

    A directory becomes an absolute path, and a hub name gets its commit. Example:
    {"actor_rollout_ref.model.path": "owner/name@commit"}. Raises ``ConfigError`` for a model that
    does not exist or has invalid weights.
    """
    models_by_key: dict[str, tuple[TrainedModelConfig | RewardNetworkConfig, WeightPurpose]] = {
        "actor_rollout_ref.model.path": (cfg.actor_rollout_ref.model, "policy")
    }
    if cfg.critic.enable:
        models_by_key["critic.model.path"] = (cfg.critic.model, "value")
    if cfg.reward_model.enable:
        models_by_key["reward_model.model.path"] = (cfg.reward_model.model, "reward")
    pinned_paths = {}
    for key, (model, weight_purpose) in models_by_key.items():
        path = str(model.path)
        try:
            pinned_paths[key] = pin_revision(path)
        except FileNotFoundError as error:
            # The checks before the start found the model, so it was removed in the meantime.
            allowed = "a directory, or a name on the model hub"
            fix = f"{key}=DIRECTORY, where DIRECTORY has config.json, weights and tokenizer"
            raise ConfigError(
                build_problem(cfg, key, str(error), allowed, fix, "missing_file")
            ) from error
        if not Path(path).is_dir():  # weights in directories were checked before the start
            directory = Path(model_directory(pinned_paths[key]))
            setting = f"{key}={path!r}"
            trust_code = model.trust_remote_code
            raise_problems(find_weight_problems(setting, directory, trust_code, weight_purpose))
    return pinned_paths


def start_ray(cfg: PPOConfig, stack: contextlib.ExitStack) -> bool:
    """Start Ray or join a Ray cluster; return True if it was joined. ``stack`` ends or leaves it.

    Raises ``ConfigError`` if the cluster cannot be reached.
    """
    policy_size = read_policy_size(Path(model_directory(str(cfg.actor_rollout_ref.model.path))))
    object_store_gb = cfg.ray_init.object_store_gb
    if object_store_gb is None:
        max_rows = compute_max_rows(cfg)
        object_store_gb = limit_object_store_size(
            estimate_object_store_gb(cfg, policy_size, max_rows)
        )
    stack.callback(stop_ray)  # before the start, which a signal may interrupt
    try:
        ray_facts = init_ray(cfg.ray_init, object_store_gb=object_store_gb)
    except ConnectionError as error:
        raise ConfigError(
            f"ray_init.address={cfg.ray_init.address!r}: cannot connect to the cluster: {error}; "
            "allowed: the address of a running cluster; fix: run `ray start --head`, or set "
            "ray_init.address=null to start Ray with the run",
            "failed_call",
        ) from error
    stack.enter_context(add_lost_nodes_to_errors())
    resource_facts = [ray_facts[key] for key in ("num_cpus", "num_gpus", "address")]
    logger.info("ray: %s CPUs, %s GPUs at %s", *resource_facts)
    return not ray_facts["started"]


def start_workers(
    cfg: PPOConfig,
    stack: contextlib.ExitStack,
    collector: TrajectoryCollector,
    is_cluster_joined: bool,
) -> TrainingWorkers:
    """Start engines, collector and worker groups; ``stack`` ends them in reverse order."""
    worker_specs = build_worker_specs(cfg)
    pools = create_pools(cfg, cfg.trainer.device, worker_specs)
    if is_cluster_joined:
        # On a cluster, release the devices. A local Ray ends with the run, and the call would hang
        # if its node process ended first, for example after SIGTERM to the whole process group.
        stack.callback(pools.shutdown)
    if not pools.is_pool_shared(Role.Actor, Role.Rollout):
        pools.reserve_pools()
    rollout_workers = start_rollout_workers(cfg, pools)
    for worker in rollout_workers:
        stack.callback(ray.kill, worker)
    # Close the collectors if the worker groups do not start. If they start, ``start_run`` adds a
    # callback that closes the collectors before the groups.
    stack.callback(collector.close)
    collector.start_collectors(rollout_workers)
    policy_config = cfg.actor_rollout_ref
    workers = TrainingWorkers.start(
        worker_specs,
        pools,
        rollout_workers,
        cfg.trainer.balance_batch,
        policy_config.rollout.weight_transfer,
        sends_adapter=policy_config.rollout.lora_sync == "adapter",
        actor_computes_reference=has_reference(cfg) and not has_reference_copy(cfg),
    )
    stack.callback(workers.shutdown)
    return workers


def resolve_device_settings(plan: RunPlan, is_cluster_joined: bool) -> RunPlan:
    """Return ``plan`` with device, number of engines and weight transport set for Ray's nodes.

    With ``is_cluster_joined`` the run joined a Ray cluster. Then Ray reports the GPUs, otherwise
    PyTorch does. Raises ``ConfigError`` if the workers do not fit on the nodes.
    """
    cfg = plan.config
    nodes = list_live_nodes(ray.nodes())
    configured_device = cfg.trainer.device
    chosen_device = (
        choose_device(configured_device, nodes)
        if is_cluster_joined
        else resolve_device(configured_device)
    )
    device = "cuda" if chosen_device == "cuda" else "cpu"
    rollout_section = "actor_rollout_ref.rollout"
    plan = plan.with_values(
        {
            "trainer.device": device,
            f"{rollout_section}.num_workers": count_engines(cfg, device),
            f"{rollout_section}.weight_transfer": resolve_weight_transfer(cfg, device),
        }
    )
    # Worker groups per training device: actor with reference, engines, critic, reward model.
    num_groups = 2 + bool(cfg.critic.enable) + cfg.reward_model.enable
    cpus_per_worker = get_worker_cpus(device)
    raise_problems(find_placement_problems(plan.config, nodes, num_groups, cpus_per_worker))
    return plan


def build_worker_specs(cfg: PPOConfig) -> dict[Role, RayClassWithInitArgs]:
    """Return the worker class of each training role (actor, critic, reward model) of a run."""
    trainer = cfg.trainer
    policy_config = cfg.actor_rollout_ref
    num_threads = trainer.num_threads or count_threads_per_process(trainer.n_gpus_per_node)
    # Set an environment variable, because OpenMP reads the thread count only when torch is loaded.
    env_vars = {"OMP_NUM_THREADS": str(num_threads)} | make_device_environment(trainer.device)

    def make_spec(cls: type, section: Section, **extra_arguments: str) -> RayClassWithInitArgs:
        arguments = {"seed": trainer.seed, "num_threads": num_threads, "device": trainer.device}
        return RayClassWithInitArgs(cls, section, env_vars=env_vars, **arguments, **extra_arguments)

    policy_roles = [Role.Actor]
    if has_reference_copy(cfg):
        policy_roles.append(Role.RefPolicy)
    policy_specs = {
        role.value: make_spec(ActorWorker, policy_config, role=role.value) for role in policy_roles
    }
    worker_specs = {Role.Actor: create_colocated_worker_cls(policy_specs)}
    if cfg.critic.enable:
        worker_specs[Role.Critic] = make_spec(CriticWorker, cfg.critic)
    if cfg.reward_model.enable:
        worker_specs[Role.RewardModel] = make_spec(RewardModelWorker, cfg.reward_model)
    return worker_specs


def make_device_environment(device: str) -> dict[str, str]:
    """Return the environment variables that hide all GPUs from a process with ``device=cpu``.

    Ray shows all GPUs to a process to which it assigns none.
    """
    return {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}


def start_rollout_workers(cfg: PPOConfig, pools: ResourcePoolManager) -> list[Any]:
    """Start the rollout workers, and return their Ray handles."""
    policy_config = cfg.actor_rollout_ref
    rollout_config = policy_config.rollout
    device = cfg.trainer.device
    num_engines = count_engines(cfg, device)
    engines_per_node = count_max_engines_per_node(cfg, device)
    num_threads = rollout_config.num_threads or count_threads_per_process(engines_per_node)
    pool = pools.get_resource_pool(Role.Rollout)
    devices_per_engine = rollout_config.tensor_model_parallel_size if pools.use_gpu else 1
    devices = pool.query_device_ids() if devices_per_engine > 1 else []
    remote_class = ray.remote(RolloutWorker)
    worker_env_vars = make_loopback_environment(ray.util.get_node_ip_address())
    if rollout_config.name != "vllm":  # vLLM's build for GPUs does not run without a GPU
        worker_env_vars |= make_device_environment(device)
    workers = []
    for engine_index in range(num_engines):
        # Distribute engines evenly over the devices, which are in the order of the nodes.
        num_engine_slots = pool.world_size // devices_per_engine
        first_device_index = engine_index * num_engine_slots // num_engines * devices_per_engine
        # Many trajectories call one engine concurrently; the engine batches their requests.
        configured_class = remote_class.options(
            max_concurrency=64, **pool.shared_actor_options(first_device_index)
        )
        worker = configured_class.remote(
            policy_config,
            policy_config.model.path,
            seed=rollout_config.seed + engine_index,
            num_threads=num_threads,
            devices=devices[first_device_index : first_device_index + devices_per_engine],
            env=worker_env_vars,
        )
        workers.append(worker)
    return workers
