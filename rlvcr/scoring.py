"""Scores of the step's own action under the four thoughts, and what follows for the rows.

    row:    [ prompt | <level>3</level><think>z</think><action> go to desk 1 </action> | ... ]
    span:                                                       └─ S, H at level 3 ─┘
    branch: [ prompt ] + <level>1</level><think></think><action> go to desk 1 </    S, H at level 1
    branch: [ prompt ] + <level>4</level><think>z'</think><action> go to desk 1 </  S, H at level 4

Targets are the sampled tokens of the action and the first token of ``</action>``, the same ids
under every thought. The policy that sampled them scores them, in the pass that also gives the old
log-probs.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rlvcr.core_rlvcr import (
    level_count_bonus,
    place_step_values,
    thinking_advantage,
    thinking_price,
    thinking_reweight,
)
from rlvcr.levels import LevelCodec
from rlvcr.records import ThinkingStep, ThoughtContext
from rlvcr.research.executed import join_credit
from rlvcr.score_table import RowStep, ScoredSteps, build_queries, scoring_metrics, tabulate
from rlvcr.settings import RLVCRSettings, method_settings
from verl.algos.groups import trajectories_of
from verl.config.schema import PPOConfig
from verl.protocol import DataProto, object_array
from verl.records import ChoiceBonus, SegmentScore
from verl.utils.seeds import derive_seed

__all__ = [
    "RowStep",
    "ScoredSteps",
    "build_queries",
    "hold_up_levels",
    "score_rows",
    "scoring_metrics",
    "tabulate",
]

logger = logging.getLogger(__name__)
DROPPED_LENGTH = "rlvcr/dropped_length"  # a share of the alternatives that were asked for
TOO_MANY_DROPPED = 0.05
EXECUTED = "thinking_executed"  # [B, R]: credit from returns of executed alternatives
ROUNDING = 1e-9  # of a spread of squares in float64
SCORED_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


def score_rows(
    data: DataProto,
    rows: Sequence[Sequence[RowStep]],
    compute_log_prob: Callable[[DataProto], DataProto],
    config: PPOConfig,
    codec: LevelCodec,
) -> DataProto:
    """Score ``rows`` (the steps of each row of ``data``) and add credit for thinking to ``data``,
    which is returned.

    Adds ``old_log_probs``, ``entropys``, ``thinking_level_entropies``, ``thinking_token_costs``,
    ``choice_mask`` and, where they are used, ``thinking_level_bonus``, ``thinking_reweight`` and
    ``thinking_executed``, all [B, R]; raw numbers go into the step records, ``rlvcr/*`` into
    ``meta_info["metrics"]``, the bonus on the levels' entropy into ``meta_info`` for the actor.
    """
    rlvcr = method_settings(config.algorithm)
    asked = data.select(list(SCORED_COLUMNS), [])
    branches, spans = build_queries(rows)
    asked.non_tensor_batch["branches"] = branches
    asked.non_tensor_batch["spans"] = spans
    # For the old log-probs of the rows; branches and spans are always scored at temperature 1.
    asked.meta_info = {"temperature": config.actor_rollout_ref.rollout.temperature}
    answer = compute_log_prob(asked)
    for key in ("old_log_probs", "entropys"):
        data.batch[key] = answer.batch[key]
    scores = answer.non_tensor_batch
    branch_scores = list(scores["branch_scores"])
    table = tabulate(rows, branch_scores, list(scores["span_scores"]), rlvcr.score)
    won = torch.as_tensor(data.non_tensor_batch["won"][table.row].astype(bool))
    # A price of 0 is one that is not charged.
    costs = table.costs * won.unsqueeze(-1) if rlvcr.price_in == "won" else table.costs
    credit = _credit(table, costs, rlvcr)
    first = str(data.non_tensor_batch["traj_uid"][0])
    seed = derive_seed("permute", config.actor_rollout_ref.rollout.seed, first)
    if rlvcr.permute:
        credit = _permuted(credit, table, won, seed)
    metrics = data.meta_info.setdefault("metrics", {})
    if rlvcr.credit != "scored":
        credit = _with_executed(credit, table, data, won, rlvcr, seed, metrics)
    columns = {
        "thinking_level_entropies": credit.advantage,
        "thinking_token_costs": credit.cost_share,
    }
    if credit.executed is not None:
        columns[EXECUTED] = credit.executed
    if rlvcr.level_bonus_w:
        bonus = _level_bonus(table, data.non_tensor_batch["uid"])
        columns["thinking_level_bonus"] = rlvcr.level_bonus_w * bonus
    # COPO needs the factors whatever ``combine`` says.
    if rlvcr.combine == "reweight" or config.algorithm.adv_estimator == "copo":
        columns["thinking_reweight"] = credit.factor
    _place(data, table.row, table.steps, columns, rlvcr.credit_end)
    _record(data, table, thinking_price(costs, rlvcr.cost_coef, rlvcr.cost_max), credit)
    data.meta_info["choice_bonus"] = _bonus(rlvcr, codec)
    branch_tokens = sum(len(branch.token_ids) for row in branches for branch in row)
    row_tokens = int(data.batch["attention_mask"].sum())
    metrics.update(scoring_metrics(table, credit.advantage))
    metrics["rlvcr/branch_tokens_ratio"] = branch_tokens / max(row_tokens, 1)
    _warn_of_dropped(metrics)
    return data


def hold_up_levels(
    data: DataProto, rows: Sequence[Sequence[RowStep]], config: PPOConfig, codec: LevelCodec
) -> DataProto:
    """Ask the actor for the bonus on the levels' entropy without thinking credit; returns ``data``.

    Adds ``choice_mask`` [B, R] and the bonus, exactly as ``score_rows`` does: estimators can then
    be compared that differ in credit alone.
    """
    numbers = [number for number, row in enumerate(rows) for _ in row]
    _place(data, numbers, [step for row in rows for step in row], {})
    data.meta_info["choice_bonus"] = _bonus(method_settings(config.algorithm), codec)
    return data


def _bonus(rlvcr: RLVCRSettings, codec: LevelCodec) -> ChoiceBonus:
    return ChoiceBonus(tuple(codec.digit_ids), rlvcr.thinking_diversity_w, name="level")


def _warn_of_dropped(metrics: Mapping[str, float]) -> None:
    dropped = metrics.get(DROPPED_LENGTH, 0.0)
    if dropped > TOO_MANY_DROPPED:
        logger.warning(
            "%s=%.2f: so many alternative thoughts were cut and left out, and the longest ones "
            "first, so that deep levels are compared where they were chosen only; raise "
            "algorithm.rlvcr.max_alternative_tokens (null: as long as a turn may be)",
            DROPPED_LENGTH,
            dropped,
        )


class _Credit(NamedTuple):
    """What thinking earned at every step, each [S]; ``cost_share`` is part of ``advantage``.

    ``executed`` comes besides, from returns; None where no other level was executed.
    """

    advantage: torch.Tensor
    cost_share: torch.Tensor
    factor: torch.Tensor
    executed: torch.Tensor | None = None


def _credit(table: ScoredSteps, costs: torch.Tensor, rlvcr: RLVCRSettings) -> _Credit:
    """With the thought tokens ``costs`` [S, 4] that are charged."""
    advantage, cost_share = thinking_advantage(
        table.scores,
        table.valid,
        table.chosen,
        costs,
        mode=rlvcr.mode,
        cost_coef=rlvcr.cost_coef,
        cost_max=rlvcr.cost_max,
        std_floor=rlvcr.std_floor,
        alternatives=rlvcr.alternatives,
    )
    factor = thinking_reweight(
        table.scores,
        table.valid,
        table.chosen,
        costs,
        cost_coef=rlvcr.cost_coef,
        cost_max=rlvcr.cost_max,
        spread_floor=rlvcr.spread_floor,
    )
    return _Credit(advantage, cost_share, factor)


def _permuted(credit: _Credit, table: ScoredSteps, won: torch.Tensor, seed: int) -> _Credit:
    """``credit`` dealt anew among the steps that were compared: a control that leaves its size and
    takes what it says about a step.
    """
    generator = torch.Generator().manual_seed(seed)
    compared = (table.chosen >= 0) & (table.valid.sum(-1) >= 2)
    order = torch.arange(len(table.chosen))
    # Won and lost plays apart: prices may be charged in won ones only, and gates tell them apart.
    for outcome in (True, False):
        members = (compared & (won == outcome)).nonzero().squeeze(-1)
        order[members] = members[torch.randperm(len(members), generator=generator)]
    moved = (values[order] for values in (credit.advantage, credit.cost_share, credit.factor))
    return _Credit(*moved)


def _with_executed(
    credit: _Credit,
    table: ScoredSteps,
    data: DataProto,
    won: torch.Tensor,
    rlvcr: RLVCRSettings,
    seed: int,
    metrics: dict[str, float],
) -> _Credit:
    """``credit`` joined with what executed alternatives found; adds to ``metrics``."""
    found = [math.nan if step.executed is None else step.executed for step in table.steps]
    # Where all others lost, a branch that wins is chance, and would be an update of its own.
    differences = torch.tensor(found).masked_fill(~_others_tell(data)[table.row], math.nan)
    if rlvcr.permute:
        tried = (~differences.isnan()).nonzero().squeeze(-1)
        generator = torch.Generator().manual_seed(seed)
        differences[tried] = differences[tried[torch.randperm(len(tried), generator=generator)]]
    counts = won if rlvcr.combine == "success" else torch.ones_like(won)
    scale = _scale(data, rlvcr)
    joined = join_credit(credit.advantage, differences, counts, rlvcr.credit, scale)
    metrics |= joined.metrics
    return _Credit(
        credit.advantage * joined.weight,
        credit.cost_share * joined.weight,
        credit.factor,
        joined.executed,
    )


def _others_tell(data: DataProto) -> torch.Tensor:
    """[B] whether the other plays of the row's group tell good from bad: one of them was won, or
    what they earned differs. The play's own luck does not decide.
    """
    columns = data.non_tensor_batch

    def beside(values: torch.Tensor) -> torch.Tensor:
        """The mean over the other plays of the group, of every trajectory."""
        sums = torch.zeros_like(values).index_add(0, group, values)
        count = torch.zeros_like(values).index_add(0, group, torch.ones_like(values))
        return (sums[group] - values) / (count[group] - 1).clamp(min=1)

    earned = torch.as_tensor(columns["episode_rewards"].astype(float))
    played = trajectories_of(earned, columns["uid"], columns["traj_uid"])
    group = played.group
    returns = played.score
    won = torch.as_tensor(columns["won"].astype(float))
    won = torch.zeros_like(returns).scatter(0, played.of_row, won)
    squares = beside(returns**2)
    differ = squares - beside(returns) ** 2 > ROUNDING * squares
    return ((beside(won) > 0) | differ)[played.of_row]


def _scale(data: DataProto, rlvcr: RLVCRSettings) -> float:
    """What differences of returns are divided by: 1, or the spread of the batch's returns where
    advantages are divided by that of their group.
    """
    if rlvcr.mode == "mean_norm":
        return 1.0
    columns = data.non_tensor_batch
    returns = dict(zip(columns["traj_uid"], columns["episode_rewards"].tolist(), strict=True))
    return max(float(np.std(list(returns.values()))), rlvcr.std_floor)


def _level_bonus(table: ScoredSteps, uid: np.ndarray) -> torch.Tensor:
    """Of every step [S], among the sampled levels of its group.

    A level that was forced gets none.
    """
    forced = torch.tensor([step.forced > 0 for step in table.steps], dtype=torch.bool)
    # -1 stands for no level: what the policy did not choose counts for no level either.
    chosen = torch.where(forced, -1, table.chosen)
    return level_count_bonus(chosen, [uid[row] for row in table.row])


def _place(
    data: DataProto,
    row_of: Sequence[int],
    steps: Sequence[RowStep],
    columns: Mapping[str, torch.Tensor],
    with_end: bool = False,
) -> None:
    """Put one value per step on the level digit and thought of that step, for each of ``columns``,
    and 1 on the digits into ``choice_mask``; step s lies in row ``row_of[s]``. ``with_end``: the
    token that ended the thought belongs to it. Credit from returns is also placed on steps that
    cannot be read.
    """
    width = data.batch["responses"].shape[1]
    # Without padding, as the starts of steps are counted.
    prompt_lengths = data.batch["attention_mask"][:, :-width].sum(-1).tolist()
    of_row: list[list[int]] = [[] for _ in range(len(data))]
    for s, row in enumerate(row_of):
        of_row[row].append(s)
    placed: dict[str, list[torch.Tensor]] = {key: [] for key in columns}
    masks: list[torch.Tensor] = []
    for row, numbers in enumerate(of_row):
        spans: list[list[tuple[int, int]]] = []
        choices: list[list[tuple[int, int]]] = []
        digits: list[list[tuple[int, int]]] = []
        for s in numbers:
            step = steps[s]
            # A response begins where the row's unpadded prompt ends.
            offset = step.start - prompt_lengths[row]
            own = step.credit_spans(offset, with_end)
            spans.append(own)
            choices.append(step.choice_spans(offset, with_end))
            # A sampled level digit is the first span of a step that has any.
            digits.append([] if step.forced else own[:1])
        for key, values in columns.items():
            where = choices if key == EXECUTED else spans
            placed[key].append(place_step_values(width, where, values[numbers]))
        masks.append(place_step_values(width, digits, [1.0] * len(digits)))
    for key, rows in placed.items():
        data.batch[key] = torch.stack(rows)
    data.batch["choice_mask"] = torch.stack(masks).long()


def _record(data: DataProto, table: ScoredSteps, prices: torch.Tensor, credit: _Credit) -> None:
    """Put records that know contexts (with ``prices`` [S, 4]) and credit of their steps in place of
    those of ``data``.
    """
    number_of: dict[tuple[int, int], int] = {}
    for s, (row, step) in enumerate(zip(table.row, table.steps, strict=True)):
        number_of[row, step.step] = s
    credited: list[list[ThinkingStep]] = []
    for row, records in enumerate(data.non_tensor_batch["steps"]):
        credited.append([])
        for record in records:
            s = number_of[row, record.step]
            contexts = _contexts(table.steps[s], table.entries[s], prices[s])
            advantage = float(credit.advantage[s])
            if credit.executed is not None:
                advantage += float(credit.executed[s])
            cost_share = float(credit.cost_share[s])
            credited[row].append(record.credited(contexts, advantage, cost_share))
    data.non_tensor_batch["steps"] = object_array(credited)


def _contexts(
    step: RowStep, entries: Mapping[int, SegmentScore], prices: torch.Tensor
) -> tuple[ThoughtContext, ...]:
    """The contexts of a step in order of level; ``prices`` [4]."""
    thoughts = step.thoughts()
    contexts = []
    for level, scores in sorted(entries.items()):
        text, tokens = thoughts[level]
        contexts.append(
            ThoughtContext(
                level=level,
                thought=text,
                tokens=tokens,
                cost=float(prices[level - 1]),
                original=level == step.parsed.level,
                scores=scores,
            )
        )
    return tuple(contexts)
