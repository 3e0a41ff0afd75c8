"""Values of ``info`` that the pool accepts from an environment, and large replies."""

from typing import Any

import numpy as np
import pytest

from agent_system.environments.env import Observation
from agent_system.environments.pool import processes, wire
from agent_system.environments.pool.processes import WorkerProcess
from tests.helpers.refusals import mentions


@pytest.mark.parametrize(
    ("key", "valid", "invalid"),
    [
        ("admissible_actions", [["look"], ("look",), []], ["look", [1], ["\ud83d"], 3]),
        ("situation", ["at the desk", ""], [["desk"], 3, "\ud83d"]),
        ("needed_level", [1, 4, np.int64(2)], [0, 5, "3", 2.0, [3]]),
        ("answer", ["42", ""], [42, ["42"], {"a": 1}, "\ud83d", float("nan")]),
        (
            "reward_parts",
            [{}, {"format": 0.5, "acc": True}, {"steps": np.float32(2), "n": np.int64(3)}],
            [
                *([0.5], 0.5, "acc", {1: 0.5}, {"\ud83d": 0.5}, {"acc": "1"}, {"acc": None}),
                *({"acc": {"a": 1.0}}, {"acc": float("nan")}, {"acc": float("inf")}),
                *({"acc": 10**400}, {"acc": 1j}, {"acc": np.complex64(1)}),
            ],
        ),
        (
            "tool_results",
            [[{"name": "look", "content": "x"}], [{"content": ""}], []],
            ["x", ["x"], [{"name": "look"}], [{"content": 3}], [{"content": "\udcff"}]],
        ),
    ],
)
def test_values_that_prompts_and_metrics_use_are_checked(
    key: str, valid: list[Any], invalid: list[Any]
):
    """An invalid value fails its trajectory. Later it would end the whole run."""
    for value in (None, *valid):
        observation = Observation("x", info={key: value})
        assert wire.check_reset(observation) is observation
        assert wire.check_step((observation, 0.0, False, {}))[0] is observation
    for value in invalid:
        observation = Observation("x", info={key: value})
        for check, result in (
            (wire.check_reset, observation),
            (wire.check_step, (observation, 0.0, False, {})),
        ):
            with pytest.raises(wire.InvalidEnvReplyError, check=mentions(key)):
                check(result)


def test_situation_of_none_is_the_state():
    assert Observation("x", info={"situation": None}).situation == "x"
    assert Observation("x", info={"situation": ""}).situation == ""


class CountedBytes(bytearray):
    """Bytes that count the calls of ``split``. Each call copies all bytes."""

    num_splits = 0

    def split(self, sep=None, maxsplit=-1):
        CountedBytes.num_splits += 1
        return super().split(sep, maxsplit)


def test_reply_in_many_parts_is_split_once_per_line(monkeypatch):
    """A reply of 48 MB arrived in 19 s instead of 0.5 s when each part of it copied all parts."""
    monkeypatch.setattr(CountedBytes, "num_splits", 0)
    monkeypatch.setattr(processes, "bytearray", CountedBytes, raising=False)
    worker = WorkerProcess("module:NAME", {}, lambda *_: None)
    replies = []
    monkeypatch.setattr(worker, "_resolve_reply", replies.append)
    lines = wire.encode({"id": 1, "ok": "x" * 1000}) + wire.encode({"id": 2, "ok": ""})
    for start in range(0, len(lines), 10):
        worker.data_received(lines[start : start + 10])
    assert replies == [{"id": 1, "ok": "x" * 1000}, {"id": 2, "ok": ""}]
    assert CountedBytes.num_splits == 2  # once per line
