"""Tests of the prefix-shared scoring pass on a CUDA device against one forward per thought.

The contexts are long, and both dtypes are tested.
"""

import argparse

import pytest
import torch

from scripts.dev.bench import scoring
from verl.workers.branch_scores import compute_log_probs_and_scores

pytestmark = pytest.mark.gpu
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
CONTEXTS = (4096, 8192)


def make_arguments(device, dtype, rows=2):
    sizes = {"thought": 12, "action": 6, "observation": 60, "max_tokens": 32768}
    return argparse.Namespace(
        **sizes, rows=rows, model=None, contexts=CONTEXTS, device=device, dtype=dtype
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("context", CONTEXTS)
def test_shared_equals_naive_on_cuda(context, dtype):
    args = make_arguments("cuda", dtype)
    engine, data = scoring.make_engine(args), scoring.make_batch(context, args)
    limits = {"max_tokens": args.max_tokens}
    shared, naive = (
        compute_log_probs_and_scores(engine, data, **limits),
        compute_log_probs_and_scores(engine, scoring.make_naive_batch(data), **limits),
    )
    assert shared.log_probs.device.type == "cpu"
    assert scoring.find_largest_difference(shared, naive) < TOLERANCE[dtype]
    plain = compute_log_probs_and_scores(engine, data.select(list(data.batch.keys()), []), **limits)
    torch.testing.assert_close(
        shared.log_probs, plain.log_probs, atol=10 * TOLERANCE[dtype], rtol=0
    )


def test_cuda_scores_equal_cpu_scores():
    scores = {}
    for device in ("cuda", "cpu"):  # in this order: the process group then supports both devices
        args = make_arguments(device, "float32", rows=1)
        engine, data = scoring.make_engine(args), scoring.make_batch(1024, args)
        scores[device] = compute_log_probs_and_scores(engine, data, max_tokens=args.max_tokens)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(
            getattr(scores["cuda"], name), getattr(scores["cpu"], name), atol=1e-3, rtol=0
        )
