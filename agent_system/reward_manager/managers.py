"""From played rows to ``token_level_scores`` [B, R].

Group estimators take the sum over a row's scores as the outcome of the trajectory that the row
belongs to, and count a trajectory once however many rows it has. Therefore *every row's scores sum
to the outcome of its whole trajectory*:

    append, episode   one row:   0 0 0 . . . 0 0 0 . . . 0 0 R        R = r0 + r1 + r2 - penalties
    append, step      one row:   0 0 r0 . . . 0 0 r1 . . . 0 0 r2
    window, both      row k:     0 0 R                                 for each k

(dots: environment tokens). Rewards of single steps are in ``step_rewards``, where step-level
estimators read them.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch

from agent_system.reward_manager.registry import register
from agent_system.reward_manager.scores import finite
from verl.protocol import DataProto, object_array
from verl.records import REWARD_PARTS
from verl.utils.limits import TimeLimit
from verl.utils.torch_functional import last_selected

logger = logging.getLogger(__name__)
ScoreFunction = Callable[..., float | Mapping[str, float]]


@register("episode", "naive", "prime")
class EpisodeRewardManager:
    """The trajectory's outcome on the last sampled token of each of its rows.

    The outcome is the return of the episode, or what ``compute_score`` says, minus
    ``invalid_action_penalty`` for each step whose action was not valid. ``token_price`` takes its
    share of a return for sampled tokens: ``R (1 - token_price min(T, token_price_max) /
    token_price_max)`` with the T tokens sampled in the whole trajectory. A lost play costs nothing
    then, which a price that is subtracted would not achieve.
    ``overlong_len`` is DAPO's soft punishment of length (Yu et al., 2025): the last
    ``overlong_len`` of ``overlong_max`` tokens take up to ``overlong_penalty`` from the return, in
    proportion, and more tokens all of it: ``R - overlong_penalty clip((T - overlong_max) /
    overlong_len + 1, 0, 1)``.
    ``compute_score(data_source, steps, extra_info)`` receives the steps of the whole trajectory in
    order, each as a dictionary with the keys of a rollout file, and a dictionary with ``task_id``,
    ``episode_reward``, ``won`` and ``uid``, and returns a finite number, or a dictionary of finite
    numbers with ``score``, whose other numbers are rewards of their own: the column
    ``reward_parts`` holds it for every row.
    """

    def __init__(
        self,
        invalid_action_penalty: float = 0.0,
        compute_score: ScoreFunction | None = None,
        token_price: float = 0.0,
        token_price_max: int = 0,
        overlong_len: int = 0,
        overlong_max: int = 0,
        overlong_penalty: float = 1.0,
    ) -> None:
        if not 0 <= token_price <= 1:
            raise ValueError(
                f"reward_model.reward_kwargs.token_price={token_price!r}: the share of a return "
                "that tokens may cost; allowed: 0 to 1; fix: token_price: 0.5"
            )
        if token_price and token_price_max < 1:
            raise ValueError(
                f"reward_model.reward_kwargs.token_price_max={token_price_max!r}: the tokens that "
                "cost the whole token_price; allowed: an integer of 1 or more; fix: the tokens of "
                "the longest play"
            )
        if not 0 <= overlong_len <= overlong_max:
            raise ValueError(
                f"reward_model.reward_kwargs.overlong_len={overlong_len!r}: the last tokens of "
                f"overlong_max ({overlong_max!r}), which are punished; allowed: 0 to overlong_max; "
                "fix: overlong_max: the tokens of the longest play"
            )
        self.overlong_len = overlong_len
        self.overlong_max = overlong_max
        self.overlong_penalty = overlong_penalty
        self.invalid_action_penalty = invalid_action_penalty
        self.compute_score = compute_score
        self.token_price = token_price
        self.token_price_max = token_price_max

    def __call__(self, data: DataProto) -> torch.Tensor:
        """``token_level_scores`` [B, R] float32.

        Raises ``TypeError`` when the custom function returns no number, ``ValueError`` when it is
        not finite.
        """
        scores = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        outcomes = torch.tensor(self.outcomes(data), dtype=torch.float32)
        rows, last = last_selected(data.batch["response_mask"])
        scores[rows, last] = outcomes[rows]
        return scores

    def step_rewards(self, data: DataProto) -> np.ndarray:
        """Of every row [B] a list: the rewards of its steps less the penalty of invalid actions."""
        columns = data.non_tensor_batch
        return object_array(
            [
                [
                    reward - (0.0 if valid else self.invalid_action_penalty)
                    for reward, valid in zip(rewards, flags, strict=True)
                ]
                for rewards, flags in zip(
                    columns["step_rewards"], columns["is_action_valid"], strict=True
                )
            ]
        )

    def outcomes(self, data: DataProto) -> list[float]:
        """The outcome of each row's trajectory [B].

        A trajectory whose function was late has failed: its column ``aborted`` says so, and
        ``meta_info["metrics"]`` how many of how many. Its outcome moves no baseline: it is the mean
        of its group, and where none of that is scored, the mean of the batch.
        """
        found: dict[str, float] = {}
        late: list[tuple[str, str]] = []  # trajectory and group
        scored: dict[str, list[float]] = defaultdict(list)  # by group
        for traj, members in rows_of_trajectories(data).items():
            uid = data.non_tensor_batch["uid"][members[0]]
            try:
                found[traj] = self._outcome(data, members)
                scored[uid].append(found[traj])
            except TimeLimit as error:
                logger.warning("%s; the play counts as the mean of its group", error)
                late.append((traj, uid))
        if self.compute_score is not None:
            _count_failed(data, {traj for traj, _ in late}, len(found))
        every = [outcome for outcomes in scored.values() for outcome in outcomes]
        for traj, uid in late:
            found[traj] = float(np.mean(scored[uid] or every or [0.0]))
        if late and REWARD_PARTS in data.non_tensor_batch:
            _fill_parts(data, {traj for traj, _ in late})
        return [found[traj] for traj in data.non_tensor_batch["traj_uid"]]

    def _outcome(self, data: DataProto, rows: list[int]) -> float:
        columns = data.non_tensor_batch
        # Over all rows of the trajectory, since each of them must sum to the same outcome.
        valid = [flag for row in rows for flag in columns["is_action_valid"][row]]
        base = float(columns["episode_rewards"][rows[0]])
        if self.compute_score is not None:
            base = self._custom(self.compute_score, data, rows)
        tokens = int(data.batch["response_mask"][rows].sum())
        if self.token_price:
            used = min(tokens, self.token_price_max) / self.token_price_max
            base = base * (1 - self.token_price * used)
        if self.overlong_len:
            over = (tokens - self.overlong_max) / self.overlong_len + 1
            base = base - self.overlong_penalty * min(max(over, 0.0), 1.0)
        return base - self.invalid_action_penalty * (len(valid) - sum(valid))

    def _custom(self, score_of: ScoreFunction, data: DataProto, rows: list[int]) -> float:
        columns, first = data.non_tensor_batch, rows[0]
        # With ``window`` history a trajectory's steps lie in several rows.
        steps = sorted(
            (step for row in rows for step in columns["steps"][row]), key=lambda step: step.step
        )
        extra = {
            "task_id": columns["task_id"][first],
            "episode_reward": float(columns["episode_rewards"][first]),
            "won": bool(columns["won"][first]),
            "uid": columns["uid"][first],
        }
        score = score_of(
            data_source=columns["data_source"][first],
            steps=[step.to_json() for step in steps],
            extra_info=extra,
        )
        name = getattr(score_of, "__name__", repr(score_of))
        who = f"custom_reward_function {name}, task_id {extra['task_id']!r}"
        if not isinstance(score, Mapping):
            return finite(score, who)
        parts = {key: finite(value, f"{who}, {key!r}") for key, value in score.items()}
        if "score" not in parts:
            raise ValueError(f"{who}: the dictionary it returned has no 'score'")
        for row in rows:
            _reward_parts(data)[row] = parts
        return parts["score"]


@register("step")
class StepRewardManager(EpisodeRewardManager):
    """Each step's reward on the last token sampled for it; the penalty of an invalid action at its
    own step.

    A row that holds only a part of its trajectory (``window``) is scored as by
    ``EpisodeRewardManager``, because its sum must be the trajectory's outcome. A custom function
    scores whole trajectories and is refused here.
    """

    def __init__(
        self, invalid_action_penalty: float = 0.0, compute_score: ScoreFunction | None = None
    ) -> None:
        if compute_score is not None:
            raise ValueError(
                "reward_model.reward_manager=step and custom_reward_function.path exclude each "
                "other: the function scores whole trajectories; allowed: one of them; "
                "fix: reward_model.reward_manager=episode"
            )
        super().__init__(invalid_action_penalty)

    def __call__(self, data: DataProto) -> torch.Tensor:
        """``token_level_scores`` [B, R] float32."""
        scores = super().__call__(data)
        columns = data.non_tensor_batch
        net = self.step_rewards(data)
        for row in range(len(data)):
            # A part of a trajectory keeps the outcome of the whole: its sum must be that.
            if len(columns["step_index"][row]) != columns["episode_lengths"][row]:
                continue
            scores[row] = 0.0
            step_ids = data.batch["step_ids"][row]
            for step, reward in zip(columns["step_index"][row], net[row], strict=True):
                last = int((step_ids == step).nonzero()[-1])
                scores[row, last] = reward
        return scores


def _reward_parts(data: DataProto) -> np.ndarray:
    """The column ``reward_parts`` [B] of ``data``: empty dictionaries until it is written to."""
    columns = data.non_tensor_batch
    if REWARD_PARTS not in columns:
        columns[REWARD_PARTS] = object_array([{} for _ in range(len(data))])
    return columns[REWARD_PARTS]


def _count_failed(data: DataProto, failed: Collection[str], graded: int) -> None:
    columns = data.non_tensor_batch
    if failed and "aborted" in columns:
        columns["aborted"] = columns["aborted"] | np.isin(columns["traj_uid"], list(failed))
    metrics = {"critic/score/graded": float(graded), "critic/score/failed": float(len(failed))}
    data.meta_info["metrics"] = data.meta_info.get("metrics", {}) | metrics


def _fill_parts(data: DataProto, late: Collection[str]) -> None:
    """Give the rows of the trajectories ``late`` the mean of each reward in their group; 0 where
    the group has none.
    """
    parts = _reward_parts(data)
    names = {name for row in parts for name in row}
    scored: dict[str, list[Mapping[str, float]]] = defaultdict(list)  # by group
    for members in rows_of_trajectories(data).values():
        # Once for a trajectory, however many rows it has.
        if parts[members[0]]:
            scored[data.non_tensor_batch["uid"][members[0]]].append(parts[members[0]])
    for row, traj in enumerate(data.non_tensor_batch["traj_uid"]):
        if traj not in late:
            continue
        peers = scored[data.non_tensor_batch["uid"][row]]
        given = {name: [peer[name] for peer in peers if name in peer] for name in names}
        parts[row] = {name: float(np.mean(of)) if of else 0.0 for name, of in given.items()}


def rows_of_trajectories(data: DataProto) -> dict[str, list[int]]:
    """The rows of every trajectory."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, trajectory in enumerate(data.non_tensor_batch["traj_uid"]):
        rows[trajectory].append(row)
    return rows
