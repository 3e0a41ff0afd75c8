"""Cells of the fault matrix: part of a job, stage of the run, and fault; and the skipped cells."""

from collections.abc import Iterator
from dataclasses import dataclass

ENGINE = "engine"
ENVIRONMENT = "environment worker"
COLLECTOR = "collector"
RANK = "training rank"
NODE = "node"
DRIVER = "driver"
PARTS = (ENGINE, ENVIRONMENT, COLLECTOR, RANK, NODE, DRIVER)

START = "start"
ROLLOUT = "rollout"
UPDATE = "update"
SAVE = "save"
EVALUATION = "last evaluation"
STAGES = (START, ROLLOUT, UPDATE, SAVE, EVALUATION)

KILLED = "killed"
HUNG = "hung"
MEMORY = "out of memory"
FAULTS = (KILLED, HUNG, MEMORY)

IDLE = "asks for no memory then"
SKIPPED = {
    **{(NODE, stage): "its processes are killed: see there" for stage in STAGES},
    (ENGINE, SAVE): IDLE,
    (ENVIRONMENT, UPDATE): IDLE,
    (ENVIRONMENT, SAVE): IDLE,
    (COLLECTOR, UPDATE): IDLE,
    (COLLECTOR, SAVE): IDLE,
    (RANK, ROLLOUT): IDLE,
    (RANK, EVALUATION): IDLE,
}


@dataclass(frozen=True)
class Cell:
    """One test of the matrix: ``part`` of the job gets ``fault`` when the run is at ``stage``."""

    part: str
    stage: str
    fault: str

    @property
    def cell_key(self) -> str:
        """Name of the cell in results and in ``CHAOS_CELL``: PART/STAGE/FAULT."""
        return f"{self.part}/{self.stage}/{self.fault}"

    @property
    def skip_reason(self) -> str | None:
        """Reason why the cell is skipped, or None if it is run."""
        return SKIPPED.get((self.part, self.stage)) if self.fault == MEMORY else None


def iter_cells() -> Iterator[Cell]:
    """Yield all cells, ordered by part, stage and fault."""
    for part in PARTS:
        for stage in STAGES:
            for fault in FAULTS:
                yield Cell(part, stage, fault)


def parse_cell(key: str) -> Cell:
    """Return the cell of ``key``. Raises ``ValueError`` if it does not exist."""
    for cell in iter_cells():
        if cell.cell_key == key:
            return cell
    raise ValueError(f"no cell {key!r}; a cell is PART/STAGE/FAULT: {PARTS}, {STAGES}, {FAULTS}")
