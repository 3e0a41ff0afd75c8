"""Environment manager: selects the tasks of each training step. Each task is repeated as a group.

The collector generates the trajectories in its own environments. ``reset``, ``step`` and
``success_evaluator`` run a batch without a collector, for evaluation scripts of verl-agent,
``multi_turn_rollout.first_prompts`` and tests.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import verl
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_registry import (
    build_missing_extra_error,
    get_package,
    read_env_settings,
)
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings
from agent_system.environments.tasks import (
    SEED_MASK,
    TaskSchedule,
    assert_same_start_states,
    check_disjoint_splits,
    check_tasks,
    group_tasks_by_part,
    hash_json,
    select_validation_set,
)
from verl.config.settings.errors import UserError, names_fix
from verl.utils.limits import (
    USER_CODE_ERRORS,
    TimeLimitError,
    describe_error,
    describe_raised_error,
    describe_user_line,
)
from verl.utils.seeds import derive_seed

if TYPE_CHECKING:
    from agent_system.environments.vectorised import LockStepDriver
    from verl.config.schema import PPOConfig
    from verl.protocol import DataProto

TaskGroup = tuple[Task, int, str]  # task, environment seed, uid


class EnvironmentManagerBase:
    """Tasks of one split, and environments for them that are reset and stepped together.

    The rows of a group (uid) have the same task and the same environment seed.
    """

    def __init__(self, config: "PPOConfig", split: str) -> None:
        self.env_config = config.env
        self.shuffle = config.data.shuffle
        self.split = split
        self.settings = read_env_settings(config.env)
        self.package = get_package(config.env.env_name)
        self._driver: LockStepDriver | None = None
        self._tasks_of_last_reset: Sequence[Task] = ()  # one task per row of the batch
        self.group_size = config.env.rollout.n
        tasks = load_tasks(config.env.env_name, self.package, self.settings, split)
        if split == "train":
            tasks = tasks[: config.env.train_tasks]
        if not tasks:
            raise UserError(
                f"environment {config.env.env_name!r} has no {split} tasks; "
                f"its settings: {self.settings!r}",
                "no_rows",
            )
        tasks_by_part = group_tasks_by_part(tasks, self.package.part_weights(self.settings))
        parts_without_tasks = ", ".join(
            repr(name) for name, part_tasks in tasks_by_part.items() if not part_tasks
        )
        if parts_without_tasks:
            raise UserError(
                f"environment {config.env.env_name!r} has no {split} tasks of "
                f"{parts_without_tasks}; allowed: a task of each part; "
                "fix: raise env.train_tasks, or remove the part",
                "no_rows",
            )
        self.replace_tasks(tasks)

    def gen_batch(self, step: int, batch_size: int, batch_in_step: int = 0) -> "DataProto":
        """Return the tasks of training step ``step`` (from 1).

        The batch has ``batch_size`` groups of ``env.rollout.n`` consecutive rows. An epoch is a
        permutation of all tasks, or their given order without ``data.shuffle``. ``batch_in_step``
        is the number of the batch within the step, from 0. If tasks are shuffled, each batch has a
        separate order. Otherwise a batch has the tasks that follow those of the batch before it.

        Returns:
            Columns ``task`` (dict), ``uid``, ``member`` (int, position in the group), ``env_seed``
            (int), ``data_source`` and ``task_id``. ``meta_info["global_step"]`` is the step.
        """
        groups: list[TaskGroup] = []
        for group_index in range(batch_size):
            # The position in the task order does not depend on the number of earlier batches.
            batch_number = step - 1 if self.task_schedule.is_shuffled else step - 1 + batch_in_step
            task = self.task_schedule.get_task(
                batch_number * batch_size + group_index, batch_in_step
            )
            seed = (
                derive_seed(self.env_config.seed, self.split, step, batch_in_step, group_index)
                & SEED_MASK
            )
            groups.append((task, seed, f"{self.split}-{step}-{batch_in_step}-{group_index}"))
        batch = self._build_batch(groups, self.group_size)
        batch.meta_info["global_step"] = step
        return batch

    def panel_batch(self) -> "DataProto":
        """Return the validation set, one row per task, with the columns of ``gen_batch``."""
        # Environment seeds of validation depend on the tasks only, not on the seed of the run. All
        # runs therefore have the same start states.
        groups = [(task, seed, f"panel-{task['task_id']}") for task, seed in self.validation_set]
        return self._build_batch(groups, 1)

    @property
    def panel_hash(self) -> str:
        """Hash of the validation set. Equal hashes mean equal tasks and environment seeds."""
        return hash_json(self.validation_set)

    def replace_tasks(self, tasks: list[Task]) -> None:
        """Replace the tasks of this split, their order in training, and the validation set."""
        part_weights = self.package.part_weights(self.settings)
        self.task_list = tasks
        seed = (self.env_config.seed, self.split)
        self.task_schedule = TaskSchedule(tasks, part_weights, self.shuffle, seed)
        self.validation_set: list[tuple[Task, int]] = []
        if self.split == "val":
            self.validation_set = select_validation_set(
                tasks, self.env_config.val_tasks, part_weights
            )

    def _build_batch(self, groups: list[TaskGroup], group_size: int) -> "DataProto":
        rows = [
            (task, seed, uid, member) for task, seed, uid in groups for member in range(group_size)
        ]
        columns = {
            "task": [row[0] for row in rows],
            "env_seed": np.array([row[1] for row in rows], dtype=np.int64),
            "uid": [row[2] for row in rows],
            "member": np.array([row[3] for row in rows], dtype=np.int64),
            "data_source": [row[0]["data_source"] for row in rows],
            "task_id": [row[0]["task_id"] for row in rows],
        }
        return verl.DataProto.from_dict(non_tensors=columns)

    def reset(self, gen_batch: "DataProto") -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
        """Start one episode per row, and return observations (lists [B] by name) and infos [B].

        Raises ``GroupMismatch`` if rows of one uid start from different states, and
        ``EnvFailure``.
        """
        rows = gen_batch.non_tensor_batch
        if self._driver is None:
            # Import here: training does not step environments together.
            from agent_system.environments.vectorised import LockStepDriver

            self._driver = LockStepDriver(self.env_config, self.settings)
        self._tasks_of_last_reset = rows["task"].tolist()
        observations = self._driver.run(
            self._driver.reset(self._tasks_of_last_reset, rows["env_seed"].tolist())
        )
        start_states = [(observation.text, observation.state) for observation in observations]
        assert_same_start_states(rows["uid"].tolist(), start_states)
        infos = [observation.info for observation in observations]
        return _build_observation_columns(observations), infos

    def step(
        self, text_actions: Sequence[str]
    ) -> tuple[dict[str, list[Any]], np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Read the action in the model text of each row and apply it.

        Return observations, rewards [B] float32, dones [B] bool, and infos [B]. A row that is done
        keeps its last observation and gets reward 0.
        """
        if self._driver is None:
            raise RuntimeError("step was called before reset; fix: call reset first")
        if len(text_actions) != len(self._tasks_of_last_reset):
            raise ValueError(
                f"{len(text_actions)} actions for {len(self._tasks_of_last_reset)} environments"
            )
        packages = map(self.package.package_for_task, self._tasks_of_last_reset)
        parsed_actions = [
            package.project(text) for package, text in zip(packages, text_actions, strict=True)
        ]
        step_results = self._driver.run(self._driver.step([action for action, _ in parsed_actions]))
        infos: list[dict[str, Any]] = []
        for (_, is_well_formed), (_, _, _, info) in zip(parsed_actions, step_results, strict=True):
            is_valid = bool(is_well_formed and info.get("is_action_valid", True))
            infos.append({**info, "is_action_valid": is_valid})
        rewards = np.array([step_result[1] for step_result in step_results], dtype=np.float32)
        dones = np.array([step_result[2] for step_result in step_results], dtype=bool)
        return (
            _build_observation_columns([step_result[0] for step_result in step_results]),
            rewards,
            dones,
            infos,
        )

    def success_evaluator(
        self, infos: Sequence[dict[str, Any]], data_sources: Sequence[str] | np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return ``success_rate`` [B] (0 or 1 per row) and ``<data_source>_success_rate``.

        ``infos`` are those of the last env step of each episode.
        """
        values_by_metric: dict[str, list[float]] = defaultdict(list)
        for info, data_source in zip(infos, data_sources, strict=True):
            success = float(bool(info.get("won", False)))
            values_by_metric["success_rate"].append(success)
            values_by_metric[f"{data_source}_success_rate"].append(success)
        return {key: np.array(values, dtype=np.float32) for key, values in values_by_metric.items()}

    def close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()


def _build_observation_columns(observations: Sequence[Observation]) -> dict[str, list[Any]]:
    return {
        "text": [observation.text for observation in observations],
        "image": [observation.image for observation in observations],
        "anchor": [observation.state for observation in observations],
        "opening": [observation.opening for observation in observations],
    }


def load_tasks(
    env_name: str, package: EnvPackage[Any], settings: EnvSettings, split: str
) -> list[Task]:
    """Return the tasks of ``split``.

    Raises ``MissingExtraError`` for a missing module, and ``ValueError`` for invalid tasks.
    """
    try:
        returned_tasks = package.tasks(settings, split)
    except ModuleNotFoundError as error:
        raise build_missing_extra_error(env_name, error) from error
    except (ImportError, OSError, MemoryError, TimeLimitError):
        raise  # callers report these errors
    except USER_CODE_ERRORS as error:  # boundary to user code
        has_fix = names_fix(describe_error(error, str))
        if isinstance(error, ValueError) and (has_fix or not describe_user_line(error)):
            raise  # its message comes from this repository, and names what to fix
        if has_fix:
            raise UserError(describe_error(error, str), "failed_call") from error
        raise UserError(
            f"the function tasks of environment {env_name!r} raised "
            f"{describe_raised_error(error)}; allowed: tasks(settings, split), which returns a "
            "list of tasks; fix: correct the function",
            "failed_call",
        ) from error
    if not isinstance(returned_tasks, Sequence):
        raise UserError(
            f"the function tasks of environment {env_name!r} returned {returned_tasks!r:.80}; "
            "allowed: a list of tasks; fix: correct the function",
            "failed_call",
        )
    check_tasks(returned_tasks, split)
    return list(returned_tasks)


def make_envs(config: "PPOConfig") -> tuple[EnvironmentManagerBase, EnvironmentManagerBase]:
    """Return the environment managers of the training tasks and of the validation tasks.

    Raises ``ValueError`` if their tasks overlap.
    """
    train_manager = EnvironmentManagerBase(config, "train")
    val_manager = EnvironmentManagerBase(config, "val")
    check_disjoint_splits(train_manager.task_list, val_manager.task_list)
    return train_manager, val_manager
