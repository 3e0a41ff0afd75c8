"""Values that are determined while a run starts, after its config was checked and written.

They are absolute paths, steps of the optimizers, and the devices and CPUs on the nodes of the Ray
cluster. ``config.yaml`` keeps the paths and names of the user. The processes of the run read the
``RunPlan.config``, a frozen copy with the values of this module.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent_system.environments.env_registry import find_settings_class
from agent_system.environments.settings import EnvSettings, FunctionFromFile
from verl.config.checks.hardware_and_paths import cpu_problems, engine_problems
from verl.config.derive import count_training_steps, engine_gpus_by_node, engines_have_separate_gpus
from verl.config.problems import build_problem
from verl.config.schema import PPOConfig
from verl.config.settings import RunsCode, Section, value_at_path
from verl.trainer.ppo.resources import ResourcePoolManager, Role

DEVICE = "trainer.device"
RANKS = "trainer.n_gpus_per_node"
NODES = "trainer.nnodes"
ENGINE_GPUS = "actor_rollout_ref.rollout.n_gpus_per_node"
ENGINE_NODES = "actor_rollout_ref.rollout.nnodes"
# CPUs that a worker reserves in Ray with trainer.device=cpu. The number of threads per process
# already limits the use of CPUs, so a small reservation suffices.
CPU_SHARE = 0.1
PATH_KEYS = (
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.resume_from_path",
    "custom_reward_function.path",
)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Configuration of the processes of a run, its device, and its number of rollout engines.

    ``config`` has absolute paths, the commits of its models, the steps of its optimizers and the
    transport of its weights. ``device`` (``cpu``, ``cuda``) holds for all workers.
    """

    config: PPOConfig
    device: str
    engines: int


def count_optimizer_steps(cfg: PPOConfig, train_tasks: int) -> dict[str, int]:
    """Return ``<section>.optim.total_training_steps`` of the optimizers for which it is not set."""
    total = count_training_steps(cfg, train_tasks)
    # The actor is not updated in the training steps of critic_warmup.
    actor_total = total - cfg.trainer.critic_warmup
    sections = {"actor_rollout_ref.actor": actor_total, "critic": total}
    values = {}
    for path, steps in sections.items():
        section = value_at_path(cfg, path)
        if section.optim.total_training_steps < 1:
            updates = section.ppo_mini_batches * section.ppo_epochs
            values[f"{path}.optim.total_training_steps"] = max(1, steps) * updates
    return values


def collect_absolute_paths(cfg: PPOConfig) -> dict[str, Any]:
    """Return the keys of ``cfg`` that are paths, with values relative to the working directory.

    The values are absolute because Ray may start its workers in another directory. The paths of
    models are not included; see ``verl.models.hub.pin_revision``.
    """
    values: dict[str, Any] = {
        path: make_absolute(value_at_path(cfg, path))
        for path in PATH_KEYS
        if value_at_path(cfg, path)
    }
    env = cfg.env
    if env.kwargs:
        values["env.kwargs"] = _make_kwargs_absolute(env.env_name, env.kwargs)
    mixture: Any = env.active_section
    # Only the settings of a mixture have parts: names of environments, with their weights.
    part_names = getattr(mixture, "part_weights", ())
    for name in (env.name, *(part_name.split("/", 1)[0] for part_name in part_names)):
        settings = getattr(env, name, None) if name.isidentifier() else None
        if isinstance(settings, EnvSettings):
            values[f"env.{name}"] = settings.model_copy(
                update=dict(_list_absolute_settings(settings))
            )
    part_kwargs = mixture.kwargs if part_names else {}
    if part_kwargs:
        kwargs = {part: _make_kwargs_absolute(part, keys) for part, keys in part_kwargs.items()}
        values[f"env.{env.name}"] = mixture.model_copy(update={"kwargs": kwargs})
    return values


def make_absolute(path: str) -> str:
    """Return ``path`` as an absolute path, with ``~`` expanded."""
    return str(Path(path).expanduser().absolute())


def _make_kwargs_absolute(env_name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` of the section of an environment, with absolute paths."""
    settings = find_settings_class(env_name).model_validate(kwargs)
    changed = settings.model_copy(update=dict(_list_absolute_settings(settings)))
    return {**kwargs, **changed.model_dump(mode="json", include=set(kwargs), exclude_unset=True)}


def _list_absolute_settings(settings: Section) -> Iterator[tuple[str, Any]]:
    """Yield the names of the settings of an environment that are paths, and absolute values."""
    for name, value in vars(settings).items():
        markers = type(settings).model_fields[name].metadata
        if name == "data_dir" and value:
            yield name, make_absolute(value)
        elif name in ("train_files", "val_files"):
            yield name, [make_absolute(file) for file in value]
        elif isinstance(value, FunctionFromFile) and value.path:
            yield name, value.model_copy(update={"path": make_absolute(value.path)})
        elif value and any(isinstance(marker, RunsCode) for marker in markers):
            yield name, _make_functions_absolute(value)


def _make_functions_absolute(value: Any) -> Any:
    """Return ``FILE.py:NAME``, also in lists, with absolute files; all other values unchanged."""
    if isinstance(value, list):
        return [_make_functions_absolute(item) for item in value]
    file, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return f"{make_absolute(file)}{colon}{name}" if file.endswith(".py") else value


# ---- devices and CPUs. Ray reports them, not PyTorch: the driver may be on a node without a GPU.


@dataclass(frozen=True)
class ClusterNode:
    """Node of the cluster and the resources that Ray can assign on it."""

    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class PoolNeed:
    """CPUs and GPUs of a pool on each of ``nodes`` nodes, and the config keys that set them."""

    nodes: int
    cpus: float
    gpus: int
    keys: tuple[str, str]  # config key of the number of nodes, config key of the devices per node


def list_live_nodes(described: Sequence[Mapping[str, Any]]) -> list[ClusterNode]:
    """Return the live nodes among the result ``described`` of ``ray.nodes()``."""
    alive = [node for node in described if node["Alive"]]
    return [
        ClusterNode(
            node.get("NodeManagerHostname") or node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in alive
    ]


def choose_device(configured: str, nodes: Sequence[ClusterNode]) -> str:
    """Return ``cpu`` or ``cuda``. ``auto`` is ``cuda`` if the cluster has a GPU."""
    if configured != "auto":
        return configured
    return "cuda" if any(node.gpus >= 1 for node in nodes) else "cpu"


def get_worker_cpus(device: str) -> float:
    """Return the number of CPUs that a worker reserves in Ray."""
    return 1.0 if device == "cuda" else CPU_SHARE


def create_pools(cfg: PPOConfig, device: str, roles: Iterable[Role]) -> ResourcePoolManager:
    """Return the pools of the training ``roles`` and of the engines, which may be separate."""
    trainer = cfg.trainer
    spec = {"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}
    mapping = dict.fromkeys([*roles, Role.Rollout], "global_pool")
    if engines_have_separate_gpus(cfg, device):
        spec["rollout_pool"] = engine_gpus_by_node(cfg)
        mapping[Role.Rollout] = "rollout_pool"
    pools = ResourcePoolManager(spec, mapping, device == "cuda", get_worker_cpus(device))
    pools.create_resource_pool()
    return pools


def find_placement_problems(
    cfg: PPOConfig, nodes: Sequence[ClusterNode], groups: int, cpus: float
) -> Iterator[str]:
    """Yield problems if ``groups`` worker groups, engines included, do not fit on ``nodes``."""
    trainer = cfg.trainer
    device = choose_device(trainer.device, nodes)
    if device == "cuda":
        if not any(node.gpus >= 1 for node in nodes):
            why = f"no node of the cluster has a GPU ({_format_nodes(nodes)})"
            yield build_problem(
                cfg, DEVICE, why, "cpu", f"{DEVICE}=cpu, or `ray start --num-gpus=N`"
            )
            return
        yield from engine_problems(cfg)
    else:
        yield from cpu_problems(cfg)
    has_separate_engines = engines_have_separate_gpus(cfg, device)
    ranks = trainer.n_gpus_per_node
    cpus_per_rank = (groups - 1 if has_separate_engines else groups) * cpus
    gpus = ranks if device == "cuda" else 0
    needs = [PoolNeed(trainer.nnodes, ranks * cpus_per_rank, gpus, (NODES, RANKS))]
    if has_separate_engines:
        node_gpus = engine_gpus_by_node(cfg)
        keys = (
            ENGINE_NODES,
            ENGINE_GPUS if cfg.actor_rollout_ref.rollout.n_gpus_per_node else RANKS,
        )
        needs.append(PoolNeed(len(node_gpus), node_gpus[0] * cpus, node_gpus[0], keys))
    nodes = list(nodes)
    free_nodes = nodes
    # Same order as ``ResourcePoolManager.reserve_pools``.
    for need in sorted(needs, key=lambda need: need.gpus, reverse=True):
        yield from _find_capacity_problems(cfg, need, nodes, free_nodes)
        free_nodes = _subtract_need(nodes, free_nodes, need)


def _find_capacity_problems(
    cfg: PPOConfig, need: PoolNeed, nodes: Sequence[ClusterNode], free: Sequence[ClusterNode]
) -> Iterator[str]:
    # One node may have enough resources for several of the ``need.nodes`` parts of the pool.
    capacity = sum(int(_count_fits(node, need)) for node in free)
    if capacity < need.nodes:
        key = need.keys[0 if any(_count_fits(node, need) >= 1 for node in nodes) else 1]
        other_workers = "training ranks" if ENGINE_NODES in need.keys else "engines"
        in_addition = "" if free == nodes else f" in addition to the {other_workers}"
        why = (
            f"{need.nodes} x ({need.gpus} GPUs and {need.cpus:g} CPUs on one node) are needed, but "
            f"only {capacity} fit{in_addition}: {_format_nodes(nodes)}"
        )
        allowed = "at most the resources of the nodes of the cluster"
        fewer = "fewer devices or nodes, more nodes, or trainer.device=cpu"
        fix = fewer if need.gpus else "fewer ranks"
        yield build_problem(
            cfg, key, why, allowed, f"{fix}; more CPUs: ray_init.num_cpus, `ray start`"
        )


def _subtract_need(
    nodes: Sequence[ClusterNode], free: Sequence[ClusterNode], need: PoolNeed
) -> list[ClusterNode]:
    """Return the free resources of each node after the pool ``need`` was placed as Ray would.

    ``nodes`` have the total resources, ``free`` those without the pools that were placed before.
    Each part of the pool gets another node if possible. Nodes without other pools are preferred,
    then those with the most free resources.
    """
    free = list(free)
    unused_indices = set(range(len(free)))
    for _ in range(need.nodes):
        fits = {k for k, node in enumerate(free) if _count_fits(node, need) >= 1}
        if not fits:
            break
        # Same choice as in RayResourcePool.
        k = max(
            fits & unused_indices or fits,
            key=lambda k: (free[k] == nodes[k], _count_fits(free[k], need)),
        )
        unused_indices.discard(k)
        node = free[k]
        free[k] = replace(node, cpus=node.cpus - need.cpus, gpus=node.gpus - need.gpus)
    return free


def _count_fits(node: ClusterNode, need: PoolNeed) -> float:
    """Return the resources of ``node`` divided by the resources per node of ``need``."""
    # Tolerance: sums of CPU shares have rounding errors.
    by_cpus = (node.cpus + 1e-6) / need.cpus
    return min(by_cpus, node.gpus / need.gpus) if need.gpus else by_cpus


def _format_nodes(nodes: Sequence[ClusterNode]) -> str:
    return ", ".join(f"{n.name} has {n.gpus:g} GPUs, {n.cpus:g} CPUs" for n in nodes) or "no node"
