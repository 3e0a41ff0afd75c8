"""Runs two training steps on one GPU, with each way to send weights and to offload state.

The log-probs of engine and trainer agree only if the engine holds the trainer's weights.
"""

import pytest

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


def make_words(root, case):
    return smoke_words(
        root,
        "run",
        f"actor_rollout_ref.model.path={ROOT}/configs/policies/quickstart",
        "cold_start.enable=false",
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=1",
        f"{ROLLOUT}.num_workers=null",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
        *CASES[case],
    )


@pytest.mark.parametrize("case", CASES)
def test_engine_and_trainer_agree_on_one_gpu(tmp_path, case):
    start(make_words(tmp_path, case), tmp_path / "log.txt").finish(TIMEOUT_S)
    steps = [m for m in read_metrics(tmp_path / "run") if "actor/grad_norm" in m]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["actor/grad_norm"] > 0
        assert metrics["perf/weight_sync_bytes"] > 0
        assert metrics["training/rollout_probs_diff_mean"] < 0.02
        assert metrics["perf/max_memory_allocated_gb"] > 0
