"""Names that job code imports are available at their earlier paths."""

import importlib
import subprocess
import sys

import pytest

from tests.helpers.refusals import mentions

ALIASES = [
    ("verl.utils.seqlen_balancing", "rearrange_micro_batches", "verl.compat.micro_batches"),
    ("verl.utils.seqlen_balancing", "get_reverse_idx", "verl.compat.micro_batches"),
    ("verl.utils.tracking", "Tracking", "verl.record.tracking"),
]


@pytest.mark.parametrize(("alias_path", "name", "real_path"), ALIASES)
def test_alias_is_the_same_object(alias_path, name, real_path):
    alias_module = importlib.import_module(alias_path)
    assert getattr(alias_module, name) is getattr(importlib.import_module(real_path), name)
    assert name in alias_module.__all__
    with pytest.raises(AttributeError, check=mentions("nothing_of_ours")):
        alias_module.nothing_of_ours  # noqa: B018


def test_earlier_module_of_the_report_still_runs():
    command = [sys.executable, "-m", "verl.utils.report", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "Write report.html of a run" in result.stdout
