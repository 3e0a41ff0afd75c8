"""Two training steps on one GPU and on two GPUs.

The cases of one GPU differ in how weights are sent and state is offloaded. Those of two GPUs differ
in the kind of parallelism. The log-probs of engine and trainer agree only if the engine holds the
trainer's weights.
"""

import pytest
import torch

from tests.helpers.jobs import ROOT, start
from tests.helpers.smoke_job import NEEDS_VLLM, smoke_words
from verl.record.tracking import read_metrics

TIMEOUT_S = 900
pytestmark = [pytest.mark.gpu, NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]
ROLLOUT, FSDP = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.fsdp_config"
BFLOAT16 = ["actor_rollout_ref.actor.dtype=bfloat16", f"{ROLLOUT}.dtype=bfloat16"]
CASES = {
    "ipc": [],
    "store": [f"{ROLLOUT}.weight_transfer=store"],
    "bfloat16": BFLOAT16,
    "flex_compiled": [
        *BFLOAT16,
        "actor_rollout_ref.model.attn_implementation=flex",
        "actor_rollout_ref.actor.use_torch_compile=true",
    ],
    "checkpointing": [*BFLOAT16, "actor_rollout_ref.model.enable_gradient_checkpointing=true"],
    "offload": [f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"],
    "offload_policy": [f"{FSDP}.offload_policy=true"],
    "lora": ["actor_rollout_ref.model.lora_rank=8"],
    "awake": [f"{ROLLOUT}.free_cache_engine=false"],
    "hf": [*BFLOAT16, f"{ROLLOUT}.name=hf"],
}


TWO_RANKS = "trainer.n_gpus_per_node=2"
CASES_OF_TWO_GPUS = {
    "ranks": [TWO_RANKS],
    "bfloat16": [*BFLOAT16, TWO_RANKS],
    "offload": [TWO_RANKS, *CASES["offload"]],
    "offload_policy": [TWO_RANKS, *CASES["offload_policy"]],
    # Each rank merges the adapter itself, so both must get equal weights.
    "lora_merged": [TWO_RANKS, *CASES["lora"], f"{ROLLOUT}.lora_sync=merged"],
    "sequence_parallel": [TWO_RANKS, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
    "tensor_parallel": [TWO_RANKS, f"{ROLLOUT}.tensor_model_parallel_size=2"],
    "separate": [f"{ROLLOUT}.nnodes=1"],  # an engine on one GPU, a rank on the other
}


def make_words(root, *overrides):
    return smoke_words(
        root,
        "run",
        f"actor_rollout_ref.model.path={ROOT}/configs/policies/quickstart",
        "cold_start.enable=false",
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=1",
        f"{ROLLOUT}.num_workers=null",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
        *overrides,
    )


def run_two_steps(root, overrides):
    """Run two steps. Check that engine and trainer compute equal log-probs."""
    start(make_words(root, *overrides), root / "log.txt").finish(TIMEOUT_S)
    steps = [m for m in read_metrics(root / "run") if "actor/grad_norm" in m]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["actor/grad_norm"] > 0
        assert metrics["perf/weight_sync_bytes"] > 0
        assert metrics["training/rollout_probs_diff_mean"] < 0.02
        assert metrics["perf/max_memory_allocated_gb"] > 0


@pytest.mark.parametrize("case", CASES)
def test_engine_and_trainer_agree_on_one_gpu(tmp_path, case):
    run_two_steps(tmp_path, CASES[case])


@pytest.mark.parametrize("case", CASES_OF_TWO_GPUS)
def test_engine_and_trainer_agree_on_two_gpus(tmp_path, case):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_two_steps(tmp_path, CASES_OF_TWO_GPUS[case])
