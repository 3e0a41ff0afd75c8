"""Tests of the exam: solvers against the library, the rule of the levels, and the episodes."""

import json

import pytest

from tests.helpers.refusals import has_problem, mentions

pytest.importorskip("reasoning_gym")

from agent_system.environments.env import Observation
from agent_system.environments.env_package.exam import questions
from agent_system.environments.env_package.exam.expert import (
    format_step_results,
    list_single_token_texts,
)
from agent_system.environments.env_package.exam.package import PACKAGE
from agent_system.environments.env_package.exam.questions import (
    is_validation_question,
    load_questions_by_generator,
    load_task_questions,
)
from agent_system.environments.env_package.exam.solvers import (
    SOLVERS,
    shorten_observation,
    solve_question,
)
from agent_system.environments.experts.demonstrations import write_demonstrations
from rlvcr.levels import LEVELS, TAGS
from tests.helpers.expert_episodes import run_expert
from verl.models.new_policy import build_tokenizer

CUBE = """\
A cube has:
- a red top side
- a green right side
- a blue front side
- a pink left side
- an orange back side
- a gold bottom side

The cube is rotated so that the side which was before at the front is now at the top.

Then the cube is rotated to bring the bottom side to the top.

Now the cube is rotated to place its left side at the top.

What is now the color of the right side of the cube?
Provide only the color as your final answer."""
SUM = "State the final answer to the following arithmetic problem: 4 - 9 + 3 ="
COUNT = 'How many times does the letter "e" appear in the text: "Eve met the man"?'


def make_settings(**section):
    return PACKAGE.read_settings({"train_tasks": 30, "val_tasks": 30, **section})


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_solver_agrees_with_the_library(name):
    questions = load_questions_by_generator(make_settings())[name]
    entries = [questions[number] for number in range(400)]
    for entry in entries:
        solution = solve_question(f"Question 1 of 8. {entry['question']}")
        assert (solution.generator, solution.answer) == (name, entry["answer"])
        assert questions.score_answer(solution.answer, entry) == 1.0
        assert solution.answer in solution.choices
        wrong_answers = set(solution.choices) - {solution.answer}
        assert len(wrong_answers) >= 5
        assert all(questions.score_answer(answer, entry) < 1.0 for answer in wrong_answers)
        assert all(solution.answer_form.fullmatch(answer) for answer in solution.choices)
    difficulty = {
        "color_cube_rotation": lambda metadata: metadata["num_rotations"],
        "chain_sum": lambda metadata: metadata["num_terms"] - 1,
        "letter_counting": lambda metadata: metadata["span_length"],
    }[name]
    steps = [len(solve_question(entry["question"]).results) for entry in entries]
    assert steps == [difficulty(entry["metadata"]) for entry in entries]
    counts = {count: steps.count(count) for count in set(steps)}
    expected = {"color_cube_rotation": (1, 5), "chain_sum": (1, 5), "letter_counting": (5, 15)}
    assert (min(counts), max(counts)) == expected[name]


def test_cube_trace_by_hand():
    solution = solve_question(CUBE)
    # Order of the sides: top, right, front, left, back, bottom.
    assert solution.results == (
        "blue green gold pink red orange",
        "orange green red pink gold blue",
        "pink orange red blue gold green",
    )
    assert solution.answer == "orange"
    assert solution.short_question == (
        "cube red green blue pink orange gold #1 front #2 bottom #3 left ? right"
    )
    assert solution.situation == "color_cube_rotation 3"


def test_sum_and_count_traces_by_hand():
    solution = solve_question(SUM)
    assert (solution.results, solution.answer) == (("-5", "-2"), "-2")
    assert solution.short_question == "sum 4 #1 - 9 #2 + 3"
    solution = solve_question(COUNT)
    assert (solution.results, solution.answer) == (("2", "3", "4", "4"), "4")
    assert solution.short_question == "count e #1 e v e #2 m e t #3 t h e #4 m a n"


def test_other_texts_have_no_solution():
    with pytest.raises(ValueError, check=mentions("color_cube_rotation")):
        solve_question("What is 4 - 9?")
    assert shorten_observation("All answers are right.") == "All answers are right."


@pytest.mark.parametrize(
    ("results", "thoughts"),
    [
        ("a", ["", "#1 a", "#1 a", "#1 a"]),
        ("ab", ["", "#2 b", "#2 b", "#1 a #2 b"]),
        ("abc", ["", "#3 c", "#2 b #3 c", "#1 a #2 b #3 c"]),
        ("abcde", ["", "#3 c #5 e", "#2 b #4 d #5 e", "#1 a #2 b #3 c #4 d #5 e"]),
        (
            "abcdef",
            ["", "#3 c #6 f", "#2 b #4 d #6 f", "#1 a #2 b #3 c #4 d #5 e #6 f"],
        ),
    ],
)
def test_level_writes_every_result_of_its_stride_and_the_last(results, thoughts):
    assert [format_step_results(results, level) for level in LEVELS] == thoughts


def start_episode():
    settings = make_settings(questions=3)
    env = PACKAGE.make(settings)
    task = PACKAGE.tasks(settings, "train")[0]
    answers = [
        entry["answer"]
        for entry in load_task_questions(load_questions_by_generator(settings), task)
    ]
    return env, env.reset(task, 0), answers


def test_right_answers_lead_to_the_end_and_the_last_one_succeeds():
    env, observation, answers = start_episode()
    for number, answer in enumerate(answers, start=1):
        assert observation.text.startswith(f"Question {number} of 3. ")
        assert observation.situation == solve_question(observation.text).situation
        assert observation.needed_level is None
        observation, reward, done, info = env.step(f" {answer.upper()} ")
        assert (reward, done) == (float(number == 3), number == 3)
        assert info == {"won": number == 3, "is_action_valid": True}


def test_wrong_answer_ends_the_episode_without_success():
    env, observation, answers = start_episode()
    observation = env.step(answers[0])[0]
    wrong = next(a for a in observation.info["admissible_actions"] if a != answers[1])
    end, reward, done, info = env.step(wrong)
    assert (reward, done, info) == (0.0, True, {"won": False, "is_action_valid": True})
    assert end.text == f"{wrong} is wrong: the exam is over."


@pytest.mark.parametrize(
    "action", ["", "1 2", "no such colour", "9" * 10, "<action>", "1.0", "\uff11"]
)
def test_text_without_the_form_of_an_answer_is_invalid(action):
    settings = make_settings(generators=["chain_sum"])
    env = PACKAGE.make(settings)
    first = env.reset(PACKAGE.tasks(settings, "train")[0], 0)
    observation, reward, done, info = env.step(action)
    assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": False})
    assert observation.anchor == first.anchor


def test_splits_and_demonstrations_share_no_validation_question():
    settings = make_settings(val_tasks=60, train_tasks=60)
    expert = PACKAGE.expert
    assert expert is not None and expert.tasks is not None
    task_lists = {
        "train": PACKAGE.tasks(settings, "train"),
        "val": PACKAGE.tasks(settings, "val"),
        "demonstrations": expert.tasks(settings, 400),
    }
    questions_by_generator = load_questions_by_generator(settings)
    texts = {
        split: {
            entry["question"]
            for task in tasks
            for entry in load_task_questions(questions_by_generator, task)
        }
        for split, tasks in task_lists.items()
    }
    assert not texts["val"] & (texts["train"] | texts["demonstrations"])
    assert all(
        is_validation_question(text) == (split == "val") for split in texts for text in texts[split]
    )
    more = PACKAGE.tasks(make_settings(train_tasks=90), "train")
    assert more[:60] == task_lists["train"] and len(task_lists["demonstrations"]) == 400
    generators = [name for task in more for name, _ in task["questions"]]
    assert all(generators.count(name) / len(generators) > 0.27 for name in SOLVERS)


def test_tasks_with_the_same_question_have_different_ids(monkeypatch):
    monkeypatch.setattr(questions, "QUESTION_NUMBERS", 40)
    settings = PACKAGE.read_settings(
        {"questions": 1, "generators": ["chain_sum"], "train_tasks": 60, "val_tasks": 4}
    )
    ids = [task["task_id"] for task in PACKAGE.tasks(settings, "train")]
    assert len(set(ids)) == 60 and len({task_id.partition("#")[0] for task_id in ids}) < 40


def test_expert_answers_every_question_of_validation_tasks():
    settings = make_settings()
    env = PACKAGE.make(settings)
    for task in PACKAGE.tasks(settings, "val"):
        turns = run_expert(PACKAGE, env, settings, task)
        assert len(turns) == settings.questions and turns[-1].info["won"]


def test_demonstrations_have_thoughts_of_the_rule_at_uniform_levels(tmp_path):
    settings = make_settings(prompt="compact")
    path = write_demonstrations("exam", settings, tmp_path, 600, num_workers=0, useless_share=0.0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    expert = PACKAGE.expert
    assert expert is not None and expert.tasks is not None and len(rows) == 600
    tasks = {task["task_id"]: task for task in expert.tasks(settings, 600)}
    levels = []
    for row in rows:
        (entry,) = load_task_questions(load_questions_by_generator(settings), tasks[row["task_id"]])
        solution = solve_question(entry["question"])
        (level,) = row["levels"]
        question, reply = (message["content"] for message in row["messages"])
        assert question == solution.short_question
        thought = format_step_results(solution.results, level)
        assert reply == (
            f"<level>{level}</level><think>{thought}</think><action>{entry['answer']}</action>"
        )
        levels.append(level)
    assert all(110 <= levels.count(level) <= 190 for level in LEVELS)


def test_prompt_of_a_question_is_its_short_form_without_history():
    prompts = PACKAGE.prompts(make_settings(prompt="compact"))
    text = f"Question 2 of 8. {SUM}"
    assert (
        prompts.window(Observation("first"), [], Observation(text), True) == "sum 4 #1 - 9 #2 + 3"
    )
    assert prompts.turn(Observation("All answers are right.")) == "All answers are right."


def test_a_result_is_one_token_per_value_after_its_step_number():
    solution = solve_question(CUBE)
    thought = format_step_results(solution.results, 4)
    tokenizer = build_tokenizer(
        [thought, f" {thought}"] * 5,
        512,
        128,
        tags=(*TAGS, *list_single_token_texts(make_settings())),
    )
    assert len(tokenizer.encode(thought)) == 3 * 7
    assert tokenizer.decode(tokenizer.encode(thought)) == thought


@pytest.mark.parametrize("generators", [[], ["gcd"], ["chain_sum", "chain_sum"]])
def test_generators_without_a_solver_are_refused(generators):
    with pytest.raises(
        ValueError, check=has_problem("out_of_range", "env.exam.generators", "chain_sum")
    ):
        PACKAGE.read_settings({"generators": generators})


def test_options_set_the_difficulty():
    settings = make_settings(options={"chain_sum": {"min_terms": 3, "max_terms": 3}})
    entry = load_questions_by_generator(settings)["chain_sum"][5]
    assert len(solve_question(entry["question"]).results) == 2
    with pytest.raises(ValueError, check=mentions("max_termz")):
        load_questions_by_generator(make_settings(options={"chain_sum": {"max_termz": 3}}))
