"""Collector workers as Ray actors: the same plays as in this process, whole groups dealt to two of
them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout import collector_group
from agent_system.multi_turn_rollout.collector_group import CollectorGroup
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from tests.helpers.play import Group, make_config, make_world, walking_policy
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.single_controller.ray import init_ray


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    facts = init_ray(num_cpus=2)
    yield
    if facts["started"]:
        ray.shutdown()


def rows(data) -> list:
    columns = zip(data.non_tensor_batch["traj_uid"], data.non_tensor_batch["steps"], strict=True)
    return [
        (traj, steps, ids)
        for (traj, steps), ids in zip(columns, data.batch["input_ids"].tolist(), strict=True)
    ]


def test_ray_collectors_play_what_one_in_this_process_plays():
    tokenizer = make_tiny_tokenizer()
    config = make_config(levels=True, n=2, num_collectors=2)
    group, envs, _ = make_world(tokenizer, config)
    batch = envs.gen_batch(1, 3)
    here, there = TrajectoryCollector(config, tokenizer), TrajectoryCollector(config, tokenizer)
    engine: Any = (
        ray.remote(ScriptedEngine)
        .options(num_cpus=0)
        .remote(tokenizer, walking_policy(levels=True))
    )
    try:
        expected = here.multi_turn_loop(batch, group, envs)
        found = there.multi_turn_loop(batch, Group([engine]), envs)
        again = there.multi_turn_loop(
            make_envs(config)[1].panel_batch()[:4], Group([engine]), envs, is_train=False
        )
        workers = there._collectors(Group([engine]))
        assert workers._plays_over() == len(expected) + 4
    finally:
        here.close()
        there.close()
    assert rows(found) == rows(expected)
    assert len(again) == 4 and again.non_tensor_batch["won"].all()


@pytest.fixture
def watched(monkeypatch):
    """What two workers return, of which ``a`` is done at the second look and ``b`` at the third,
    and what progress hears; ``broken`` ones raise.
    """

    def watch(*broken: str) -> tuple[Any, list[int]]:
        looks = iter([([], ["a", "b"]), (["a"], ["b"]), (["b"], [])])
        # Plays of earlier calls, 10 of them, are over as well.
        over = iter([10, 11, 13])
        heard: list[int] = []
        names = {"a": "collector-0", "b": "collector-1"}

        def gather(refs: list[str], timeout_s: float, labels: list[str]) -> list[str]:
            assert timeout_s > 0 and labels == [names[ref] for ref in refs]
            if set(refs) & set(broken):
                raise RuntimeError(f"{refs} broke")
            return [f"plays of {ref}" for ref in refs]

        fake = SimpleNamespace(wait=lambda refs, num_returns, timeout: next(looks))
        monkeypatch.setattr(collector_group, "gather", gather)
        monkeypatch.setattr(collector_group, "ray", fake)
        monkeypatch.setattr(CollectorGroup, "_plays_over", lambda self: next(over))
        progress: Any = SimpleNamespace(to=heard.append)
        group = object.__new__(CollectorGroup)
        return CollectorGroup._watched(group, names, 60.0, progress), heard

    return watch


def test_progress_hears_of_the_plays_that_are_over(watched):
    assert watched() == (["plays of a", "plays of b"], [1, 3])


def test_a_worker_that_failed_is_told_while_the_others_play(watched):
    with pytest.raises(RuntimeError, match=r"\['a'\] broke"):
        watched("a")
