"""Memory by arithmetic: the numbers by hand, and what they refuse."""

import subprocess

import pytest

from verl.trainer.config import plan as plan_module
from verl.trainer.config.memory import (
    GIB,
    PolicySize,
    cpu_node_bytes,
    gpu_node_bytes,
    memory_problems,
    micro_tokens,
    play_bytes,
    store_gb,
    update_bytes,
)
from verl.trainer.config.plan import Facts, gather_facts, make_plan
from verl.trainer.config.validate import find_problems
from verl.trainer.launch.extensions import load_config

SMALL = PolicySize(parameters=1_540_000_000, vocab_size=151_936, layers=28, hidden=1536)
P = 7_620_000_000
LARGE = PolicySize(parameters=P, vocab_size=152_064, layers=28, hidden=3584)
FSDP = "actor_rollout_ref.actor.fsdp_config"
ROLLOUT = "actor_rollout_ref.rollout"
RANKS = 8


def config(*words: str):
    return load_config("alfworld_qwen2.5_1.5b_8gpu", words)


def test_an_update_holds_shards_one_layer_activations_and_logits():
    shards = (16 + 4) * P / RANKS  # trained, and the reference
    gathered = 2 * P / 28 * 2
    activations = 16384 * 28 * 3584 * 2
    logits = 2 * 4 * (1 << 27)
    assert update_bytes(config(), LARGE) == shards + gathered + activations + logits
    kept = update_bytes(
        config("actor_rollout_ref.model.enable_gradient_checkpointing=false"), LARGE
    )
    assert kept == shards + gathered + 16 * activations + logits
    assert update_bytes(config(), PolicySize()) is None


def test_ranks_that_compute_a_row_together_hold_a_part_of_it():
    key = "actor_rollout_ref.actor"
    rows = (f"{key}.use_dynamic_bsz=false", f"{key}.ppo_micro_batch_size_per_gpu=2")
    alone = config(*rows)
    together = config(*rows, f"{key}.ulysses_sequence_parallel_size=4")
    row = alone.data.max_prompt_length + alone.data.max_response_length
    assert micro_tokens(alone) == 2 * row
    assert micro_tokens(together) == -(-2 * row // 4)
    # By tokens, a micro-batch holds as many more as there are ranks to compute it.
    assert micro_tokens(config(f"{key}.ulysses_sequence_parallel_size=4")) == 16384


def test_joint_ranks_are_of_one_node_and_compile_nothing():
    for where in ("actor_rollout_ref.actor", "critic"):
        key = f"{where}.ulysses_sequence_parallel_size"
        (found,) = find_problems(config(f"{key}=3", "trainer.device=cpu"))
        assert found.startswith(key) and "the 8 ranks of a node" in found and f"{key}=1" in found
        assert find_problems(config(f"{key}=2", "trainer.device=cpu")) == []
    words = ["ulysses_sequence_parallel_size=2", "use_torch_compile=true"]
    both = [f"actor_rollout_ref.actor.{word}" for word in words]
    (found,) = find_problems(config(*both, "trainer.device=cpu"))
    assert found.startswith("actor_rollout_ref.actor.use_torch_compile") and "fix: " in found


def test_an_engine_plays_beside_weights_and_moments():
    held = (12 + 4) * P / RANKS
    assert play_bytes(config(), LARGE, 80 * GIB) == held + 0.5 * 80 * GIB
    moved = config(f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true")
    assert play_bytes(moved, LARGE, 80 * GIB) == 4 * P / RANKS + 0.5 * 80 * GIB


def test_ranks_load_no_copies_of_their_own():
    """Gathered, cast and in the store, beside eight sleeping engines: more than loading takes."""
    assert gpu_node_bytes(config("trainer.save_freq=-1"), LARGE) == (4 + 2 * 2 + 8 * 2) * P
    one = ("trainer.n_gpus_per_node=1", f"{ROLLOUT}.num_workers=1")
    assert gpu_node_bytes(config(*one, "trainer.save_freq=-1"), LARGE) == (4 + 2 * 2 + 2) * P


def test_a_save_copies_weights_and_moments_into_host_memory():
    one = ("trainer.n_gpus_per_node=1", f"{ROLLOUT}.num_workers=1", "trainer.save_freq=25")
    at_once = (*one, "trainer.async_save=false")
    handing_over = (4 + 2 * 2 + 2) * P
    assert gpu_node_bytes(config(*at_once), LARGE) == (4 + 8) * P
    assert gpu_node_bytes(config(*one), LARGE) == handing_over + (4 + 8) * P
    weights = "actor_rollout_ref.actor.checkpoint.contents=[model]"
    assert gpu_node_bytes(config(*one, weights), LARGE) == handing_over + 4 * P
    adapters = "actor_rollout_ref.model.lora_rank=32"
    assert gpu_node_bytes(config(*one, adapters), LARGE) == handing_over + 4 * P
    with_critic = ("algorithm.adv_estimator=gae", adapters)
    assert gpu_node_bytes(config(*at_once, *with_critic), LARGE) == (4 + 4 + 8) * P
    without = config(*one[:2], "trainer.save_freq=-1")
    assert cpu_node_bytes(config(*one), LARGE) - cpu_node_bytes(without, LARGE) == (4 + 8) * P


def test_the_object_store_holds_the_weights_as_engines_take_them():
    assert store_gb(config(), LARGE) == 1.0 + 2 * 7.62
    assert store_gb(config(f"{ROLLOUT}.dtype=float32"), LARGE) == 1.0 + 4 * 7.62
    assert store_gb(config(), PolicySize()) == 1.0


def test_what_fits_is_let_through():
    for size in (SMALL, LARGE):
        assert list(memory_problems(config(), size, 80.0, 1000.0)) == []
    assert list(memory_problems(config(), LARGE, None, None)) == []


@pytest.mark.parametrize(
    ("words", "device", "host", "what"),
    [
        ([], 24.0, None, "a GPU needs about"),
        (["trainer.n_gpus_per_node=1", f"{ROLLOUT}.num_workers=1"], 80.0, None, "for an update"),
        ([f"{ROLLOUT}.gpu_memory_utilization=0.9"], 80.0, None, "while its engine plays"),
        ([f"{ROLLOUT}.free_cache_engine=false"], 40.0, None, "for an update"),
        (["trainer.rollout_overlap=one_step"], 40.0, None, "for an update"),
        ([f"{ROLLOUT}.gpu_memory_utilization=0.1"], 80.0, None, "the weights of its engine"),
        ([], 80.0, 128.0, "a node needs about 255.5 GiB (there are 128.0) of host memory"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_plan(words, device, host, what):
    facts = Facts(
        device="cuda",
        memory_gb=host,
        device_memory_gb=device,
        parameters=LARGE.parameters,
        vocab_size=LARGE.vocab_size,
        layers=LARGE.layers,
        hidden=LARGE.hidden,
    )
    problems = make_plan(config(*words), facts).problems()
    assert any(what in problem and "fix: " in problem for problem in problems), problems


def test_a_cluster_is_not_judged_by_the_memory_of_the_driver():
    facts = Facts(device="cuda", memory_gb=16.0, parameters=LARGE.parameters)
    assert make_plan(config(), facts).problems() != []
    assert make_plan(config("ray_init.address='head:1'"), facts).problems() == []


def test_the_smallest_gpu_of_a_machine_counts(monkeypatch):
    def run(words, **_):
        return subprocess.CompletedProcess(words, 0, "81559\n24576\n")

    monkeypatch.setattr(plan_module.subprocess, "run", run)
    assert gather_facts(config()).device_memory_gb == 24.0
    assert gather_facts(config("trainer.device=cpu")).device_memory_gb is None

    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(plan_module.subprocess, "run", missing)
    assert gather_facts(config()).device_memory_gb is None


def test_flex_attention_is_refused_where_there_is_no_gpu(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    keys = [f"{part}.model.attn_implementation" for part in ("actor_rollout_ref", "critic")]
    for key in keys:
        (found,) = [text for text in find_problems(config(f"{key}=flex", "trainer.device=cpu"))]
        assert found.startswith(key) and "no gradient on a CPU" in found and f"{key}=sdpa" in found
    for words in (["trainer.device=cuda"], ["trainer.device=auto", "ray_init.address='head:1'"]):
        problems = find_problems(config(*(f"{key}=flex" for key in keys), *words))
        assert not any("attn_implementation" in text for text in problems)


def test_tensor_parallelism_is_refused_where_there_may_be_a_gpu(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    words = [f"{key}=2", f"{ROLLOUT}.num_workers=4"]
    (found,) = [text for text in find_problems(config(*words)) if text.startswith(key)]
    assert "one process" in found and f"fix: {key}=1" in found
    assert not any(key in text for text in find_problems(config(*words, "trainer.device=cpu")))
    joined = find_problems(config(*words, "trainer.device=auto", "ray_init.address='head:1'"))
    assert any(text.startswith(key) for text in joined)
