"""docs/porting.md: names that it promises import, every algorithm has a row whose test exists."""

import importlib
import re
from pathlib import Path

import pytest

import rlvcr.core_rlvcr  # noqa: F401  registers its estimators
from verl.algos import ADV_ESTIMATORS, LOSS_AGG_MODES, POLICY_LOSSES
from verl.names import KL_ESTIMATORS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "porting.md").read_text()
QUOTED = re.compile(r"`([^`]+)`")
OURS = ("verl.", "rlvcr.", "agent_system.")


def rows_below(heading: str) -> list[list[str]]:
    """Cells of the table's rows in a section, without its header."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def named(cell: str) -> list[str]:
    return QUOTED.findall(cell)


SAME = [
    (named(module)[0], name)
    for module, names in rows_below("Names with the same path")
    for name in named(names)
]
ELSEWHERE = rows_below("Names with another path")
TESTED = rows_below("Every algorithm and option, and its test")


@pytest.mark.parametrize(("module", "name"), SAME)
def test_a_name_is_found_under_its_usual_path(module, name):
    assert hasattr(importlib.import_module(module), name)


def find(path: str) -> object:
    """The module, or what a module holds, at a dotted path; raises where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("row", ELSEWHERE, ids=lambda row: row[0].split("`")[1])
def test_a_counterpart_exists_and_the_other_path_is_none_of_ours(row):
    there, here, _ = row
    (ours,) = named(here)
    assert find(ours) is not None
    with pytest.raises((ModuleNotFoundError, AttributeError)):
        find(named(there)[0])


def ours(registry: dict) -> set[str]:
    """What our packages register, without what other tests or pages have added."""
    functions = {name: getattr(entry, "function", entry) for name, entry in registry.items()}
    return {name for name, f in functions.items() if f.__module__.startswith(OURS)}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("estimator", ours(ADV_ESTIMATORS)),
        ("policy loss", ours(POLICY_LOSSES)),
        ("KL form", set(KL_ESTIMATORS)),
        ("aggregation", set(LOSS_AGG_MODES)),
    ],
)
def test_everything_that_is_registered_has_a_row(kind, names):
    assert names
    told = {named(name)[0] for of_kind, name, _ in TESTED if of_kind == kind}
    assert told == names, f"rows of docs/porting.md for {sorted(told ^ names)}"


@pytest.mark.parametrize("row", TESTED, ids=lambda row: row[1])
def test_the_test_of_a_row_exists(row):
    file, _, name = named(row[2])[0].partition("::")
    assert re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
