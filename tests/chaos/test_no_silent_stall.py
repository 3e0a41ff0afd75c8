"""Two cells of ``python -m scripts.dev.chaos matrix``: a hanging part ends the run and is named,
and a part that can be replaced does not end it.
"""

import re

import pytest

from scripts.dev.chaos.cells import ENVIRONMENT, HUNG, KILLED, RANK, ROLLOUT, SAVE, Cell
from scripts.dev.chaos.matrix import run_cell
from tests.helpers.refusals import list_log_lines
from tests.helpers.tiny_model import make_tiny_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


def test_rank_that_hangs_in_a_save_is_named_with_its_stacks(policy, tmp_path):
    result = run_cell(Cell(RANK, SAVE, HUNG), policy, tmp_path / "cell")
    assert (result.verdict, result.status) == ("ends", 1)
    waiting = r"actor\[rank 0\].save_checkpoint"
    stalled = rf"Stalled: save_checkpoint .*\d+ s.*{waiting}"
    assert re.search(rf"{stalled}; ActorWorker\[rank 0\] \(process \d+, stop", result.error_line)
    log = (tmp_path / "cell" / "log.txt").read_text()
    waits = list_log_lines(log, "verl.utils.watchdog", "actor[rank 0].save_checkpoint")
    assert any(" INFO " in line for line in waits)
    (stacks,) = (tmp_path / "cell" / "run" / "logs").glob("stacks-*.txt")
    _, *sections = re.split("^== ", stacks.read_text(), flags=re.MULTILINE)
    parts = {part.partition(" (")[0]: "most recent call first" in part for part in sections}
    assert parts["driver"] and parts["environment worker"] and not parts["ActorWorker[rank 0]"]


def test_killed_environment_worker_is_replaced(policy, tmp_path):
    result = run_cell(Cell(ENVIRONMENT, ROLLOUT, KILLED), policy, tmp_path / "cell")
    assert (result.verdict, result.status) == ("continues", 0)
    assert "env_dead" in result.error_line
