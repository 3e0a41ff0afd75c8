"""Memory estimates: numbers computed by hand, and configurations that they refuse."""

import subprocess

import pytest

from tests.helpers.refusals import fix, has_problem
from verl.config import plan as plan_module
from verl.config.derive import (
    compute_max_rows,
    count_engines,
    count_max_engines_per_node,
    resolve_weight_transfer,
)
from verl.config.memory import (
    GIB,
    PolicySize,
    count_micro_batch_tokens,
    estimate_cpu_node_bytes,
    estimate_gpu_node_bytes,
    estimate_object_store_gb,
    estimate_rollout_bytes,
    estimate_update_bytes,
    find_memory_problems,
)
from verl.config.plan import PlanFacts, gather_facts, make_plan
from verl.config.settings import ConfigError, Problem
from verl.config.validate import find_problems
from verl.trainer.launch.extensions import load_config

SMALL = PolicySize(parameters=1_540_000_000, vocab_size=151_936, num_layers=28, hidden_size=1536)
P = 7_620_000_000
LARGE = PolicySize(parameters=P, vocab_size=152_064, num_layers=28, hidden_size=3584)
FSDP = "actor_rollout_ref.actor.fsdp_config"
ROLLOUT = "actor_rollout_ref.rollout"
SHARE_KEY = f"{ROLLOUT}.gpu_memory_utilization"
OVERLAP = "trainer.rollout_overlap=one_step"
CONFLICT = "conflicting_keys"
# Parts of the fixes for an update and for an engine that do not fit into the memory of a GPU.
UPDATE_FIX = "enable_gradient_checkpointing=true"
CACHE_FIX = f"a smaller {ROLLOUT}.kv_cache_gb"
RANKS = 8


def config(*overrides: str):
    return load_config("alfworld_qwen2.5_1.5b_8gpu", overrides)


def test_update_holds_shards_one_layer_activations_and_logits():
    shards = (16 + 4) * P / RANKS  # trained weights, and the reference
    gathered = 2 * P / 28 * 2
    activations = 16384 * 28 * 3584 * 2
    logits = 2 * 4 * (1 << 27)
    assert estimate_update_bytes(config(), LARGE) == shards + gathered + activations + logits
    without_checkpointing = estimate_update_bytes(
        config("actor_rollout_ref.model.enable_gradient_checkpointing=false"), LARGE
    )
    assert without_checkpointing == shards + gathered + 16 * activations + logits
    assert estimate_update_bytes(config(), PolicySize()) is None


def test_sequence_parallel_ranks_hold_a_part_of_a_row():
    key = "actor_rollout_ref.actor"
    rows = (f"{key}.use_dynamic_bsz=false", f"{key}.ppo_micro_batch_size_per_gpu=2")
    single = config(*rows)
    together = config(*rows, f"{key}.ulysses_sequence_parallel_size=4")
    row = single.data.max_prompt_length + single.data.max_response_length
    assert count_micro_batch_tokens(single) == 2 * row
    assert count_micro_batch_tokens(together) == -(-2 * row // 4)
    # The token budget is per rank, so it does not depend on the number of joint ranks.
    assert count_micro_batch_tokens(config(f"{key}.ulysses_sequence_parallel_size=4")) == 16384


def test_sequence_parallel_ranks_share_a_node_and_do_not_compile():
    for section in ("actor_rollout_ref.actor", "critic"):
        key = f"{section}.ulysses_sequence_parallel_size"
        (problem,) = find_problems(config(f"{key}=3", "trainer.device=cpu"))
        assert problem.startswith(key) and "8" in problem and f"{key}=1" in problem
        assert find_problems(config(f"{key}=2", "trainer.device=cpu")) == []
    overrides = ["ulysses_sequence_parallel_size=2", "use_torch_compile=true"]
    both = [f"actor_rollout_ref.actor.{override}" for override in overrides]
    (problem,) = find_problems(config(*both, "trainer.device=cpu"))
    assert problem.startswith("actor_rollout_ref.actor.use_torch_compile") and "fix: " in problem


def test_engine_generates_next_to_weights_and_moments():
    state_bytes = (12 + 4) * P / RANKS
    assert estimate_rollout_bytes(config(), LARGE, 80 * GIB) == state_bytes + 0.5 * 80 * GIB
    moved = config(f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true")
    assert estimate_rollout_bytes(moved, LARGE, 80 * GIB) == 4 * P / RANKS + 0.5 * 80 * GIB


def test_node_holds_one_copy_of_the_model_while_loading():
    one = ("trainer.n_gpus_per_node=1", f"{ROLLOUT}.num_workers=1")
    for overrides in ((), one):
        assert estimate_gpu_node_bytes(config(*overrides, "trainer.save_freq=0"), LARGE) == 4 * P


def test_weights_in_the_store_are_counted_twice_plus_gathered():
    one = ("trainer.n_gpus_per_node=1", f"{ROLLOUT}.num_workers=1", "trainer.save_freq=0")
    through_store = config(*one, f"{ROLLOUT}.weight_transfer=store")
    assert estimate_gpu_node_bytes(through_store, LARGE) == (4 + 2 * 2) * P


def test_save_copies_weights_and_moments_to_host_memory():
    node = ("trainer.n_gpus_per_node=1", f"{ROLLOUT}.weight_transfer=store")
    one = (*node, "trainer.save_freq=25")
    at_once = (*one, "trainer.async_save=false")
    weight_sync = (4 + 2 * 2) * P
    assert estimate_gpu_node_bytes(config(*at_once), LARGE) == (4 + 8) * P
    assert estimate_gpu_node_bytes(config(*one), LARGE) == weight_sync + (4 + 8) * P
    weights = "actor_rollout_ref.actor.checkpoint.contents=[model]"
    assert estimate_gpu_node_bytes(config(*one, weights), LARGE) == weight_sync + 4 * P
    adapters = "actor_rollout_ref.model.lora_rank=32"
    assert estimate_gpu_node_bytes(config(*one, adapters), LARGE) == weight_sync + 4 * P
    with_critic = ("algorithm.adv_estimator=gae", adapters)
    assert estimate_gpu_node_bytes(config(*at_once, *with_critic), LARGE) == (4 + 4 + 8) * P
    without = config(*node, "trainer.save_freq=0")
    assert (
        estimate_cpu_node_bytes(config(*one), LARGE) - estimate_cpu_node_bytes(without, LARGE)
        == (4 + 8) * P
    )


REF = "actor_rollout_ref.ref.fsdp_config"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((f"{FSDP}.param_offload=true",), 4),
        ((f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"), 12),
        ((f"{FSDP}.offload_policy=true", f"{REF}.param_offload=true"), 12 + 4),
        ((f"{FSDP}.offload_policy=true", "actor_rollout_ref.model.lora_rank=32"), 4),
        ((f"{FSDP}.offload_policy=true", "trainer.nnodes=2"), 12 / 2),
        ((f"{FSDP}.offload_policy=true", f"{FSDP}.fsdp_size=4"), 2 * 12),
    ],
)
def test_offloaded_models_are_in_host_memory(overrides, expected):
    """While a model loads, one whole copy of it is in host memory, 4 bytes per parameter."""
    estimate = estimate_gpu_node_bytes(config(*overrides, "trainer.save_freq=0"), LARGE)
    assert estimate == max(4, expected) * P
    # A checkpoint adds a copy of the weights and moments.
    with_moments = "lora_rank=32" not in str(overrides)
    num_nodes = 2 if "trainer.nnodes=2" in overrides else 1
    saved = config(*overrides, "trainer.save_freq=1", "trainer.async_save=false")
    saved_bytes = (12 if with_moments else 4) / num_nodes
    assert estimate_gpu_node_bytes(saved, LARGE) == max(4, expected + saved_bytes) * P


def test_sleeping_engines_with_adapters_keep_weights_in_host_memory():
    lora = ("actor_rollout_ref.model.lora_rank=32", "trainer.save_freq=0")

    def estimate_per_parameter(*overrides, sends_adapter=True):
        node_bytes = estimate_gpu_node_bytes(config(*lora, *overrides), LARGE, sends_adapter)
        assert node_bytes is not None
        return node_bytes / P

    assert estimate_per_parameter(sends_adapter=False) == 4
    assert estimate_per_parameter() == 4 + 8 * 2  # an engine on each of the 8 GPUs
    assert estimate_per_parameter(f"{ROLLOUT}.tensor_model_parallel_size=2") == 4 + 4 * 2
    assert estimate_per_parameter(f"{ROLLOUT}.free_cache_engine=false") == 4
    assert estimate_per_parameter(f"{ROLLOUT}.nnodes=1", OVERLAP) == 4


def test_object_store_holds_trajectories_rows_and_weights_in_the_engine_dtype():
    def estimate_gb(*overrides, size=LARGE):
        cfg = config(*overrides)
        return estimate_object_store_gb(cfg, size, compute_max_rows(cfg))

    tokens = 16 * 8 * 8192  # tasks, trajectories of a task, tokens of a row
    one_rollout = 1.0 + tokens * (50 + 40) / 1e9
    assert config().trainer.device == "cuda" and estimate_gb() == one_rollout  # weights by CUDA IPC
    overlap = ("trainer.rollout_overlap=one_step", f"{ROLLOUT}.nnodes=1")
    overlap += (f"{ROLLOUT}.n_gpus_per_node=8",)
    assert estimate_gb(*overlap) == pytest.approx(one_rollout + tokens * 50 / 1e9)
    store = f"{ROLLOUT}.weight_transfer=store"
    assert estimate_gb(store) == pytest.approx(one_rollout + 2 * 7.62)
    assert estimate_gb(store, f"{ROLLOUT}.dtype=float32") == pytest.approx(one_rollout + 4 * 7.62)
    assert estimate_gb(store, size=PolicySize()) == one_rollout
    turns = estimate_gb("env.history=window", "env.max_steps=50")
    assert turns == pytest.approx(1.0 + 50 * tokens * 90 / 1e9)


@pytest.mark.parametrize(
    ("model_config", "weights"),
    [
        ("{}", b"\xff" * 8),
        ("{}", b"\x02" + b"\0" * 7 + b"[]"),
        ("{}", (10**6).to_bytes(8, "little") + b"[" * 10**6),
        ("[1]", b""),
    ],
)
def test_facts_of_a_damaged_policy_are_unknown(tmp_path, model_config, weights):
    (tmp_path / "config.json").write_text(model_config)
    (tmp_path / "model.safetensors").write_bytes(weights)
    facts = gather_facts(config(f"actor_rollout_ref.model.path={tmp_path}"))
    assert facts.parameters is None and facts.vocab_size is None


def test_fitting_configurations_have_no_problem():
    for size in (SMALL, LARGE):
        assert list(find_memory_problems(config(), size, 80.0, 1000.0)) == []
    assert list(find_memory_problems(config(), LARGE, None, None)) == []


@pytest.mark.parametrize(
    ("overrides", "device", "host", "key", "part"),
    [
        ([], 24.0, None, "plan", "24.0"),
        ([f"{ROLLOUT}.kv_cache_gb=60"], 80.0, None, "plan", CACHE_FIX),
        ([f"{ROLLOUT}.kv_cache_gb=30", OVERLAP], 60.0, None, "plan", UPDATE_FIX),
        (["trainer.n_gpus_per_node=1", f"{ROLLOUT}.num_workers=1"], 80.0, None, "plan", UPDATE_FIX),
        ([f"{SHARE_KEY}=0.9"], 80.0, None, "plan", f"a smaller {SHARE_KEY}"),
        ([f"{ROLLOUT}.free_cache_engine=false"], 40.0, None, "plan", UPDATE_FIX),
        ([OVERLAP], 40.0, None, "plan", UPDATE_FIX),
        ([f"{SHARE_KEY}=0.1"], 80.0, None, SHARE_KEY, f"a larger {SHARE_KEY}"),
        ([], 80.0, 64.0, "plan", "85.2 GiB"),
    ],
)
def test_plan_refuses_what_does_not_fit(overrides, device, host, key, part):
    facts = PlanFacts(
        device="cuda",
        memory_gb=host,
        device_memory_gb=device,
        parameters=LARGE.parameters,
        vocab_size=LARGE.vocab_size,
        num_layers=LARGE.num_layers,
        hidden_size=LARGE.hidden_size,
    )
    problems = make_plan(config(*overrides), facts).find_problems()
    assert has_problem("does_not_fit", key, part)(ConfigError(problems))


def test_joined_cluster_is_not_limited_by_the_driver_memory():
    facts = PlanFacts(device="cuda", memory_gb=16.0, parameters=LARGE.parameters)
    assert make_plan(config(), facts).find_problems() != []
    assert make_plan(config("ray_init.address='head:1'"), facts).find_problems() == []


def test_smallest_gpu_of_the_machine_counts(monkeypatch):
    def run(overrides, **_):
        return subprocess.CompletedProcess(overrides, 0, "81559\n24576\n")

    monkeypatch.setattr(plan_module.subprocess, "run", run)
    assert gather_facts(config()).device_memory_gb == 24.0
    assert gather_facts(config("trainer.device=cpu")).device_memory_gb is None

    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(plan_module.subprocess, "run", missing)
    assert gather_facts(config()).device_memory_gb is None


def test_flex_attention_is_refused_without_gpu(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    keys = [f"{part}.model.attn_implementation" for part in ("actor_rollout_ref", "critic")]
    for key in keys:
        (problem,) = [text for text in find_problems(config(f"{key}=flex", "trainer.device=cpu"))]
        assert problem.startswith(key) and "CPU" in problem and f"{key}=sdpa" in problem
    for overrides in (
        ["trainer.device=cuda"],
        ["trainer.device=auto", "ray_init.address='head:1'"],
    ):
        problems = find_problems(config(*(f"{key}=flex" for key in keys), *overrides))
        assert not any("attn_implementation" in text for text in problems)


def test_cache_of_given_size_adds_to_the_engine_weights():
    state_bytes = (12 + 4) * P / RANKS
    fixed = config(f"{ROLLOUT}.kv_cache_gb=10")
    assert estimate_rollout_bytes(fixed, LARGE, 80 * GIB) == state_bytes + 2 * P + 10 * GIB
    parallel = config(f"{ROLLOUT}.kv_cache_gb=10", f"{ROLLOUT}.tensor_model_parallel_size=4")
    assert estimate_rollout_bytes(parallel, LARGE, 80 * GIB) == state_bytes + 2 * P / 4 + 10 * GIB
    assert list(find_memory_problems(fixed, LARGE, 80.0, None)) == []


def test_cpu_cache_has_a_default_size():
    overrides = ("trainer.device=cpu", f"{ROLLOUT}.num_workers=1")
    unset = estimate_cpu_node_bytes(config(*overrides), LARGE)
    assert estimate_cpu_node_bytes(config(*overrides, f"{ROLLOUT}.kv_cache_gb=1.0"), LARGE) == unset
    assert (
        estimate_cpu_node_bytes(config(*overrides, f"{ROLLOUT}.kv_cache_gb=3.0"), LARGE)
        == unset + 2 * GIB
    )


# ---------------------------------------------------------------- engines on several devices


def engine_problems(*overrides: str) -> list[Problem]:
    keys = ("tensor_model_parallel_size", "num_workers", "weight_transfer", "rollout.n_gpus")
    return [text for text in find_problems(config(*overrides)) if any(key in text for key in keys)]


def test_engines_use_several_devices_of_a_node():
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    assert engine_problems(f"{key}=4") == []
    assert count_engines(config(f"{key}=4"), "cuda") == 2
    assert count_engines(config(f"{key}=4", "trainer.nnodes=2"), "cuda") == 4
    plan = make_plan(config(f"{key}=4"), PlanFacts(device="cuda", parameters=P)).format_text()
    assert "2 engines" in plan and "on 4 GPUs each" in plan


@pytest.mark.parametrize(
    ("overrides", "key", "code"),
    [
        (["tensor_model_parallel_size=3"], "tensor_model_parallel_size=3", CONFLICT),
        (["tensor_model_parallel_size=2", "name=hf"], "tensor_model", CONFLICT),
        (["tensor_model_parallel_size=2", "num_workers=5"], "num_workers=5", "does_not_fit"),
        (
            ["tensor_model_parallel_size=2", "weight_transfer=store"],
            "weight_transfer='store'",
            CONFLICT,
        ),
        (["weight_transfer=ipc", "name=hf"], "weight_transfer='ipc'", CONFLICT),
        (["weight_transfer=nccl"], "weight_transfer='nccl'", CONFLICT),
        (["weight_transfer=ipc", "nnodes=1"], "weight_transfer='ipc'", CONFLICT),
        (["nnodes=1", "n_gpus_per_node=2", "num_workers=3"], "num_workers=3", "does_not_fit"),
        (
            ["nnodes=1", "n_gpus_per_node=4", "tensor_model_parallel_size=3"],
            "tensor_model_parallel_size=3",
            CONFLICT,
        ),
        (["n_gpus_per_node=2"], "n_gpus_per_node=2", CONFLICT),
    ],
)
def test_impossible_engine_settings_are_refused(overrides, key, code):
    (problem,) = engine_problems(*(f"{ROLLOUT}.{override}" for override in overrides))
    assert problem.code == code and problem.startswith(f"{ROLLOUT}.{key}") and fix(problem)


def test_devices_of_a_joined_cluster_count_unless_device_is_cpu(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    three_devices = f"{ROLLOUT}.tensor_model_parallel_size=3"
    assert engine_problems(three_devices, "trainer.device=cpu") == []
    assert engine_problems(three_devices, "trainer.device=auto", "ray_init.address='head:1'") != []


@pytest.mark.parametrize("transfer", ["ipc", "nccl"])
def test_gpu_weight_transfer_is_refused_without_gpu(transfer):
    (problem,) = engine_problems("trainer.device=cpu", f"{ROLLOUT}.weight_transfer={transfer}")
    assert "trainer.device" in problem


def test_engines_with_separate_gpus_are_counted_there():
    separate = (f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=4")
    cfg = config(*separate)
    assert engine_problems(*separate) == []
    assert count_engines(cfg, "cuda") == 8 and count_max_engines_per_node(cfg, "cuda") == 4
    assert count_engines(config(*separate, f"{ROLLOUT}.tensor_model_parallel_size=4"), "cuda") == 2
    assert count_engines(config(f"{ROLLOUT}.nnodes=2"), "cuda") == 16, "as many as there are ranks"
    assert count_engines(cfg, "cpu") == 1 and resolve_weight_transfer(cfg, "cpu") == "store"
    assert resolve_weight_transfer(cfg, "cuda") == "nccl"
    text = make_plan(cfg, PlanFacts(device="cuda", parameters=P)).format_text()
    assert "8 GPUs" in text and "NCCL" in text
    assert "trainer.rollout_overlap=one_step" in text, "else one half waits for the other"
    # The engines have these GPUs to themselves, and so does the update, with or without overlap.
    assert estimate_rollout_bytes(cfg, LARGE, 80 * GIB) == 0.5 * 80 * GIB
    overlapped = (*separate, "trainer.rollout_overlap=one_step")
    large = f"{ROLLOUT}.kv_cache_gb=30"
    assert list(find_memory_problems(config(*overlapped, large), LARGE, 60.0, None)) == []
    assert (
        "note"
        not in make_plan(config(*overlapped), PlanFacts(device="cuda", parameters=P)).format_text()
    )
    shared = find_memory_problems(config(large, overlapped[-1]), LARGE, 60.0, None)
    assert has_problem("does_not_fit", "plan", UPDATE_FIX)(ConfigError(shared))
    (too_large,) = find_memory_problems(
        config(*separate, f"{ROLLOUT}.kv_cache_gb=50"), LARGE, 60.0, None
    )
    assert CACHE_FIX in too_large and "offload" not in too_large


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        (["weight_transfer=nccl"], "auto, ipc, store"),
        (["weight_transfer=nccl", "tensor_model_parallel_size=2"], "auto, ipc"),
        (["weight_transfer=ipc", "nnodes=1"], "auto, nccl, store"),
        (["weight_transfer=ipc", "name=hf"], "auto, store"),
    ],
)
def test_refused_weight_transfer_lists_the_possible_ones(overrides, allowed):
    (problem,) = engine_problems(*(f"{ROLLOUT}.{override}" for override in overrides))
    assert f"; allowed: {allowed}; " in problem


@pytest.mark.parametrize(("heads", "kv", "fits"), [(28, 4, True), (28, 3, False), (30, 2, False)])
def test_attention_heads_that_do_not_divide_are_refused(heads, kv, fits):
    size = PolicySize(num_heads=heads, num_kv_heads=kv)
    head_problems = list(
        find_memory_problems(config(f"{ROLLOUT}.tensor_model_parallel_size=4"), size, 80.0, 1)
    )
    assert bool(head_problems) is not fits
    assert all(
        str(heads) in text and str(kv) in text and "; fix: " in text for text in head_problems
    )
    assert list(find_memory_problems(config(), size, 80.0, 1)) == []


def test_weight_transfer_follows_from_device_and_engine():
    transfers = {
        ("cuda", "vllm"): "ipc",
        ("cuda", "hf"): "store",
        ("cpu", "vllm"): "store",
        ("cuda", "my_lab:Engine"): "store",
    }
    for (device, name), transfer in transfers.items():
        cfg = config(f"{ROLLOUT}.name={name}")
        assert resolve_weight_transfer(cfg, device) == transfer, (device, name)
        text = make_plan(cfg, PlanFacts(device=device)).format_text()
        assert ("CUDA IPC" in text) == (transfer == "ipc")
        assert ("object store" in text) == (transfer == "store" and device == "cuda")
    forced = config(f"{ROLLOUT}.weight_transfer=store")
    assert resolve_weight_transfer(forced, "cuda") == "store"
