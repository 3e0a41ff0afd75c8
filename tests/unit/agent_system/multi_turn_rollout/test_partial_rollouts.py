"""Partial rollouts: the order in which groups are returned, and that no group is lost."""

import asyncio
import random
from collections import Counter

import pytest

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.partial_rollouts import GroupsInFlight, PartialRollouts
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory
from tests.helpers.number_line_world import make_config, make_world
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.utils.saved_state import InvalidStateError


class Clock:
    """Coroutines that end after n turns of the event loop, in place of time."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def wait_ticks(self, name: str, ticks: int) -> str:
        for _ in range(ticks):
            await asyncio.sleep(0)
        self.ended.append(name)
        return name


def test_finished_groups_are_returned_and_others_continue():
    async def take_three_times() -> tuple[list[str], list[str], list[str]]:
        groups: GroupsInFlight[str] = GroupsInFlight(max_calls_waited=9)
        clock = Clock()
        for name, ticks in (("slow", 200), ("a", 2), ("b", 4)):
            groups.start(name, clock.wait_ticks(name, ticks))
        first = await groups.take_finished(max_unfinished_groups=1)
        groups.start("c", clock.wait_ticks("c", 3))
        second = await groups.take_finished(max_unfinished_groups=1)
        return first, second, await groups.take_finished(max_unfinished_groups=0)

    assert asyncio.run(take_three_times()) == (["a", "b"], ["c"], ["slow"])


def test_groups_are_returned_oldest_first_up_to_the_number():
    async def take_twice() -> tuple[list[str], list[str]]:
        groups: GroupsInFlight[str] = GroupsInFlight(max_calls_waited=9)
        for name in "abcde":
            groups.start(name, Clock().wait_ticks(name, 1))
        await asyncio.sleep(0.01)  # all are done
        return await groups.take_finished(max_unfinished_groups=2), await groups.take_finished(
            max_unfinished_groups=0
        )

    assert asyncio.run(take_twice()) == (["a", "b", "c"], ["d", "e"])


def test_group_past_the_patience_is_waited_for():
    async def take_three_times() -> list[list[str]]:
        groups: GroupsInFlight[str] = GroupsInFlight(max_calls_waited=2)
        clock = Clock()
        groups.start("slow", clock.wait_ticks("slow", 2000))
        taken = []
        for step in range(3):
            groups.start(f"quick {step}", clock.wait_ticks(f"quick {step}", 1))
            taken.append(await groups.take_finished(max_unfinished_groups=1))
        await groups.cancel_all()
        return taken

    assert asyncio.run(take_three_times()) == [["quick 0"], ["quick 1"], ["slow"]]


def test_slow_groups_keep_their_share():
    """Three in ten groups take thirty times as long, and so do three in ten returned groups."""

    async def count_groups() -> tuple[Counter[bool], Counter[bool]]:
        groups: GroupsInFlight[str] = GroupsInFlight(max_calls_waited=8)
        draw = random.Random(0)
        clock = Clock()
        started: Counter[bool] = Counter()
        returned: Counter[bool] = Counter()
        for step in range(60):
            for number in range(16 + (4 if step == 0 else 0)):
                slow = draw.random() < 0.3
                started[slow] += 1
                name = f"{step} {number} {'slow' if slow else 'quick'}"
                groups.start(name, clock.wait_ticks(name, 90 if slow else 3))
            taken = await groups.take_finished(max_unfinished_groups=4)
            assert len(taken) == 16
            returned.update("slow" in name for name in taken)
        await groups.cancel_all()
        return started, returned

    started, returned = asyncio.run(count_groups())
    assert abs(returned[True] / returned.total() - started[True] / started.total()) < 0.02


def test_failed_group_cancels_the_others():
    ended = []

    async def wait() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("wait")
        return ""

    async def fail() -> str:
        raise RuntimeError("the engine is gone")

    async def run() -> None:
        groups: GroupsInFlight[str] = GroupsInFlight(max_calls_waited=2)
        groups.start("wait", wait())
        groups.start("fail", fail())
        with pytest.raises(ValueError, check=mentions("'wait'")):
            groups.start("wait", wait())
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await groups.take_finished(max_unfinished_groups=1)
        assert not len(groups)

    asyncio.run(run())
    assert ended == ["wait"]


# ---- in the trainer's process -------------------------------------------------------------------


def returned(uid: str) -> Trajectory:
    return Trajectory(RolloutSpec(0, {}, uid, f"{uid}/0", 0))


def test_groups_in_flight_survive_a_resume():
    envs = make_envs(make_config(n=2))[0]
    groups = PartialRollouts(2)
    batch = groups.add_groups(envs.gen_batch(1, 3), envs)
    uids = list(dict.fromkeys(batch.non_tensor_batch["uid"]))
    assert len(uids) == 5 and uids[:3] == ["train-1-0-0", "train-1-0-1", "train-1-0-2"]
    groups.remove_returned([returned(uid) for uid in (uids[0], uids[2], uids[3])])
    assert groups.group_names() == [f"{uids[1]}@3", f"{uids[4]}@3"]

    resumed = PartialRollouts(2)
    resumed.resume(groups.group_names())
    assert resumed.group_names() == groups.group_names()
    # A different number of groups per step leaves the started groups unchanged.
    resumed_batch = resumed.add_groups(envs.gen_batch(2, 4), envs)
    expected_rows = [
        row for row in range(len(batch)) if batch.non_tensor_batch["uid"][row] in (uids[1], uids[4])
    ]
    for column in ("uid", "task_id", "env_seed", "member"):
        assert (
            resumed_batch.non_tensor_batch[column][8:].tolist()
            == batch.non_tensor_batch[column][expected_rows].tolist()
        )
    assert len(resumed_batch) == 12  # no further group: the number in flight is already reached


def test_every_step_gets_its_number_of_new_groups():
    tokenizer = make_tiny_tokenizer()
    config = make_config(n=2)
    config.env.rollout.carry_over = 2
    group, envs, _ = make_world(tokenizer, config)
    collector = TrajectoryCollector(config, tokenizer)
    uids: list[str] = []
    try:
        for step in (1, 2, 3):
            data = collector.multi_turn_loop(envs.gen_batch(step, 3), group, envs)
            assert len(data) == 6
            assert len(collector.state()["under_way"]) == 2
            uids += data.non_tensor_batch["traj_uid"].tolist()
    finally:
        collector.close()
    assert len(set(uids)) == len(uids) == 18
    in_flight = {name.partition("@")[0] for name in collector.state()["under_way"]}
    assert not {uid.split("/")[0] for uid in uids} & in_flight


@pytest.mark.parametrize(
    "names",
    [
        *(None, "train-1-0-1@3", {"train-1-0-1@3": 1}, [3], [None]),
        *([name] for name in ("", "train", "train-1-0-1", "train-1-0@3", "train-1-0-x@3")),
        *([name] for name in ("train-1-0-1@", "train-1-0-1@3\n", "../1-0-1@3", "train-1-0-1@-3")),
    ],
)
def test_invalid_names_of_a_checkpoint_are_refused(names):
    with pytest.raises(InvalidStateError, check=mentions("under_way", "train-3-0-5@16")):
        PartialRollouts(2).resume(names)


@pytest.mark.parametrize("number", [0, 1])
def test_resume_with_fewer_groups_drops_the_rest(number, caplog):
    groups = PartialRollouts(number)
    groups.resume(["train-1-0-1@3", "train-1-4-1@3"])
    assert groups.group_names() == ["train-1-0-1@3"][:number]
    assert "train-1-4-1@3" in caplog.text
