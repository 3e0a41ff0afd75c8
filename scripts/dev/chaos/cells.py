"""Cells of the fault matrix: part of a job, stage of the run, and fault.

The tables below list the skipped cells, and the method in which each fault happens.
"""

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
OUT_OF_MEMORY = "out of memory"
FAULTS = (KILLED, HUNG, OUT_OF_MEMORY)

NO_ALLOCATION = "asks for no memory then"
SKIP_REASONS = {
    **{(NODE, stage): "its processes are killed: see there" for stage in STAGES},
    (ENGINE, SAVE): NO_ALLOCATION,
    (ENVIRONMENT, UPDATE): NO_ALLOCATION,
    (ENVIRONMENT, SAVE): NO_ALLOCATION,
    (COLLECTOR, UPDATE): NO_ALLOCATION,
    (COLLECTOR, SAVE): NO_ALLOCATION,
    (RANK, ROLLOUT): NO_ALLOCATION,
    (RANK, EVALUATION): NO_ALLOCATION,
}

ENGINE_CLASS = "verl.workers.rollout.hf:HFEngine"
RANK_CLASS = "verl.workers.actor:ActorWorker"
TRAINER_CLASS = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
COLLECTOR_CLASS = "agent_system.multi_turn_rollout.collector_worker:CollectorWorker"
# Ray has stored the methods of the actor class CollectorWorker before they could be patched. Patch
# a class that CollectorWorker uses instead.
TRAJECTORY_CLASS = "agent_system.multi_turn_rollout.trajectory_generator:TrajectoryGenerator"
POOL_CLASS = "agent_system.environments.pool.environment_pool:EnvironmentPool"
LINE_ENV_CLASS = "agent_system.environments.env_package.number_line.package:NumberLineEnv"

# Process role, class and method that run during a stage.
STAGE_METHODS = {
    START: (RANK, "verl.workers.engine:TrainEngine", "__init__"),
    ROLLOUT: (ENGINE, ENGINE_CLASS, "step"),
    UPDATE: (RANK, RANK_CLASS, "update_actor"),
    SAVE: (RANK, RANK_CLASS, "save_checkpoint"),
    EVALUATION: (ENGINE, ENGINE_CLASS, "step"),
}
# Methods that start the parts of the job that start later than the training rank.
LATE_START_METHODS = {
    COLLECTOR: (COLLECTOR, POOL_CLASS, "start"),
    ENVIRONMENT: (ENVIRONMENT, LINE_ENV_CLASS, "__init__"),
}
OUT_OF_MEMORY_METHODS = {
    (ENGINE, START): (ENGINE, ENGINE_CLASS, "__init__"),
    (ENGINE, UPDATE): (ENGINE, ENGINE_CLASS, "update_weights"),
    (ENVIRONMENT, ROLLOUT): (ENVIRONMENT, LINE_ENV_CLASS, "step"),
    (ENVIRONMENT, EVALUATION): (ENVIRONMENT, LINE_ENV_CLASS, "step"),
    (COLLECTOR, ROLLOUT): (COLLECTOR, TRAJECTORY_CLASS, "generate_trajectory"),
    (COLLECTOR, EVALUATION): (COLLECTOR, TRAJECTORY_CLASS, "generate_trajectory"),
    (DRIVER, START): (DRIVER, TRAINER_CLASS, "__init__"),
    (DRIVER, ROLLOUT): (DRIVER, TRAINER_CLASS, "collect"),
    (DRIVER, UPDATE): (DRIVER, TRAINER_CLASS, "update_actor"),
    (DRIVER, SAVE): (DRIVER, TRAINER_CLASS, "save"),
    (DRIVER, EVALUATION): (DRIVER, TRAINER_CLASS, "validate"),
}


@dataclass(frozen=True)
class Cell:
    """One test of the fault matrix.

    ``part`` (process of the job) gets ``fault`` when the run is at ``stage``.
    """

    part: str
    stage: str
    fault: str

    @property
    def cell_key(self) -> str:
        """Name of the cell in results and in ``CHAOS_CELL``: PART/STAGE/FAULT."""
        return f"{self.part}/{self.stage}/{self.fault}"

    @property
    def skip_reason(self) -> str | None:
        """Reason why this test of the fault matrix is skipped, or None if it is run."""
        return SKIP_REASONS.get((self.part, self.stage)) if self.fault == OUT_OF_MEMORY else None

    def get_injection_point(self) -> tuple[str, str, str]:
        """Return process role, class and method in which the fault happens."""
        if self.fault == OUT_OF_MEMORY and (self.part, self.stage) in OUT_OF_MEMORY_METHODS:
            return OUT_OF_MEMORY_METHODS[self.part, self.stage]
        if self.stage == START and self.part in LATE_START_METHODS:
            return LATE_START_METHODS[self.part]
        return STAGE_METHODS[self.stage]


def iter_cells() -> Iterator[Cell]:
    """Yield all cells of the fault matrix, ordered by part of the job, stage and fault."""
    for part in PARTS:
        for stage in STAGES:
            for fault in FAULTS:
                yield Cell(part, stage, fault)


def parse_cell(key: str) -> Cell:
    """Return the cell of the key PART/STAGE/FAULT. Raises ``ValueError`` for other keys."""
    for cell in iter_cells():
        if cell.cell_key == key:
            return cell
    raise ValueError(f"no cell {key!r}; a cell is PART/STAGE/FAULT: {PARTS}, {STAGES}, {FAULTS}")
