"""Two ranks with row-wise passes: their numbers of passes differ, and only rank 0 has the weights.

Scores and the summed gradient equal those of one rank with all rows.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.helpers.model_families import ROW_WISE, WINDOWED, build_family
from tests.helpers.policy_rows import add_branches, gradients, random_rows
from tests.helpers.ranks import run_two_ranks
from verl.config.schema.model import OptimConfig
from verl.models.loader import load_causal_lm
from verl.models.policy import PolicyModel
from verl.protocol import DataProto
from verl.utils.seeds import seed_everything
from verl.workers.branch_scores import compute_log_probs_and_scores
from verl.workers.engine import TrainEngine
from verl.workers.rows import Rows

FAMILIES = {"qwen3.5": ROW_WISE["qwen3.5"], "gemma3": WINDOWED["gemma3"]}
ROWS = 6
# Rank 1 has rows of one length only, so it has fewer passes.
ROWS_OF_RANK = ([0, 1, 2, 3], [4, 5])


def make_rows(rank: int | None) -> DataProto:
    data = add_branches(random_rows(ROWS))
    return data if rank is None else data[ROWS_OF_RANK[rank]]


def score_and_backward(
    directory: Path, data: DataProto, empty: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    lm = load_causal_lm(directory, without_weights=empty)
    engine = TrainEngine(PolicyModel(lm), device="cpu", optim=OptimConfig())
    scores = compute_log_probs_and_scores(engine, data, max_rows=4)
    assert scores.branch_scores is not None
    numbers = [score[2:] for row in scores.branch_scores for score in row]
    results = {"log_probs": scores.log_probs, "branches": torch.tensor(numbers)}
    rows, index = Rows(data), list(range(len(data)))
    packed = rows.pack_rows(index)
    targets = rows.sampled_targets(packed, index)
    inputs = (packed.input_ids, packed.position_ids, packed.layout)
    loss = engine.module(*inputs, [targets])[0].log_probs.sum() / 100
    engine.backward(loss, is_last_micro_batch=True)
    return results, gradients(engine.module)


def run_rank(rank: int, directory: Path) -> None:
    dist.init_process_group("gloo")
    for name in FAMILIES:
        seed_everything(3)
        path = directory / name / ("config" if rank else "files")
        results, gradient = score_and_backward(path, make_rows(rank), empty=rank > 0)
        save_file(results, directory / f"{name}.{rank}.safetensors")
        save_file(gradient, directory / f"{name}.{rank}.gradient.safetensors")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("row-wise")
    for name, config in FAMILIES.items():
        model = build_family(config())
        model.save_pretrained(directory / name / "files")
        model.config.save_pretrained(directory / name / "config")
    run_two_ranks(run_rank, directory)
    return directory


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_score_and_learn_as_one(directory, name):
    expected, expected_gradient = score_and_backward(
        directory / name / "files", make_rows(None), False
    )
    ranks = [load_file(directory / f"{name}.{rank}.safetensors") for rank in range(2)]
    for key, values in expected.items():
        actual = torch.cat([result[key] for result in ranks])
        torch.testing.assert_close(actual, values, atol=1e-5, rtol=0)
    for rank in range(2):
        gradient = load_file(directory / f"{name}.{rank}.gradient.safetensors")
        assert gradient.keys() == expected_gradient.keys()
        for parameter, values in expected_gradient.items():
            torch.testing.assert_close(gradient[parameter], values, atol=1e-5, rtol=0)
