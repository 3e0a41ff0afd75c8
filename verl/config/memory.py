"""Estimates of the memory of a run on a device and on a node, in bytes.

P parameters, R ranks that share one copy of them, T tokens of a micro-batch, L layers of width H:

    trained model      4P bytes weights + 4P gradient + 8P Adam moments, divided by R
    frozen reference   4P bytes divided by R
    gathered layers    all parameters of two layers, which FSDP2 gathers at the same time
    activations        T L H numbers with gradient checkpointing, 16 T L H without
    logits             values and gradient of the largest chunk (``MAX_LOGITS``)
    engine             gpu_memory_utilization or, with kv_cache_gb, weights and KV cache; 0 on the
                       GPU of a training rank while the engine sleeps or if it has separate GPUs

The estimates are lower bounds, so that a run which fits is never refused.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

from verl.config.derive import (
    count_engines,
    count_max_engines_per_node,
    engines_have_separate_gpus,
    resolve_weight_transfer,
)
from verl.config.load import guess_device
from verl.config.schema import PPOConfig
from verl.config.schema.model import FSDPConfig
from verl.config.schema.sft import NewPolicyConfig
from verl.config.settings import Problem
from verl.names import CPU_CACHE_GB, MAX_LOGITS

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}
WEIGHT_BYTES_PER_PARAMETER = 4  # per parameter: master weight, float32
# In an update: master weight, gradient and two moments, all in float32.
TRAINING_BYTES_PER_PARAMETER = 16
# Between updates: master weight and two moments, all in float32.
IDLE_TRAINING_BYTES_PER_PARAMETER = 12
# Activations that backward needs (inputs of matrix products), per token, layer and unit of the
# hidden size.
ACTIVATION_WIDTHS_PER_LAYER = 16
# Keys of a model's config.json, in the order of the fields of ``PolicySize``.
MODEL_CONFIG_SIZE_KEYS = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
)
# Bytes in Ray's object store per token of a row: of its trajectory (tokens, log-probs, texts), and
# of the columns that an update reads. Both were measured with trajectories of ten turns.
TRAJECTORY_BYTES_PER_TOKEN = 50
ROW_BYTES_PER_TOKEN = 40
OTHER_OBJECTS_GB = 1.0  # assumed size of all other objects in Ray's object store, GB
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class PolicySize:
    """Size of a policy: parameters, vocabulary, layers, width and heads; None if unknown."""

    parameters: int | None = None
    vocab_size: int | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None


def read_policy_size(path: Path) -> PolicySize:
    """Return the size of the policy in directory ``path``, without reading its weights."""
    from safetensors import SafetensorError, safe_open

    config_file = path / "config.json"
    if not config_file.is_file():
        return PolicySize()
    parameters = 0
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, framework="numpy") as weights:
                slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118
                parameters += sum(math.prod(tensor.get_shape()) for tensor in slices)
        except SafetensorError as error:
            raise ValueError(f"{file}: {error}; fix: copy the file again") from error
    model_config = json.loads(config_file.read_text())
    sizes = [model_config.get(key) for key in MODEL_CONFIG_SIZE_KEYS]
    # A later check of the model reports sizes that are not integers.
    known_sizes = [size if isinstance(size, int) else None for size in sizes]
    return PolicySize(parameters or None, *known_sizes)


def count_new_parameters(new_policy: NewPolicyConfig, vocab_size: int) -> int:
    """Return the number of parameters of a new policy with a vocabulary of ``vocab_size``."""
    head_width = new_policy.head_width
    hidden = new_policy.hidden_size
    query_width = head_width * new_policy.num_attention_heads
    key_width = head_width * new_policy.num_key_value_heads
    # Query and output projections per attention head, key and value per key/value head, and the
    # norms of queries and keys. Queries of Qwen3.5 have a gate of the same size.
    is_hybrid = new_policy.architecture == "qwen3_5"
    query_projections = 3 if is_hybrid else 2
    attention_params = hidden * (query_projections * query_width + 2 * key_width) + 2 * head_width
    mlp_params = 3 * hidden * new_policy.intermediate_size + 2 * hidden  # SwiGLU and two norms
    embedding_params = vocab_size * hidden * (1 if new_policy.tie_word_embeddings else 2)
    num_layers = new_policy.num_hidden_layers
    num_linear_layers = (num_layers + 1) // 2 if is_hybrid else 0
    # Linear attention: projections to queries, keys, values, gate and output; a convolution of
    # width 4 over queries, keys and values; a norm; per head two projections and two scalars.
    conv_width = 2 * key_width + query_width
    linear_attention_params = hidden * (conv_width + 2 * query_width) + 4 * conv_width + head_width
    linear_attention_params += 2 * new_policy.num_attention_heads * (hidden + 1)
    layer_params = num_layers * mlp_params + num_linear_layers * linear_attention_params
    layer_params += (num_layers - num_linear_layers) * attention_params
    return embedding_params + layer_params + hidden  # with the norm after the last layer


def estimate_cpu_node_bytes(cfg: PPOConfig, size: PolicySize) -> float:
    """Return the memory that each node needs in a run on CPU, in bytes.

    The sum contains trained and frozen weights, engines with caches, logits, and the copy for a
    checkpoint. Weights of a policy of unknown size count as 0.
    """
    parameters = size.parameters or 0
    rollout = cfg.actor_rollout_ref.rollout
    trainer = cfg.trainer
    # With LoRA, only the frozen weights are counted. Adapters and their optimizer state are small.
    lora_ranks = [cfg.actor_rollout_ref.model.lora_rank]
    lora_ranks += [cfg.critic.model.lora_rank] if cfg.critic.enable else []
    model_bytes_per_parameter = WEIGHT_BYTES_PER_PARAMETER * has_reference_copy(cfg) + sum(
        WEIGHT_BYTES_PER_PARAMETER if rank else TRAINING_BYTES_PER_PARAMETER for rank in lora_ranks
    )
    cache_bytes = (CPU_CACHE_GB if rollout.kv_cache_gb is None else rollout.kv_cache_gb) * GIB
    weight_bytes = parameters * BYTES_PER_VALUE[rollout.dtype]
    engine_bytes = count_engines(cfg, "cpu") * (weight_bytes + cache_bytes)
    logit_bytes_per_rank = estimate_logit_bytes(count_micro_batch_tokens(cfg), size)
    checkpoint_bytes = parameters * _count_checkpoint_bytes_per_parameter(cfg)
    total_bytes = parameters * model_bytes_per_parameter + engine_bytes + checkpoint_bytes
    return total_bytes / trainer.nnodes + logit_bytes_per_rank * trainer.n_gpus_per_node


def estimate_update_bytes(cfg: PPOConfig, size: PolicySize) -> float | None:
    """Return the memory that a training rank needs on its GPU in an update, in bytes.

    The memory of a rollout engine on the same GPU is not included. None if the size of the policy
    is unknown.
    """
    parameters = size.parameters
    if parameters is None:
        return None
    actor = cfg.actor_rollout_ref.actor
    needed_bytes = 0.0
    if not actor.fsdp_config.offload_policy:
        lora_rank = cfg.actor_rollout_ref.model.lora_rank
        per_parameter = WEIGHT_BYTES_PER_PARAMETER if lora_rank else TRAINING_BYTES_PER_PARAMETER
        needed_bytes = parameters * per_parameter / _count_ranks_per_copy(cfg, actor.fsdp_config)
    critic = cfg.critic.model
    if cfg.critic.enable:
        needed_bytes += _estimate_idle_bytes(cfg, critic.fsdp_config, critic.lora_rank, parameters)
    needed_bytes += _estimate_reference_bytes(cfg, parameters)
    # The gradient is not sharded until it is reduced.
    if not actor.fsdp_config.reduce_every_micro_batch:
        needed_bytes += parameters * WEIGHT_BYTES_PER_PARAMETER
    gathered_bytes = 2 * parameters / (size.num_layers or parameters) * BYTES_PER_VALUE[actor.dtype]
    logit_bytes = estimate_logit_bytes(count_micro_batch_tokens(cfg), size)
    return needed_bytes + gathered_bytes + estimate_activation_bytes(cfg, size) + logit_bytes


def estimate_rollout_bytes(cfg: PPOConfig, size: PolicySize, device_bytes: float) -> float | None:
    """Return the memory used on a GPU while its rollout engine generates, in bytes.

    ``device_bytes`` is the total memory of the GPU. None if the size of the policy is unknown.
    """
    parameters = size.parameters
    if parameters is None:
        return None
    engine_bytes = _estimate_awake_engine_bytes(cfg, parameters, device_bytes)
    if engines_have_separate_gpus(cfg, "cuda"):
        return engine_bytes
    policy_config = cfg.actor_rollout_ref
    training_bytes = _estimate_idle_bytes(
        cfg, policy_config.actor.fsdp_config, policy_config.model.lora_rank, parameters
    )
    return training_bytes + _estimate_reference_bytes(cfg, parameters) + engine_bytes


def _estimate_engine_weight_bytes(cfg: PPOConfig, parameters: int) -> float:
    rollout = cfg.actor_rollout_ref.rollout
    return parameters * BYTES_PER_VALUE[rollout.dtype] / rollout.tensor_model_parallel_size


def _estimate_awake_engine_bytes(cfg: PPOConfig, parameters: int, device_bytes: float) -> float:
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.kv_cache_gb is None:
        return rollout.gpu_memory_utilization * device_bytes
    return _estimate_engine_weight_bytes(cfg, parameters) + rollout.kv_cache_gb * GIB


def estimate_gpu_node_bytes(
    cfg: PPOConfig, size: PolicySize, sends_adapter: bool = False
) -> float | None:
    """Return a lower bound of the peak host memory of a node of a GPU run, in bytes.

    The peak is the largest of three phases. Loading: rank 0 reads the whole model. Weight sync
    through the object store: rank 0 gathers a copy, casts it and stores it. Saving: every rank
    copies its shards, also those in host memory.

    With ``sends_adapter`` a weight sync sends only the LoRA adapter. Sleeping engines then keep
    their weights in host memory. Return None for an unknown size.
    """
    parameters = size.parameters
    if parameters is None:
        return None
    loading_bytes = parameters * WEIGHT_BYTES_PER_PARAMETER
    rollout = cfg.actor_rollout_ref.rollout
    engine_weight_bytes = parameters * BYTES_PER_VALUE[rollout.dtype]
    if sends_adapter and can_engines_sleep(cfg):
        loading_bytes += count_max_engines_per_node(cfg, "cuda") * engine_weight_bytes
    # Three copies of the weights: gathered (float32), cast, and in the object store.
    uses_object_store = resolve_weight_transfer(cfg, "cuda") == "store"
    sync_bytes = 0
    if uses_object_store:
        sync_bytes = parameters * WEIGHT_BYTES_PER_PARAMETER + 2 * engine_weight_bytes
    # A checkpoint has one copy of the policy, whose shards are distributed over some nodes.
    num_ranks = _count_ranks_per_copy(cfg, cfg.actor_rollout_ref.actor.fsdp_config)
    num_nodes = -(-num_ranks // cfg.trainer.n_gpus_per_node)
    checkpoint_bytes = parameters * _count_checkpoint_bytes_per_parameter(cfg) / num_nodes
    saving_bytes = checkpoint_bytes + parameters * _count_offloaded_bytes_per_parameter(cfg)
    # An asynchronous save continues during the weight sync of the next training step.
    if cfg.trainer.async_save:
        sync_bytes += checkpoint_bytes
    return max(loading_bytes, sync_bytes, saving_bytes)


def can_engines_sleep(cfg: PPOConfig) -> bool:
    """Return True if the engines of a run on GPUs free their memory during training."""
    is_overlap_off = cfg.trainer.rollout_overlap == "off"
    frees_memory = cfg.actor_rollout_ref.rollout.free_cache_engine and is_overlap_off
    return frees_memory and not engines_have_separate_gpus(cfg, "cuda")


def _count_offloaded_bytes_per_parameter(cfg: PPOConfig) -> float:
    """Return the bytes per parameter that offloaded models need in the host memory of a node."""
    policy_config = cfg.actor_rollout_ref
    trained_models = [(policy_config.actor.fsdp_config, policy_config.model.lora_rank)]
    if cfg.critic.enable:
        trained_models.append((cfg.critic.model.fsdp_config, cfg.critic.model.lora_rank))
    copies = []  # sharding settings and bytes per parameter of each offloaded part of a model
    for fsdp, lora_rank in trained_models:
        if fsdp.param_offload or fsdp.offload_policy:
            copies.append((fsdp, WEIGHT_BYTES_PER_PARAMETER))
        # The moments of LoRA adapters are small, so they are not counted.
        if not lora_rank and (fsdp.optimizer_offload or fsdp.offload_policy):
            copies.append((fsdp, IDLE_TRAINING_BYTES_PER_PARAMETER - WEIGHT_BYTES_PER_PARAMETER))
    ref_fsdp = policy_config.ref.fsdp_config
    if has_reference_copy(cfg) and (ref_fsdp.param_offload or ref_fsdp.offload_policy):
        copies.append((ref_fsdp, WEIGHT_BYTES_PER_PARAMETER))
    ranks_per_node = cfg.trainer.n_gpus_per_node
    return sum(
        num_bytes * ranks_per_node / _count_ranks_per_copy(cfg, fsdp) for fsdp, num_bytes in copies
    )


def _count_checkpoint_bytes_per_parameter(cfg: PPOConfig) -> int:
    """Return the bytes of a checkpoint divided by the number of parameters of the policy.

    A critic counts as a second model with the same number of parameters.
    """
    if cfg.trainer.save_freq == 0:
        return 0
    policy_config = cfg.actor_rollout_ref
    saved_models = [(policy_config.actor.checkpoint, policy_config.model)]
    saved_models += [(cfg.critic.checkpoint, cfg.critic.model)] if cfg.critic.enable else []
    # The optimizer moments of LoRA adapters are small, so they are not counted.
    return sum(
        IDLE_TRAINING_BYTES_PER_PARAMETER
        if "optimizer" in checkpoint.contents and not model.lora_rank
        else WEIGHT_BYTES_PER_PARAMETER
        for checkpoint, model in saved_models
    )


def estimate_object_store_gb(cfg: PPOConfig, size: PolicySize, max_rows: int) -> float:
    """Return the GB that the object store of a local Ray needs, for ``max_rows`` rows per step.

    It holds the trajectories of a step (of two if rollouts overlap with updates), the rows that are
    sent to the ranks, and possibly the weights. Trajectories of validations are not counted.
    """
    step_tokens = max_rows * cfg.data.max_row_tokens
    num_rollouts = 1 if cfg.trainer.rollout_overlap == "off" else 2
    store_bytes = step_tokens * (num_rollouts * TRAJECTORY_BYTES_PER_TOKEN + ROW_BYTES_PER_TOKEN)
    if resolve_weight_transfer(cfg, guess_device(cfg.trainer.device)) == "store":
        store_bytes += (size.parameters or 0) * BYTES_PER_VALUE[cfg.actor_rollout_ref.rollout.dtype]
    return OTHER_OBJECTS_GB + store_bytes / 1e9


def has_reference(cfg: PPOConfig) -> bool:
    """Return True if the run has a frozen reference policy."""
    return cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward


def has_reference_copy(cfg: PPOConfig) -> bool:
    """Return True if the reference is a second model, and not the policy without its adapter."""
    return has_reference(cfg) and not cfg.actor_rollout_ref.model.lora_rank


def count_micro_batch_tokens(cfg: PPOConfig) -> int:
    """Return the tokens of the policy's largest micro-batch in an update, on one rank."""
    actor = cfg.actor_rollout_ref.actor
    if actor.use_dynamic_bsz:
        return actor.ppo_max_token_len_per_gpu
    tokens = cfg.data.max_row_tokens * (actor.ppo_micro_batch_size_per_gpu or 1)
    return -(-tokens // actor.ulysses_sequence_parallel_size)


def estimate_logit_bytes(tokens: int, size: PolicySize) -> int:
    """Return the bytes of float32 logits and their gradient, for ``tokens`` on one rank."""
    # A logit and its gradient have 4 bytes each. At most MAX_LOGITS logits are in memory at once.
    return 2 * 4 * min(tokens * (size.vocab_size or 0), MAX_LOGITS)


def estimate_activation_bytes(cfg: PPOConfig, size: PolicySize) -> int:
    """Return the bytes of activations that one rank keeps for backward of one micro-batch."""
    if size.num_layers is None or size.hidden_size is None:
        return 0
    num_activations = count_micro_batch_tokens(cfg) * size.num_layers * size.hidden_size
    if not cfg.actor_rollout_ref.model.enable_gradient_checkpointing:
        num_activations *= ACTIVATION_WIDTHS_PER_LAYER
    return num_activations * BYTES_PER_VALUE[cfg.actor_rollout_ref.actor.dtype]


def find_memory_problems(
    cfg: PPOConfig,
    size: PolicySize,
    device_gb: float | None,
    host_gb: float | None,
    sends_adapter: bool = False,
) -> Iterator[Problem]:
    """Yield a message for each estimate that exceeds the memory of a GPU or of a node.

    ``device_gb`` (one GPU) and ``host_gb`` (host of a node) are in GiB; None skips that check.
    ``estimate_gpu_node_bytes`` explains ``sends_adapter``. Also yield a message if the attention
    heads cannot be divided evenly among an engine's devices.
    """
    yield from _find_attention_head_problems(cfg, size)
    if device_gb is not None:
        yield from _find_device_problems(cfg, size, device_gb * GIB)
    host_bytes = estimate_gpu_node_bytes(cfg, size, sends_adapter)
    if host_gb is not None and host_bytes is not None and host_bytes > host_gb * GIB:
        memory_text = _format_gib(host_bytes, host_gb * GIB)
        fix = "fewer ranks or engines on a node, or a smaller policy"
        message = f"plan: a node needs {memory_text} of host memory; fix: {fix}"
        yield Problem(message, "does_not_fit")


def _find_attention_head_problems(cfg: PPOConfig, size: PolicySize) -> Iterator[Problem]:
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    gpus_per_engine = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    num_heads = size.num_heads or gpus_per_engine
    num_kv_heads = size.num_kv_heads or num_heads
    # A key/value head can be replicated on several devices, a query head cannot.
    if num_heads % gpus_per_engine or (
        num_kv_heads % gpus_per_engine and gpus_per_engine % num_kv_heads
    ):
        why = f"{num_heads} query heads and {num_kv_heads} key/value heads do not divide evenly"
        message = f"{key}={gpus_per_engine}: {why}; allowed: a size that divides both; fix: {key}=1"
        yield Problem(message, "does_not_fit")


def _find_device_problems(
    cfg: PPOConfig, size: PolicySize, device_bytes: float
) -> Iterator[Problem]:
    parameters = size.parameters
    if parameters is None:
        return
    rollout = cfg.actor_rollout_ref.rollout
    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    fsdp_path = "actor_rollout_ref.actor.fsdp_config"
    has_separate_gpus = engines_have_separate_gpus(cfg, "cuda")
    needed_update_bytes = estimate_update_bytes(cfg, size) or 0.0
    # An engine that does not sleep keeps its memory while the policy is updated.
    if not can_engines_sleep(cfg) and not has_separate_gpus:
        needed_update_bytes += _estimate_awake_engine_bytes(cfg, parameters, device_bytes)
    if needed_update_bytes > device_bytes:
        memory_text = _format_gib(needed_update_bytes, device_bytes)
        yield Problem(
            f"plan: a GPU needs {memory_text} for an update; fix: fewer tokens per micro-batch, "
            f"enable_gradient_checkpointing=true, more ranks, or {fsdp_path}.offload_policy=true",
            "does_not_fit",
        )
    needed_rollout_bytes = estimate_rollout_bytes(cfg, size, device_bytes) or 0.0
    if needed_rollout_bytes > device_bytes:
        has_cache_size = rollout.kv_cache_gb is not None
        fix = f"a smaller {'actor_rollout_ref.rollout.kv_cache_gb' if has_cache_size else key}"
        if not has_separate_gpus:
            fix += f", or {fsdp_path}.param_offload=true {fsdp_path}.optimizer_offload=true"
        memory_text = _format_gib(needed_rollout_bytes, device_bytes)
        message = f"plan: a GPU needs {memory_text} while its engine generates; fix: {fix}"
        yield Problem(message, "does_not_fit")
    engine_bytes = _estimate_engine_weight_bytes(cfg, parameters)
    engine_memory_share = rollout.gpu_memory_utilization
    if rollout.kv_cache_gb is None and engine_bytes > engine_memory_share * device_bytes:
        memory_text = _format_gib(engine_bytes, engine_memory_share * device_bytes, "its share")
        fix = f"a larger {key}, or a larger actor_rollout_ref.rollout.tensor_model_parallel_size"
        yield Problem(
            f"{key}={engine_memory_share}: a GPU needs {memory_text} for the weights of its "
            f"engine; allowed: more than that; fix: {fix}",
            "does_not_fit",
        )


def _estimate_idle_bytes(
    cfg: PPOConfig, fsdp: FSDPConfig, lora_rank: int, parameters: int
) -> float:
    """Return the bytes of a trained model on one GPU while it is not updated."""
    if fsdp.offload_policy or (fsdp.param_offload and fsdp.optimizer_offload):
        return 0.0
    # With LoRA only the frozen weights are counted, because the adapters are small.
    per_parameter = WEIGHT_BYTES_PER_PARAMETER if lora_rank else IDLE_TRAINING_BYTES_PER_PARAMETER
    return parameters * per_parameter / _count_ranks_per_copy(cfg, fsdp)


def _estimate_reference_bytes(cfg: PPOConfig, parameters: int) -> float:
    fsdp = cfg.actor_rollout_ref.ref.fsdp_config
    if not has_reference_copy(cfg) or fsdp.param_offload or fsdp.offload_policy:
        return 0.0
    return parameters * WEIGHT_BYTES_PER_PARAMETER / _count_ranks_per_copy(cfg, fsdp)


def _count_ranks_per_copy(cfg: PPOConfig, fsdp: FSDPConfig) -> int:
    num_ranks = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes
    return num_ranks if fsdp.fsdp_size in (-1, 0) else min(fsdp.fsdp_size, num_ranks)


def _format_gib(needed_bytes: float, available_bytes: float, label: str = "there are") -> str:
    return f"about {needed_bytes / GIB:.1f} GiB ({label} {available_bytes / GIB:.1f})"
