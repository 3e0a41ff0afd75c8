"""Start order of engines and training ranks on shared GPUs: no process measures memory that another
is about to allocate."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.trainer_fakes import Group
from verl.trainer.ppo import resources
from verl.trainer.ppo.resources import ResourcePoolManager, Role, TrainingWorkers


class Loading(Group):
    """A group that records its creation, and the start and end of loading."""

    def __init__(self, events: list[Any], name: str) -> None:
        super().__init__(events, name)
        self.calls.append(f"{name} created")

    def submit(self, method: str, *_args: Any, **_kwargs: Any) -> Any:
        self.calls.append(f"{self.name}: {method}")
        return SimpleNamespace(get=lambda: self.calls.append(f"{self.name}: loaded"))

    def compute_ref_log_prob(self, data: Any, /) -> Any:
        raise NotImplementedError(data)


@pytest.fixture
def start(monkeypatch):
    """Start an actor, a reference and an engine. Return the events and the workers."""

    def run(
        use_gpu: bool, shared: bool = False, engines: str = "pool"
    ) -> tuple[list[Any], TrainingWorkers]:
        events: list[Any] = []
        monkeypatch.setattr(
            resources, "call_engines", lambda _engines, *call: events.append(("engine", *call))
        )
        monkeypatch.setattr(
            resources,
            "RayWorkerGroup",
            lambda _pool, _spec, name_prefix: Loading(events, name_prefix),
        )
        roles = (Role.Actor,) if shared else (Role.Actor, Role.RefPolicy)
        pool: Any = None
        pool_names = dict.fromkeys(roles, "pool") | {Role.Rollout: engines}
        pools = ResourcePoolManager({}, pool_names, use_gpu, resource_pool_dict={"pool": pool})
        role_names = ["actor", "ref"] if shared else []
        specs: Any = dict.fromkeys(roles, SimpleNamespace(role_names=role_names))
        return events, TrainingWorkers.start(specs, pools, ["engine"])

    return run


def test_on_shared_gpus_engines_start_first_and_groups_in_turn(start):
    events, workers = start(use_gpu=True)
    assert events == [
        ("engine", "wait_until_ready"),
        ("engine", "sleep", 2),
        "actor created",
        "ref created",
        "actor: init_model",
        "actor: loaded",
        "ref: init_model",
        "ref: loaded",
        ("engine", "wait_until_ready"),
    ]
    events.clear()
    workers._wake_engine_part("weights")
    assert events == [("engine", "wake", "weights")], "the first weights wake the engines"


def test_engines_on_separate_gpus_never_sleep(start):
    events, workers = start(use_gpu=True, engines="separate")
    assert events[:2] == ["actor created", "ref created"] and events[-1] == (
        "engine",
        "wait_until_ready",
    )
    events.clear()
    workers.sleep_engines()
    workers._wake_engine_part("weights")
    assert events == []


def test_on_cpus_engines_start_while_the_groups_load(start):
    events, workers = start(use_gpu=False)
    assert events == [
        "actor created",
        "ref created",
        "actor: init_model",
        "actor: loaded",
        "ref: init_model",
        "ref: loaded",
        ("engine", "wait_until_ready"),
    ]
    events.clear()
    workers._wake_engine_part("weights")
    assert events == []


def test_actor_and_reference_may_share_processes(start):
    events, workers = start(use_gpu=False, shared=True)
    assert events[:3] == ["actor created", "actor created", "ref created"], (
        "one group with two roles"
    )
    assert events[3:] == [
        "actor: init_model",
        "actor: loaded",
        "ref: init_model",
        "ref: loaded",
        ("engine", "wait_until_ready"),
    ]
    assert (workers.actor_group.name, workers.reference_group.name) == ("actor", "ref")
