"""Estimate the GPU memory and the time of a training step for each recipe, by arithmetic.

A recipe is a config of this repository for a policy and a kind of GPU, listed in ``RECIPES``.

    python scripts/dev/recipes.py            the tables of docs/cluster.md, in Markdown

Nothing here is measured. The estimates use published shapes of models and devices, formulas, and
assumptions. Use them to see which part of a step takes longest.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from verl.config.derive import (
    count_engine_gpus_by_node,
    count_engines,
    count_trajectories_per_step,
    engines_have_separate_gpus,
    resolve_weight_transfer,
)
from verl.config.memory import has_reference
from verl.config.plan import PlanFacts, make_plan
from verl.config.schema import PPOConfig
from verl.trainer.launch.extensions import load_config

GIGA = 1e9
BF16_BYTES = 2  # bytes of a bfloat16 number
FLOAT32_BYTES = 4
OTHER_LEVELS = 3  # number of alternative thoughts per turn


@dataclass(frozen=True)
class PolicyShape:
    """Sizes of a published language model, as in its ``config.json``."""

    layers: int
    hidden: int
    intermediate: int  # width of the MLP layers
    heads: int
    kv_heads: int
    vocab: int
    has_tied_embeddings: bool  # the output head has the weights of the embedding

    @property
    def kv_width(self) -> int:
        """Number of elements of the keys of one token in one layer."""
        return self.kv_heads * self.hidden // self.heads

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases (biases of queries, keys and values)."""
        num_attention_weights = 2 * self.hidden**2 + 2 * self.hidden * self.kv_width
        num_biases = self.hidden + 2 * self.kv_width
        num_layer_parameters = (
            num_attention_weights
            + num_biases
            + 3 * self.hidden * self.intermediate
            + 2 * self.hidden
        )
        return (
            self.num_embedding_weights * (1 if self.has_tied_embeddings else 2)
            + self.layers * num_layer_parameters
            + self.hidden
        )

    @property
    def num_embedding_weights(self) -> int:
        """Number of weights of one embedding table."""
        return self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_width * BF16_BYTES


@dataclass(frozen=True)
class Device:
    """A GPU, and the memory of the node that it is in."""

    memory_gb: float
    teraflops: float  # bfloat16 with float32 accumulation, dense
    gigabytes_per_s: float  # memory bandwidth
    host_gb: float  # memory of the node


# Assumptions about episodes and hardware that no configuration contains.
TURN_SHARE = 0.5  # mean turns of an episode, as a fraction of env.max_steps
TURN_TOKENS = 60  # sampled tokens of a turn
THOUGHT_TOKENS = 40  # tokens of the thought, included in ``TURN_TOKENS``
OBSERVATION_TOKENS = 60  # tokens that the environment adds per turn
PROMPT_TOKENS = 500  # tokens before the first turn
PEAK_FLOPS_SHARE = 0.4  # share of the device's peak FLOPs in training and scoring
PEAK_BANDWIDTH_SHARE = 0.6  # share of the device's peak bandwidth in decoding
ENGINE_STEP_S = 0.005  # overhead of an engine step, apart from reading memory
ENV_STEP_S = 0.05  # duration of an env step
STORE_GB_PER_S = 4.0  # GB/s, weights through host memory
LINK_GB_PER_S = 25.0  # GB/s, weights that a rank gathers from the other ranks

MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": PolicyShape(24, 896, 4864, 14, 2, 151_936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": PolicyShape(28, 1536, 8960, 12, 2, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": PolicyShape(28, 3584, 18944, 28, 4, 152_064, False),
}
RTX_4090 = Device(23.6, 165, 1008, 64)
H100 = Device(79.6, 989, 3350, 512)
RECIPES = {
    "alfworld_qwen2.5_0.5b_24gb": RTX_4090,
    "alfworld_qwen2.5_1.5b_80gb": H100,
    "alfworld_qwen2.5_1.5b_8gpu": H100,
    "scienceworld_qwen2.5_1.5b_8gpu": H100,
    "alfworld_qwen2.5_7b_8gpu": H100,
    "alfworld_qwen2.5_7b_2nodes": H100,
    "alfworld_qwen2.5_7b_2nodes_apart": H100,
}
# Estimators in the same tuple have the same cost.
ESTIMATORS = (("grpo", "gigpo"), ("copo", "rlvcr"))
ROLLOUT_PARTS = ("rollout", "alternatives")
TRAINING_PARTS = ("score", "reference", "update")
PARTS = (*ROLLOUT_PARTS, *TRAINING_PARTS, "weight sync")


def make_memory_facts(cfg: PPOConfig, device: Device) -> PlanFacts:
    """Return the sizes of ``device`` and of the model, from which the memory need is estimated."""
    policy_shape = MODELS[str(cfg.actor_rollout_ref.model.path)]
    return PlanFacts(
        cores=64,
        memory_gb=device.host_gb,
        device="cuda",
        device_memory_gb=device.memory_gb,
        parameters=policy_shape.num_parameters,
        vocab_size=policy_shape.vocab,
        num_layers=policy_shape.layers,
        hidden_size=policy_shape.hidden,
        num_heads=policy_shape.heads,
        num_kv_heads=policy_shape.kv_heads,
    )


def estimate_part_seconds(cfg: PPOConfig, device: Device) -> dict[str, float]:
    """Estimate the seconds of each part of a training step, such as rollout and update."""
    policy_shape = MODELS[str(cfg.actor_rollout_ref.model.path)]
    rollout = cfg.actor_rollout_ref.rollout
    num_ranks = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes
    num_engines = count_engines(cfg, "cuda")
    num_trajectories = count_trajectories_per_step(cfg)
    mean_turns = TURN_SHARE * cfg.env.max_steps
    row_tokens = PROMPT_TOKENS + mean_turns * (TURN_TOKENS + OBSERVATION_TOKENS)
    num_alternatives = OTHER_LEVELS if cfg.algorithm.adv_estimator in ("rlvcr", "copo") else 0

    def compute_decoding_s(num_sequences: float, tokens_per_sequence: float) -> float:
        """Return the seconds in which an engine samples this many tokens of each sequence."""
        batch_size = min(num_sequences, rollout.max_num_seqs)
        cache_bytes = batch_size * row_tokens / 2 * policy_shape.kv_bytes_per_token
        bytes_per_s = device.gigabytes_per_s * GIGA * PEAK_BANDWIDTH_SHARE
        step_s = (policy_shape.num_parameters * BF16_BYTES + cache_bytes) / bytes_per_s
        return num_sequences / batch_size * tokens_per_sequence * (step_s + ENGINE_STEP_S)

    def compute_forward_s(num_passes: int, num_tokens: float) -> float:
        """Return the seconds of the forward passes on ``num_tokens``, shared by all ranks."""
        total_flops_per_s = device.teraflops * 1e12 * PEAK_FLOPS_SHARE * num_ranks
        return num_passes * 2 * policy_shape.num_parameters * num_tokens / total_flops_per_s

    num_engine_rounds = max(1.0, num_trajectories / (num_engines * rollout.max_num_seqs))
    num_thoughts = num_alternatives * num_trajectories * mean_turns
    total_row_tokens = num_trajectories * row_tokens
    # Cost in forward passes: 1 forward, 2 backward, and 1 for gradient checkpointing.
    num_update_passes = 3 + cfg.actor_rollout_ref.model.enable_gradient_checkpointing
    return {
        "rollout": compute_decoding_s(num_trajectories / num_engines, mean_turns * TURN_TOKENS)
        + num_engine_rounds * mean_turns * ENV_STEP_S,
        "alternatives": compute_decoding_s(num_thoughts / num_engines, THOUGHT_TOKENS)
        if num_thoughts
        else 0.0,
        "score": compute_forward_s(1, total_row_tokens + num_thoughts * TURN_TOKENS),
        "reference": compute_forward_s(1, total_row_tokens) * has_reference(cfg),
        "update": compute_forward_s(num_update_passes, total_row_tokens)
        * cfg.actor_rollout_ref.actor.ppo_epochs,
        "weight sync": estimate_sync_seconds(cfg, device),
    }


def estimate_step_seconds(cfg: PPOConfig, parts: dict[str, float]) -> float:
    """Estimate the seconds of a training step.

    With ``trainer.rollout_overlap=one_step`` and separate GPUs for engines, rollout and training
    run at the same time. Alternative thoughts are scored after rollout and training have ended.
    """
    rollout_s = sum(parts[part] for part in ROLLOUT_PARTS)
    training_s = sum(parts[part] for part in TRAINING_PARTS)
    if not (engines_have_separate_gpus(cfg, "cuda") and cfg.trainer.rollout_overlap == "one_step"):
        return rollout_s + training_s + parts["weight sync"]
    scoring_s = parts["score"] if parts["alternatives"] else 0.0
    return max(rollout_s, training_s - scoring_s) + scoring_s + parts["weight sync"]


def estimate_sync_seconds(cfg: PPOConfig, device: Device) -> float:
    """Estimate the seconds of gathering the weights in float32 and sending them to the engines."""
    num_parameters = MODELS[str(cfg.actor_rollout_ref.model.path)].num_parameters
    gathered_bytes = num_parameters * FLOAT32_BYTES
    if resolve_weight_transfer(cfg, "cuda") == "store":
        # The weights are written to the store and read from it in bfloat16.
        return (gathered_bytes + num_parameters * 2 * BF16_BYTES) / (STORE_GB_PER_S * GIGA)
    has_other_ranks = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes > 1
    sent_bytes = (
        has_other_ranks * gathered_bytes
        + engines_have_separate_gpus(cfg, "cuda") * num_parameters * BF16_BYTES
    )
    # The device casts all weights, packs them into a buffer, copies them out of it and loads them.
    # Each operation reads and writes all weights.
    device_bytes = gathered_bytes + num_parameters * 7 * BF16_BYTES
    device_seconds = device_bytes / (device.gigabytes_per_s * GIGA * PEAK_BANDWIDTH_SHARE)
    return sent_bytes / (LINK_GB_PER_S * GIGA) + device_seconds


def format_tables() -> Iterator[str]:
    """Yield the lines of two Markdown tables: GPU memory and seconds of a step, for each recipe."""
    yield "| config | devices | needed on a GPU, an update | fits |"
    yield "|---|---|---|---|"
    for name, device in RECIPES.items():
        cfg = load_config(name, ["algorithm.adv_estimator=rlvcr"])
        memory_plan = make_plan(cfg, make_memory_facts(cfg, device))
        devices_text = (
            f"{cfg.trainer.nnodes} x {cfg.trainer.n_gpus_per_node} x {device.memory_gb:g} GiB"
        )
        if engines_have_separate_gpus(cfg, "cuda"):
            gpus_by_node = count_engine_gpus_by_node(cfg)
            devices_text += f", and {len(gpus_by_node)} x {gpus_by_node[0]} for engines"
        fits = "; ".join(memory_plan.find_problems()) or "yes"
        yield f"| `{name}` | {devices_text} | {memory_plan.device_memory_gb:.1f} GiB | {fits} |"
    yield ""
    yield f"| config | estimators | {' | '.join(PARTS)} | a step, s | 150, h |"
    yield f"|{'---|' * (len(PARTS) + 4)}"
    for name, device in RECIPES.items():
        for estimators in ESTIMATORS:
            cfg = load_config(name, [f"algorithm.adv_estimator={estimators[0]}"])
            part_seconds = estimate_part_seconds(cfg, device)
            step_seconds = estimate_step_seconds(cfg, part_seconds)
            cells = [f"{part_seconds[part]:.1f}" for part in PARTS]
            cells += [f"{step_seconds:.0f}", f"{150 * step_seconds / 3600:.1f}"]
            yield f"| `{name}` | {', '.join(estimators)} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(format_tables()))
