"""Memory of a run by arithmetic: what a device and a node must hold, in bytes.

P parameters, R ranks that share one copy of them, T tokens of a micro-batch, L layers of width H:

    trained model      4P weights + 4P gradient + 8P moments, over R ranks
    frozen reference   4P over R
    one layer          gathered whole, and the next one with it
    activations        T L H numbers with gradient checkpointing, 16 T L H without
    logits             values and gradient of a piece
    engine             its share of the device while it plays; asleep, and where it has a device of
                       its own, it holds nothing

Lower bounds on purpose: what is refused by them cannot run.
"""

import dataclasses
from collections.abc import Iterator

from verl.config.derive import engine_count, have_own_gpus, weight_transfer
from verl.config.schema import PPOConfig
from verl.config.schema.model import FSDPConfig
from verl.names import CPU_CACHE_GB, MAX_LOGITS

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WEIGHT_BYTES = 4  # master weights, float32
TRAINING_BYTES = 16  # master weight, gradient and two moments, float32 each
RESTING_BYTES = 12  # between updates: no gradient
# Numbers per token and layer, in widths of the model: what its matrix products read.
SAVED_WIDTHS = 16
ROWS_GB = 1.0  # of trajectories in the object store
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class PolicySize:
    """A policy as its files describe it; None: not known."""

    parameters: int | None = None
    vocab_size: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None


def cpu_node_bytes(cfg: PPOConfig, size: PolicySize) -> float:
    """What a node of a run on CPU holds: trained and frozen copies, engines with their caches,
    logits of one micro-batch per rank, and the copy that a save makes. A lower bound while the
    policy is not there yet.
    """
    parameters = size.parameters or 0
    rollout = cfg.actor_rollout_ref.rollout
    trainer = cfg.trainer
    copies = TRAINING_BYTES * (1 + bool(cfg.critic.enable)) + WEIGHT_BYTES * has_reference(cfg)
    cache = (CPU_CACHE_GB if rollout.kv_cache_gb is None else rollout.kv_cache_gb) * GIB
    engines = engine_count(cfg, "cpu") * (parameters * BYTES[rollout.dtype] + cache)
    logits = logit_bytes(micro_tokens(cfg), size) * trainer.n_gpus_per_node
    saved = parameters * _saved_bytes(cfg)
    # Weights and engines are spread over the nodes; logits are counted for the ranks of one node.
    return (parameters * copies + engines + saved) / trainer.nnodes + logits


def update_bytes(cfg: PPOConfig, size: PolicySize) -> float | None:
    """What a GPU of a training rank holds while the policy is updated and its engine sleeps."""
    parameters = size.parameters
    if parameters is None:
        return None
    held = _trained(cfg, cfg.actor_rollout_ref.actor.fsdp_config, parameters, TRAINING_BYTES)
    if cfg.critic.enable and not _rests_on_host(cfg.critic.model.fsdp_config):
        held += parameters * RESTING_BYTES / _sharers(cfg, cfg.critic.model.fsdp_config)
    held += _reference(cfg, parameters)
    if not cfg.actor_rollout_ref.actor.fsdp_config.reduce_every_micro_batch:
        held += parameters * WEIGHT_BYTES  # the gradient of all, until it is reduced
    gathered = (
        2 * parameters / (size.layers or parameters) * BYTES[cfg.actor_rollout_ref.actor.dtype]
    )
    return held + gathered + activation_bytes(cfg, size) + logit_bytes(micro_tokens(cfg), size)


def play_bytes(cfg: PPOConfig, size: PolicySize, device_bytes: float) -> float | None:
    """What a GPU of ``device_bytes`` holds while its engine plays."""
    parameters = size.parameters
    if parameters is None:
        return None
    if have_own_gpus(cfg, "cuda"):
        return _awake(cfg, parameters, device_bytes)
    fsdp = cfg.actor_rollout_ref.actor.fsdp_config
    held = _trained(cfg, fsdp, parameters, RESTING_BYTES) if not _rests_on_host(fsdp) else 0.0
    return held + _reference(cfg, parameters) + _awake(cfg, parameters, device_bytes)


def engine_bytes(cfg: PPOConfig, size: PolicySize) -> float | None:
    """Weights of an engine on one of its GPUs, without any cache."""
    return None if size.parameters is None else _share(cfg, size.parameters)


def _share(cfg: PPOConfig, parameters: int) -> float:
    rollout = cfg.actor_rollout_ref.rollout
    return parameters * BYTES[rollout.dtype] / rollout.tensor_model_parallel_size


def _awake(cfg: PPOConfig, parameters: int, device_bytes: float) -> float:
    """An engine that is awake, on one of its GPUs."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.kv_cache_gb is None:
        return rollout.gpu_memory_utilization * device_bytes
    return _share(cfg, parameters) + rollout.kv_cache_gb * GIB


def gpu_node_bytes(cfg: PPOConfig, size: PolicySize) -> float | None:
    """What the host memory of a node of a GPU run holds at least, at the largest of its moments.

    Loading: rank 0 reads the whole model, for one group after another. Handing the weights over
    through the object store: the copy that rank 0 gathers and the one there; sleeping engines hold
    none. Saving: every rank's copy of its shards, with ``trainer.async_save`` while weights are
    handed over.
    """
    if size.parameters is None:
        return None
    whole = size.parameters * WEIGHT_BYTES
    rollout = cfg.actor_rollout_ref.rollout
    weights = size.parameters * BYTES[rollout.dtype]
    # Gathered, cast, and in the store.
    handing_over = whole + 2 * weights if weight_transfer(cfg, "cuda") == "store" else 0
    saving = size.parameters * _saved_bytes(cfg) / _nodes_of_a_copy(cfg)
    # A save goes on beside the next iterations.
    busiest = handing_over + saving if cfg.trainer.async_save else max(handing_over, saving)
    return max(whole, busiest)


def _saved_bytes(cfg: PPOConfig) -> int:
    """Of each parameter of the policy, and of a critic of its size, in a checkpoint."""
    if cfg.trainer.save_freq == 0:
        return 0
    policy = cfg.actor_rollout_ref
    # Of LoRA's moments, which are small, nothing is counted.
    resumable = "optimizer" in policy.actor.checkpoint.contents and not policy.model.lora_rank
    saved = RESTING_BYTES if resumable else WEIGHT_BYTES
    if cfg.critic.enable:
        resumable = "optimizer" in cfg.critic.checkpoint.contents
        saved += RESTING_BYTES if resumable else WEIGHT_BYTES
    return saved


def _nodes_of_a_copy(cfg: PPOConfig) -> int:
    """Nodes over which one copy of the policy is sharded: those of the first copy save it."""
    ranks = _sharers(cfg, cfg.actor_rollout_ref.actor.fsdp_config)
    return -(-ranks // cfg.trainer.n_gpus_per_node)


def store_gb(cfg: PPOConfig, size: PolicySize) -> float:
    """GB of Ray's object store on a node: trajectories, and one copy of the weights for all engines
    while they are handed over.
    """
    return ROWS_GB + (size.parameters or 0) * BYTES[cfg.actor_rollout_ref.rollout.dtype] / 1e9


def has_reference(cfg: PPOConfig) -> bool:
    """Whether a frozen copy of the policy is held."""
    return cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward


def micro_tokens(cfg: PPOConfig) -> int:
    """Tokens of the policy's largest micro-batch in an update, on one rank."""
    actor = cfg.actor_rollout_ref.actor
    if actor.use_dynamic_bsz:
        return actor.ppo_max_token_len_per_gpu
    row = cfg.data.max_prompt_length + cfg.data.max_response_length
    tokens = row * (actor.ppo_micro_batch_size_per_gpu or 1)
    return -(-tokens // actor.ulysses_sequence_parallel_size)


def logit_bytes(tokens: int, size: PolicySize) -> int:
    """Float32 logits of a micro-batch of ``tokens`` on one rank, and their gradient; they are
    computed in pieces.
    """
    # Twice (values and gradient) 4 bytes; MAX_LOGITS bounds the piece that exists at a time.
    return 2 * 4 * min(tokens * (size.vocab_size or 0), MAX_LOGITS)


def activation_bytes(cfg: PPOConfig, size: PolicySize) -> int:
    """What the layers keep for backward of one micro-batch on one rank."""
    if size.layers is None or size.hidden is None:
        return 0
    widths = 1 if cfg.actor_rollout_ref.model.enable_gradient_checkpointing else SAVED_WIDTHS
    numbers = micro_tokens(cfg) * size.layers * size.hidden * widths
    return numbers * BYTES[cfg.actor_rollout_ref.actor.dtype]


def memory_problems(
    cfg: PPOConfig, size: PolicySize, device_gb: float | None, host_gb: float | None
) -> Iterator[str]:
    """What a GPU of ``device_gb`` GiB, or a node with ``host_gb`` GiB of memory, cannot hold, and
    heads that cannot be spread over the devices of an engine.
    """
    yield from _head_problems(cfg, size)
    if device_gb is not None:
        yield from _device_problems(cfg, size, device_gb * GIB)
    host = gpu_node_bytes(cfg, size)
    if host_gb is not None and host is not None and host > host_gb * GIB:
        fix = "fewer ranks or engines on a node, or a smaller policy"
        yield f"plan: a node needs {_gib(host, host_gb * GIB)} of host memory; fix: {fix}"


def _head_problems(cfg: PPOConfig, size: PolicySize) -> Iterator[str]:
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    each = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    heads = size.heads or each
    kv_heads = size.kv_heads or heads
    # A key/value head can be on several devices, a query head cannot.
    if heads % each or (kv_heads % each and each % kv_heads):
        why = f"{heads} heads over {kv_heads} of keys and values do not divide evenly"
        yield f"{key}={each}: {why}; allowed: a size that divides both; fix: {key}=1"


def _device_problems(cfg: PPOConfig, size: PolicySize, there: float) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    size_key = key if rollout.kv_cache_gb is None else "actor_rollout_ref.rollout.kv_cache_gb"
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    held = 0.0 if size.parameters is None else _awake(cfg, size.parameters, there)
    update = update_bytes(cfg, size)
    # An engine that does not sleep keeps what it has while the policy is updated.
    sleeps = rollout.free_cache_engine and cfg.trainer.rollout_overlap == "off"
    awake = 0.0 if sleeps or have_own_gpus(cfg, "cuda") else held
    if update is not None and update + awake > there:
        fix = (
            "fewer tokens per micro-batch, enable_gradient_checkpointing=true, more ranks, or "
            f"{fsdp}.offload_policy=true"
        )
        yield f"plan: a GPU needs {_gib(update + awake, there)} for an update; fix: {fix}"
    play = play_bytes(cfg, size, there)
    if play is not None and play > there:
        fix = f"a smaller {size_key}"
        if not have_own_gpus(cfg, "cuda"):
            fix += f", or {fsdp}.param_offload=true {fsdp}.optimizer_offload=true"
        yield f"plan: a GPU needs {_gib(play, there)} while its engine plays; fix: {fix}"
    engine = engine_bytes(cfg, size)
    share = rollout.gpu_memory_utilization
    if rollout.kv_cache_gb is None and engine is not None and engine > share * there:
        what = f"{_gib(engine, share * there, 'its share')} for the weights of its engine"
        fix = f"a larger {key}, or a larger actor_rollout_ref.rollout.tensor_model_parallel_size"
        yield f"{key}={share}: a GPU needs {what}; allowed: more than that; fix: {fix}"


def _trained(cfg: PPOConfig, fsdp: FSDPConfig, parameters: int, per_weight: int) -> float:
    """The trained policy on one device; of LoRA's adapters, which are small, nothing is counted."""
    if fsdp.offload_policy:
        return 0.0
    per_weight = WEIGHT_BYTES if cfg.actor_rollout_ref.model.lora_rank else per_weight
    return parameters * per_weight / _sharers(cfg, fsdp)


def _reference(cfg: PPOConfig, parameters: int) -> float:
    fsdp = cfg.actor_rollout_ref.ref.fsdp_config
    if not has_reference(cfg) or fsdp.param_offload or fsdp.offload_policy:
        return 0.0
    return parameters * WEIGHT_BYTES / _sharers(cfg, fsdp)


def _rests_on_host(fsdp: FSDPConfig) -> bool:
    return fsdp.offload_policy or (fsdp.param_offload and fsdp.optimizer_offload)


def _sharers(cfg: PPOConfig, fsdp: FSDPConfig) -> int:
    """Ranks that share one copy of the parameters."""
    ranks = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes
    return ranks if fsdp.fsdp_size in (-1, 0) else min(fsdp.fsdp_size, ranks)


def _gib(needed: float, there: float, of: str = "there are") -> str:
    return f"about {needed / GIB:.1f} GiB ({of} {there / GIB:.1f})"
