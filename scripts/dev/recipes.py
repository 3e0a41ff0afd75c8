"""What the recipes for GPUs need and how long an iteration of each should take, by arithmetic.

    python scripts/dev/recipes.py            the tables of docs/cluster.md, in Markdown

Nothing here was measured: a table of published models and devices, formulas, and a list of
assumptions that is printed with them. Use it to see which part of an iteration is the long one.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from verl.config.derive import (
    engine_count,
    engine_gpus,
    have_own_gpus,
    trajectories_per_iteration,
    weight_transfer,
)
from verl.config.memory import has_reference
from verl.config.plan import Facts, make_plan
from verl.config.schema import PPOConfig
from verl.trainer.launch.extensions import load_config

GIGA = 1e9
BF16_BYTES = 2
OTHER_LEVELS = 3  # whose thoughts are sampled and scored beside the chosen one's
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Model:
    """The shape of a published policy, as its ``config.json`` has it."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys in one layer."""
        return self.kv_heads * self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Weights and biases (of queries, keys and values)."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_width
        biases = self.hidden + 2 * self.kv_width
        layer = attention + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.embeddings * (1 if self.tied else 2) + self.layers * layer + self.hidden

    @property
    def embeddings(self) -> int:
        """Weights of one table of all tokens."""
        return self.vocab * self.hidden

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_width * BF16_BYTES


@dataclass(frozen=True)
class Device:
    """A GPU, and the memory of the node that it is in."""

    memory_gb: float
    teraflops: float  # bfloat16 with float32 accumulation, dense
    gigabytes_per_s: float
    host_gb: float


@dataclass(frozen=True)
class Assumed:
    """What no configuration says."""

    steps: float = 0.5  # of env.max_steps, in the mean play
    turn: int = 60  # sampled tokens of a step
    thought: int = 40  # of these
    observation: int = 60  # tokens that the environment adds per step
    prompt: int = 500  # tokens before the first step
    compute: float = 0.4  # share of the device's operations that training and scoring reach
    bandwidth: float = 0.6  # share of its bandwidth that decoding reaches
    engine_step_s: float = 0.005  # of an engine beside reading, per token of a batch
    env_step_s: float = 0.05  # an environment, in a batch of others
    store: float = 4.0  # GB/s of weights through host memory
    link: float = 25.0  # GB/s at which a rank gathers weights from the others


MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": Model(24, 896, 4864, 14, 2, 151_936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": Model(28, 1536, 8960, 12, 2, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": Model(28, 3584, 18944, 28, 4, 152_064, False),
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
# Those of a line cost the same.
ESTIMATORS = (("grpo", "gigpo"), ("copo", "rlvcr"))
PLAYED = ("rollout", "alternatives")
TRAINED = ("score", "reference", "update")
PARTS = (*PLAYED, *TRAINED, "weight sync")


def facts_of(cfg: PPOConfig, device: Device) -> Facts:
    """What the plan would find on a machine with ``device`` and the model of ``cfg``."""
    model = MODELS[str(cfg.actor_rollout_ref.model.path)]
    return Facts(
        cores=64,
        memory_gb=device.host_gb,
        device="cuda",
        device_memory_gb=device.memory_gb,
        parameters=model.parameters,
        vocab_size=model.vocab,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
    )


def seconds(cfg: PPOConfig, device: Device, assumed: Assumed) -> dict[str, float]:
    """Seconds of each of ``PARTS`` in one iteration."""
    model = MODELS[str(cfg.actor_rollout_ref.model.path)]
    rollout = cfg.actor_rollout_ref.rollout
    ranks = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes
    engines = engine_count(cfg, "cuda")
    plays = trajectories_per_iteration(cfg)
    steps = assumed.steps * cfg.env.max_steps
    row = assumed.prompt + steps * (assumed.turn + assumed.observation)
    contexts = OTHER_LEVELS if cfg.algorithm.adv_estimator in ("rlvcr", "copo") else 0
    branches = contexts * plays * steps * assumed.turn

    def decode(sequences: float, tokens: float) -> float:
        """An engine that samples ``tokens`` for each of ``sequences``, as many at once as fit."""
        at_once = min(sequences, rollout.max_num_seqs)
        read = model.parameters * BF16_BYTES + at_once * row / 2 * model.cache_bytes
        step = read / (device.gigabytes_per_s * GIGA * assumed.bandwidth) + assumed.engine_step_s
        return sequences / at_once * tokens * step

    def compute(passes: int, tokens: float) -> float:
        """``passes`` times the operations of one forward pass over ``tokens``, on all ranks."""
        each = device.teraflops * 1e12 * assumed.compute * ranks
        return passes * 2 * model.parameters * tokens / each

    rounds = max(1.0, plays / (engines * rollout.max_num_seqs))
    # A forward pass, the same again for checkpointing, and twice it backward.
    passes = 3 + cfg.actor_rollout_ref.model.enable_gradient_checkpointing
    return {
        "rollout": decode(plays / engines, steps * assumed.turn)
        + rounds * steps * assumed.env_step_s,
        "alternatives": decode(contexts * plays * steps / engines, assumed.thought)
        if contexts
        else 0.0,
        "score": compute(1, plays * row + branches),
        "reference": compute(1, plays * row) * has_reference(cfg),
        "update": compute(passes, plays * row) * cfg.actor_rollout_ref.actor.ppo_epochs,
        "weight sync": hand_over(cfg, device, assumed),
    }


def iteration(cfg: PPOConfig, parts: dict[str, float]) -> float:
    """Seconds of an iteration. Engines with GPUs of their own play while the others train, where
    plays overlap; branches are scored after both, because credit for thinking belongs to the plays.
    """
    played = sum(parts[part] for part in PLAYED)
    trained = sum(parts[part] for part in TRAINED)
    if not (have_own_gpus(cfg, "cuda") and cfg.trainer.rollout_overlap == "one_step"):
        return played + trained + parts["weight sync"]
    between = parts["score"] if parts["alternatives"] else 0.0
    return max(played, trained - between) + between + parts["weight sync"]


def hand_over(cfg: PPOConfig, device: Device, assumed: Assumed) -> float:
    """Seconds until the engines have new weights, which are gathered in float32."""
    parameters = MODELS[str(cfg.actor_rollout_ref.model.path)].parameters
    gathered = parameters * FLOAT32_BYTES
    if weight_transfer(cfg, "cuda") == "store":
        # Then, in the engines' precision, into the store and out of it.
        return (gathered + parameters * 2 * BF16_BYTES) / (assumed.store * GIGA)
    others = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes > 1
    sent = others * gathered + have_own_gpus(cfg, "cuda") * parameters * BF16_BYTES
    # On the device: cast, packed into a piece, copied out of it, loaded; each reads and writes.
    moved = gathered + parameters * 7 * BF16_BYTES
    seconds_there = moved / (device.gigabytes_per_s * GIGA * assumed.bandwidth)
    return sent / (assumed.link * GIGA) + seconds_there


def tables() -> Iterator[str]:
    """The lines of both tables."""
    yield "| config | devices | needed on a GPU, an update | fits |"
    yield "|---|---|---|---|"
    for name, device in RECIPES.items():
        cfg = _loaded(name, "rlvcr")
        plan = make_plan(cfg, facts_of(cfg, device))
        nodes = f"{cfg.trainer.nnodes} x {cfg.trainer.n_gpus_per_node} x {device.memory_gb:g} GiB"
        if have_own_gpus(cfg, "cuda"):
            nodes += f", and {len(engine_gpus(cfg))} x {engine_gpus(cfg)[0]} for engines"
        fits = "; ".join(plan.problems()) or "yes"
        yield f"| `{name}` | {nodes} | {plan.device_memory_gb:.1f} GiB | {fits} |"
    yield ""
    yield f"| config | estimators | {' | '.join(PARTS)} | a step, s | 150, h |"
    yield f"|{'---|' * (len(PARTS) + 4)}"
    for name, device in RECIPES.items():
        for estimators in ESTIMATORS:
            cfg = _loaded(name, estimators[0])
            parts = seconds(cfg, device, Assumed())
            total = iteration(cfg, parts)
            cells = [f"{parts[part]:.1f}" for part in PARTS]
            cells += [f"{total:.0f}", f"{150 * total / 3600:.1f}"]
            yield f"| `{name}` | {', '.join(estimators)} | {' | '.join(cells)} |"


def _loaded(name: str, estimator: str) -> PPOConfig:
    cfg = load_config(name, [f"algorithm.adv_estimator={estimator}"])
    if not isinstance(cfg, PPOConfig):
        raise TypeError(f"{name} is no config of main_ppo")
    return cfg


if __name__ == "__main__":
    print("\n".join(tables()))
