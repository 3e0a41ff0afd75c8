"""A panel whose tasks are played several times is measured by pass@k, best@k and maj@k."""

from types import SimpleNamespace

import pytest

from verl.protocol import DataProto
from verl.trainer.ppo.metrics import first_rows, last_actions, repeated_plays

# Task, trajectory, won, return, actions of the row's steps by number.
PLAYS = [
    ("t", "a", True, 1.0, {0: "look", 1: "open"}),
    ("t", "b", False, 0.0, {1: "leave"}),
    ("t", "b", False, 0.0, {0: "look"}),  # an earlier step of it, in a later row
    ("t", "c", True, 0.5, {0: "open"}),
    ("u", "d", False, 0.0, {0: "x"}),
    ("u", "e", False, -1.0, {}),
    ("u", "f", False, 0.0, {0: "x"}),
]


def panel(plays) -> DataProto:
    names = ("uid", "traj_uid", "won", "episode_rewards")
    columns = {name: [play[i] for play in plays] for i, name in enumerate(names)}
    columns["steps"] = [
        [SimpleNamespace(step=step, action=action) for step, action in play[4].items()]
        for play in plays
    ]
    return DataProto.from_dict({}, columns)


def test_tasks_of_three_plays_by_hand():
    batch = panel(PLAYS)
    assert last_actions(batch) == {"a": "open", "b": "leave", "c": "open", "d": "x", "f": "x"}
    found = repeated_plays(batch, first_rows(batch))
    assert found == pytest.approx(
        {
            "val/pass@1": (2 / 3 + 0) / 2,
            "val/best@1": (0.5 - 1 / 3) / 2,
            "val/maj@1": (2 / 3 + 0) / 2,
            "val/pass@2": (1 + 0) / 2,
            "val/best@2": ((1 + 1 + 0.5) / 3 + 0) / 2,
            "val/maj@2": ((0.5 + 1 + 0.5) / 3 + 0) / 2,
            "val/pass@3": (1 + 0) / 2,
            "val/best@3": (1 + 0) / 2,
            "val/maj@3": (1 + 0) / 2,
        }
    )


def test_tasks_that_were_played_once_say_nothing_of_it():
    batch = panel([PLAYS[0], PLAYS[4]])
    assert repeated_plays(batch, first_rows(batch)) == {}
