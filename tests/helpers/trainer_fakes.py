"""Fakes of all objects that the trainer uses. They record their calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch

from tests.helpers.number_line_world import make_config
from verl.models.forward_kind import ForwardSettings
from verl.names import RolloutOverlap
from verl.protocol import DataProto, object_array
from verl.records import WrittenFiles
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

ROWS = 4
WIDTH = 3


def make_trainer_rows(meta_info: dict[str, Any] | None = None) -> DataProto:
    """Return two trajectories of two rows each: the first is a success, the second is not."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    tensors = {
        "prompts": torch.zeros(ROWS, 2, dtype=torch.long),
        "responses": torch.zeros(ROWS, WIDTH, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(ROWS, 2, dtype=torch.long), mask], dim=1),
        "response_mask": mask,
        "rollout_log_probs": torch.zeros(ROWS, WIDTH),
    }
    columns = {
        "uid": ["t1", "t1", "t2", "t2"],
        "traj_uid": ["a", "a", "b", "b"],
        "won": [True, True, False, False],
        "episode_rewards": [1.0, 1.0, 0.0, 0.0],
        "episode_lengths": [2, 2, 2, 2],
        "aborted": [False] * ROWS,
        "data_source": ["line"] * ROWS,
        "steps": [[] for _ in range(ROWS)],
    }
    return DataProto.from_dict(tensors, columns, meta_info)


class LocalHandle:
    """Imitates the Ray handle of a rollout worker; the reference of a call is the call itself."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: (self.worker, name, args))


class Group:
    """Group of training workers: actor, reference or critic."""

    world_size = 1

    def __init__(self, calls: list[Any], name: str) -> None:
        self.calls = calls
        self.name = name
        self.weights: list[float] = []

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(method, args, kwargs)

    def spawn(self, roles: Iterable[str]) -> dict[str, Self]:
        return {role: type(self)(self.calls, role) for role in roles}

    def call_for_refs(self, method: str, /, *_args: object) -> list[Any]:
        return [method]

    def get_forward_settings(self) -> list[ForwardSettings]:
        return [ForwardSettings(prefix_tree="auto" if self.name == "actor" else True)]

    def compute_log_prob(self, data: DataProto, /) -> DataProto:
        return DataProto.from_dict({"old_log_probs": torch.zeros(len(data), WIDTH)})

    def compute_values(self, data: DataProto, /) -> DataProto:
        self.calls.append("values")
        return DataProto.from_dict({"values": torch.zeros(len(data), WIDTH)})

    def update_actor(self, data: DataProto, /) -> DataProto:
        return self._update(data, "update_actor")

    def update_critic(self, data: DataProto, /) -> DataProto:
        return self._update(data, "update_critic")

    def _update(self, data: DataProto, method: str) -> DataProto:
        self.calls.append(method)
        self.shares = data.batch["row_shares"].tolist()
        return DataProto(meta_info={"metrics": {f"{self.name}/loss": [1.0, 2.0], "lr": 0.5}})

    def save_checkpoint(self, directory: str, /) -> None:
        raise NotImplementedError(directory)

    def written_files(self) -> list[WrittenFiles | None]:
        raise NotImplementedError

    def load_checkpoint(self, directory: str, /) -> None:
        raise NotImplementedError(directory)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        raise NotImplementedError(timeout_s)


class LocalActorGroup(Group):
    """Group of one actor worker in this process; references are as in ``LocalHandle``."""

    def __init__(self, worker: Any) -> None:
        super().__init__([], "actor")
        self.worker = worker

    def call_for_refs(self, method: str, /, *args: object) -> list[Any]:
        return [(self.worker, method, args)]


class Workers:
    """Training workers that give all tokens the same score and record their calls."""

    data_parallel_size = 1
    has_reference = False
    actor_forward = ForwardSettings(prefix_tree="auto")
    critic_forward = ForwardSettings()

    def __init__(self, engines: Sequence[Any] = (), with_critic: bool = False) -> None:
        self.calls: list[Any] = []
        self.rollout_workers = engines
        self.actor_group = Group(self.calls, "actor")
        self.critic_group = Group(self.calls, "critic") if with_critic else None

    def compute_log_prob(self, data: DataProto) -> DataProto:
        shape = data.batch["responses"].shape
        scores = {"old_log_probs": torch.zeros(shape), "entropys": torch.zeros(shape)}
        return DataProto.from_dict(scores)

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        raise NotImplementedError(data)

    def compute_values(self, data: DataProto) -> DataProto:
        assert self.critic_group is not None
        return self.critic_group.compute_values(data)

    def pop_engine_metrics(self) -> dict[str, float]:
        self.calls.append("metrics")
        return {}

    def sleep_engines(self) -> None:
        self.calls.append("sleep")

    def wake_engines(self) -> None:
        self.calls.append("wake")

    def sync_weights(self, version: int, is_updated: bool = False) -> dict[str, float]:
        self.calls.append(("sync", version, "updated") if is_updated else ("sync", version))
        return {}

    def save_checkpoint(self, directory: Path) -> Callable[[], list[WrittenFiles]]:
        self.calls.append(("save", directory))
        return list

    def load_checkpoint(self, directory: Path) -> None:
        self.calls.append(("load", directory))


class Tasks:
    """Ten tasks whose content is not used."""

    panel_hash = "panel of today"

    def __init__(self) -> None:
        self.task_list = list(range(10))

    def gen_batch(self, step: int, batch_size: int) -> DataProto:
        return DataProto(meta_info={"global_step": step, "tasks asked for": batch_size})

    def panel_batch(self) -> DataProto:
        return DataProto(meta_info={"panel": True})


class Collector:
    """Collector that always returns the same rows."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.groups_under_way: list[str] = []

    def multi_turn_loop(
        self, gen_batch: DataProto, actor_rollout_wg: Any, envs: Tasks, is_train: bool = True
    ) -> DataProto:
        step = gen_batch.meta_info["global_step"]
        # Only the engines are passed: the trainer keeps the training workers.
        assert not hasattr(actor_rollout_wg, "compute_log_prob") and len(envs.task_list) == 10
        self.calls.append(("play" if is_train else "panel", step))
        return make_trainer_rows({"timing": {"env": 1.0}, "metrics": {"rollout/aborted": 0.0}})

    def greedy_loop(self, gen_batch: DataProto, actor_rollout_wg: Any, envs: Tasks) -> DataProto:
        raise NotImplementedError(gen_batch, actor_rollout_wg, envs)

    def convert_scores_to_estimator_inputs(self, data: DataProto) -> DataProto:
        raise NotImplementedError(data)

    def state(self) -> dict[str, Any]:
        return {"under_way": self.groups_under_way}

    def resume(self, state: Mapping[str, Any]) -> None:
        self.groups_under_way = list(state.get("under_way", []))


class Journal:
    """Journal that records its calls in ``calls``, and metrics by step."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.metrics: dict[int, dict[str, float]] = {}

    def open(
        self,
        resume_step: int | None,
        total_steps: int,
        keeps_later_steps: bool = False,
    ) -> None:
        self.calls.append(("open", resume_step, total_steps))
        self.keeps_later_steps = keeps_later_steps

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self.calls.append(("log", step))
        self.metrics[step] = metrics

    def log_rollouts(self, step: int, batch: DataProto, validation: bool = False) -> None:
        assert len(batch) == ROWS
        self.calls.append(("panel rollouts" if validation else "rollouts", step))

    def flush(self) -> None:
        self.calls.append("flush")

    def finish_run(self) -> None:
        self.calls.append("finish")


class Checkpoints:
    """Checkpoints in memory.

    ``find_latest_valid`` returns ``newest``. ``waited`` is True if ``wait`` was called after the
    last save. ``begun_at`` is the step after which checkpoints were set aside.
    """

    waited = False
    begun_at: int | None = None

    def __init__(self, newest: Path | None = None, state: Mapping[str, Any] | None = None) -> None:
        self.newest = newest
        self.state = dict(state or {})

    def save(self, step: int, writer: Callable[[Path], object], state: dict[str, Any]) -> Path:
        path = Path(f"global_step_{step}")
        self.waited = False
        writer(path)
        self.state = state
        return path

    def load_state(self, path: str | Path) -> dict[str, Any]:
        assert Path(path).name.startswith("global_step_")
        return self.state

    def find_latest_valid(self) -> Path | None:
        return self.newest

    def find_checkpoints(self) -> dict[int, Path]:
        return {}

    def set_aside_later_checkpoints(self, step: int) -> None:
        self.begun_at = step

    def wait(self) -> None:
        self.waited = True


class ScoreByOutcome:
    """Puts the return of an episode on the first token of each of its rows."""

    def __call__(self, data: DataProto) -> torch.Tensor:
        scores = torch.zeros(len(data), WIDTH)
        scores[:, 0] = torch.tensor([float(won) for won in data.non_tensor_batch["won"]])
        return scores

    def step_rewards(self, data: DataProto) -> np.ndarray:
        return object_array([[float(won)] for won in data.non_tensor_batch["won"]])


def make_fake_run(
    checkpoints: Checkpoints | None = None,
    with_critic: bool = False,
    steps: int = 4,
    overlap: RolloutOverlap = "off",
) -> tuple[RayPPOTrainer[Tasks], list[Any], Journal]:
    """Return a trainer with fakes, all recorded calls in order, and its journal."""
    config = make_config()
    config.trainer.total_training_steps = steps
    config.trainer.test_freq = -1
    config.trainer.save_freq = 0
    config.trainer.critic_warmup = 0
    config.trainer.val_before_train = False
    config.trainer.val_only = False
    config.trainer.resume_mode = "auto"
    config.trainer.rollout_overlap = overlap
    config.data.train_batch_size = 2
    workers: Any = Workers(with_critic=with_critic)
    journal: Any = Journal(workers.calls)
    checkpoint_manager: Any = checkpoints or Checkpoints()
    trainer = RayPPOTrainer(
        config=config,
        workers=workers,
        collector=Collector(workers.calls),
        envs=Tasks(),
        val_envs=Tasks(),
        reward_fn=ScoreByOutcome(),
        journal=journal,
        checkpoints=checkpoint_manager,
    )
    return trainer, workers.calls, journal
