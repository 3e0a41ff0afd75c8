"""Tests of the bounds of graders: time, memory, and no execution of text of the policy."""

import asyncio
import json

import pytest

from agent_system.environments.env import EnvFailure
from agent_system.environments.env_package.reasoning_gym.answers import (
    SANITIZERS_OF_EVALUATED_ANSWERS,
    find_right_answer,
    sanitize_answer,
)
from agent_system.environments.pool.environment_pool import EnvironmentPool

GRADER = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        while True:
            time.sleep(0.01)
    if solution_str == "eat":
        return len(bytearray(2**40)) * 0.0
    return 1.0
"""
CODE = (
    "__import__('os')._exit(0)",
    "exec(x)",
    "open(x)",
    "[].__class__",
    "x.real.imag",
    "9**9**9**9",
    "2**(9**9)",
    "10**99999",
    "[y for y in (1)]",
    "lambda: 1",
    "sin(" * 5 + "x" + ")" * 5,
)


def test_failing_grader_fails_its_episode_and_not_the_worker(tmp_path):
    rows, grader = tmp_path / "rows.jsonl", tmp_path / "grade.py"
    rows.write_text(json.dumps({"prompt": "?", "ground_truth": "1"}))
    grader.write_text(GRADER)
    section = {"val_files": [str(rows)], "grade_s": 0.5, "reward": {"path": str(grader)}}
    task = {
        "task_id": "dataset/val/0",
        "data_source": "rows",
        "messages": [{"role": "user", "content": "?"}],
        "ground_truth": "1",
        "extra_info": {},
    }

    async def grade_answers():
        pool = EnvironmentPool("dataset", section, 1, 2)
        await pool.start()
        pids, results = pool.worker_pids, []
        for answer in ("hang", "eat", "fine"):
            async with pool.open_session() as env:
                await env.reset(task, 0)
                try:
                    results.append((await env.step(answer))[1])
                except EnvFailure as failure:
                    results.append(f"{failure.kind}: {failure.detail}")
        is_same_worker = pids == pool.worker_pids
        await pool.close()
        return results, is_same_worker

    (hung, eaten, fine), is_same_worker = asyncio.run(grade_answers())
    assert "timeout: step: TimeLimitError('grading dataset/val/0 took over 0.5 s')" in hung
    assert "error: step: MemoryError" in eaten
    assert fine == 1.0 and is_same_worker


@pytest.mark.parametrize("generator", SANITIZERS_OF_EVALUATED_ANSWERS)
def test_evaluating_graders_receive_no_code(generator):
    for answer in CODE:
        assert sanitize_answer(answer, generator, {}) is None, answer
        assert (
            sanitize_answer(answer, "composite", {"metadata": {"source_dataset": generator}})
            is None
        )
        assert sanitize_answer(answer, "chain_sum", {}) == answer


@pytest.mark.parametrize("generator", [*SANITIZERS_OF_EVALUATED_ANSWERS, "game_of_life_halting"])
def test_right_answers_of_evaluating_graders_succeed(generator):
    pytest.importorskip("reasoning_gym")
    from agent_system.environments.env_package.reasoning_gym.package import (
        PACKAGE,
        ReasoningGymEnv,
    )

    env = ReasoningGymEnv(
        PACKAGE.read_settings({"task": generator, "train_tasks": 1, "val_tasks": 12})
    )
    for number in range(12):
        env.reset({"number": number}, 0)
        assert env.step(str(find_right_answer(env.entry)))[3]["won"], env.entry


def test_lenient_grader_receives_only_right_answers():
    def prepare(text, answer):
        return sanitize_answer(text, "game_of_life_halting", {"answer": answer})

    assert prepare("It is TRUE.", "True") and prepare("false", False)
    assert (
        prepare("false", "True")
        is prepare("win", "True")
        is prepare("true or false", "True")
        is None
    )


def test_negated_and_enormous_answers_are_wrong():
    assert sanitize_answer("not True", "game_of_life_halting", {"answer": "True"}) is None
    assert sanitize_answer("-12", "gsm_symbolic", {"answer": "12"}) is None
    assert sanitize_answer("12", "gsm_symbolic", {"answer": "12"}) == "12"
    assert sanitize_answer("1 " * 20_000, "codeio", {"answer": "1"}) is None


def test_question_depends_only_on_its_number():
    pytest.importorskip("reasoning_gym")
    from agent_system.environments.env_package.reasoning_gym.package import PACKAGE
    from agent_system.environments.env_package.reasoning_gym.questions import load_questions

    section = {"task": "list_functions", "train_tasks": 1}
    questions: list[list[str]] = []
    # Two numbers of tasks, because equal settings would give the cached questions.
    for val_tasks in (8, 9):
        numbered = load_questions(PACKAGE.read_settings({**section, "val_tasks": val_tasks}))
        questions.append([numbered[number]["question"] for number in range(8)])
    assert questions[0] == questions[1]


def test_unreadable_answer_is_wrong_without_an_error():
    pytest.importorskip("reasoning_gym")
    from agent_system.environments.env_package.reasoning_gym.package import (
        PACKAGE,
        ReasoningGymEnv,
    )

    env = ReasoningGymEnv(PACKAGE.read_settings({"task": "prime_factorization", "val_tasks": 2}))
    env.reset({"number": 0}, 0)
    _, reward, done, info = env.step("two * many")
    assert (reward, done, info["won"]) == (0.0, True, False)
