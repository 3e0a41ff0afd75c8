"""Measure the CPU time of the driver per step, in milliseconds per row.

    python -m scripts.dev.bench.driver

Nothing is generated or trained. Simulated trajectories of one row each pass through the methods
that the trainer calls in a step. Collectors and ranks are simulated: what they receive and return
passes through Ray's object store.

    receive   read summaries and rows of the trajectories of the collectors from the store
    pack      compute the metrics of the trajectories, and join the rows
    send      send rows for the two forward passes, of the policy and of the reference
    answers   read log-probs from the store and join them
    score     ``score`` without send and answers: order of rows by rank, train-inference mismatch,
              rollout correction
    reward    ``compute_rewards``
    credit    ``compute_advantages``
    update    shard the rows of the update by mini-batch, and send them
    journal   send advantages and other values to the collectors, and write the JSON lines that
              they return (in a run, a background thread does this)
    collector pack trajectories, copy them without texts, and encode their JSON lines (in a run, the
              collectors do this, each for its own trajectories)

Seconds are CPU seconds of this process on one thread, so other work on the machine matters little.
"""

import argparse
import gc
import json
import pickle
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from agent_system.multi_turn_rollout.collector_worker import CollectedTrajectories
from agent_system.multi_turn_rollout.metrics import (
    compute_episode_metrics,
    compute_rollout_metrics,
    split_rollout_time,
)
from agent_system.multi_turn_rollout.packing import (
    build_rows,
    collate_rows,
    select_usable_trajectories,
)
from agent_system.multi_turn_rollout.stored_trajectories import (
    StoredTrajectories,
    encode_rows_on_collectors,
    encode_stored_rows,
    link_stored_trajectories,
)
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, Turn
from agent_system.reward_manager import load_reward_manager
from agent_system.tokens.ledger import SegmentKind, TokenLedger
from verl.protocol import DataProto
from verl.record.rollout_log import ENCODE_ROLLOUTS, ENCODE_TOKENS
from verl.records import NUM_RANKS
from verl.single_controller.base.decorator import Dispatch, MethodRegistration, plan_calls
from verl.single_controller.ray import init_ray
from verl.trainer.launch.extensions import load_config
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.resources import TrainingWorkers
from verl.utils import jsonl
from verl.utils.jsonl import RowEncoder
from verl.utils.sampling import StopReason
from verl.utils.seqlen_balancing import order_rows_for_ranks

ROWS = (4096, 16384, 65536)  # rows of the measured steps, one row per trajectory
RANKS = 8  # simulated training ranks
GROUP_SIZE = 8  # trajectories of a group
STORE_GB = 8.0  # size of Ray's object store
STORE_TIMEOUT_S = 60.0  # timeout for reading a value from the object store
CHUNK_SIZE = 64  # trajectories per collector result; results differ only in their ids
VOCABULARY_SIZE = 150_000  # upper bound of the random token ids
# Declares the simulated calls as worker calls whose rows are divided among the ranks.
SHARDED_CALL = MethodRegistration(Dispatch.DP_COMPUTE_PROTO)
BLOCKING_PARTS = ("receive", "pack", "send", "answers", "score", "reward", "credit", "update")
JOURNAL_PART = "journal"
COLLECTOR_PART = "collector"
OTHER_PROCESSES = "other processes"  # work that a run does outside of the driver


@dataclass(frozen=True)
class TrajectoryShape:
    """Sizes of a simulated trajectory: turns with an observation after each."""

    turns: int = 10
    prompt: int = 128  # tokens before the first turn
    sampled_tokens: int = 24  # sampled tokens of a turn
    observation_tokens: int = 16  # tokens of an observation

    @property
    def row_tokens(self) -> int:
        """Tokens of a row, without the last observation; by default 128 + 10 * (24 + 16) - 16."""
        return (
            self.prompt
            + self.turns * (self.sampled_tokens + self.observation_tokens)
            - self.observation_tokens
        )


class CpuClock:
    """CPU seconds of each part of a step, without the parts that are measured inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open_parts: list[str] = []
        self._last_cpu_seconds = 0.0

    @contextmanager
    def measure_part(self, name: str) -> Iterator[None]:
        """Add the CPU time of the ``with`` block to the part ``name``."""
        self._add_elapsed()
        self._open_parts.append(name)
        try:
            yield
        finally:
            self._add_elapsed()
            self._open_parts.pop()

    def _add_elapsed(self) -> None:
        cpu_seconds = time.process_time()
        if self._open_parts:
            self.seconds[self._open_parts[-1]] += cpu_seconds - self._last_cpu_seconds
        self._last_cpu_seconds = cpu_seconds


class MeasuredStore:
    """Ray's object store. ``sent`` counts the stored bytes by part of the step."""

    def __init__(self, clock: CpuClock) -> None:
        self.sent = Counter[str]()
        self._clock = clock

    def put(self, value: object, name: str) -> ray.ObjectRef:
        """Put ``value`` into the store, and add its bytes to ``sent[name]``."""
        with self._clock.measure_part(OTHER_PROCESSES):
            buffers: list[pickle.PickleBuffer] = []
            message = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
            self.sent[name] += len(message) + sum(len(buffer.raw()) for buffer in buffers)
        return ray.put(value)


class SimulatedCollector:
    """Collector in this process that imitates the handle of a Ray actor."""

    def __init__(self, clock: CpuClock, store: MeasuredStore) -> None:
        self._clock = clock
        self._store = store
        self.encode_rows = self  # imitates a Ray actor: ``encode_rows.remote`` is the method below

    def remote(self, values: DataProto, encode: RowEncoder) -> ray.ObjectRef:
        """Encode rows as JSON lines, and return the Ray reference of the lines."""
        sent_values = self._store.put(values, JOURNAL_PART)
        with self._clock.measure_part(COLLECTOR_PART):
            lines = encode_stored_rows(
                ray.get(sent_values, timeout=STORE_TIMEOUT_S), encode, WordTokenizer()
            )
        with self._clock.measure_part(OTHER_PROCESSES):
            return ray.put(lines)


class SimulatedRanks:
    """Simulated worker group: it shards and sends data, and returns zeros."""

    def __init__(self, ranks: int, clock: CpuClock, store: MeasuredStore) -> None:
        self.world_size = ranks
        self._clock = clock
        self._store = store

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return zeros."""
        return self._return_zeros(data, "old_log_probs", "entropys")

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return zeros."""
        return self._return_zeros(data, "ref_log_prob")

    def update_actor(self, data: DataProto) -> DataProto:
        """Return constant metrics of an update."""
        calls, join_answers = plan_calls(SHARDED_CALL, self.world_size, (data,), {})
        for call in calls:
            self._store.put(call, "update")
        with self._clock.measure_part(OTHER_PROCESSES):
            metrics = {"actor/pg_loss": [0.0], "actor/optimizer_steps": 1.0}
            answers = [DataProto(meta_info={"metrics": dict(metrics)}) for _ in calls]
        return join_answers(answers)

    def _return_zeros(self, data: DataProto, *column_names: str) -> DataProto:
        calls, join_answers = plan_calls(SHARDED_CALL, self.world_size, (data,), {})
        for call in calls:
            self._store.put(call, "send")
        with self._clock.measure_part(OTHER_PROCESSES):
            response_shapes = [args[0].batch["responses"].shape for args, _ in calls]
            zero_columns = [
                {name: torch.zeros(shape) for name in column_names} for shape in response_shapes
            ]
            answers = [
                self._store.put(DataProto.from_dict(columns), "answers") for columns in zero_columns
            ]
        with self._clock.measure_part("answers"):
            return join_answers(ray.get(answers, timeout=STORE_TIMEOUT_S))


class SimulatedWorkers(TrainingWorkers):
    """Training workers with simulated ranks. The time of calls is counted as ``send``."""

    def __init__(self, ranks: int, clock: CpuClock, store: MeasuredStore) -> None:
        worker_group: Any = SimulatedRanks(ranks, clock, store)
        super().__init__(worker_group, [], reference_group=worker_group)
        self._clock = clock

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return the log-probs of the simulated ranks."""
        with self._clock.measure_part("send"):
            return super().compute_log_prob(data)

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return the reference log-probs of the simulated ranks."""
        with self._clock.measure_part("send"):
            return super().compute_ref_log_prob(data)


class WordTokenizer:
    """Tokenizer that decodes every token to one word."""

    def decode(self, token_ids: list[int], /) -> str:
        """Return a text with one word per token."""
        return " word" * len(token_ids)


@dataclass(frozen=True)
class DriverCost:
    """Cost of one training step for the driver."""

    rows: int
    ranks: int
    seconds: dict[str, float]  # CPU seconds by part of the step
    sent: dict[str, int]  # sent bytes by part of the step

    def per_row(self, part: str) -> float:
        """Return the CPU milliseconds per row of ``part``."""
        return 1e3 * self.seconds[part] / self.rows

    @property
    def blocking_ms(self) -> float:
        """CPU milliseconds per row of all parts of a step except those in background threads."""
        return sum(self.per_row(part) for part in BLOCKING_PARTS)


def make_trajectory(number: int, shape: TrajectoryShape, rng: np.random.Generator) -> Trajectory:
    """Return a simulated trajectory of ``shape`` with random tokens."""
    task = {"task_id": f"task-{number}", "data_source": "invented"}
    trajectory = Trajectory(RolloutSpec(0, task, "", "", number), reward=float(rng.random() < 0.5))
    ledger = TokenLedger()
    ledger.append(rng.integers(VOCABULARY_SIZE, size=shape.prompt).tolist(), SegmentKind.PROMPT)
    for step in range(shape.turns):
        segment = ledger.append(
            rng.integers(VOCABULARY_SIZE, size=shape.sampled_tokens).tolist(),
            SegmentKind.AGENT,
            logprobs=(-rng.random(shape.sampled_tokens)).tolist(),
            turn=step,
            policy_version=1,
            stop_reason=StopReason.STOP,
        )
        observation = f"You arrive at desk {step}. On it, you see a book {number} and a pen. " * 3
        turn = Turn(
            step,
            observation,
            observation,
            0,
            segment.start,
            segment.end_position,
            "",
            StopReason.STOP,
        )
        turn.response = f"<think>the mug {number} may be here</think><action>take it</action>"
        turn.action = "take it"
        turn.is_action_valid = True
        trajectory.turns.append(turn)
        ledger.append(
            rng.integers(VOCABULARY_SIZE, size=shape.observation_tokens).tolist(), SegmentKind.ENV
        )
    trajectory.ledgers.append(ledger)
    return trajectory


def receive_chunks(
    rows: int, shape: TrajectoryShape, clock: CpuClock, store: MeasuredStore
) -> CollectedTrajectories:
    """Read ``rows`` trajectories in chunks, as collectors return them."""
    rng = np.random.default_rng(0)
    trajectories = [make_trajectory(n, shape, rng) for n in range(CHUNK_SIZE)]
    with clock.measure_part(COLLECTOR_PART):
        chunk_without_texts = CollectedTrajectories(trajectories, 1.0, 0.0).copy_without_texts()
    # All chunks are equal, so multiply the time for one of them.
    clock.seconds[COLLECTOR_PART] *= rows / CHUNK_SIZE
    collected = CollectedTrajectories([], 0.0, 0.0)
    for first_index in range(0, rows, CHUNK_SIZE):
        stored_chunk = store.put(chunk_without_texts, "receive")
        stored_trajectories = ray.put(trajectories)
        with clock.measure_part("receive"):
            chunk: CollectedTrajectories = ray.get(stored_chunk, timeout=STORE_TIMEOUT_S)
            link_stored_trajectories(chunk.trajectories, StoredTrajectories(stored_trajectories, 0))
            collected.add(chunk)
        for traj_index, trajectory in enumerate(chunk.trajectories, start=first_index):
            uid = f"train-1-0-{traj_index // GROUP_SIZE}"
            traj_uid = f"{uid}/{traj_index % GROUP_SIZE}"
            trajectory.spec = replace(trajectory.spec, index=traj_index, uid=uid, traj_uid=traj_uid)
    del collected.trajectories[rows:]
    return collected


def pack_trajectories(rollout: CollectedTrajectories, ranks: int) -> DataProto:
    """Compute the metrics of the rollout, and return its rows as a batch ordered for ``ranks``."""
    trajectories, _ = select_usable_trajectories(rollout.trajectories, "drop_group")
    compute_rollout_metrics(rollout.trajectories, rollout.rollout_s)
    compute_episode_metrics(rollout.trajectories)
    split_rollout_time(rollout.trajectories, rollout.rollout_s, rollout.thoughts_s)
    rows = build_rows(trajectories)
    row_order = order_rows_for_ranks([row.response_end for row in rows], ranks)
    batch = collate_rows([rows[index] for index in row_order], 0)
    batch.meta_info[NUM_RANKS] = ranks
    return batch


def make_trainer(workers: TrainingWorkers) -> RayPPOTrainer[Any]:
    """Return a trainer at step 1, without collector, tasks, rollout log and checkpoints."""
    overrides = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=none"]
    cfg = load_config("ppo_trainer", overrides)
    unused: Any = None
    reward_manager = load_reward_manager(cfg)
    trainer = RayPPOTrainer(cfg, workers, unused, unused, unused, reward_manager, unused, unused)
    trainer.global_step = 1
    return trainer


def measure_driver_cost(
    rows: int, ranks: int = RANKS, shape: TrajectoryShape | None = None
) -> DriverCost:
    """Run one step with ``rows`` trajectories of ``shape``. Return the cost for the driver."""
    init_ray(num_cpus=1, object_store_gb=STORE_GB)
    gc.freeze()  # as a run does
    clock = CpuClock()
    store = MeasuredStore(clock)
    trainer = make_trainer(SimulatedWorkers(ranks, clock, store))
    rollout = receive_chunks(rows, shape or TrajectoryShape(), clock, store)
    with clock.measure_part("pack"):
        batch = pack_trajectories(rollout, ranks)
    del rollout
    with clock.measure_part("score"):
        batch = trainer.compute_log_probs_and_values(trainer.score(batch))
    with clock.measure_part("reward"):
        batch = trainer.compute_rewards(batch)
    with clock.measure_part("credit"):
        batch = trainer.compute_advantages(batch)
    with clock.measure_part("update"):
        trainer.update_actor(batch)
    collector = SimulatedCollector(clock, store)
    with tempfile.TemporaryDirectory() as folder, clock.measure_part(JOURNAL_PART):
        for encode in (ENCODE_TOKENS, ENCODE_ROLLOUTS):
            lines = encode_rows_on_collectors(batch, encode, [collector], WordTokenizer())
            jsonl.write(Path(folder) / "lines.jsonl", lines)
    return DriverCost(rows, ranks, dict(clock.seconds), dict(store.sent))


def format_table(costs: Sequence[DriverCost]) -> Iterator[str]:
    """Yield the lines of a Markdown table: CPU milliseconds per row for each part of a step."""
    yield f"| ms of CPU per row | {' | '.join(f'{cost.rows:,} rows' for cost in costs)} |"
    yield f"|---|{'---|' * len(costs)}"
    for part in BLOCKING_PARTS:
        yield f"| {part} | {' | '.join(f'{cost.per_row(part):.3f}' for cost in costs)} |"
    blocking_cells = (f"{cost.blocking_ms:.2f}" for cost in costs)
    yield f"| **for which the run waits** | {' | '.join(blocking_cells)} |"
    journal_cells = (f"{cost.per_row(JOURNAL_PART):.2f}" for cost in costs)
    yield f"| {JOURNAL_PART}, behind the step | {' | '.join(journal_cells)} |"
    collector_cells = (f"{cost.per_row(COLLECTOR_PART):.2f}" for cost in costs)
    yield f"| {COLLECTOR_PART}, in other processes | {' | '.join(collector_cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the CPU time of the driver per row. With ``--json``, also write it to a file."""
    parser = argparse.ArgumentParser(description="CPU of the driver per row.")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--ranks", type=int, default=RANKS)
    for name, value in vars(TrajectoryShape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    shape = TrajectoryShape(**{name: getattr(args, name) for name in vars(TrajectoryShape())})
    costs = [measure_driver_cost(rows, args.ranks, shape) for rows in args.rows]
    print(f"{shape.row_tokens:,} tokens and {shape.turns} turns a row, {args.ranks} ranks\n")
    print("\n".join(format_table(costs)))
    if args.json is not None:
        args.json.write_text(json.dumps([vars(cost) for cost in costs], indent=1) + "\n")


if __name__ == "__main__":
    main()
