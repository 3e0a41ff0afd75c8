"""Tests that all metrics of the pages and of a run are declared with their unit."""

import re
from pathlib import Path

import pytest

from scripts.dev.metric_specs import SPECS, find_spec

DOCS = Path(__file__).parents[4] / "docs"
NAMES = sorted(
    {
        re.sub(r"\{.*?\}|<.*?>", "mean", name)
        for page in DOCS.glob("*.md")
        for name in re.findall(
            r"`((?:val|episode|rollout|rlvcr|actor|critic|perf|timing_s|reward|audit|training|rollout_corr)"
            r"/[^`\s]+)`",
            page.read_text(encoding="utf-8"),
        )
        if not name.endswith((".py", "/*"))  # files of rlvcr/, and whole families
    }
)
# The keys of metrics.jsonl after two steps of the config ``smoke``.
RECORDED = (DOCS.parent / "tests/golden/smoke_metrics.txt").read_text(encoding="utf-8").split()


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_named_in_docs_is_declared(name):
    assert find_spec(name) is not None


@pytest.mark.parametrize("name", RECORDED)
def test_every_metric_of_a_run_is_declared(name):
    assert find_spec(name) is not None


def test_only_three_specs_stand_for_a_section():
    # Users name their rewards. The lengths are three statistics of one kind.
    families = ("reward/*", "prompt_length/*", "response_length/*")
    whole = [spec.name for spec in SPECS if re.fullmatch(r"\w+/\*", spec.name)]
    assert sorted(whole) == sorted(families)


@pytest.mark.parametrize(
    "name, unit",
    [
        ("val/success_rate", "share"),
        ("val/maths/graded", "count"),
        ("val/aborted", "count"),
        ("critic/score/failed", "count"),
        ("critic/score/mean", "reward"),
        ("rollout/tokens_per_episode", "tokens"),
        ("val/levels/free/tokens_per_step_low", "tokens"),
        ("timing_s/gen", "seconds"),
    ],
)
def test_metric_has_its_unit(name, unit):
    declared = find_spec(name)
    assert declared is not None and declared.unit == unit
