"""Questions of reasoning-gym: who sees which, what an answer earns, and how numbers are spelt."""

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
    project_answer,
)
from agent_system.environments.env_package.reasoning_gym.questions import load_questions
from agent_system.environments.expert_protocol import EpisodeStart, Noise
from tests.helpers.refusals import mentions

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


def settings(**fields):
    return PACKAGE.read_settings({"train_tasks": 60, "val_tasks": 20} | fields)


def asked(chosen, split):
    questions = load_questions(chosen)
    return [questions[task["number"]]["question"] for task in PACKAGE.tasks(chosen, split)]


def test_no_seed_and_no_question_is_in_both_splits():
    chosen = settings(**SUMS)
    numbers = {
        split: {task["number"] for task in PACKAGE.tasks(chosen, split)}
        for split in ("train", "val")
    }
    assert len(numbers["train"]) == 60
    assert numbers["val"] <= set(range(20)) and min(numbers["train"]) >= 20
    held_out = asked(chosen, "val")
    assert len(set(held_out)) == len(held_out)
    assert not set(held_out) & set(asked(chosen, "train"))


def test_a_generator_that_has_fewer_questions_gives_fewer():
    tiny = settings(**SUMS, train_tasks=100, val_tasks=400)
    assert 100 < len(asked(tiny, "val")) <= 121
    assert 0 <= len(asked(tiny, "train")) < 100


def test_the_task_seed_changes_the_questions():
    assert asked(settings(task_seed=1), "val") != asked(settings(task_seed=10_000), "val")
    assert asked(settings(), "val") == asked(settings(), "val")


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "letter_counting", "countdown"])
def test_the_right_answer_wins_and_another_does_not(task):
    chosen = settings(task=task)
    env = PACKAGE.make(chosen)
    first = PACKAGE.tasks(chosen, "val")[0]
    question = env.reset(first, seed=0).text
    assert question and question == env.reset(first, seed=5).text
    answer = str(load_questions(chosen)[first["number"]]["answer"])
    _, reward, done, info = env.step(answer)
    assert (reward, done, info["won"], info["is_action_valid"]) == (1.0, True, True, True)
    env.reset(first, seed=0)
    _, reward, done, info = env.step("no idea")
    assert reward < 1 and done and not info["won"] and info["is_action_valid"]
    env.reset(first, seed=0)
    _, reward, _, info = env.step("")
    assert reward == 0.0 and not info["won"] and not info["is_action_valid"]


@pytest.mark.parametrize(
    ("text", "answer", "formed"),
    [
        ("<think>1 or 2?</think><answer>2</answer>", "2", True),
        ("<answer>1</answer> no: <action> a\nb </action>", "a\nb", True),
        ("<answer>1</action>", "", False),
        ("the answer is 2", "", False),
    ],
)
def test_the_last_tagged_answer_counts(text, answer, formed):
    assert project_answer(text) == (answer, formed)


@pytest.mark.parametrize(
    ("text", "spelt"),
    [
        ("Calculate 12 + 345.", "Calculate 1 2 + 3 4 5."),
        ("State the final answer to the following problem: 20 - 7 =", "2 0 - 7 ="),
        ("-61", "-6 1"),
        ("", ""),
    ],
)
def test_numbers_are_spelt_digit_by_digit(text, spelt):
    assert separate_digits(text) == spelt
    if ":" not in text:
        assert join_digits(spelt) == text


def test_compact_answers_are_read_digit_by_digit():
    chosen = settings(**SUMS, prompt="compact")
    env = PACKAGE.make(chosen)
    for task in PACKAGE.tasks(chosen, "val"):
        shown = PACKAGE.prompts(chosen).first(env.reset(task, seed=0), False)
        terms = re.findall(r"\d[\d ]*", shown)
        total = sum(int(term.replace(" ", "")) for term in terms)
        assert env.step(" ".join(str(total)))[1] == 1.0


def answers(noise, count=400):
    chosen = settings(**SUMS, prompt="compact")
    env = PACKAGE.make(chosen)
    task = PACKAGE.tasks(chosen, "train")[0]
    rng = random.Random(0)
    graded = []
    for _ in range(count):
        first = env.reset(task, seed=0)
        decision = AnswerExpert(EpisodeStart(chosen, task, first, rng, noise)).act()
        graded.append((env.step(decision.action)[1] == 1.0, decision.is_useless))
    return graded


def test_the_expert_is_wrong_as_often_as_the_noise_says():
    assert all(right and not slack for right, slack in answers(Noise(), count=5))
    noisy = answers(Noise(useless_share=0.3))
    assert all(right != slack for right, slack in noisy)
    assert 0.2 < sum(slack for _, slack in noisy) / len(noisy) < 0.4


def test_one_digit_is_another():
    rng = random.Random(0)
    for answer in ("7", "-40", "3/5"):
        wrong = change_one_digit(answer, rng)
        assert sum(a != b for a, b in zip(answer, wrong, strict=True)) == 1
    assert change_one_digit("yes", rng) == "yes"


def test_an_unknown_generator_or_option_says_what_there_is():
    with pytest.raises(ValueError, check=mentions("task='chain_sun'", "chain_sum")):
        PACKAGE.tasks(settings(task="chain_sun"), "val")
    wrong = settings(options={"chain_sum": {"terms": 3}})
    with pytest.raises(ValueError, check=mentions("options.chain_sum={'terms': 3}", "max_terms")):
        PACKAGE.tasks(wrong, "val")


class Counted:
    """Questions that count how often they are made."""

    def __init__(self):
        self.made = 0

    def __getitem__(self, number):
        self.made += 1
        return {"question": f"{number}?"}

    def score_answer(self, answer, entry):
        raise NotImplementedError(answer, entry)


def test_held_out_questions_are_made_once_for_both_splits(monkeypatch):
    counted = Counted()
    monkeypatch.setattr(questions_module, "load_questions", lambda _settings: counted)
    chosen = PACKAGE.read_settings({"train_tasks": 2, "val_tasks": 3})
    assert len(PACKAGE.tasks(chosen, "val")) == 3 and counted.made == 3
    assert len(PACKAGE.tasks(chosen, "train")) == 2 and counted.made == 5


def test_an_answer_that_the_grader_cannot_read_earns_nothing():
    chosen = settings(task="prime_factorization", train_tasks=3, val_tasks=3)
    env = PACKAGE.make(chosen)
    env.reset(PACKAGE.tasks(chosen, "train")[0], 0)
    _, reward, done, info = env.step("of")
    assert (reward, done, info["won"]) == (0.0, True, False)


def test_a_question_that_is_asked_again_is_the_same_one():
    questions = load_questions(settings(task="gcd"))
    first = questions[1]
    text = str(first)
    first["metadata"].clear()  # a caller's change of its copy
    assert str(questions[1]) == text and questions[1] != questions[2]


def test_what_cannot_be_played_as_it_is_or_does_not_repeat_itself_is_not_listed():
    listed = PACKAGE.variants()
    assert not {"ransom_note", "composite", "codeio"} & set(listed) and "gcd" in listed


@pytest.mark.parametrize("task", ["syllogism", "circuit_logic", "course_schedule"])
@pytest.mark.parametrize("split", ["val", "train"])
def test_no_answer_is_right_for_more_than_half_of_the_tasks(task, split):
    chosen = settings(task=task, train_tasks=80, val_tasks=80)
    questions = load_questions(chosen)
    answers = Counter(
        str(questions[one["number"]]["answer"]) for one in PACKAGE.tasks(chosen, split)
    )
    assert len(answers) == 2 and max(answers.values()) <= sum(answers.values()) / 2


@pytest.mark.parametrize(
    ("answer", "won"),
    [
        *(("0.125", True), ("1/8", True), (" .12501 ", True), ("(1/2)**3", False)),
        *(("0", False), ("0.1", False), ("0.12", False), ("0.1250000001", True), ("-0.125", False)),
        *(("nan", False), ("1e-999999999", False), ("1/0", False), ("12.5%", False)),
    ],
)
def test_a_probability_is_compared_as_a_number(answer, won):
    env = ReasoningGymEnv(settings(task="coin_flip"))
    env.entry = {"answer": "0.125", "metadata": {}}
    assert env.step(answer)[3]["won"] == won


def test_generators_that_are_slow_are_asked_for_fewer_questions():
    assert settings().val_tasks == 20
    slow, quick = (PACKAGE.read_settings({"task": task}) for task in ("futoshiki", "gcd"))
    assert slow.val_tasks < 100 < quick.val_tasks and slow.train_tasks < quick.train_tasks
    assert PACKAGE.read_settings({"task": "futoshiki", "val_tasks": 500}).val_tasks == 500
    assert (
        PACKAGE.read_settings({"task": "futoshiki", "val_tasks": None}).val_tasks == slow.val_tasks
    )


@pytest.mark.parametrize("task", ["graph_color", "propositional_logic", "rubiks_cube"])
def test_the_expert_knows_an_answer_where_the_generator_names_one_of_several(task):
    chosen = settings(task=task, val_tasks=3)
    env = PACKAGE.make(chosen)
    assert PACKAGE.expert is not None and PACKAGE.expert.knows_solution(chosen)
    for one in PACKAGE.tasks(chosen, "val"):
        begin = EpisodeStart(chosen, one, env.reset(one, 0), random.Random(0))
        assert env.step(AnswerExpert(begin).act().action)[3]["won"]
    assert not PACKAGE.expert.knows_solution(settings(task="rush_hour"))
    assert env.step("anything")[1] < 0.25
