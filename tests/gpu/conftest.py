"""What all tests on a CUDA device begin with."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def nccl():
    """A process group of this test's own: one that other tests began may know gloo alone."""
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    dist.destroy_process_group()
