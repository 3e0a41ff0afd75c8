"""Credit audit with a known truth: both the best levels and the audited scores are given.

If the position is an even number, thinking at level 1 or 2 there makes the episode fail; at an odd
number level 3 or 4 does. All other moves are correct.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_system.multi_turn_rollout import audit_rollouts
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from rlvcr.research.audit import correlate_scores
from tests.helpers.number_line_world import PLACE, make_world, walk
from tests.helpers.thinking_trajectories import thinking_config
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.protocol import DataProto, object_array
from verl.records import ScoreResult

LEVELS_BY_POSITION = re.compile(
    r"You are at (\d+)\.(?:(?!You are at).)*?<level>(\d)</level><think>", re.DOTALL
)
AWAY = {"left": "right", "right": "left"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def level_return(position: int, level: int) -> float:
    return float((level > 2) == (position % 2 == 0))


def script(request: Any, prompt: str) -> str:
    if request.stop == ("</think>", "<action>"):
        return "so</think>"
    # A wrong level at any position makes the policy walk away from there on.
    is_failure = any(
        not level_return(int(position), int(level))
        for position, level in LEVELS_BY_POSITION.findall(prompt)
    )
    move = AWAY[walk(prompt)] if is_failure else walk(prompt)
    continuation = f"so</think><action>{move}</action>"
    if prompt.endswith("<think>"):
        return continuation
    current = int(PLACE.findall(prompt)[-1][0])
    return f"<level>{3 if current % 2 == 0 else 1}</level><think>{continuation}"


class Scorer:
    """Stand-in for ``compute_log_prob`` with the score ``score_of(position, level)``."""

    def __init__(self, tokenizer: Any, score_of: Any) -> None:
        self.tokenizer = tokenizer
        self.score_of = score_of

    def __call__(self, data: DataProto) -> DataProto:
        columns = data.non_tensor_batch
        span_scores, branch_scores = [], []
        for row in range(len(data)):
            row_tokens = data.batch["input_ids"][row][
                data.batch["attention_mask"][row].bool()
            ].tolist()
            span_scores.append(
                [self._score(row_tokens[: span.start], span) for span in columns["spans"][row]]
            )
            branch_scores.append(
                [self._score(row_tokens[: b.start], b) for b in columns["branches"][row]]
            )
        shape = data.batch["responses"].shape
        zeros = {"old_log_probs": torch.zeros(shape), "entropys": torch.zeros(shape)}
        scores = {
            "span_scores": object_array(span_scores),
            "branch_scores": object_array(branch_scores),
        }
        return DataProto.from_dict(zeros, scores)

    def _score(self, context_ids: list[int], query: Any) -> ScoreResult:
        positions = PLACE.findall(self.tokenizer.decode(context_ids))
        value = self.score_of(int(positions[-1][0]), query.label)
        return ScoreResult(query.step, query.label, value, -value, value, value, 1)


def run_audit(tokenizer, score_of, points: int = 60, groups: int = 12):
    config = thinking_config("append", n=1, audit_points=points, audit_plays=2)
    config.env.max_steps = 12
    group, envs, _ = make_world(tokenizer, config, script, score=Scorer(tokenizer, score_of))
    collector = TrajectoryCollector(config, tokenizer)
    try:
        return collector.audit_loop(envs.gen_batch(1, groups), group, envs)
    finally:
        collector.close()


def correlation(points, name: str) -> float:
    audit = next(score for score in correlate_scores(points).scores if score.name == name)
    assert audit.all_levels is not None
    return audit.all_levels[0]


def test_audit_detects_a_known_effect(tokenizer):
    data, _, points = run_audit(tokenizer, level_return)
    assert len(points) > 20
    positions = {}
    for row, steps in enumerate(data.non_tensor_batch["steps"]):
        uid = data.non_tensor_batch["traj_uid"][row]
        for step in steps:
            positions[uid, step.step] = int(PLACE.findall(step.observation)[-1][0])
    for point in points:
        position = positions[point.traj_uid, point.step]
        assert point.returns == tuple(
            (level_return(position, level),) * 2 for level in (1, 2, 3, 4)
        )
        assert point.chosen == (3 if position % 2 == 0 else 1)
    assert correlation(points, "logprob") > 0.9 and correlation(points, "entropy") > 0.9
    _, _, shuffled = run_audit(tokenizer, lambda where, level: float((where * 7 + level * 3) % 5))
    assert abs(correlation(shuffled, "logprob")) < 0.25


def test_higher_score_means_higher_certainty(tokenizer):
    _, _, points = run_audit(tokenizer, lambda _place, level: float(level), points=4)
    assert len(points) == 4
    levels = (1.0, 2.0, 3.0, 4.0)
    assert points[0].scores == dict.fromkeys(
        ("logprob", "entropy", "mean_prob", "geometric_prob", "deeper"), levels
    )


def test_audit_points_are_drawn_repeatably(tokenizer):
    first = [(p.traj_uid, p.step) for p in run_audit(tokenizer, level_return, points=5).points]
    repeated = [(p.traj_uid, p.step) for p in run_audit(tokenizer, level_return, points=5).points]
    more = [(p.traj_uid, p.step) for p in run_audit(tokenizer, level_return, points=9).points]
    assert first == repeated == more[:5]
    assert len({uid for uid, _ in more}) > 2


def test_rollouts_of_options_are_generated_in_parts(tokenizer, monkeypatch):
    at_once = run_audit(tokenizer, level_return, points=5).points
    call_sizes = []
    generate_specs = TrajectoryCollector._generate_specs

    def record_size(self, specs, *args):
        call_sizes.append(len(specs))
        return generate_specs(self, specs, *args)

    monkeypatch.setattr(TrajectoryCollector, "_generate_specs", record_size)
    monkeypatch.setattr(audit_rollouts, "ROLLOUTS_PER_CALL", 20)
    assert run_audit(tokenizer, level_return, points=5).points == at_once
    assert call_sizes[-3:] == [16, 16, 8]  # two points of 4 levels x 2 rollouts each


def test_point_with_failed_branches_is_dropped(tokenizer, monkeypatch):
    make_spec = audit_rollouts.make_branch_spec

    def change_first_observation(trajectory, turn, level, name):
        spec = make_spec(trajectory, turn, level, name)
        if not spec.replayed_turns or level != 2:
            return spec
        return replace(spec, expected_observations=("elsewhere", *spec.expected_observations[1:]))

    monkeypatch.setattr(audit_rollouts, "make_branch_spec", change_first_observation)
    _, _, points = run_audit(tokenizer, level_return)
    assert points and {point.step for point in points} == {0}
