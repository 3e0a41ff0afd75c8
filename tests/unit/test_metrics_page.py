"""All metrics of the pages and of a run have a row in ``docs/reference/metrics.md``."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# Unit by name or pattern of names, in the order of the page: the first match counts.
UNITS: dict[str, str] = dict(
    re.findall(
        r"^\| `(\S+)` \|.+\| (\w+) \|$",
        (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
)
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


def find_unit(name):
    return next((unit for pattern, unit in UNITS.items() if fnmatchcase(name, pattern)), None)


@pytest.mark.parametrize("name", sorted({*NAMES, *RECORDED}))
def test_every_metric_of_pages_and_runs_has_a_row(name):
    assert find_unit(name) is not None


def test_only_three_rows_stand_for_a_section():
    # Users name their rewards. The lengths are three statistics of one kind.
    families = ("reward/*", "prompt_length/*", "response_length/*")
    whole = [name for name in UNITS if re.fullmatch(r"\w+/\*", name)]
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
    assert find_unit(name) == unit
