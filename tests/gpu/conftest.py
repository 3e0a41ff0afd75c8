"""Fixtures of all tests on a CUDA device."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def nccl():
    """Remove process groups of other tests, which may only support gloo, and the group of this
    test.
    """
    _leave_process_group()
    yield
    _leave_process_group()


def _leave_process_group():
    if dist.is_initialized():  # a test may make no engine
        dist.destroy_process_group()
