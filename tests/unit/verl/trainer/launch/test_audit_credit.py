"""Credit of estimators at audited turns against numbers by hand, with and without levels."""

import math

import numpy as np
import pytest
import torch

import rlvcr.core_rlvcr  # noqa: F401  (registers rlvcr, copo and level_groups)
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from rlvcr.research.audit import AuditedTurn
from rlvcr.score_table import DIGIT_LABEL_OFFSET
from rlvcr.settings import get_rlvcr_settings
from tests.helpers.number_line_world import PLACE, make_world
from tests.helpers.thinking_trajectories import thinking_config
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.config.load import default_config
from verl.protocol import DataProto, object_array
from verl.records import ScoreResult
from verl.trainer.launch.audit_credit import add_credits


def make_point(traj_uid: str, step: int) -> AuditedTurn:
    return AuditedTurn(traj_uid, step, 1, True, ((1.0,), (0.0,)), {})


def test_credits_of_estimators_without_levels_by_hand():
    """Two trajectories of a group with two turns each. Both start in "x", one has success."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]])
    rewards = torch.zeros(2, 4)
    rewards[0, 3] = 1.0
    tensors = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "step_ids": torch.tensor([[0, 0, -1, 1], [0, 0, -1, -1]]),
        "old_log_probs": torch.tensor([[-1.0, -3.0, math.nan, -0.5], [-2.0, -2.0, 0.0, 0.0]]),
        "entropys": torch.tensor([[0.2, 0.4, math.nan, 0.1], [1.0, 2.0, 0.0, 0.0]]),
    }
    columns = {
        "uid": object_array(["g", "g"]),
        "traj_uid": object_array(["a", "b"]),
        "step_rewards": object_array([[0.0, 1.0], [0.0]]),
        "step_index": object_array([[0, 1], [0]]),
        "anchor_obs": object_array([["x", "y"], ["x"]]),
        "won": np.array([True, False]),
    }
    cfg = default_config()
    cfg.algorithm.gamma = 0.5
    cfg.algorithm.norm_adv_by_std_in_grpo = False
    points = [make_point("a", 0), make_point("a", 1), make_point("b", 0)]
    points, skipped = add_credits(points, DataProto.from_dict(tensors, columns), cfg)
    expected = {
        # Return minus the mean of the group, and minus that of the other member.
        "grpo": [0.5, 0.5, -0.5],
        "rloo": [1.0, 1.0, -1.0],
        # The same plus the discounted return from the state: 0.5 and 0 from "x", "y" is seen once.
        "gigpo": [0.75, 0.5, -0.75],
        "logprob": [-2.0, -0.5, -2.0],
        "entropy": [-0.3, -0.1, -1.5],
        "prob": [math.exp(-2), math.exp(-0.5), math.exp(-2)],
    }
    for name, values in expected.items():
        assert [point.step_scores[name] for point in points] == pytest.approx(values), name
    assert {"graphgpo", "hgpo", "gpg", "opo"} <= set(points[0].step_scores)
    assert "values" in skipped["gae"] and "reward_baselines" in skipped["remax"]
    assert "thinking_level_entropies" in skipped["rlvcr_additive"]
    assert not points[0].scores and "rlvcr_posterior" in skipped


LOG_PROBS = (-2.0, -0.4, -1.0, -0.1)  # of the action after a thought of each level
DIGITS = (-1.2, -0.9, -2.0, -1.8)  # of the level digits
ENTROPY = 0.3


def answer_requests(data: DataProto) -> DataProto:
    def answer(request) -> ScoreResult:
        label = request.label
        value = (
            DIGITS[label - DIGIT_LABEL_OFFSET - 1]
            if label > DIGIT_LABEL_OFFSET
            else LOG_PROBS[label - 1]
        )
        return ScoreResult(request.step, label, value, ENTROPY, 0.5, math.exp(value), 1)

    columns = data.non_tensor_batch
    answers = {
        "span_scores": object_array([[answer(span) for span in row] for row in columns["spans"]]),
        "branch_scores": object_array([[answer(b) for b in row] for row in columns["branches"]]),
    }
    zeros = torch.zeros(data.batch["responses"].shape)
    return DataProto.from_dict({"old_log_probs": zeros, "entropys": zeros.clone()}, answers)


def act_by_seed(request, prompt: str) -> str:
    """Half of the trajectories succeed at level 2 with a short thought, the others fail at 4."""
    if request.stop == ("</think>", "<action>"):
        return "so</think>"
    position, target = map(int, PLACE.findall(prompt)[-1])
    start = int(PLACE.findall(prompt)[0][0])
    succeeds = request.seed % 2 if len(PLACE.findall(prompt)) == 1 else "<think>no" not in prompt
    move = "right" if (target > position) == bool(succeeds) else "left"
    level, thought = (2, "so " * (1 + start % 2)) if succeeds else (4, "no")
    action = f"{thought}</think><action>{move}</action>"
    return action if prompt.endswith("<think>") else f"<level>{level}</level><think>{action}"


def test_credits_of_every_rlvcr_variant_by_hand():
    config = thinking_config(
        "append",
        n=8,
        score="logprob",
        step_advantage_w=0.5,
        cost_coef=0.2,
        cost_max=4,
        price_in="won",
        audit_points=40,
        audit_plays=1,
    )
    config.env.max_steps = 8
    config.env.kwargs = {"size": 6}
    tokenizer = make_tiny_tokenizer()
    group, envs, _ = make_world(tokenizer, config, act_by_seed, score=answer_requests)
    collector = TrajectoryCollector(config, tokenizer)
    try:
        data, scored, points = collector.audit_loop(envs.gen_batch(1, 2), group, envs)
    finally:
        collector.close()
    rewards = torch.zeros(scored.batch["response_mask"].shape)
    rewards[:, 0] = torch.as_tensor(scored.non_tensor_batch["episode_rewards"]).float()
    scored.batch["token_level_rewards"] = rewards
    points, skipped = add_credits(points, scored, config)
    assert {point.won for point in points} == {True, False}
    assert "gae" in skipped and "rlvcr_additive" not in skipped
    columns = data.non_tensor_batch
    row_of = {uid: row for row, uid in enumerate(columns["traj_uid"])}
    pi = np.exp(DIGITS) / np.exp(DIGITS).sum()
    joint = pi * np.exp(LOG_PROBS)
    scores = np.array(LOG_PROBS)
    w = get_rlvcr_settings(config.algorithm).step_advantage_w
    for point in points:
        row = row_of[point.traj_uid]
        members = columns["episode_rewards"][columns["uid"] == columns["uid"][row]]
        trajectory = columns["episode_rewards"][row] - members.mean()
        (record,) = (step for step in columns["steps"][row] if step.step == point.step)
        tokens = np.array([context.tokens for context in record.contexts])
        chosen = point.chosen - 1
        prices = 0.2 * np.minimum(tokens, 4) / 4 * point.won
        score_part = scores[chosen] - scores.mean()
        price_part = prices.mean() - prices[chosen]
        thinking = score_part + price_part
        utilities = scores - prices
        scaled = (utilities - utilities.min()) / max(np.ptp(utilities), 0.02)
        factor = np.exp(2 * scaled[chosen]) / np.exp(2 * scaled).mean()
        assert point.step_scores["rlvcr_score"] == pytest.approx(score_part, abs=1e-6)
        assert point.step_scores["rlvcr_price"] == pytest.approx(price_part, abs=1e-6)
        expected = {
            "rlvcr_additive": trajectory + w * thinking,
            # ``combine`` changes the sign of the score only, not of the price.
            "rlvcr_gated": trajectory + w * (np.sign(trajectory) * score_part + price_part),
            "rlvcr_success": trajectory + w * (score_part * point.won + price_part),
            "rlvcr_reweight": trajectory * factor,
            "copo": trajectory * (factor if trajectory > 0 else 1.0),
        }
        actual = {name: point.step_scores[name] for name in expected}
        assert actual == pytest.approx(expected, abs=1e-5)
        posterior = (joint / joint.sum() - pi) * trajectory
        assert point.scores["rlvcr_posterior"] == pytest.approx(tuple(posterior), abs=1e-6)


def test_level_groups_charge_tokens_at_the_audited_turn():
    """Successes from the same state with 1 and 3 thought tokens have prices -1 and +1."""
    config = thinking_config("append", n=8, audit_points=30, audit_plays=1)
    config.env.max_steps = 8
    config.env.kwargs = {"size": 6}

    def walk_with_thoughts(request, prompt: str) -> str:
        reply = act_by_seed(request, prompt)
        long = request.seed % 4 < 2 and "</level><think>" in reply
        return reply.replace("<think>so", "<think>so so so") if long else reply

    tokenizer = make_tiny_tokenizer()
    group, envs, _ = make_world(tokenizer, config, walk_with_thoughts, score=answer_requests)
    collector = TrajectoryCollector(config, tokenizer)
    try:
        data, scored, points = collector.audit_loop(envs.gen_batch(1, 1), group, envs)
    finally:
        collector.close()
    scored.batch["token_level_rewards"] = torch.zeros(scored.batch["response_mask"].shape)
    points, _ = add_credits(points, scored, config)
    turns = [
        (uid, anchor, record.step, record.thought_tokens, won)
        for uid, anchors, records, won in zip(
            data.non_tensor_batch["traj_uid"],
            data.non_tensor_batch["anchor_obs"],
            data.non_tensor_batch["steps"],
            data.non_tensor_batch["won"],
            strict=True,
        )
        for anchor, record in zip(anchors, records, strict=True)
    ]
    turn_of_point = {(uid, step): (anchor, tokens) for uid, anchor, step, tokens, _ in turns}
    prices = []
    for point in points:
        anchor, tokens = turn_of_point[point.traj_uid, point.step]
        successes = [t for _, a, _, t, won in turns if won and a == anchor]
        others = [t for u, a, _, t, won in turns if won and a == anchor and u != point.traj_uid]
        price = 0.0
        if point.won and others:
            price = (tokens - np.mean(others)) / max(np.std(successes), 1.0)
        prices.append(-price)
    actual = [point.step_scores["level_groups"] for point in points]
    assert actual == pytest.approx(prices, abs=1e-6)
    assert min(prices) < 0 < max(prices)
