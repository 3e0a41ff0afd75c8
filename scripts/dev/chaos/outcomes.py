"""Results of the fault matrix, one per cell (part of a job, stage of the run, fault).

They are kept in docs/chaos between runs, and written to docs/reliability.md.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from scripts.dev.chaos.cells import FAULTS, PARTS, STAGES, Cell
from scripts.dev.chaos.job import RESULTS_DIR
from scripts.dev.chaos.matrix import CellResult
from tests.helpers.jobs import ROOT
from verl.utils.files import atomic_write

RESULTS_PATH = RESULTS_DIR / "matrix.json"
RELIABILITY_PAGE = ROOT / "docs" / "reliability.md"
TABLE_BEGIN = "<!-- scripts.dev.chaos matrix -->\n"
TABLE_END = "<!-- end of the matrix -->\n"


def read_results(path: Path = RESULTS_PATH) -> dict[str, CellResult]:
    """Return the results of the fault matrix by cell (PART/STAGE/FAULT); {} without the file."""
    if not path.exists():
        return {}
    return {row["key"]: CellResult(**row) for row in json.loads(path.read_text())}


def write_results(results: Mapping[str, CellResult], path: Path = RESULTS_PATH) -> None:
    """Write all results to ``path`` as JSON."""
    with atomic_write(path) as file:
        json.dump([asdict(result) for result in results.values()], file, indent=1)


def format_table(results: Mapping[str, CellResult]) -> str:
    """Return the fault matrix as a Markdown table with a row for each part of a job and stage."""
    lines = ["| part | when | killed | hung | out of memory |", "|---|---|---|---|---|"]
    for part in PARTS:
        for stage in STAGES:
            fault_cells = [_format_cell(Cell(part, stage, fault), results) for fault in FAULTS]
            lines.append(f"| {part} | {stage} | {' | '.join(fault_cells)} |")
    return "\n".join(lines) + "\n"


def _format_cell(cell: Cell, results: Mapping[str, CellResult]) -> str:
    if cell.skip_reason is not None:
        return f"({cell.skip_reason})"
    result = results.get(cell.cell_key)
    if result is None:
        return "not run"
    if result.verdict == "ends":
        return f"ends after {result.seconds:.0f} s, status {result.status}"
    return result.verdict


def write_page(results: Mapping[str, CellResult], page: Path = RELIABILITY_PAGE) -> None:
    """Write the fault matrix into the Markdown file ``page``, between two marker lines."""
    text_before, begin_marker, text_after_begin = page.read_text(encoding="utf-8").partition(
        TABLE_BEGIN
    )
    _, end_marker, text_after = text_after_begin.partition(TABLE_END)
    if not begin_marker or not end_marker:
        raise ValueError(
            f"{page} has no lines {TABLE_BEGIN!r} and {TABLE_END!r}; add them around the table"
        )
    with atomic_write(page) as file:
        file.write(f"{text_before}{begin_marker}{format_table(results)}{end_marker}{text_after}")
