"""Tests of reasoning-gym: splits, rewards of answers, and digits in compact prompts."""

import random
import re
from collections import Counter

import pytest

from agent_system.environments.env_package.reasoning_gym import questions as questions_module
from agent_system.environments.env_package.reasoning_gym.answers import (
    join_digits,
    separate_digits,
)
from agent_system.environments.env_package.reasoning_gym.expert import (
    AnswerExpert,
    change_one_digit,
)
from agent_system.environments.env_package.reasoning_gym.package import (
    PACKAGE,
    ReasoningGymEnv,
    parse_answer,
)
from agent_system.environments.env_package.reasoning_gym.questions import load_questions
from agent_system.environments.expert_protocol import EpisodeStart, Noise
from tests.helpers.refusals import has_problem
from verl.config.settings.errors import UserError

# 121 questions: 0 + 0 to 10 + 10.
SUMS = {
    "task": "basic_arithmetic",
    "options": {
        "basic_arithmetic": {
            "operators": ["+"],
            "max_terms": 2,
            "max_digits": 1,
            "allow_negation": False,
            "allow_parentheses": False,
        }
    },
}


def make_settings(**fields):
    return PACKAGE.read_settings({"train_tasks": 60, "val_tasks": 20} | fields)


def list_questions(settings, split):
    questions = load_questions(settings)
    return [questions[task["number"]]["question"] for task in PACKAGE.tasks(settings, split)]


def test_splits_share_no_seed_and_no_question():
    settings = make_settings(**SUMS)
    numbers = {
        split: {task["number"] for task in PACKAGE.tasks(settings, split)}
        for split in ("train", "val")
    }
    assert len(numbers["train"]) == 60
    assert numbers["val"] <= set(range(20)) and min(numbers["train"]) >= 20
    held_out = list_questions(settings, "val")
    assert len(set(held_out)) == len(held_out)
    assert not set(held_out) & set(list_questions(settings, "train"))


def test_small_generator_gives_fewer_questions():
    tiny = make_settings(**SUMS, train_tasks=100, val_tasks=400)
    assert 100 < len(list_questions(tiny, "val")) <= 121
    assert 0 <= len(list_questions(tiny, "train")) < 100


def test_task_seed_changes_the_questions():
    assert list_questions(make_settings(task_seed=1), "val") != list_questions(
        make_settings(task_seed=10_000), "val"
    )
    assert list_questions(make_settings(), "val") == list_questions(make_settings(), "val")


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "letter_counting", "countdown"])
def test_only_the_right_answer_succeeds(task):
    settings = make_settings(task=task)
    env = PACKAGE.make(settings)
    first = PACKAGE.tasks(settings, "val")[0]
    question = env.reset(first, seed=0).text
    assert question and question == env.reset(first, seed=5).text
    answer = str(load_questions(settings)[first["number"]]["answer"])
    _, reward, done, info = env.step(answer)
    assert (reward, done, info["won"], info["is_action_valid"]) == (1.0, True, True, True)
    env.reset(first, seed=0)
    _, reward, done, info = env.step("no idea")
    assert reward < 1 and done and not info["won"] and info["is_action_valid"]
    env.reset(first, seed=0)
    _, reward, _, info = env.step("")
    assert reward == 0.0 and not info["won"] and not info["is_action_valid"]


@pytest.mark.parametrize(
    ("text", "answer", "well_formed"),
    [
        ("<think>1 or 2?</think><answer>2</answer>", "2", True),
        ("<answer>1</answer> no: <action> a\nb </action>", "a\nb", True),
        ("<answer>1</action>", "", False),
        ("the answer is 2", "", False),
    ],
)
def test_last_tagged_answer_is_the_action(text, answer, well_formed):
    assert parse_answer(text) == (answer, well_formed)


@pytest.mark.parametrize(
    ("text", "separated"),
    [
        ("Calculate 12 + 345.", "Calculate 1 2 + 3 4 5."),
        ("State the final answer to the following problem: 20 - 7 =", "2 0 - 7 ="),
        ("-61", "-6 1"),
        ("", ""),
    ],
)
def test_digits_of_numbers_are_separated(text, separated):
    assert separate_digits(text) == separated
    if ":" not in text:
        assert join_digits(separated) == text


def test_compact_answers_are_read_with_separated_digits():
    settings = make_settings(**SUMS, prompt="compact")
    env = PACKAGE.make(settings)
    for task in PACKAGE.tasks(settings, "val"):
        prompt = PACKAGE.prompts(settings).first(env.reset(task, seed=0), False)
        terms = re.findall(r"\d[\d ]*", prompt)
        total = sum(int(term.replace(" ", "")) for term in terms)
        assert env.step(" ".join(str(total)))[1] == 1.0


def grade_expert_answers(noise, count=400):
    settings = make_settings(**SUMS, prompt="compact")
    env = PACKAGE.make(settings)
    task = PACKAGE.tasks(settings, "train")[0]
    rng = random.Random(0)
    graded = []
    for _ in range(count):
        first = env.reset(task, seed=0)
        decision = AnswerExpert(EpisodeStart(settings, task, first, rng, noise)).act()
        graded.append((env.step(decision.action)[1] == 1.0, decision.is_useless))
    return graded


def test_expert_is_wrong_at_the_useless_share():
    assert all(
        is_right and not is_useless
        for is_right, is_useless in grade_expert_answers(Noise(), count=5)
    )
    noisy = grade_expert_answers(Noise(useless_share=0.3))
    assert all(is_right != is_useless for is_right, is_useless in noisy)
    assert 0.2 < sum(is_useless for _, is_useless in noisy) / len(noisy) < 0.4


def test_change_one_digit_changes_exactly_one_digit():
    rng = random.Random(0)
    for answer in ("7", "-40", "3/5"):
        wrong = change_one_digit(answer, rng)
        assert sum(a != b for a, b in zip(answer, wrong, strict=True)) == 1
    assert change_one_digit("yes", rng) == "yes"


def test_unknown_generator_or_option_lists_the_known_ones():
    key = "env.reasoning_gym.task"
    with pytest.raises(
        UserError, check=has_problem("unknown_name", key, "'chain_sun'", "chain_sum")
    ):
        PACKAGE.tasks(make_settings(task="chain_sun"), "val")
    wrong = make_settings(options={"chain_sum": {"terms": 3}})
    key = "env.reasoning_gym.options.chain_sum"
    refused = has_problem("out_of_range", key, "{'terms': 3}", "max_terms")
    with pytest.raises(UserError, check=refused):
        PACKAGE.tasks(wrong, "val")


class CountingQuestions:
    """Questions that count how often one is generated."""

    def __init__(self):
        self.count = 0

    def __getitem__(self, number):
        self.count += 1
        return {"question": f"{number}?"}

    def score_answer(self, answer, entry):
        raise NotImplementedError(answer, entry)


def test_each_question_is_generated_once_for_both_splits(monkeypatch):
    questions = CountingQuestions()
    monkeypatch.setattr(questions_module, "load_questions", lambda _settings: questions)
    settings = PACKAGE.read_settings({"train_tasks": 2, "val_tasks": 3})
    assert len(PACKAGE.tasks(settings, "val")) == 3 and questions.count == 3
    assert len(PACKAGE.tasks(settings, "train")) == 2 and questions.count == 5


def test_unreadable_answer_gets_reward_0():
    settings = make_settings(task="prime_factorization", train_tasks=3, val_tasks=3)
    env = PACKAGE.make(settings)
    env.reset(PACKAGE.tasks(settings, "train")[0], 0)
    _, reward, done, info = env.step("of")
    assert (reward, done, info["won"]) == (0.0, True, False)


def test_a_repeated_question_is_equal():
    questions = load_questions(make_settings(task="gcd"))
    first = questions[1]
    text = str(first)
    first["metadata"].clear()  # a caller's change of its copy
    assert str(questions[1]) == text and questions[1] != questions[2]


def test_unsupported_and_irreproducible_generators_are_not_listed():
    listed = PACKAGE.variants()
    assert not {"ransom_note", "composite", "codeio"} & set(listed) and "gcd" in listed


@pytest.mark.parametrize("generator", ["syllogism", "circuit_logic", "course_schedule"])
@pytest.mark.parametrize("split", ["val", "train"])
def test_no_answer_is_right_for_more_than_half_of_the_tasks(generator, split):
    settings = make_settings(task=generator, train_tasks=80, val_tasks=80)
    questions = load_questions(settings)
    answer_counts = Counter(
        str(questions[task["number"]]["answer"]) for task in PACKAGE.tasks(settings, split)
    )
    assert (
        len(answer_counts) == 2 and max(answer_counts.values()) <= sum(answer_counts.values()) / 2
    )


@pytest.mark.parametrize("generator", ["boxnet", "graph_color"])
def test_generators_without_stored_answers_keep_all_distinct_questions(generator):
    settings = make_settings(task=generator, train_tasks=20, val_tasks=8)
    assert load_questions(settings)[0].get("answer") is None
    task_counts = [len(PACKAGE.tasks(settings, split)) for split in ("train", "val")]
    assert task_counts == [20, 8]


@pytest.mark.parametrize(
    ("answer", "is_success"),
    [
        *(("0.125", True), ("1/8", True), (" .12501 ", True), ("(1/2)**3", False)),
        *(("0", False), ("0.1", False), ("0.12", False), ("0.1250000001", True), ("-0.125", False)),
        *(("nan", False), ("1e-999999999", False), ("1/0", False), ("12.5%", False)),
    ],
)
def test_probability_is_compared_as_a_number(answer, is_success):
    env = ReasoningGymEnv(make_settings(task="coin_flip"))
    env.entry = {"answer": "0.125", "metadata": {}}
    assert env.step(answer)[3]["won"] == is_success


def test_slow_generators_have_fewer_tasks_by_default():
    assert make_settings().val_tasks == 20
    slow, quick = (PACKAGE.read_settings({"task": task}) for task in ("futoshiki", "gcd"))
    assert slow.val_tasks < 100 < quick.val_tasks and slow.train_tasks < quick.train_tasks
    assert PACKAGE.read_settings({"task": "futoshiki", "val_tasks": 500}).val_tasks == 500
    assert (
        PACKAGE.read_settings({"task": "futoshiki", "val_tasks": None}).val_tasks == slow.val_tasks
    )


@pytest.mark.parametrize("generator", ["graph_color", "propositional_logic", "rubiks_cube"])
def test_expert_answers_where_the_generator_gives_one_answer(generator):
    settings = make_settings(task=generator, val_tasks=3)
    env = PACKAGE.make(settings)
    assert PACKAGE.expert is not None and PACKAGE.expert.knows_solution(settings)
    for task in PACKAGE.tasks(settings, "val"):
        start = EpisodeStart(settings, task, env.reset(task, 0), random.Random(0))
        assert env.step(AnswerExpert(start).act().action)[3]["won"]
    assert not PACKAGE.expert.knows_solution(make_settings(task="rush_hour"))
    assert env.step("anything")[1] < 0.25
