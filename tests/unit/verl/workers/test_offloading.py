"""Ranks that offload parameters and moments train like ranks that keep them on the GPU.

In these tests host memory stands for the GPU. Every move copies the tensors, so FSDP must use the
copies.
"""

import pytest
import torch

from tests.helpers.policy_rows import policy_config, random_rows
from tests.helpers.ranks import run_two_ranks
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.schema.model import FSDPConfig
from verl.protocol import DataProto
from verl.workers.actor import ActorWorker
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import gather_full_weights


class HostAsGpu(str):
    """Device name ``cpu`` that also equals ``cuda``."""

    def __eq__(self, other: object) -> bool:
        return other in ("cpu", "cuda")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def offload_to_copies(engine: TrainEngine) -> list[str]:
    """Let ``engine`` offload its state to copies. Return the list of devices that it moves to."""
    moves: list[str] = []

    def copy_module(device: str) -> torch.nn.Module:
        moves.append(device)
        return engine.module._apply(lambda tensor: tensor.to("cpu", copy=True))

    def copy_moments(device: str) -> None:
        assert engine.optimizer is not None
        for state in engine.optimizer.state.values():
            state.update({key: value.clone() for key, value in state.items()})

    engine.module.to = copy_module  # pyright: ignore[reportAttributeAccessIssue]
    engine._move_optimizer = copy_moments
    engine.device = HostAsGpu("cpu")
    engine.fsdp = FSDPConfig(param_offload=True, optimizer_offload=True)
    return moves


def train(policy: str, data: DataProto, offloads: bool, lora_rank: int) -> list[torch.Tensor]:
    """Return the log-probs before each of two updates, and the weights after them."""
    config = policy_config(policy, ppo_mini_batches=2)
    config.model.lora_rank = lora_rank
    worker = ActorWorker(config, device="cpu", seed=3)
    worker.init_model()
    moves = offload_to_copies(worker.train_engine) if offloads else []
    log_probs = []
    for _ in range(2):
        log_probs.append(worker.compute_log_prob(data).batch["old_log_probs"])
        worker.update_actor(data)
    assert moves == (["cpu", "cpu"] * 4 if offloads else [])  # to the GPU and back
    return [*log_probs, *gather_full_weights(worker.train_engine).values()]


def compare_on_rank(number: int, policy: str) -> None:
    data = random_rows(rows=6)[3 * number : 3 * number + 3]
    for lora_rank in (0, 4):
        kept, offloaded = (train(policy, data, offloads, lora_rank) for offloads in (False, True))
        assert len(kept) > 2 or number > 0, "rank 0 has the weights"
        torch.testing.assert_close(offloaded, kept, rtol=0, atol=0)
        assert not torch.equal(kept[0], kept[1]), "the updates changed nothing"


@pytest.mark.timeout(300)
def test_offloaded_ranks_train_like_others(tmp_path):
    run_two_ranks(compare_on_rank, str(make_tiny_policy(tmp_path)))
