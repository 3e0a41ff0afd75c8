"""Setup of all tests: no Hugging Face hub, few threads, checked tensor shapes, and no ``gpu`` tests
without a CUDA device. The memory limit of the process is restored after each test.
"""

import os
import resource

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest

import verl.trainer.launch.extensions  # noqa: F401  (plugs in the settings of environments and method)
from tests.helpers.shape_check import check_shapes

check_shapes()
MEMORY_LIMIT = resource.getrlimit(resource.RLIMIT_AS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests without a CUDA device; torch is imported only if there are such tests."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_teardown() -> None:
    """Restore the memory limit, which code of environment workers sets for its process.

    Otherwise Ray's object store would not fit later, and Ray would abort the test process.
    """
    resource.setrlimit(resource.RLIMIT_AS, MEMORY_LIMIT)


@pytest.fixture(scope="session")
def main_job(tmp_path_factory):
    """Finished run of the smallest real job (``tests/helpers/smoke_job.py``); takes minutes."""
    from tests.helpers.smoke_job import run_smoke_job

    return run_smoke_job(tmp_path_factory.mktemp("main_job"))
