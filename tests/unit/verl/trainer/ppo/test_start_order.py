"""Who comes first where engines and training ranks share GPUs: nobody measures what another one is
about to take.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.trainer_fakes import Group
from verl.trainer.ppo import resources
from verl.trainer.ppo.resources import ResourcePoolManager, Role, TrainingWorkers


class Loading(Group):
    """A group that notes when it is there, when it begins to load, and when it has loaded."""

    def __init__(self, heard: list[Any], name: str) -> None:
        super().__init__(heard, name)
        self.calls.append(f"{name} is there")

    def submit(self, method: str, *_args: Any, **_kwargs: Any) -> Any:
        self.calls.append(f"{self.name}: {method}")
        return SimpleNamespace(get=lambda: self.calls.append(f"{self.name}: loaded"))

    def compute_ref_log_prob(self, data: Any, /) -> Any:
        raise NotImplementedError(data)


@pytest.fixture
def start(monkeypatch):
    """Start an actor, a reference and an engine; what happened, and the workers."""

    def run(
        use_gpu: bool, shared: bool = False, engines: str = "pool"
    ) -> tuple[list[Any], TrainingWorkers]:
        heard: list[Any] = []
        monkeypatch.setattr(
            resources, "call_engines", lambda _engines, *call: heard.append(("engine", *call))
        )
        monkeypatch.setattr(
            resources,
            "RayWorkerGroup",
            lambda _pool, _spec, name_prefix: Loading(heard, name_prefix),
        )
        roles = (Role.Actor,) if shared else (Role.Actor, Role.RefPolicy)
        pool: Any = None
        places = dict.fromkeys(roles, "pool") | {Role.Rollout: engines}
        pools = ResourcePoolManager({}, places, use_gpu, resource_pool_dict={"pool": pool})
        housed = ["actor", "ref"] if shared else []
        specs: Any = dict.fromkeys(roles, SimpleNamespace(role_names=housed))
        return heard, TrainingWorkers.start(specs, pools, ["engine"])

    return run


def test_on_gpus_engines_measure_alone_and_groups_load_one_after_another(start):
    heard, workers = start(use_gpu=True)
    assert heard == [
        ("engine", "wait_until_ready"),
        ("engine", "sleep", 2),
        "actor is there",
        "ref is there",
        "actor: init_model",
        "actor: loaded",
        "ref: init_model",
        "ref: loaded",
        ("engine", "wait_until_ready"),
    ]
    heard.clear()
    workers._wake_part("weights")
    assert heard == [("engine", "wake", "weights")], "the first weights wake them"


def test_engines_on_gpus_of_their_own_load_while_the_groups_do_and_never_sleep(start):
    heard, workers = start(use_gpu=True, engines="their own")
    assert heard[:2] == ["actor is there", "ref is there"] and heard[-1] == (
        "engine",
        "wait_until_ready",
    )
    heard.clear()
    workers.sleep_engines()
    workers._wake_part("weights")
    assert heard == []


def test_on_cpus_engines_load_while_the_groups_do(start):
    heard, workers = start(use_gpu=False)
    assert heard == [
        "actor is there",
        "ref is there",
        "actor: init_model",
        "actor: loaded",
        "ref: init_model",
        "ref: loaded",
        ("engine", "wait_until_ready"),
    ]
    heard.clear()
    workers._wake_part("weights")
    assert heard == []


def test_actor_and_reference_may_share_processes(start):
    heard, workers = start(use_gpu=False, shared=True)
    assert heard[:3] == ["actor is there", "actor is there", "ref is there"], "a group of two roles"
    assert heard[3:] == [
        "actor: init_model",
        "actor: loaded",
        "ref: init_model",
        "ref: loaded",
        ("engine", "wait_until_ready"),
    ]
    assert (workers.actor_group.name, workers.reference_group.name) == ("actor", "ref")
