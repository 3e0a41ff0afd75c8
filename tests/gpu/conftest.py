"""Fixtures of all tests on a CUDA device."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def nccl():
    """Remove process groups of other tests, which may only support gloo, and the group of this
    test.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    dist.destroy_process_group()
