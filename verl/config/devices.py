"""Check the devices of a run: those of this machine, or of ``--check --on MACHINE``."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.derive import (
    choose_vllm_transfer_backend,
    count_engine_gpus_by_node,
    count_engines,
    engines_have_separate_gpus,
)
from verl.config.problems import CheckContext, Problems, build_conflict, build_problem
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Problem, value_at_path
from verl.config.settings.hints import nearest_name

# Usable memory of a GPU in GiB, by name. If a GPU has two memory sizes, its name contains the size.
MEMORY_GB = {
    "RTX3090": 23.7,
    "RTX4090": 23.6,
    "RTX5090": 31.8,
    "A10": 22.5,
    "A10G": 22.5,
    "L4": 22.5,
    "L40S": 44.7,
    "A6000": 47.5,
    "A100-40GB": 39.6,
    "A100-80GB": 79.3,
    "H100": 79.6,
    "H200": 140.4,
    "B200": 178.4,
}
MACHINE_PATTERN = re.compile(
    r"(?:(?P<nodes>[1-9]\d*)x)?(?P<gpus>[1-9]\d*)x(?P<name>[a-z][\w-]*)"
    r"(?::(?P<memory>\d+(?:\.\d+)?)(?:gi?b)?)?",
    re.IGNORECASE,
)
ALLOWED_MACHINES = "GPUSxNAME or NODESxGPUSxNAME, optionally with :GIB, as 8xH100 or 2x8xA100:40"


@dataclass(frozen=True)
class Machine:
    """Group of nodes with equal GPUs; ``gpus`` are per node, ``memory_gb`` is GiB per GPU."""

    nodes: int
    gpus: int
    name: str
    memory_gb: float

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus} x {self.name} with {self.memory_gb:g} GiB"


def parse_machine(text: str) -> Machine:
    """Parse a text such as ``2x8xA100:40``; raise ``ConfigError`` for an unknown GPU or format."""
    match = MACHINE_PATTERN.fullmatch(text.strip())
    if match is None:
        message = f"--on {text}: no devices; allowed: {ALLOWED_MACHINES}; fix: --on 8xH100"
        raise ConfigError(message, "invalid_syntax")
    name = match["name"]
    memory_gb_by_name = {key.lower(): value for key, value in MEMORY_GB.items()}
    memory_gb = float(match["memory"] or memory_gb_by_name.get(name.lower(), 0))
    if memory_gb <= 0:
        similar_name = nearest_name(name.upper(), MEMORY_GB, cutoff=0.5)
        suggestion = f", or {similar_name}" if similar_name else ""
        why = f"the memory of a {name} is not known"
        allowed = f"{', '.join(MEMORY_GB)}, or a name with its GiB after a colon"
        message = f"--on {text}: {why}; allowed: {allowed}; fix: {name}:80{suggestion}"
        raise ConfigError(message, "unknown_name")
    return Machine(int(match["nodes"] or 1), int(match["gpus"]), name, memory_gb)


def apply_machine(cfg: PPOConfig, machine: Machine) -> list[Problem]:
    """Set ``trainer.device=cuda``; return messages about devices that ``machine`` lacks."""
    if cfg.trainer.device == "cpu":
        why = f"it contradicts --on {machine}"
        return [build_conflict(cfg, "trainer.device", why, "auto, cuda", "trainer.device=auto")]
    cfg.trainer.device = "cuda"
    return list(_find_missing_devices(cfg, machine))


def _find_missing_devices(cfg: PPOConfig, machine: Machine) -> Iterator[Problem]:
    trainer = cfg.trainer
    for key, num_available in (("n_gpus_per_node", machine.gpus), ("nnodes", machine.nodes)):
        if getattr(trainer, key) > num_available:
            key_path = f"trainer.{key}"
            why = f"--on gives {machine}"
            allowed, fix = f"{num_available} or fewer", f"{key_path}={num_available}"
            yield build_problem(cfg, key_path, why, allowed, fix, "does_not_fit")
    needed_gpus = trainer.nnodes * trainer.n_gpus_per_node
    if engines_have_separate_gpus(cfg, "cuda"):
        needed_gpus += sum(count_engine_gpus_by_node(cfg))
        if needed_gpus > machine.nodes * machine.gpus:
            why = f"engines and training ranks need {needed_gpus} GPUs, and --on gives {machine}"
            key = "actor_rollout_ref.rollout.nnodes"
            fix = "more devices in --on, or fewer engines or training ranks"
            allowed = "nodes that the training ranks do not use"
            yield build_problem(cfg, key, why, allowed, fix, "does_not_fit")


# ---- devices of the training ranks and of the engines --------------------------------------------


def check_devices(cfg: PPOConfig, ctx: CheckContext) -> Problems:
    """Check that training ranks and rollout engines fit on the devices."""
    trainer = cfg.trainer
    num_ranks = trainer.n_gpus_per_node * trainer.nnodes
    if ctx.device == "cuda":
        yield from check_engine_devices(cfg)
    elif cfg.ray_init.cluster_address and trainer.device == "auto":
        # A cluster that the run joins may have GPUs although this machine has none.
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
    num_devices = sum(count_engine_gpus_by_node(cfg))
    gpus_per_engine = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    num_engines = count_engines(cfg, "cuda")
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
    num_devices = count_engine_gpus_by_node(cfg)[0]
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
    return [choose_vllm_transfer_backend(cfg), *(["store"] if engine_has_one_gpu else [])]
