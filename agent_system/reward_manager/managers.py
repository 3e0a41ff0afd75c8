"""Reward managers: they compute ``token_level_scores`` [B, R] of the rows of trajectories.

Group estimators read the sum of a row's scores as the outcome of the row's trajectory. A trajectory
counts once, however many rows it has. Therefore *the scores of each row sum to the outcome of its
whole trajectory*:

    env.history  manager
    append       episode   one row:   0 0 0 . . . 0 0 0 . . . 0 0 R    R = r0 + r1 + r2 - penalties
    append       step      one row:   0 0 r0 . . . 0 0 r1 . . . 0 0 r2
    window       any       row k:     0 0 R                             for each turn k

Dots are environment tokens. Step-level estimators read the rewards of turns from ``step_rewards``.

A manager gets the penalty of an invalid action, the user-provided score function (or None), and
``reward_model.reward_kwargs``. Register a class in a module that
``actor_rollout_ref.model.external_lib`` imports::

    @register("mine")
    class Mine(EpisodeRewardManager): ...

Without registration, use ``reward_model.reward_manager=my_lab.rewards:Mine`` or ``mine.py:Mine``.
"""

import functools
import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from agent_system.reward_manager.custom import check_arguments, load_function, load_import_path
from agent_system.reward_manager.scores import (
    compute_weighted_sum,
    read_finite_number,
    read_finite_numbers,
)
from verl.config.schema import PPOConfig
from verl.config.settings.errors import UserError
from verl.config.settings.hints import did_you_mean
from verl.protocol import DataProto, object_array
from verl.records import PRICE_MULTIPLIER, REWARD_PARTS
from verl.utils.limits import (
    USER_CODE_ERRORS,
    TimeLimitError,
    describe_error,
    describe_raised_error,
    time_limit,
)
from verl.utils.torch_functional import find_last_nonzero

logger = logging.getLogger(__name__)
SCORE_FUNCTION_ARGUMENTS = ("data_source", "steps", "extra_info")
MAX_FAILED_CALLS = 3  # consecutive batches without a score after which the run ends
ScoreFunction = Callable[..., float | Mapping[str, float]]


class RewardManager(Protocol):
    """Protocol of a reward manager, which assigns outcomes of trajectories to tokens."""

    def __call__(self, data: DataProto) -> torch.Tensor:
        """Return ``token_level_scores`` [B, R]. Each row sums to its trajectory's outcome."""
        ...

    def step_rewards(self, data: DataProto) -> np.ndarray:
        """Return a list for every row [B]: the rewards of its turns."""
        ...


RewardManagerFactory = Callable[..., RewardManager]
M = TypeVar("M", bound=RewardManagerFactory)
REWARD_MANAGER_KEY = "reward_model.reward_manager"
REWARD_MANAGERS: dict[str, RewardManagerFactory] = {}


def register(*names: str) -> Callable[[M], M]:
    """Return a decorator that registers a reward manager class under ``names``.

    A later registration of a name replaces an earlier one.
    """

    def register_class(cls: M) -> M:
        REWARD_MANAGERS.update(dict.fromkeys(names, cls))
        return cls

    return register_class


def find_reward_manager_class(name: str) -> RewardManagerFactory:
    """Return the class registered as ``name``, or at the import path ``name``."""
    if name in REWARD_MANAGERS:
        return REWARD_MANAGERS[name]
    if ":" not in name:
        raise UserError(
            f"{REWARD_MANAGER_KEY}={name!r}: unknown{did_you_mean(name, REWARD_MANAGERS)}; "
            f"allowed: {', '.join(sorted(REWARD_MANAGERS))}, module:Class or FILE.py:Class; "
            "fix: name one of them",
            "unknown_name",
        )
    return load_import_path(name, REWARD_MANAGER_KEY)


@register("episode", "naive", "prime")
class EpisodeRewardManager:
    """Reward manager that puts the outcome of a trajectory on the last sampled token of each row.

    The outcome is computed in this order, with the return R and the T tokens that were sampled in
    the whole trajectory:

    1. R is the episode's return, or the result of ``compute_score``.
    2. Token price: ``R (1 - token_price min(T, token_price_max) / token_price_max)`` if R is above
       0. Other returns have no price. With ``relative_token_price`` instead:
       ``R (1 - relative_token_price sigmoid(z))``. ``compute_relative_lengths`` defines z. The key
       ``price_multiplier`` of ``data.meta_info`` multiplies ``token_price`` and
       ``relative_token_price``.
    3. DAPO's overlong penalty (Yu et al., 2025):
       ``R - overlong_penalty clip((T - overlong_max) / overlong_len + 1, 0, 1)``.
    4. ``invalid_action_penalty`` is subtracted for each turn with an invalid action.

    Example: R = 1, T = 300, ``token_price=0.5``, ``token_price_max=600`` give 0.75. With
    ``overlong_len=200``, ``overlong_max=400`` and ``overlong_penalty=1`` 0.5 is subtracted: 0.25.

    ``compute_score(data_source, steps, extra_info)`` receives the turns of the whole trajectory in
    order, as dicts with the fields of a rollout file. ``extra_info`` has ``task_id``,
    ``episode_reward``, ``won`` and ``uid``. It returns a finite number, or a dict of finite numbers
    with the key ``score``. The column ``reward_parts`` then has the dict for every row.
    """

    def __init__(
        self,
        invalid_action_penalty: float = 0.0,
        compute_score: ScoreFunction | None = None,
        token_price: float = 0.0,
        token_price_max: int = 0,
        relative_token_price: float = 0.0,
        overlong_len: int = 0,
        overlong_max: int = 0,
        overlong_penalty: float = 1.0,
    ) -> None:
        if not 0 <= token_price <= 1:
            raise UserError(
                f"reward_model.reward_kwargs.token_price={token_price!r}: the largest share of a "
                "return that tokens cost; allowed: 0 to 1; fix: token_price: 0.5",
                "out_of_range",
            )
        if not 0 <= relative_token_price <= 1 or (relative_token_price and token_price):
            raise UserError(
                f"reward_model.reward_kwargs.relative_token_price={relative_token_price!r}: the "
                "largest share of a return that tokens cost, relative to the group's successes; "
                "allowed: 0 to 1, without token_price; fix: relative_token_price: 0.5",
                "out_of_range",
            )
        if token_price and token_price_max < 1:
            raise UserError(
                f"reward_model.reward_kwargs.token_price_max={token_price_max!r}: the number of "
                "tokens that cost the whole token_price; allowed: an integer of 1 or more; "
                "fix: set the number of tokens of the longest trajectory",
                "out_of_range",
            )
        if not 0 <= overlong_len <= overlong_max:
            raise UserError(
                f"reward_model.reward_kwargs.overlong_len={overlong_len!r}: the last tokens of "
                f"overlong_max ({overlong_max!r}), which get a penalty; allowed: 0 to "
                "overlong_max; fix: set overlong_max to the tokens of the longest trajectory",
                "out_of_range",
            )
        self.overlong_len = overlong_len
        self.overlong_max = overlong_max
        self.overlong_penalty = overlong_penalty
        self.invalid_action_penalty = invalid_action_penalty
        self.compute_score = compute_score
        # Start at the limit: a function that has never returned a score is wrong.
        self._num_failed_calls = MAX_FAILED_CALLS
        self._reward_names: set[str] = set()  # of all rewards in ``reward_parts`` so far
        self.token_price = token_price
        self.token_price_max = token_price_max
        self.relative_token_price = relative_token_price

    def __call__(self, data: DataProto) -> torch.Tensor:
        """Return ``token_level_scores`` [B, R] float32. Raises as ``compute_outcomes``."""
        scores = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        outcomes = torch.tensor(self.compute_outcomes(data), dtype=torch.float32)
        rows, last_columns = find_last_nonzero(data.batch["response_mask"])
        scores[rows, last_columns] = outcomes[rows]
        return scores

    def step_rewards(self, data: DataProto) -> np.ndarray:
        """Return a list for every row [B]: rewards of its turns minus invalid action penalties."""
        columns = data.non_tensor_batch
        net_rewards = [
            [
                reward - (0.0 if is_valid else self.invalid_action_penalty)
                for reward, is_valid in zip(rewards, validity_flags, strict=True)
            ]
            for rewards, validity_flags in zip(
                columns["step_rewards"], columns["is_action_valid"], strict=True
            )
        ]
        return object_array(net_rewards)

    def compute_outcomes(self, data: DataProto) -> list[float]:
        """Return the outcome of each row's trajectory [B].

        A trajectory has failed if its custom function raises, exceeds its time limit or returns an
        invalid value. Then ``aborted`` becomes True, and metrics in ``meta_info`` count it. Its
        outcome becomes the mean of its group, or else of the batch, so that the baseline does not
        change. The first error is raised if no trajectory has a score in the first call or in
        ``MAX_FAILED_CALLS`` consecutive calls.
        """
        outcome_by_trajectory: dict[str, float] = {}
        group_by_failed_trajectory: dict[str, str] = {}
        errors: list[Exception] = []
        outcomes_by_group: dict[str, list[float]] = defaultdict(list)
        rows_by_trajectory = group_rows_by_trajectory(data)
        relative_lengths = (
            compute_relative_lengths(data, rows_by_trajectory) if self.relative_token_price else {}
        )
        for traj_uid, rows in rows_by_trajectory.items():
            uid = data.non_tensor_batch["uid"][rows[0]]
            try:
                score = self._score_trajectory(data, rows)
            except Exception as error:  # boundary to user code
                errors.append(error)
                error_text = describe_error(error, str)
                logger.warning("%s; the outcome is set to the mean of its group", error_text)
                group_by_failed_trajectory[traj_uid] = uid
                continue
            outcome = self._compute_outcome(data, rows, score, relative_lengths.get(traj_uid, 0.0))
            outcome_by_trajectory[traj_uid] = outcome
            outcomes_by_group[uid].append(outcome)
        if outcome_by_trajectory:
            self._num_failed_calls = 0
        elif errors:
            self._num_failed_calls += 1
            if self._num_failed_calls >= MAX_FAILED_CALLS:
                raise errors[0]
        if self.compute_score is not None:
            metrics = {
                "critic/score/graded": float(len(outcome_by_trajectory)),
                "critic/score/failed": float(len(group_by_failed_trajectory)),
            }
            data.meta_info["metrics"] = data.meta_info.get("metrics", {}) | metrics
        failed_trajectories = list(group_by_failed_trajectory)
        columns = data.non_tensor_batch
        if failed_trajectories and "aborted" in columns:
            columns["aborted"] = columns["aborted"] | np.isin(
                columns["traj_uid"], failed_trajectories
            )
        all_outcomes = [outcome for outcomes in outcomes_by_group.values() for outcome in outcomes]
        for traj_uid, uid in group_by_failed_trajectory.items():
            outcome_by_trajectory[traj_uid] = float(
                np.mean(outcomes_by_group[uid] or all_outcomes or [0.0])
            )
        # If all trajectories fail, only earlier batches tell which named rewards a row needs.
        self._reward_names |= {name for row in columns.get(REWARD_PARTS, ()) for name in row}
        if failed_trajectories and self._reward_names:
            _impute_failed_reward_parts(data, failed_trajectories, self._reward_names)
        return [outcome_by_trajectory[traj_uid] for traj_uid in columns["traj_uid"]]

    def _compute_outcome(
        self, data: DataProto, rows: list[int], outcome: float, relative_length: float
    ) -> float:
        """Return ``outcome`` minus token prices and penalties of the trajectory.

        ``outcome`` is the score of the trajectory, which has the row indices ``rows``.
        """
        columns = data.non_tensor_batch
        validity_flags = [is_valid for row in rows for is_valid in columns["is_action_valid"][row]]
        num_tokens = int(data.batch["response_mask"][rows].sum())
        price_multiplier = data.meta_info.get(PRICE_MULTIPLIER, 1.0)
        price_share = self.relative_token_price * relative_length
        if self.token_price:
            # A trajectory of ``token_price_max`` or more tokens has the whole price.
            length_fraction = min(num_tokens, self.token_price_max) / self.token_price_max
            price_share = self.token_price * length_fraction
        if outcome > 0:  # a negative return would rise with the number of tokens
            outcome = outcome * (1 - price_multiplier * price_share)
        if self.overlong_len:
            overlong_share = (num_tokens - self.overlong_max) / self.overlong_len + 1
            outcome = outcome - self.overlong_penalty * min(max(overlong_share, 0.0), 1.0)
        return outcome - self.invalid_action_penalty * (len(validity_flags) - sum(validity_flags))

    def _score_trajectory(self, data: DataProto, rows: list[int]) -> float:
        """Return the score of the trajectory with the row indices ``rows``.

        It is the result of the custom function, or else the return of the trajectory.
        """
        columns, first_row = data.non_tensor_batch, rows[0]
        score_function = self.compute_score
        if score_function is None:
            return float(columns["episode_rewards"][first_row])
        # With ``window`` history the turns of a trajectory are in several rows.
        turn_records = [turn_record for row in rows for turn_record in columns["steps"][row]]
        sorted_turn_records = sorted(turn_records, key=lambda turn_record: turn_record.step)
        trajectory_info = {
            "task_id": columns["task_id"][first_row],
            "episode_reward": float(columns["episode_rewards"][first_row]),
            "won": bool(columns["won"][first_row]),
            "uid": columns["uid"][first_row],
        }
        score = score_function(
            data_source=columns["data_source"][first_row],
            steps=[turn_record.to_json() for turn_record in sorted_turn_records],
            extra_info=trajectory_info,
        )
        name = getattr(score_function, "__name__", repr(score_function))
        source = f"custom_reward_function {name}, task_id {trajectory_info['task_id']!r}"
        if not isinstance(score, Mapping):
            return read_finite_number(score, source)
        score_parts = read_finite_numbers(score, source)
        if "score" not in score_parts:
            raise ValueError(f"{source}: the returned dictionary has no 'score'; fix: add it")
        for row in rows:
            _get_reward_parts(data)[row] = score_parts
        return score_parts["score"]


@register("step")
class StepRewardManager(EpisodeRewardManager):
    """Reward manager that puts the reward of each turn on the last token sampled in it.

    The penalty of an invalid action is subtracted in its turn. A row with only a part of its
    trajectory (``window``) is scored by ``EpisodeRewardManager``, because its sum must be the
    outcome of the trajectory. A custom function scores whole trajectories and is refused.
    """

    def __init__(
        self, invalid_action_penalty: float = 0.0, compute_score: ScoreFunction | None = None
    ) -> None:
        if compute_score is not None:
            raise UserError(
                "reward_model.reward_manager=step and custom_reward_function.path exclude each "
                "other: the function scores whole trajectories; allowed: one of them; "
                "fix: reward_model.reward_manager=episode",
                "conflicting_keys",
            )
        super().__init__(invalid_action_penalty)

    def __call__(self, data: DataProto) -> torch.Tensor:
        """Return ``token_level_scores`` [B, R] float32 with one reward per turn."""
        scores = super().__call__(data)
        columns = data.non_tensor_batch
        turn_rewards = self.step_rewards(data)
        for row in range(len(data)):
            # A row with only some turns keeps its score, the outcome of the whole trajectory.
            if len(columns["step_index"][row]) != columns["episode_lengths"][row]:
                continue
            scores[row] = 0.0
            step_ids = data.batch["step_ids"][row]
            for step, reward in zip(columns["step_index"][row], turn_rewards[row], strict=True):
                scores[row, int((step_ids == step).nonzero()[-1])] = reward
        return scores


def _get_reward_parts(data: DataProto) -> np.ndarray:
    """Return the column ``reward_parts`` [B] of ``data``; add it with empty dicts if missing."""
    columns = data.non_tensor_batch
    if REWARD_PARTS not in columns:
        columns[REWARD_PARTS] = object_array([{} for _ in range(len(data))])
    return columns[REWARD_PARTS]


def _impute_failed_reward_parts(
    data: DataProto, failed_trajectories: Collection[str], reward_names: Collection[str]
) -> None:
    """Set ``reward_parts`` (rewards by name) of ``failed_trajectories`` to their groups' means.

    They get the rewards ``reward_names``; a reward that no member of the group has becomes 0.
    """
    reward_parts_by_row = _get_reward_parts(data)
    uids = data.non_tensor_batch["uid"]
    reward_parts_by_group: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    for rows in group_rows_by_trajectory(data).values():
        # Count a trajectory once, however many rows it has.
        if reward_parts_by_row[rows[0]]:
            reward_parts_by_group[uids[rows[0]]].append(reward_parts_by_row[rows[0]])
    for row, traj_uid in enumerate(data.non_tensor_batch["traj_uid"]):
        if traj_uid not in failed_trajectories:
            continue
        reward_parts_by_row[row] = {}
        for name in reward_names:
            member_rewards = [
                member_parts[name]
                for member_parts in reward_parts_by_group[uids[row]]
                if name in member_parts
            ]
            reward_parts_by_row[row][name] = (
                float(np.mean(member_rewards)) if member_rewards else 0.0
            )


def group_rows_by_trajectory(data: DataProto) -> dict[str, list[int]]:
    """Return the row indices of each trajectory, by ``traj_uid``."""
    rows_by_trajectory: dict[str, list[int]] = defaultdict(list)
    for row, traj_uid in enumerate(data.non_tensor_batch["traj_uid"]):
        rows_by_trajectory[traj_uid].append(row)
    return rows_by_trajectory


def load_reward_manager(config: PPOConfig) -> RewardManager:
    """Return the reward manager that ``config`` (the whole configuration) names.

    Raises ``ValueError`` for an unknown manager or invalid ``reward_kwargs``, and the errors of
    ``load_function`` for a custom function.
    """
    manager_class = find_reward_manager_class(config.reward_model.reward_manager)
    actor_config = config.actor_rollout_ref.actor
    invalid_action_penalty = (
        actor_config.invalid_action_penalty_coef if actor_config.use_invalid_action_penalty else 0.0
    )
    score_function = load_trajectory_score_function(config)
    kwargs = config.reward_model.reward_kwargs
    try:
        # Bind without calling: a ``TypeError`` inside the manager is not a wrong setting.
        inspect.signature(manager_class).bind(invalid_action_penalty, score_function, **kwargs)
    except TypeError as error:
        allowed_keys = ", ".join(list(inspect.signature(manager_class).parameters)[2:]) or "none"
        name = getattr(manager_class, "__name__", repr(manager_class))
        raise UserError(
            f"reward_model.reward_kwargs={kwargs!r}: {error}; allowed: {allowed_keys} (the keyword "
            f"arguments of {name}); fix: remove the others",
            "unknown_key",
        ) from error
    return manager_class(invalid_action_penalty, score_function, **kwargs)


def load_trajectory_score_function(config: PPOConfig) -> ScoreFunction | None:
    """Return the user-provided function that scores trajectories, or None.

    Its ``score`` is the weighted sum of its rewards if ``reward_model.weights`` is set. Return None
    if the environment uses the function to grade answers.
    """
    function_config = config.custom_reward_function
    env_settings = config.env.active_section
    if not function_config.path or (env_settings and env_settings.data_keys):
        return None
    function = load_function(function_config.path, function_config.name)
    kwargs = function_config.reward_kwargs
    check_arguments(
        function,
        f"custom_reward_function.name={function_config.name!r} in {function_config.path}",
        (*SCORE_FUNCTION_ARGUMENTS, *kwargs),
        ", where steps are those of a whole trajectory",
    )
    function = limit_call_time(function, function_config.timeout_s)
    weights = config.reward_model.weights
    if not kwargs and not weights:
        return function
    source = f"custom_reward_function {function_config.name}"

    @functools.wraps(function)
    def score_with_weights(**arguments: Any) -> Any:
        score = function(**arguments, **kwargs)
        if not weights:
            return score
        rewards = score if isinstance(score, Mapping) else {"score": score}
        finite_rewards = read_finite_numbers(rewards, source)
        return finite_rewards | {"score": compute_weighted_sum(finite_rewards, weights, source)}

    return score_with_weights


def limit_call_time(function: ScoreFunction, seconds: float) -> ScoreFunction:
    """Return ``function`` with a time limit. A longer call raises ``TimeLimitError``."""
    name = getattr(function, "__name__", repr(function))

    @functools.wraps(function)
    def score_within_limit(**arguments: Any) -> float | Mapping[str, float]:
        source = (
            f"custom_reward_function {name}, task_id {arguments['extra_info'].get('task_id')!r}"
        )
        try:
            with time_limit(seconds, f"{source},"):
                return function(**arguments)
        except TimeLimitError:
            raise
        except USER_CODE_ERRORS as error:  # boundary to user code
            raise RuntimeError(
                f"{source}: it raised {describe_raised_error(error)}; fix: return a finite number"
            ) from error

    return score_within_limit


def compute_relative_lengths(
    data: DataProto, rows_by_trajectory: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Return ``sigmoid(z)`` for each trajectory, by ``traj_uid``.

    z is the number of sampled tokens minus the mean over the group's successful trajectories,
    divided by their (population) standard deviation. z is 0 if the successful trajectories have
    equal lengths, or if there are fewer than two.

        successes with 10 and 30 tokens: mean 20, std 10, so sigmoid(-1) = 0.27, sigmoid(1) = 0.73
    """
    columns = data.non_tensor_batch
    token_count_by_trajectory = {
        traj_uid: int(data.batch["response_mask"][list(rows)].sum())
        for traj_uid, rows in rows_by_trajectory.items()
    }
    success_lengths_by_group: dict[str, list[int]] = defaultdict(list)
    for traj_uid, rows in rows_by_trajectory.items():
        if columns["won"][rows[0]]:
            success_lengths_by_group[columns["uid"][rows[0]]].append(
                token_count_by_trajectory[traj_uid]
            )
    relative_lengths: dict[str, float] = {}
    for traj_uid, rows in rows_by_trajectory.items():
        success_lengths = success_lengths_by_group[columns["uid"][rows[0]]]
        std = float(np.std(success_lengths)) if success_lengths else 0.0
        z = (
            (token_count_by_trajectory[traj_uid] - float(np.mean(success_lengths))) / std
            if std
            else 0.0
        )
        # sigmoid(z). ``exp(-z)`` would overflow for a trajectory much shorter than the successes.
        relative_lengths[traj_uid] = (1 + math.tanh(z / 2)) / 2
    return relative_lengths
