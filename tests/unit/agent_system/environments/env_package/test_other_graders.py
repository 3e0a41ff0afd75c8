"""Tables of user-provided grades and of the graders of other environments."""

from fractions import Fraction

import numpy as np
import pytest

from agent_system.environments.env import Observation
from agent_system.environments.env_package.dataset.comparison import canonicalize_answer
from agent_system.environments.env_package.dataset.grading import (
    Grader,
    InvalidGradeError,
    grade_answer,
    read_grade,
)
from agent_system.environments.env_package.dataset.settings import RewardFromFile
from agent_system.environments.env_package.search.package import is_exact_match
from agent_system.environments.env_package.twenty_questions.game import read_move
from agent_system.environments.pool import wire as pool_wire
from agent_system.reward_manager.scores import is_full_score


@pytest.mark.parametrize("acc", [True, 1, 1.0, np.bool_(True), np.float32(1), np.int64(1)])
def test_acc_accepts_truth_values(acc):
    assert read_grade({"score": 0.3, "acc": acc}, "t").is_right
    assert not read_grade({"score": 1.0, "acc": type(acc)(0)}, "t").is_right


@pytest.mark.parametrize("acc", ["False", "true", 0.3, 2, -1, None, [], [1], {}, Fraction(1, 2)])
def test_other_acc_values_give_no_grade(acc):
    with pytest.raises(InvalidGradeError) as error_info:
        read_grade({"score": 0.3, "acc": acc}, "t")
    assert "'acc'" in str(error_info.value) and str(acc) in str(error_info.value)


@pytest.mark.parametrize(
    "weights", [(0.7, 0.2, 0.1), (0.6, 0.3, 0.1), (0.1,) * 10, (1 / 3,) * 3, (0.5, 0.5)]
)
def test_weights_that_sum_to_one_give_a_full_score(weights):
    names = {f"part {n}": weight for n, weight in enumerate(weights)}
    assert read_grade(dict.fromkeys(names, 1.0), "t", names).is_right
    parts = dict.fromkeys(names, 1.0) | {"part 0": 0.99}
    assert not read_grade(parts, "t", names).is_right


@pytest.mark.parametrize("score, full", [(1, True), (1 - 1e-7, True), (0.999, False), (2.5, True)])
def test_is_full_tolerates_rounding(score, full):
    assert is_full_score(score) is full


@pytest.mark.parametrize("won", [0.3, float("nan"), 2, "True", None])
def test_won_must_be_a_truth_value(won):
    with pytest.raises(pool_wire.InvalidEnvReplyError):
        pool_wire.check_step((Observation(""), 0.0, True, {"won": won}))


@pytest.mark.parametrize(
    "given, truth, is_right",
    [
        ("female", "male", False),
        ("Paris or London", "Paris", False),
        ("not Paris", "Paris", False),
        ("\u201cParis\u201d", "Paris", True),
        ("\uff30aris", "Paris", True),
        ("the Paris!", "Paris", True),
        ("rock\u2013n\u2013roll", "rock-n-roll", True),
        ("", "Paris", False),
    ],
)
def test_search_compares_whole_answers(given, truth, is_right):
    assert is_exact_match(given, [truth]) is is_right


@pytest.mark.parametrize(
    "text, guess",
    [
        ("<think>[cat]</think>[dog]", "dog"),
        ("<action>[the Cat]</action>", "cat"),
        ("[cat] or [dog]", "dog"),
        ("[tomcat]", "tomcat"),
        ("<think>[cat]", None),
        ("is it a cat?", None),
    ],
)
def test_twenty_questions_takes_the_last_guess_outside_thoughts(text, guess):
    assert read_move(text).guess == guess


def test_equal_answers_share_one_key():
    for texts in (
        ("\\boxed{0.5}", "1/2", "It is 0.5."),
        ("Answer: Paris", "paris", "The answer is Paris, because it is."),
        ("(A)", "A. Rome", "\\boxed{A}", "Option A is correct."),
        ("72", "She sold 72 in May.", "It is 72 (seventy-two)."),
    ):
        assert len({canonicalize_answer(text) for text in texts}) == 1
    assert canonicalize_answer("<think>5") is None is canonicalize_answer("")
    assert canonicalize_answer("5 km") != canonicalize_answer("5 m")
    assert (
        canonicalize_answer("at least 5") != canonicalize_answer("5") != canonicalize_answer("> 5")
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [("<think>5", ""), ("", ""), ("\\boxed{" + "x" * 5000 + "}", ""), ("\\boxed{5}", "5")],
)
def test_action_without_an_answer_has_an_empty_vote(text, answer):
    task = {"task_id": "t", "data_source": "d", "ground_truth": "7", "extra_info": {}}
    _, _, _, info = grade_answer(Grader(RewardFromFile(path=None)), task, text, 10.0)
    assert info["answer"] == answer
