"""docs/porting.md: the listed names can be imported, and every algorithm has a row with an existing
test."""

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
    """Return the cells of the table rows in a section, without its header."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def quoted_names(cell: str) -> list[str]:
    return QUOTED.findall(cell)


SAME_PATH = [
    (quoted_names(module)[0], name)
    for module, names in rows_below("Names with the same path")
    for name in quoted_names(names)
]
OTHER_PATH = rows_below("Names with another path")
TESTED = rows_below("Every algorithm and option, and its test")


@pytest.mark.parametrize(("module", "name"), SAME_PATH)
def test_name_imports_from_its_usual_path(module, name):
    assert hasattr(importlib.import_module(module), name)


def resolve_path(path: str) -> object:
    """Return the module or the member of a module at a dotted path. Raise if there is none."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("row", OTHER_PATH, ids=lambda row: row[0].split("`")[1])
def test_counterpart_exists_and_other_path_does_not(row):
    other_cell, our_cell, _ = row
    (our_path,) = quoted_names(our_cell)
    assert resolve_path(our_path) is not None
    with pytest.raises((ModuleNotFoundError, AttributeError)):
        resolve_path(quoted_names(other_cell)[0])


def our_names(registry: dict) -> set[str]:
    """Return the names that our packages register, without those that tests or pages added."""
    functions = {name: getattr(entry, "function", entry) for name, entry in registry.items()}
    return {name for name, f in functions.items() if f.__module__.startswith(OURS)}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("estimator", our_names(ADV_ESTIMATORS)),
        ("policy loss", our_names(POLICY_LOSSES)),
        ("KL form", set(KL_ESTIMATORS)),
        ("aggregation", set(LOSS_AGG_MODES)),
    ],
)
def test_every_registered_name_has_a_row(kind, names):
    assert names
    documented = {quoted_names(name)[0] for of_kind, name, _ in TESTED if of_kind == kind}
    assert documented == names, f"rows of docs/porting.md for {sorted(documented ^ names)}"


@pytest.mark.parametrize("row", TESTED, ids=lambda row: row[1])
def test_test_named_in_a_row_exists(row):
    file, _, name = quoted_names(row[2])[0].partition("::")
    assert re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
