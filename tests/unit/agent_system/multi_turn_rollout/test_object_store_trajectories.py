"""Rows that collectors pack: the joined batch, metrics and lines equal those of whole trajectories.

``pack_at_once`` packs all trajectories in one process, with its own code.
"""

import pickle
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_system.multi_turn_rollout import stored_trajectories
from agent_system.multi_turn_rollout.collector_worker import CollectedTrajectories
from agent_system.multi_turn_rollout.metrics import (
    compute_episode_metrics,
    compute_rollout_metrics,
    split_rollout_time,
)
from agent_system.multi_turn_rollout.packing import (
    build_row_turns,
    build_rows,
    collate_rows,
    make_turn_record,
    select_usable_trajectories,
)
from agent_system.multi_turn_rollout.stored_trajectories import (
    StoredTrajectories,
    StoredTurnRecords,
    TrajectoryReference,
    encode_rows_on_collectors,
    encode_stored_rows,
    link_stored_trajectories,
    load_trajectories,
)
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, Turn
from agent_system.tokens.ledger import SegmentKind, TokenLedger
from rlvcr.alternatives import TurnAlternativeThoughts
from rlvcr.levels import ParsedTurn
from rlvcr.records import CreditedTurns, ScoredThought
from verl.protocol import DataProto, object_array
from verl.record.rollout_log import (
    ENCODE_ROLLOUTS,
    ENCODE_TOKENS,
    format_rollout_lines,
    format_token_lines,
)
from verl.records import ANSWER, CORRECTION_WEIGHTS, INFO_NUMBERS, REWARD_PARTS, ScoreResult
from verl.single_controller.base import WorkerDiedError
from verl.utils import jsonl
from verl.utils.sampling import StopReason

PAD = 7
HISTORIES = ("append", "window", "chat")


class Words:
    """Tokenizer that decodes every token to one word."""

    def decode(self, token_ids: list[int], /) -> str:
        return "".join(f" w{token}" for token in token_ids)


def make_trajectory(draw: random.Random, history: str, index: int, options: set[str]) -> Trajectory:
    """Return a trajectory of 0 to 4 turns. ``chat`` begins a new row at some turns."""
    group, member = divmod(index, 3)
    task = {"task_id": f"task-{group}", "data_source": f"source-{group % 2}", "text": "long"}
    spec = RolloutSpec(index, task, f"g{group}", f"g{group}/{member}", 7)
    trajectory = Trajectory(spec, reward=draw.choice([0, 1, 0.5]), won=draw.random() < 0.5)
    for step in range(draw.randrange(5)):
        begins_row = history == "window" or (history == "chat" and draw.random() < 0.3)
        if begins_row or not trajectory.ledgers:
            trajectory.ledgers.append(TokenLedger())
            prompt = [draw.randrange(90) for _ in range(draw.randint(1, 6))]
            trajectory.ledgers[-1].append(prompt, SegmentKind.PROMPT)
        trajectory.turns.append(add_turn(draw, trajectory.ledgers, step, options))
    trajectory.active_s, trajectory.env_wait_s = draw.random(), draw.random()
    trajectory.engine_wait_s = draw.random()
    trajectory.truncated = draw.choice([None, None, "steps"])
    if "numbers" in options and draw.random() < 0.5:
        trajectory.reward_parts = {"format": draw.random()}
        trajectory.info_numbers = {"score": draw.random()}
        trajectory.answer = draw.choice([None, "7"])
    if draw.random() < 0.1:
        trajectory.abort("env_dead", "killed")
    return trajectory


def add_turn(draw: random.Random, ledgers: list[TokenLedger], step: int, options: set[str]) -> Turn:
    ledger = ledgers[-1]
    forced = 1 if "levels" in options and draw.random() < 0.2 else 0
    start = len(ledger)
    if forced:
        ledger.append([80], SegmentKind.BRIDGE, turn=step)
    count = draw.randint(6, 9)
    ledger.append(
        [draw.randrange(90) for _ in range(count)],
        SegmentKind.AGENT,
        logprobs=[-draw.random() for _ in range(count)],
        turn=step,
        policy_version=draw.choice([3, 4]),
    )
    turn = Turn(
        step,
        f"obs {step}",
        f"obs {step}",
        len(ledgers) - 1,
        start,
        len(ledger),
        "look",
        StopReason.STOP,
    )
    turn.num_forced_tokens = forced
    turn.is_action_valid = draw.random() < 0.5
    turn.action = draw.choice(["left", "right"])
    turn.reward = draw.random()
    turn.situation = draw.choice([turn.anchor, "a fork"])
    ledger.append([draw.randrange(90)] * draw.randrange(4), SegmentKind.ENV, turn=step + 1)
    if "levels" in options:
        level = draw.randint(1, 4)
        turn.parsed = ParsedTurn(level, (1, 2), (2, 4), (4, 5), (4, 6), "why", "look", "tags", None)
        turn.alternatives = TurnAlternativeThoughts(sampled_tokens=draw.randrange(9))
    if "images" in options and draw.random() < 0.5:
        turn.image = f"picture {draw.random()}"
    return turn


def send(value: Any) -> Any:
    """Return ``value`` as another process receives it: arrays are read-only."""
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(message, buffers=[buffer.raw().toreadonly() for buffer in buffers])


class Store(dict):
    """Object store: references are numbers. ``fetch`` has the signature of ``ray_get``."""

    def put(self, value: object) -> str:
        ref = f"object {len(self)}"
        self[ref] = send(value)
        return ref

    def fetch(self, ref: str, timeout_s: float, label: str) -> Any:
        assert timeout_s > 0 and label
        if isinstance(self[ref], Exception):
            raise self[ref]
        return self[ref]


@pytest.fixture
def store(monkeypatch) -> Store:
    store = Store()
    stored_trajectories.load_rows.cache_clear()
    monkeypatch.setattr(stored_trajectories, "ray_get", store.fetch)
    return store


def collect_apart(
    trajectories: Sequence[Trajectory], store: Store, draw: random.Random, collectors: int = 3
) -> list[Trajectory]:
    """Return the summaries of trajectories of three collectors, in order.

    Members of a group may have different collectors.
    """
    shards: list[list[Trajectory]] = [[] for _ in range(collectors)]
    for trajectory in trajectories:
        shards[draw.randrange(collectors)].append(trajectory)
    summaries: dict[int, Trajectory] = {}
    for number, shard in enumerate(shards):
        result = send(CollectedTrajectories(shard, 1.0, 0.0).copy_without_texts())
        link_stored_trajectories(result.trajectories, StoredTrajectories(store.put(shard), number))
        summaries |= {t.spec.index: t for t in result.trajectories}
    return [summaries[trajectory.spec.index] for trajectory in trajectories]


def pack(trajectories: Sequence[Trajectory], **options: Any) -> DataProto:
    return collate_rows(build_rows(trajectories), PAD, **options)


def pack_at_once(trajectories: Sequence[Trajectory]) -> tuple[dict[str, torch.Tensor], dict]:
    """Return tensors and columns of ``trajectories``, token by token."""
    rows = build_rows(trajectories)
    prompts = max(1, *(row.response_start for row in rows))
    responses = max(1, *(row.response_end - row.response_start for row in rows))
    tensors = {
        "prompts": torch.full((len(rows), prompts), PAD),
        "responses": torch.full((len(rows), responses), PAD),
        "input_ids": torch.full((len(rows), prompts + responses), PAD),
        "attention_mask": torch.zeros(len(rows), prompts + responses, dtype=torch.long),
        "position_ids": torch.zeros(len(rows), prompts + responses, dtype=torch.long),
        "response_mask": torch.zeros(len(rows), responses, dtype=torch.long),
        "step_ids": torch.full((len(rows), responses), -1),
        "rollout_log_probs": torch.zeros(len(rows), responses),
    }
    for b, row in enumerate(rows):
        ledger = row.trajectory.ledgers[row.turns[0].ledger] if row.turns else TokenLedger()
        turns, log_probs = ledger.to_arrays().turn_ids(), ledger.token_logprobs()
        for position, token in enumerate(ledger.token_ids[: row.response_end]):
            column = prompts - row.response_start + position
            tensors["input_ids"][b, column] = token
            tensors["attention_mask"][b, column] = 1
            tensors["position_ids"][b, column:] = position
            if position < row.response_start:
                tensors["prompts"][b, column] = token
                continue
            column -= prompts
            tensors["responses"][b, column] = token
            tensors["response_mask"][b, column] = int(turns[position] >= 0)
            tensors["step_ids"][b, column] = turns[position]
            tensors["rollout_log_probs"][b, column] = log_probs[position]
    whole = [row.trajectory for row in rows]
    columns: dict[str, list] = {
        "uid": [t.spec.uid for t in whole],
        "traj_uid": [t.spec.traj_uid for t in whole],
        "data_source": [t.spec.task["data_source"] for t in whole],
        "task_id": [t.spec.task["task_id"] for t in whole],
        "anchor_obs": [[turn.anchor for turn in row.turns] for row in rows],
        "is_action_valid": [[turn.is_action_valid for turn in row.turns] for row in rows],
        "step_rewards": [[turn.reward for turn in row.turns] for row in rows],
        "step_index": [[turn.step for turn in row.turns] for row in rows],
        "episode_rewards": [float(t.reward) for t in whole],
        "episode_lengths": [len(t.turns) for t in whole],
        "won": [t.won for t in whole],
        "aborted": [t.aborted is not None for t in whole],
        "truncated": [t.truncated or "" for t in whole],
        "steps": [[make_turn_record(turn) for turn in row.turns] for row in rows],
    }
    images = [{"image": [t.image for t in row.turns if t.image is not None]} for row in rows]
    optional = {
        "multi_modal_data": (images, any(image["image"] for image in images)),
        REWARD_PARTS: ([t.reward_parts for t in whole], any(t.reward_parts for t in whole)),
        INFO_NUMBERS: ([t.info_numbers for t in whole], any(t.info_numbers for t in whole)),
        ANSWER: ([t.answer for t in whole], any(t.answer is not None for t in whole)),
    }
    return tensors, columns | {key: values for key, (values, used) in optional.items() if used}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("options", ["", "levels", "images", "numbers", "levels images numbers"])
@pytest.mark.parametrize("seed", range(4))
def test_joined_rows_are_those_of_one_process(store, history, options, seed):
    draw = random.Random(f"{history}{options}{seed}")
    whole = [make_trajectory(draw, history, index, set(options.split())) for index in range(24)]
    apart = collect_apart(whole, store, draw)
    # Training drops failed trajectories; validation keeps all.
    for on_abort in (None, "drop_group", "keep_rest"):
        kept, kept_apart = whole, apart
        if on_abort is not None:
            kept, counts = select_usable_trajectories(whole, on_abort)
            kept_apart, counts_apart = select_usable_trajectories(apart, on_abort)
            assert counts_apart == counts
        tensors, columns = pack_at_once(kept)
        for data in (pack(kept_apart), pack(kept)):
            assert set(data.tensor_keys()) == set(tensors)
            for key, tensor in tensors.items():
                assert data.batch[key].dtype == tensor.dtype and data.batch[key].equal(tensor), key
            assert set(data.non_tensor_batch) == set(columns)
            for key, values in columns.items():
                assert data.non_tensor_batch[key].tolist() == values, key
        if "levels" in options:
            assert build_row_turns(build_rows(kept_apart)) == build_row_turns(build_rows(kept))
    loaded = load_trajectories(apart)
    assert [(t.spec, t.turns) for t in loaded] == [(t.spec, t.turns) for t in whole]
    assert [[x.token_ids for x in t.ledgers] for t in loaded] == [
        [x.token_ids for x in t.ledgers] for t in whole
    ]


@pytest.mark.parametrize("options", ["", "levels"])
def test_metrics_of_summaries_are_those_of_trajectories(store, options):
    draw = random.Random(options)
    whole = [make_trajectory(draw, "append", index, {options}) for index in range(30)]
    apart = collect_apart(whole, store, draw)
    assert compute_rollout_metrics(apart, 2.0) == compute_rollout_metrics(whole, 2.0)
    assert compute_episode_metrics(apart) == compute_episode_metrics(whole)
    assert split_rollout_time(apart, 2.0, 1.0) == split_rollout_time(whole, 2.0, 1.0)
    assert not any(turn.observation or turn.response for t in apart for turn in t.turns)
    assert all(t.ledgers == [] and "text" not in t.spec.task for t in apart)


def test_texts_are_not_read_before_they_are_needed(store, monkeypatch):
    draw = random.Random(0)
    whole = [make_trajectory(draw, "append", index, {"levels"}) for index in range(9)]
    apart = collect_apart(whole, store, draw)
    monkeypatch.setattr(stored_trajectories, "ray_get", None)
    data = pack(apart)
    records = data.non_tensor_batch["steps"]
    # Shard, send and select them, and add credit.
    credited = object_array(
        [CreditedTurns(row, []) for row in send(data)[[2, 1]].non_tensor_batch["steps"]]
    )
    assert all(isinstance(row, StoredTurnRecords) for row in records)
    assert [row.records.row for row in credited] == [records[2].row, records[1].row]
    indices = [row.records.trajectory.index for row in credited]
    assert indices == [records[2].trajectory.index, records[1].trajectory.index]
    monkeypatch.setattr(stored_trajectories, "ray_get", store.fetch)
    assert credited[0].records == records[2]


class FakeCollector:
    """Actor handle of a collector in this process. ``dies`` makes its results errors."""

    def __init__(self, store: Store, dies: bool = False) -> None:
        self.encode_rows = SimpleNamespace(remote=self._encode)
        self.store = store
        self.dies = dies
        self.num_rows = 0

    def _encode(self, values: DataProto, encode: Any) -> str:
        ref = self.store.put(None)
        self.store[ref] = WorkerDiedError("killed")
        if not self.dies:
            self.num_rows += len(values)
            self.store[ref] = send(encode_stored_rows(send(values), send(encode), Words()))
        return ref


def add_computed_columns(data: DataProto, draw: random.Random) -> None:
    """Add what a training step adds, and let it change what it may change."""
    generator = torch.Generator().manual_seed(draw.randrange(99))
    for key in ("advantages", "entropys", "old_log_probs", CORRECTION_WEIGHTS, "values"):
        data.batch[key] = torch.randn(data.batch["responses"].shape, generator=generator)
    data.non_tensor_batch["aborted"] = data.non_tensor_batch["aborted"].copy()
    data.non_tensor_batch["aborted"][0] = True


def add_credit(data: DataProto) -> None:
    context = ScoredThought(2, "why", 1, 0.5, False, ScoreResult(0, 2, -1.0, 0.5, 0.3, 0.2, 4))
    data.non_tensor_batch["steps"] = object_array(
        [
            CreditedTurns(row, [((context,), 0.1 * step, 0.01) for step in steps])
            for row, steps in zip(
                data.non_tensor_batch["steps"], data.non_tensor_batch["step_index"], strict=True
            )
        ]
    )


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("options", ["", "levels"])
@pytest.mark.parametrize("dying", [(), (1,), (0, 1, 2)])
def test_collectors_write_the_lines_of_the_driver(store, history, options, dying, monkeypatch):
    monkeypatch.setattr(stored_trajectories, "MAX_ENCODED_ROWS", 7)
    draw = random.Random(f"{history}{options}")
    whole = [make_trajectory(draw, history, index, {options}) for index in range(24)]
    apart = collect_apart(whole, store, draw)
    # Without the longest trajectory, the batch is narrower than the rows of its collector.
    longest = max(whole, key=lambda t: max((len(ledger) for ledger in t.ledgers), default=0))
    apart = [t for t in apart if t.spec.index != longest.spec.index]
    whole = [t for t in whole if t is not longest]
    local, data = pack(whole), pack(apart)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    for table in (local, data):
        add_computed_columns(table, random.Random(1))
        if options:
            add_credit(table)
        table.reorder(order)
    collectors = [FakeCollector(store, number in dying) for number in range(3)]
    for encode, format_lines in (
        (ENCODE_ROLLOUTS, format_rollout_lines),
        (ENCODE_TOKENS, format_token_lines),
    ):
        expected = [f"{jsonl.dumps(line)}\n".encode() for line in format_lines(local, Words())]
        lines = [
            bytes(line) for line in encode_rows_on_collectors(data, encode, collectors, Words())
        ]
        assert lines == expected
        here = [
            bytes(line) for line in encode_rows_on_collectors(local, encode, collectors, Words())
        ]
        assert here == expected
    num_encoded = sum(collector.num_rows for collector in collectors)
    assert (num_encoded == 2 * len(data)) == (not dying) and (num_encoded == 0) == (len(dying) == 3)


def test_retokenized_rows_are_refused_unless_allowed(store):
    draw = random.Random(3)
    whole = [make_trajectory(draw, "append", index, set()) for index in range(6)]
    bad = next(t for t in whole if t.turns)
    bad.ledgers[0].append([5], SegmentKind.AGENT, turn=9, retokenized=True)
    apart = collect_apart(whole, store, draw)
    with pytest.raises(ValueError):
        pack(apart)
    assert len(pack(apart, allow_retokenized=True)) == 6
    others = [t for t in apart if t.spec.index != bad.spec.index]
    assert len(pack(others)) == 5


def test_steps_equal_their_records(store):
    turn = Turn(0, "o", "o", 0, 1, 2, "r", StopReason.STOP)
    ledger = TokenLedger()
    ledger.append([1], SegmentKind.PROMPT)
    ledger.append([2], SegmentKind.AGENT, logprobs=[-1.0])
    spec = RolloutSpec(0, {"task_id": "t", "data_source": "d"}, "g", "g/0", 0)
    source = StoredTrajectories(store.put([Trajectory(spec, [ledger], [turn])]), 0)
    steps = StoredTurnRecords(TrajectoryReference(source, 0), 0)
    assert steps == [make_turn_record(turn)] and steps != [] and len(steps) == 1
    assert steps[0] == make_turn_record(turn) and steps[:0] == []
