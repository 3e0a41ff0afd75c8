"""Names that job code imports are found where it looks for them."""

import importlib
import subprocess
import sys

import pytest

from tests.helpers.refusals import mentions

FACES = [
    ("verl.utils.seqlen_balancing", "rearrange_micro_batches", "verl.compat.micro_batches"),
    ("verl.utils.seqlen_balancing", "get_reverse_idx", "verl.compat.micro_batches"),
    ("verl.utils.tracking", "Tracking", "verl.record.tracking"),
]


@pytest.mark.parametrize(("place", "name", "home"), FACES)
def test_a_promised_name_is_found_under_its_promised_path(place, name, home):
    face = importlib.import_module(place)
    assert getattr(face, name) is getattr(importlib.import_module(home), name)
    assert name in face.__all__
    with pytest.raises(AttributeError, check=mentions("nothing_of_ours")):
        face.nothing_of_ours  # noqa: B018


def test_the_earlier_name_of_the_report_still_writes_one():
    command = [sys.executable, "-m", "verl.utils.report", "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "Write report.html of a run" in answer.stdout
