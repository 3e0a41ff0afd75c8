"""The cells of the matrix: which part is struck, when, and how; and which of them make no sense."""

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
    """``part`` is struck at ``stage`` in the way that ``deed`` says."""

    part: str
    stage: str
    deed: str

    @property
    def key(self) -> str:
        """What a result is kept under, and what the job is told."""
        return f"{self.part}/{self.stage}/{self.deed}"

    @property
    def senseless(self) -> str | None:
        """Why there is nothing to try; None where there is."""
        return SENSELESS.get((self.part, self.stage)) if self.deed == MEMORY else None


def every_cell() -> Iterator[Cell]:
    """All of them, row by row."""
    for part in PARTS:
        for stage in STAGES:
            for deed in DEEDS:
                yield Cell(part, stage, deed)


def cell_of(key: str) -> Cell:
    """The cell of ``key``. Raises ``ValueError`` for one that does not exist."""
    for cell in every_cell():
        if cell.key == key:
            return cell
    raise ValueError(f"no cell {key!r}; a cell is PART/STAGE/DEED: {PARTS}, {STAGES}, {DEEDS}")
