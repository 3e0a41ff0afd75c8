"""Estimates of the memory of a run on a device and on a node, in bytes.

P parameters, R ranks that share one copy of them, T tokens of a micro-batch, L layers of width H:

    trained model      4P bytes weights + 4P gradient + 8P Adam moments, divided by R
    frozen reference   4P bytes divided by R
    gathered layers    all parameters of two layers, which FSDP2 gathers at the same time
    activations        T L H numbers with gradient checkpointing, 16 T L H without
    logits             values and gradient of the largest chunk (``MAX_LOGITS``)
    engine             gpu_memory_utilization, or weights and KV cache, while it generates; 0 on the
                       device of a training rank while it sleeps or if it has separate GPUs

The estimates are lower bounds, so that a run which fits is never refused.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

from verl.config.derive import engine_count, engines_have_separate_gpus, resolve_weight_transfer
from verl.config.schema import PPOConfig
from verl.config.schema.model import FSDPConfig
from verl.config.schema.sft import NewPolicyConfig
from verl.names import CPU_CACHE_GB, MAX_LOGITS

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WEIGHT_BYTES = 4  # per parameter: master weight, float32
TRAINING_BYTES = 16  # per parameter in an update: master weight, gradient and two moments, float32
IDLE_TRAINING_BYTES = 12  # per parameter between updates: the same without the gradient
# Activations per token and layer that backward needs (inputs of matrix products), in units of H.
SAVED_WIDTHS = 16
# Keys of config.json, in the order of PolicySize.
SIZE_KEYS = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
)
ROWS_GB = 1.0  # assumed size of all trajectories in Ray's object store, GB
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class PolicySize:
    """Size of a policy; None for values that its files do not state."""

    parameters: int | None = None
    vocab_size: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None


def read_policy_size(path: Path) -> PolicySize:
    """Return the size of the policy in directory ``path``, without reading its weights."""
    config = path / "config.json"
    if not config.is_file():
        return PolicySize()
    parameters = 0
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            # A safetensors file starts with the header's length (8 bytes) and the header (JSON).
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        parameters += sum(
            math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        )
    values = json.loads(config.read_text())
    return PolicySize(parameters or None, *(values.get(key) for key in SIZE_KEYS))


def count_new_parameters(new: NewPolicyConfig, vocab: int) -> int:
    """Return the number of parameters of a new policy with ``vocab`` tokens."""
    head = new.head_dim or new.hidden_size // new.num_attention_heads
    queries, keys = head * new.num_attention_heads, head * new.num_key_value_heads
    # Query and output projections per attention head, key and value per key/value head, and the
    # norms of queries and keys. Queries of Qwen3.5 have a gate of the same size.
    is_hybrid = new.architecture == "qwen3_5"
    attention = new.hidden_size * ((3 if is_hybrid else 2) * queries + 2 * keys) + 2 * head
    # Three matrices of SwiGLU and two norms.
    common = 3 * new.hidden_size * new.intermediate_size + 2 * new.hidden_size
    embeddings = vocab * new.hidden_size * (1 if new.tie_word_embeddings else 2)
    linear_layers = (new.num_hidden_layers + 1) // 2 if is_hybrid else 0
    # Projections and a convolution (width 4) of queries, keys and values, gate and output, two
    # numbers per head with their projections and offsets, and a norm.
    mixed = 2 * keys + queries
    linear = new.hidden_size * (mixed + 2 * queries) + 4 * mixed + head
    linear += 2 * new.num_attention_heads * (new.hidden_size + 1)
    layers = new.num_hidden_layers * common + linear_layers * linear
    layers += (new.num_hidden_layers - linear_layers) * attention
    # The last term is the norm after the last layer.
    return embeddings + layers + new.hidden_size


def cpu_node_bytes(cfg: PPOConfig, size: PolicySize) -> float:
    """Return the memory of a node of a run on CPU, in bytes.

    It contains trained and frozen weights, engines with caches, logits and the copy for a
    checkpoint. Weights of a policy of unknown size count as 0.
    """
    parameters = size.parameters or 0
    rollout = cfg.actor_rollout_ref.rollout
    trainer = cfg.trainer
    copies = TRAINING_BYTES * (1 + bool(cfg.critic.enable)) + WEIGHT_BYTES * has_reference(cfg)
    cache = (CPU_CACHE_GB if rollout.kv_cache_gb is None else rollout.kv_cache_gb) * GIB
    engines = engine_count(cfg, "cpu") * (parameters * BYTES[rollout.dtype] + cache)
    logits = logit_bytes(micro_batch_tokens(cfg), size) * trainer.n_gpus_per_node
    saved = parameters * _checkpoint_bytes_per_parameter(cfg)
    # Weights and engines are distributed over the nodes; logits are of the ranks of one node.
    return (parameters * copies + engines + saved) / trainer.nnodes + logits


def update_bytes(cfg: PPOConfig, size: PolicySize) -> float | None:
    """Return the memory that a training rank needs on its GPU in an update, in bytes.

    The memory of a rollout engine on the same GPU is not included. None for an unknown size.
    """
    parameters = size.parameters
    if parameters is None:
        return None
    actor = cfg.actor_rollout_ref.actor
    needed = _trained_bytes(cfg, actor.fsdp_config, parameters, TRAINING_BYTES)
    critic_fsdp = cfg.critic.model.fsdp_config
    if cfg.critic.enable and not _is_offloaded(critic_fsdp):
        needed += parameters * IDLE_TRAINING_BYTES / _ranks_per_copy(cfg, critic_fsdp)
    needed += _reference_bytes(cfg, parameters)
    if not actor.fsdp_config.reduce_every_micro_batch:
        needed += parameters * WEIGHT_BYTES  # the whole gradient, until it is reduced
    gathered = 2 * parameters / (size.layers or parameters) * BYTES[actor.dtype]
    logits = logit_bytes(micro_batch_tokens(cfg), size)
    return needed + gathered + activation_bytes(cfg, size) + logits


def rollout_bytes(cfg: PPOConfig, size: PolicySize, device_bytes: float) -> float | None:
    """Return the memory used on a GPU while its rollout engine generates, in bytes.

    ``device_bytes`` is the total memory of the GPU. None for an unknown size.
    """
    parameters = size.parameters
    if parameters is None:
        return None
    engine = _awake_engine_bytes(cfg, parameters, device_bytes)
    if engines_have_separate_gpus(cfg, "cuda"):
        return engine
    fsdp = cfg.actor_rollout_ref.actor.fsdp_config
    held = 0.0
    if not _is_offloaded(fsdp):
        held = _trained_bytes(cfg, fsdp, parameters, IDLE_TRAINING_BYTES)
    return held + _reference_bytes(cfg, parameters) + engine


def _engine_weight_bytes(cfg: PPOConfig, parameters: int) -> float:
    rollout = cfg.actor_rollout_ref.rollout
    return parameters * BYTES[rollout.dtype] / rollout.tensor_model_parallel_size


def _awake_engine_bytes(cfg: PPOConfig, parameters: int, device_bytes: float) -> float:
    """Return the bytes of weights and KV cache of an engine that is not asleep, on one GPU."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.kv_cache_gb is None:
        return rollout.gpu_memory_utilization * device_bytes
    return _engine_weight_bytes(cfg, parameters) + rollout.kv_cache_gb * GIB


def gpu_node_bytes(cfg: PPOConfig, size: PolicySize) -> float | None:
    """Return a lower bound of the peak host memory of a node of a GPU run, in bytes.

    The peak is the largest of three phases. Loading: rank 0 reads the whole model. Weight sync
    through the object store: rank 0 gathers a copy, casts it and stores it. Saving: every rank
    copies its shards, with ``trainer.async_save`` at the same time as a weight sync. None for an
    unknown size.
    """
    if size.parameters is None:
        return None
    loading_bytes = size.parameters * WEIGHT_BYTES
    rollout = cfg.actor_rollout_ref.rollout
    weights = size.parameters * BYTES[rollout.dtype]
    # Three copies of the weights: gathered (float32), cast, and in the object store.
    syncing = loading_bytes + 2 * weights if resolve_weight_transfer(cfg, "cuda") == "store" else 0
    # Only the ranks of the nodes that hold one copy of the policy write it to a checkpoint.
    ranks = _ranks_per_copy(cfg, cfg.actor_rollout_ref.actor.fsdp_config)
    nodes = -(-ranks // cfg.trainer.n_gpus_per_node)
    saving = size.parameters * _checkpoint_bytes_per_parameter(cfg) / nodes
    # An asynchronous save continues during the next training steps.
    peak_step_bytes = syncing + saving if cfg.trainer.async_save else max(syncing, saving)
    return max(loading_bytes, peak_step_bytes)


def _checkpoint_bytes_per_parameter(cfg: PPOConfig) -> int:
    """Return the bytes of a checkpoint divided by the number of parameters of the policy.

    A critic counts as a second model with the same number of parameters.
    """
    if cfg.trainer.save_freq == 0:
        return 0
    policy = cfg.actor_rollout_ref
    # The moments of LoRA adapters are small and not counted.
    resumable = "optimizer" in policy.actor.checkpoint.contents and not policy.model.lora_rank
    bytes_per_parameter = IDLE_TRAINING_BYTES if resumable else WEIGHT_BYTES
    if cfg.critic.enable:
        resumable = "optimizer" in cfg.critic.checkpoint.contents
        bytes_per_parameter += IDLE_TRAINING_BYTES if resumable else WEIGHT_BYTES
    return bytes_per_parameter


def estimate_store_gb(cfg: PPOConfig, size: PolicySize) -> float:
    """Return the size of Ray's object store on a node, in GB: trajectories and one policy."""
    return ROWS_GB + (size.parameters or 0) * BYTES[cfg.actor_rollout_ref.rollout.dtype] / 1e9


def has_reference(cfg: PPOConfig) -> bool:
    """Return True if the run has a frozen reference policy."""
    return cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward


def micro_batch_tokens(cfg: PPOConfig) -> int:
    """Return the tokens of the policy's largest micro-batch in an update, on one rank."""
    actor = cfg.actor_rollout_ref.actor
    if actor.use_dynamic_bsz:
        return actor.ppo_max_token_len_per_gpu
    row = cfg.data.max_prompt_length + cfg.data.max_response_length
    tokens = row * (actor.ppo_micro_batch_size_per_gpu or 1)
    return -(-tokens // actor.ulysses_sequence_parallel_size)


def logit_bytes(tokens: int, size: PolicySize) -> int:
    """Return the bytes of float32 logits and their gradient, for ``tokens`` on one rank."""
    # Values and gradient have 4 bytes each. MAX_LOGITS bounds the chunk in memory at a time.
    return 2 * 4 * min(tokens * (size.vocab_size or 0), MAX_LOGITS)


def activation_bytes(cfg: PPOConfig, size: PolicySize) -> int:
    """Return the bytes of activations that one rank keeps for backward of one micro-batch."""
    if size.layers is None or size.hidden is None:
        return 0
    widths = 1 if cfg.actor_rollout_ref.model.enable_gradient_checkpointing else SAVED_WIDTHS
    numbers = micro_batch_tokens(cfg) * size.layers * size.hidden * widths
    return numbers * BYTES[cfg.actor_rollout_ref.actor.dtype]


def memory_problems(
    cfg: PPOConfig, size: PolicySize, device_gb: float | None, host_gb: float | None
) -> Iterator[str]:
    """Yield a message for each estimate that exceeds the memory of a GPU or of a node.

    ``device_gb`` (one GPU) and ``host_gb`` (host of a node) are in GiB; None skips that check.
    Attention heads that an engine's devices cannot share evenly are reported too.
    """
    yield from _head_problems(cfg, size)
    if device_gb is not None:
        yield from _device_problems(cfg, size, device_gb * GIB)
    host = gpu_node_bytes(cfg, size)
    if host_gb is not None and host is not None and host > host_gb * GIB:
        fix = "fewer ranks or engines on a node, or a smaller policy"
        yield f"plan: a node needs {_format_gib(host, host_gb * GIB)} of host memory; fix: {fix}"


def _head_problems(cfg: PPOConfig, size: PolicySize) -> Iterator[str]:
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    gpus_per_engine = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    heads = size.heads or gpus_per_engine
    kv_heads = size.kv_heads or heads
    # A key/value head can be replicated on several devices, a query head cannot.
    if heads % gpus_per_engine or (kv_heads % gpus_per_engine and gpus_per_engine % kv_heads):
        why = f"{heads} query heads and {kv_heads} key/value heads do not divide evenly"
        yield f"{key}={gpus_per_engine}: {why}; allowed: a size that divides both; fix: {key}=1"


def _device_problems(cfg: PPOConfig, size: PolicySize, device_bytes: float) -> Iterator[str]:
    parameters = size.parameters
    if parameters is None:
        return
    rollout = cfg.actor_rollout_ref.rollout
    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    has_separate_gpus = engines_have_separate_gpus(cfg, "cuda")
    updating = update_bytes(cfg, size) or 0.0
    # An engine that does not sleep keeps its memory while the policy is updated.
    sleeps = rollout.free_cache_engine and cfg.trainer.rollout_overlap == "off"
    if not sleeps and not has_separate_gpus:
        updating += _awake_engine_bytes(cfg, parameters, device_bytes)
    if updating > device_bytes:
        fix = (
            "fewer tokens per micro-batch, enable_gradient_checkpointing=true, more ranks, or "
            f"{fsdp}.offload_policy=true"
        )
        yield f"plan: a GPU needs {_format_gib(updating, device_bytes)} for an update; fix: {fix}"
    generating = rollout_bytes(cfg, size, device_bytes) or 0.0
    if generating > device_bytes:
        size_key = key if rollout.kv_cache_gb is None else "actor_rollout_ref.rollout.kv_cache_gb"
        fix = f"a smaller {size_key}"
        if not has_separate_gpus:
            fix += f", or {fsdp}.param_offload=true {fsdp}.optimizer_offload=true"
        gib = _format_gib(generating, device_bytes)
        yield f"plan: a GPU needs {gib} while its engine generates; fix: {fix}"
    engine = _engine_weight_bytes(cfg, parameters)
    engine_share = rollout.gpu_memory_utilization
    if rollout.kv_cache_gb is None and engine > engine_share * device_bytes:
        gib = _format_gib(engine, engine_share * device_bytes, "its share")
        fix = f"a larger {key}, or a larger actor_rollout_ref.rollout.tensor_model_parallel_size"
        yield (
            f"{key}={engine_share}: a GPU needs {gib} for the weights of its engine; "
            f"allowed: more than that; fix: {fix}"
        )


def _trained_bytes(cfg: PPOConfig, fsdp: FSDPConfig, parameters: int, per_weight: int) -> float:
    """Return the bytes of the trained policy on one device; LoRA adapters are not counted."""
    if fsdp.offload_policy:
        return 0.0
    per_weight = WEIGHT_BYTES if cfg.actor_rollout_ref.model.lora_rank else per_weight
    return parameters * per_weight / _ranks_per_copy(cfg, fsdp)


def _reference_bytes(cfg: PPOConfig, parameters: int) -> float:
    fsdp = cfg.actor_rollout_ref.ref.fsdp_config
    if not has_reference(cfg) or fsdp.param_offload or fsdp.offload_policy:
        return 0.0
    return parameters * WEIGHT_BYTES / _ranks_per_copy(cfg, fsdp)


def _is_offloaded(fsdp: FSDPConfig) -> bool:
    return fsdp.offload_policy or (fsdp.param_offload and fsdp.optimizer_offload)


def _ranks_per_copy(cfg: PPOConfig, fsdp: FSDPConfig) -> int:
    """Return the number of ranks that share one copy of the parameters."""
    ranks = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes
    return ranks if fsdp.fsdp_size in (-1, 0) else min(fsdp.fsdp_size, ranks)


def _format_gib(needed: float, available: float, label: str = "there are") -> str:
    return f"about {needed / GIB:.1f} GiB ({label} {available / GIB:.1f})"
