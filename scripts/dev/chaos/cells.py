"""Cells of the fault matrix: part, stage and fault; and the cells that are skipped."""

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
PLAY = "mid-play"
UPDATE = "update"
SAVE = "save"
EVALUATION = "last evaluation"
STAGES = (START, PLAY, UPDATE, SAVE, EVALUATION)

KILLED = "killed"
HUNG = "hung"
MEMORY = "out of memory"
DEEDS = (KILLED, HUNG, MEMORY)

IDLE = "asks for no memory then"
SENSELESS = {
    **{(NODE, stage): "its processes are killed: see there" for stage in STAGES},
    (ENGINE, SAVE): IDLE,
    (ENVIRONMENT, UPDATE): IDLE,
    (ENVIRONMENT, SAVE): IDLE,
    (COLLECTOR, UPDATE): IDLE,
    (COLLECTOR, SAVE): IDLE,
    (RANK, PLAY): IDLE,
    (RANK, EVALUATION): IDLE,
}


@dataclass(frozen=True)
class Cell:
    """Fault ``deed`` of ``part`` at ``stage``."""

    part: str
    stage: str
    deed: str

    @property
    def key(self) -> str:
        """Name of the cell in results and in ``CHAOS_CELL``: PART/STAGE/FAULT."""
        return f"{self.part}/{self.stage}/{self.deed}"

    @property
    def senseless(self) -> str | None:
        """Reason why the cell is skipped, or None if it is run."""
        return SENSELESS.get((self.part, self.stage)) if self.deed == MEMORY else None


def every_cell() -> Iterator[Cell]:
    """Yield all cells, ordered by part, stage and fault."""
    for part in PARTS:
        for stage in STAGES:
            for deed in DEEDS:
                yield Cell(part, stage, deed)


def cell_of(key: str) -> Cell:
    """Return the cell of ``key``. Raises ``ValueError`` if it does not exist."""
    for cell in every_cell():
        if cell.key == key:
            return cell
    raise ValueError(f"no cell {key!r}; a cell is PART/STAGE/FAULT: {PARTS}, {STAGES}, {DEEDS}")
