"""What every test shares: no hub, few threads, shapes of the maths checked, ``gpu`` tests skipped
where there is no CUDA device.
"""

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest

import verl.trainer.launch.extensions  # noqa: F401  (plugs in the settings of environments and method)
from tests.helpers.shape_check import check_shapes

check_shapes()
# Files that read ``main_job``. One process runs them all, so the job runs once.
MAIN_JOB_FILES = {"tests/e2e/test_main_job.py", "tests/chaos/test_kill_and_resume.py"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one process as ``--dist loadfile`` does, and the files of ``main_job`` to
    the same process.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "main_job" if file in MAIN_JOB_FILES else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU; torch is asked only when such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def main_job(tmp_path_factory):
    """A finished run of the smallest real job (``tests/helpers/smoke_job.py``); takes minutes,
    played once.
    """
    from tests.helpers.smoke_job import run_smoke_job

    return run_smoke_job(tmp_path_factory.mktemp("main_job"))
