"""A credit audit whose truth is planted: which levels are worth something is known, and so is what
is told beforehand.

Where the play stands on an even number, thinking at level 1 or 2 there loses it; on an odd number
level 3 or 4 does. The rest is walked as it should be.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_system.multi_turn_rollout import audit_rollouts
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from rlvcr.research.audit import audit_scores
from tests.helpers.play import PLACE, make_world, walk
from tests.helpers.thinking_plays import thinking_config
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.protocol import DataProto, object_array
from verl.records import SegmentScore

SAID = re.compile(r"You are at (\d+)\.(?:(?!You are at).)*?<level>(\d)</level><think>", re.DOTALL)
AWAY = {"left": "right", "right": "left"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def worth(position: int, level: int) -> float:
    return float((level > 2) == (position % 2 == 0))


def script(request: Any, prompt: str) -> str:
    if request.stop == ("</think>", "<action>"):
        return "so</think>"
    # What is right at every place is known; a wrong level anywhere spoils the rest.
    lost = any(not worth(int(place), int(level)) for place, level in SAID.findall(prompt))
    move = AWAY[walk(prompt)] if lost else walk(prompt)
    answer = f"so</think><action>{move}</action>"
    if prompt.endswith("<think>"):
        return answer
    position = int(PLACE.findall(prompt)[-1][0])
    return f"<level>{3 if position % 2 == 0 else 1}</level><think>{answer}"


class Scorer:
    """Stands for ``compute_log_prob``: certainty is ``told(position, level)``."""

    def __init__(self, tokenizer: Any, told: Any) -> None:
        self.tokenizer = tokenizer
        self.told = told

    def __call__(self, data: DataProto) -> DataProto:
        columns = data.non_tensor_batch
        own, others = [], []
        for row in range(len(data)):
            real = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()
            own.append([self._score(real[: span.start], span) for span in columns["spans"][row]])
            others.append([self._score(real[: b.start], b) for b in columns["branches"][row]])
        shape = data.batch["responses"].shape
        zeros = {"old_log_probs": torch.zeros(shape), "entropys": torch.zeros(shape)}
        answers = {"span_scores": object_array(own), "branch_scores": object_array(others)}
        return DataProto.from_dict(zeros, answers)

    def _score(self, before: list[int], asked: Any) -> SegmentScore:
        places = PLACE.findall(self.tokenizer.decode(before))
        value = self.told(int(places[-1][0]), asked.label)
        return SegmentScore(asked.step, asked.label, value, -value, value, value, 1)


def audited(tokenizer, told, points: int = 60, groups: int = 12):
    config = thinking_config("append", n=1, audit_points=points, audit_plays=2)
    config.env.max_steps = 12
    group, envs, _ = make_world(tokenizer, config, script, score=Scorer(tokenizer, told))
    collector = TrajectoryCollector(config, tokenizer)
    try:
        return collector.audit_loop(envs.gen_batch(1, groups), group, envs)
    finally:
        collector.close()


def correlation(points, name: str) -> float:
    found = next(score for score in audit_scores(points).scores if score.name == name)
    assert found.all_levels is not None
    return found.all_levels[0]


def test_a_planted_effect_is_found_and_shuffled_scores_are_not(tokenizer):
    data, _, points = audited(tokenizer, worth)
    assert len(points) > 20
    places = {}
    for row, steps in enumerate(data.non_tensor_batch["steps"]):
        uid = data.non_tensor_batch["traj_uid"][row]
        for step in steps:
            places[uid, step.step] = int(PLACE.findall(step.observation)[-1][0])
    for point in points:
        position = places[point.traj_uid, point.step]
        assert point.returns == tuple((worth(position, level),) * 2 for level in (1, 2, 3, 4))
        assert point.chosen == (3 if position % 2 == 0 else 1)
    assert correlation(points, "logprob") > 0.9 and correlation(points, "entropy") > 0.9
    _, _, shuffled = audited(tokenizer, lambda place, level: float((place * 7 + level * 3) % 5))
    assert abs(correlation(shuffled, "logprob")) < 0.25


def test_certainty_is_scored_the_higher_the_better(tokenizer):
    _, _, points = audited(tokenizer, lambda _place, level: float(level), points=4)
    assert len(points) == 4
    levels = (1.0, 2.0, 3.0, 4.0)
    assert points[0].scores == dict.fromkeys(
        ("logprob", "entropy", "mean_prob", "geometric_prob", "deeper"), levels
    )


def test_points_are_drawn_by_name(tokenizer):
    first = [(p.traj_uid, p.step) for p in audited(tokenizer, worth, points=5).points]
    again = [(p.traj_uid, p.step) for p in audited(tokenizer, worth, points=5).points]
    more = [(p.traj_uid, p.step) for p in audited(tokenizer, worth, points=9).points]
    assert first == again == more[:5]
    assert len({uid for uid, _ in more}) > 2


def test_a_point_whose_plays_broke_is_left_out(tokenizer, monkeypatch):
    made = audit_rollouts.make_branch_spec

    def first_one_is_lost(trajectory, turn, level, name):
        job = made(trajectory, turn, level, name)
        if not job.replay or level != 2:
            return job
        return replace(job, expected_observations=("elsewhere", *job.expected_observations[1:]))

    monkeypatch.setattr(audit_rollouts, "make_branch_spec", first_one_is_lost)
    _, _, points = audited(tokenizer, worth)
    assert points and {point.step for point in points} == {0}
