"""Groups that go on while others are learned from: who is handed out when, and that nobody is
lost.
"""

import asyncio
import random
from collections import Counter

import pytest

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.partial_rollouts import GroupsInFlight, PartialRollouts
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory
from tests.helpers.play import make_config, make_world
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_tokenizer


class Clock:
    """Time that passes when everybody waits: a coroutine of n ticks is done after n turns."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def last(self, name: str, ticks: int) -> str:
        for _ in range(ticks):
            await asyncio.sleep(0)
        self.ended.append(name)
        return name


def test_whoever_is_done_first_is_handed_out_and_the_others_go_on():
    async def play() -> tuple[list[str], list[str], list[str]]:
        groups: GroupsInFlight[str] = GroupsInFlight(patience=9)
        clock = Clock()
        for name, ticks in (("slow", 200), ("a", 2), ("b", 4)):
            groups.start(name, clock.last(name, ticks))
        first = await groups.take_finished(keep=1)
        groups.start("c", clock.last("c", 3))
        second = await groups.take_finished(keep=1)
        return first, second, await groups.take_finished(keep=0)

    assert asyncio.run(play()) == (["a", "b"], ["c"], ["slow"])


def test_exactly_as_many_as_began_are_handed_out_the_oldest_first():
    async def play() -> tuple[list[str], list[str]]:
        groups: GroupsInFlight[str] = GroupsInFlight(patience=9)
        for name in "abcde":
            groups.start(name, Clock().last(name, 1))
        await asyncio.sleep(0.01)  # all are done
        return await groups.take_finished(keep=2), await groups.take_finished(keep=0)

    assert asyncio.run(play()) == (["a", "b", "c"], ["d", "e"])


def test_what_has_waited_long_is_waited_for():
    async def play() -> list[list[str]]:
        groups: GroupsInFlight[str] = GroupsInFlight(patience=2)
        clock = Clock()
        groups.start("slow", clock.last("slow", 2000))
        taken = []
        for step in range(3):
            groups.start(f"quick {step}", clock.last(f"quick {step}", 1))
            taken.append(await groups.take_finished(keep=1))
        await groups.cancel_all()
        return taken

    assert asyncio.run(play()) == [["quick 0"], ["quick 1"], ["slow"]]


def test_slow_tasks_keep_their_share():
    """Three in ten groups are thirty times as slow: what is handed out has as many of them."""

    async def play() -> tuple[Counter[bool], Counter[bool]]:
        groups: GroupsInFlight[str] = GroupsInFlight(patience=8)
        draw = random.Random(0)
        clock = Clock()
        began: Counter[bool] = Counter()
        came: Counter[bool] = Counter()
        for step in range(60):
            for place in range(16 + (4 if step == 0 else 0)):
                slow = draw.random() < 0.3
                began[slow] += 1
                name = f"{step} {place} {'slow' if slow else 'quick'}"
                groups.start(name, clock.last(name, 90 if slow else 3))
            taken = await groups.take_finished(keep=4)
            assert len(taken) == 16
            came.update("slow" in name for name in taken)
        await groups.cancel_all()
        return began, came

    began, came = asyncio.run(play())
    assert abs(came[True] / came.total() - began[True] / began.total()) < 0.02


def test_a_group_that_fails_ends_the_others():
    ended = []

    async def wait() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("wait")
        return ""

    async def fail() -> str:
        raise RuntimeError("the engine is gone")

    async def play() -> None:
        groups: GroupsInFlight[str] = GroupsInFlight(patience=2)
        groups.start("wait", wait())
        groups.start("fail", fail())
        with pytest.raises(ValueError, check=mentions("'wait'")):
            groups.start("wait", wait())
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await groups.take_finished(keep=1)
        assert not len(groups)

    asyncio.run(play())
    assert ended == ["wait"]


# ---- as the trainer's process knows them ---------------------------------------------------------


def handed_out(uid: str) -> Trajectory:
    return Trajectory(RolloutSpec(0, {}, uid, f"{uid}/0", 0, 0))


def test_what_is_under_way_survives_a_resume():
    envs = make_envs(make_config(n=2))[0]
    groups = PartialRollouts(2)
    batch = groups.add_groups(envs.gen_batch(1, 3), envs)
    uids = list(dict.fromkeys(batch.non_tensor_batch["uid"]))
    assert len(uids) == 5 and uids[:3] == ["train-1-0-0", "train-1-0-1", "train-1-0-2"]
    groups.remove_returned([handed_out(uid) for uid in (uids[0], uids[2], uids[3])])
    assert groups.group_names() == [f"{uids[1]}@3", f"{uids[4]}@3"]

    resumed = PartialRollouts(2)
    resumed.resume(groups.group_names())
    assert resumed.group_names() == groups.group_names()
    # Another number of groups a step changes nothing for those that were begun.
    again = resumed.add_groups(envs.gen_batch(2, 4), envs)
    kept = [
        row for row in range(len(batch)) if batch.non_tensor_batch["uid"][row] in (uids[1], uids[4])
    ]
    for column in ("uid", "task_id", "env_seed", "member"):
        assert (
            again.non_tensor_batch[column][8:].tolist()
            == batch.non_tensor_batch[column][kept].tolist()
        )
    assert len(again) == 12  # nothing beside these: as many are under way as should be


def test_every_step_gets_as_many_groups_as_it_asks_for_and_none_twice():
    tokenizer = make_tiny_tokenizer()
    config = make_config(n=2)
    config.env.rollout.carry_over = 2
    group, envs, _ = make_world(tokenizer, config)
    collector = TrajectoryCollector(config, tokenizer)
    seen: list[str] = []
    try:
        for step in (1, 2, 3):
            data = collector.multi_turn_loop(envs.gen_batch(step, 3), group, envs)
            assert len(data) == 6
            assert len(collector.state()["under_way"]) == 2
            seen += data.non_tensor_batch["traj_uid"].tolist()
    finally:
        collector.close()
    assert len(set(seen)) == len(seen) == 18
    under_way = {name.partition("@")[0] for name in collector.state()["under_way"]}
    assert not {uid.split("/")[0] for uid in seen} & under_way


@pytest.mark.parametrize("number", [0, 1])
def test_fewer_groups_go_on_after_a_resume_that_asks_for_fewer(number, caplog):
    groups = PartialRollouts(number)
    groups.resume(["train-1-0-1@3", "train-1-4-1@3"])
    assert groups.group_names() == ["train-1-0-1@3"][:number]
    assert "train-1-4-1@3" in caplog.text
