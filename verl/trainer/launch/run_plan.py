"""Values that are determined while a run starts: paths, optimizer steps, devices, CPUs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from agent_system.environments.env_registry import find_settings_class
from agent_system.environments.settings import EnvSettings, FunctionFromFile
from verl.config.adapter_files import START_KEY, read_adapter_settings
from verl.config.derive import (
    count_engine_gpus_by_node,
    count_training_steps,
    engines_have_separate_gpus,
)
from verl.config.devices import check_cpu_settings, check_engine_devices
from verl.config.problems import build_problem
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, NamesCode, Problem, Section, value_at_path
from verl.trainer.ppo.resources import ResourcePoolManager, Role
from verl.utils.checkpoint import CheckpointManager, choose_checkpoint

DEVICE_KEY = "trainer.device"
RANKS_KEY = "trainer.n_gpus_per_node"
NODES_KEY = "trainer.nnodes"
ENGINE_GPUS_KEY = "actor_rollout_ref.rollout.n_gpus_per_node"
ENGINE_NODES_KEY = "actor_rollout_ref.rollout.nnodes"
# CPUs that a worker reserves in Ray with trainer.device=cpu. The number of threads per process
# already limits the use of CPUs, so a small reservation suffices.
CPUS_PER_CPU_WORKER = 0.1
# Keys whose values are paths, which are made absolute.
PATH_KEYS = (
    START_KEY,
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.resume_from_path",
    "custom_reward_function.path",
)


@dataclass(frozen=True)
class RunPlan:
    """Configuration of a run as it was written, and the values that its start determined."""

    written_config: PPOConfig
    values: Mapping[str, Any] = field(default_factory=dict)  # by dotted key

    @cached_property
    def config(self) -> PPOConfig:
        """Frozen configuration with ``values``, which all processes of the run read."""
        return self.written_config.with_values(self.values)

    def with_values(self, values: Mapping[str, Any]) -> "RunPlan":
        """Return a plan with additional ``values``."""
        return replace(self, values={**self.values, **values})


def count_optimizer_steps(cfg: PPOConfig, train_tasks: int) -> dict[str, int]:
    """Return ``<section>.optim.total_training_steps`` for each optimizer that does not set it."""
    num_training_steps = count_training_steps(cfg, train_tasks)
    # The actor is not updated in the training steps of critic_warmup.
    num_actor_training_steps = num_training_steps - cfg.trainer.critic_warmup
    steps_by_section = {
        "actor_rollout_ref.actor": num_actor_training_steps,
        "critic": num_training_steps,
    }
    steps_by_key = {}
    for section_path, steps in steps_by_section.items():
        section = value_at_path(cfg, section_path)
        if section.optim.total_training_steps < 1:
            steps_per_training_step = section.ppo_mini_batches * section.ppo_epochs
            steps_by_key[f"{section_path}.optim.total_training_steps"] = (
                max(1, steps) * steps_per_training_step
            )
    return steps_by_key


def collect_absolute_paths(cfg: PPOConfig) -> dict[str, Any]:
    """Return the keys of ``cfg`` that are paths, with absolute values.

    A relative path refers to the working directory of the driver, but Ray may start its workers in
    another directory. Paths of models are not included; ``verl.models.hub.pin_revision`` makes
    them absolute.
    """
    path_by_key = {key: value_at_path(cfg, key) for key in PATH_KEYS}
    absolute_values: dict[str, Any] = {
        key: make_absolute(path) for key, path in path_by_key.items() if path
    }
    adapters = cfg.actor_rollout_ref.model.adapters
    if adapters:
        absolute_values["actor_rollout_ref.model.adapters"] = {
            name: make_absolute(directory) for name, directory in adapters.items()
        }
    env = cfg.env
    if env.kwargs:
        absolute_values["env.kwargs"] = _make_kwargs_absolute(env.env_name, env.kwargs)
    active_settings: Any = env.active_section
    # Only a mixture, an environment made of several others, has ``part_weights`` (name -> weight).
    mixture_parts = getattr(active_settings, "part_weights", ())
    for name in (env.name, *(mixture_part.split("/", 1)[0] for mixture_part in mixture_parts)):
        settings = getattr(env, name, None) if name.isidentifier() else None
        if isinstance(settings, EnvSettings):
            absolute_values[f"env.{name}"] = _make_settings_absolute(settings)
    kwargs_by_part = active_settings.kwargs if mixture_parts else {}
    if kwargs_by_part:
        kwargs = {part: _make_kwargs_absolute(part, keys) for part, keys in kwargs_by_part.items()}
        absolute_values[f"env.{env.name}"] = active_settings.model_copy(update={"kwargs": kwargs})
    return absolute_values


def build_adapter_resume_overrides(cfg: PPOConfig) -> dict[str, Any]:
    """Return keys that replace the start adapter by the checkpoint to continue from, if any.

    Then the directory of the start adapter is not read, and may be missing. The result is empty for
    a run without a start adapter or without a valid checkpoint. Raises ``ConfigError`` if there is
    no valid checkpoint and the start adapter cannot be read.
    """
    start_adapter, trainer = cfg.actor_rollout_ref.model.lora_adapter_path, cfg.trainer
    if start_adapter is None:
        return {}
    checkpoint_manager = CheckpointManager(
        Path(make_absolute(trainer.default_local_dir)) / "checkpoints"
    )
    checkpoint = choose_checkpoint(
        checkpoint_manager, trainer.resume_mode, trainer.resume_from_path
    )
    if checkpoint is not None:
        return {
            START_KEY: None,
            "trainer.resume_mode": "resume_path",
            "trainer.resume_from_path": make_absolute(str(checkpoint)),
        }
    try:
        read_adapter_settings(start_adapter)
    except ValueError as error:
        raise ConfigError(
            f"{START_KEY}={start_adapter!r}: {error}, and the run has no valid checkpoint to "
            "continue from; allowed: a directory of peft; fix: restore the directory or a "
            "checkpoint",
            "unreadable_file",
        ) from error
    return {}


def make_absolute(path: str) -> str:
    """Return ``path`` as an absolute path, with ``~`` expanded."""
    return str(Path(path).expanduser().absolute())


def _make_kwargs_absolute(env_name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs``, settings of the environment ``env_name``, with absolute paths."""
    settings = find_settings_class(env_name).model_validate(kwargs)
    absolute_settings = _make_settings_absolute(settings)
    return kwargs | absolute_settings.model_dump(
        mode="json", include=set(kwargs), exclude_unset=True
    )


def _make_settings_absolute(settings: EnvSettings) -> EnvSettings:
    return settings.model_copy(update=dict(_list_absolute_settings(settings)))


def _list_absolute_settings(settings: Section) -> Iterator[tuple[str, Any]]:
    """Yield name and absolute value of each environment setting that is a path."""
    for name, value in vars(settings).items():
        names_code = any(
            isinstance(marker, NamesCode) for marker in type(settings).model_fields[name].metadata
        )
        absolute_value = _make_setting_absolute(name, value, names_code)
        if absolute_value is not None:
            yield name, absolute_value


def _make_setting_absolute(name: str, value: Any, names_code: bool) -> Any:
    """Return ``value`` with absolute paths, or None if the setting ``name`` is no path."""
    if name == "data_dir" and value:
        return make_absolute(value)
    if name in ("train_files", "val_files"):
        return [make_absolute(file) for file in value]
    if isinstance(value, FunctionFromFile) and value.path:
        return value.model_copy(update={"path": make_absolute(value.path)})
    return _make_function_paths_absolute(value) if names_code and value else None


def _make_function_paths_absolute(value: object) -> Any:
    """Make FILE absolute in a value ``FILE.py:NAME`` or a list of such values."""
    if isinstance(value, list):
        return [_make_function_paths_absolute(item) for item in value]
    file, separator, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return f"{make_absolute(file)}{separator}{name}" if file.endswith(".py") else value


# ---- devices and CPUs, as reported by Ray. The driver may be on a node without a GPU, so PyTorch
# ---- cannot report them.


@dataclass(frozen=True)
class ClusterNode:
    """Node of the cluster and the resources that Ray can assign on it."""

    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class PoolRequirement:
    """CPUs and GPUs that a resource pool needs on each of ``nodes`` nodes."""

    nodes: int
    cpus: float
    gpus: int
    keys: tuple[str, str]  # config key of the number of nodes, config key of the devices per node


def list_live_nodes(node_descriptions: Sequence[Mapping[str, Any]]) -> list[ClusterNode]:
    """Return the live nodes among the result ``node_descriptions`` of ``ray.nodes()``."""
    return [
        ClusterNode(
            node.get("NodeManagerHostname") or node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in node_descriptions
        if node["Alive"]
    ]


def choose_device(configured_device: str, nodes: Sequence[ClusterNode]) -> str:
    """Return ``configured_device``; for ``auto`` return ``cuda`` if the cluster has a GPU."""
    if configured_device != "auto":
        return configured_device
    return "cuda" if any(node.gpus >= 1 for node in nodes) else "cpu"


def get_worker_cpus(device: str) -> float:
    """Return the number of CPUs that a worker reserves in Ray."""
    return 1.0 if device == "cuda" else CPUS_PER_CPU_WORKER


def create_pools(cfg: PPOConfig, device: str, roles: Iterable[Role]) -> ResourcePoolManager:
    """Return the manager of new device pools: one for the training ``roles``, one for engines.

    If engines have no separate GPUs, they share the pool of the training roles.
    """
    trainer = cfg.trainer
    processes_by_pool = {"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}
    pool_by_role = dict.fromkeys([*roles, Role.Rollout], "global_pool")
    if engines_have_separate_gpus(cfg, device):
        processes_by_pool["rollout_pool"] = count_engine_gpus_by_node(cfg)
        pool_by_role[Role.Rollout] = "rollout_pool"
    pools = ResourcePoolManager(
        processes_by_pool, pool_by_role, device == "cuda", get_worker_cpus(device)
    )
    pools.create_resource_pool()
    return pools


def find_placement_problems(
    cfg: PPOConfig, nodes: Sequence[ClusterNode], num_groups: int, cpus: float
) -> Iterator[Problem]:
    """Yield problems if ``num_groups`` worker groups, engines included, do not fit on ``nodes``."""
    trainer = cfg.trainer
    device = choose_device(trainer.device, nodes)
    if device == "cuda":
        if not any(node.gpus >= 1 for node in nodes):
            why = f"no node of the cluster has a GPU ({_format_nodes(nodes)})"
            fix = f"{DEVICE_KEY}=cpu, or `ray start --num-gpus=N`"
            yield build_problem(cfg, DEVICE_KEY, why, "cpu", fix, "does_not_fit")
            return
        yield from check_engine_devices(cfg)
    else:
        yield from check_cpu_settings(cfg)
    has_separate_engines = engines_have_separate_gpus(cfg, device)
    ranks_per_node = trainer.n_gpus_per_node
    cpus_per_rank = (num_groups - 1 if has_separate_engines else num_groups) * cpus
    training_gpus_per_node = ranks_per_node if device == "cuda" else 0
    pool_keys = (NODES_KEY, RANKS_KEY)
    pool_needs = [
        PoolRequirement(
            trainer.nnodes, ranks_per_node * cpus_per_rank, training_gpus_per_node, pool_keys
        )
    ]
    if has_separate_engines:
        gpus_by_node = count_engine_gpus_by_node(cfg)
        engine_gpus_per_node = gpus_by_node[0]
        configured_engine_gpus = cfg.actor_rollout_ref.rollout.n_gpus_per_node
        pool_keys = (ENGINE_NODES_KEY, ENGINE_GPUS_KEY if configured_engine_gpus else RANKS_KEY)
        pool_needs.append(
            PoolRequirement(
                len(gpus_by_node), engine_gpus_per_node * cpus, engine_gpus_per_node, pool_keys
            )
        )
    nodes = list(nodes)
    free_nodes = nodes
    # Place the pools in the order of ``ResourcePoolManager.reserve_pools``.
    for pool_need in sorted(pool_needs, key=lambda pool_need: pool_need.gpus, reverse=True):
        yield from _find_capacity_problems(cfg, pool_need, nodes, free_nodes)
        free_nodes = _subtract_pool(nodes, free_nodes, pool_need)


def _find_capacity_problems(
    cfg: PPOConfig,
    pool_need: PoolRequirement,
    nodes: Sequence[ClusterNode],
    free_nodes: Sequence[ClusterNode],
) -> Iterator[Problem]:
    # The pool has ``pool_need.nodes`` bundles. One node may have resources for several bundles.
    num_fitting_bundles = sum(int(_count_fitting_bundles(node, pool_need)) for node in free_nodes)
    if num_fitting_bundles < pool_need.nodes:
        fits_on_a_node = any(_count_fitting_bundles(node, pool_need) >= 1 for node in nodes)
        key = pool_need.keys[0 if fits_on_a_node else 1]
        other_workers = "training ranks" if ENGINE_NODES_KEY in pool_need.keys else "engines"
        addition_text = "" if free_nodes == nodes else f" in addition to the {other_workers}"
        why = (
            f"{pool_need.nodes} x ({pool_need.gpus} GPUs and {pool_need.cpus:g} CPUs on one node) "
            f"are needed, but only {num_fitting_bundles} fit{addition_text}: {_format_nodes(nodes)}"
        )
        allowed = "at most the resources of the nodes of the cluster"
        fix = "fewer ranks"
        if pool_need.gpus:
            fix = "fewer devices or nodes, more nodes, or trainer.device=cpu"
        fix += "; more CPUs: ray_init.num_cpus, `ray start`"
        yield build_problem(cfg, key, why, allowed, fix, "does_not_fit")


def _subtract_pool(
    nodes: Sequence[ClusterNode], free_nodes: Sequence[ClusterNode], pool_need: PoolRequirement
) -> list[ClusterNode]:
    """Return the free resources of each node after Ray has placed the pool ``pool_need``.

    ``nodes`` have the total resources. ``free_nodes`` have the resources that earlier pools left.
    The pool has ``pool_need.nodes`` bundles, which are placed on different nodes if possible. Nodes
    without other pools are preferred, then nodes with the most free resources.
    """
    free_nodes = list(free_nodes)
    unused_node_indices = set(range(len(free_nodes)))
    for _ in range(pool_need.nodes):
        fitting_node_indices = {
            node_index
            for node_index, node in enumerate(free_nodes)
            if _count_fitting_bundles(node, pool_need) >= 1
        }
        if not fitting_node_indices:
            break
        # Choose the node as RayResourcePool does.
        node_index = max(
            fitting_node_indices & unused_node_indices or fitting_node_indices,
            key=lambda node_index: (
                free_nodes[node_index] == nodes[node_index],
                _count_fitting_bundles(free_nodes[node_index], pool_need),
            ),
        )
        unused_node_indices.discard(node_index)
        node = free_nodes[node_index]
        free_nodes[node_index] = replace(
            node, cpus=node.cpus - pool_need.cpus, gpus=node.gpus - pool_need.gpus
        )
    return free_nodes


def _count_fitting_bundles(node: ClusterNode, pool_need: PoolRequirement) -> float:
    """Return how many bundles of ``pool_need`` fit on ``node``, as a fraction."""
    # The tolerance 1e-6 allows for rounding errors in sums of CPU shares.
    fit_by_cpus = (node.cpus + 1e-6) / pool_need.cpus
    return min(fit_by_cpus, node.gpus / pool_need.gpus) if pool_need.gpus else fit_by_cpus


def _format_nodes(nodes: Sequence[ClusterNode]) -> str:
    return (
        ", ".join(f"{node.name} has {node.gpus:g} GPUs, {node.cpus:g} CPUs" for node in nodes)
        or "no node"
    )
