"""A grader that hangs or eats memory breaks its own play; text of a policy is no code to it."""

import asyncio
import json

import pytest

from agent_system.environments.env import EnvFailure
from agent_system.environments.env_package.reasoning_gym.answers import (
    EVALUATED_READERS,
    find_right_answer,
    prepare_answer,
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
)


def test_a_bad_grade_breaks_its_play_and_the_worker_goes_on(tmp_path):
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

    async def played():
        pool = EnvironmentPool("dataset", section, 1, 2)
        await pool.start()
        pids, said = pool.worker_pids, []
        for answer in ("hang", "eat", "fine"):
            async with pool.open_session() as env:
                await env.reset(task, 0)
                try:
                    said.append((await env.step(answer))[1])
                except EnvFailure as failure:
                    said.append(f"{failure.kind}: {failure.detail}")
        same = pids == pool.worker_pids
        await pool.close()
        return said, same

    (hung, eaten, fine), same = asyncio.run(played())
    assert "error: step: TimeLimit('grading dataset/val/0 took over 0.5 s')" in hung
    assert "error: step: MemoryError" in eaten
    assert fine == 1.0 and same


@pytest.mark.parametrize("generator", EVALUATED_READERS)
def test_code_is_not_shown_to_graders_that_evaluate(generator):
    for answer in CODE:
        assert prepare_answer(answer, generator, {}) is None, answer
        assert (
            prepare_answer(answer, "composite", {"metadata": {"source_dataset": generator}}) is None
        )
        assert prepare_answer(answer, "chain_sum", {}) == answer


@pytest.mark.parametrize("generator", [*EVALUATED_READERS, "game_of_life_halting"])
def test_right_answers_of_these_generators_still_win(generator):
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


def test_a_grader_that_takes_every_text_for_right_sees_right_ones_alone():
    def seen(text, answer):
        return prepare_answer(text, "game_of_life_halting", {"answer": answer})

    assert seen("It is TRUE.", "True") and seen("false", False)
    assert seen("false", "True") is seen("win", "True") is seen("true or false", "True") is None


def test_questions_that_draw_from_pythons_own_generator_hang_on_their_number_alone():
    pytest.importorskip("reasoning_gym")
    from agent_system.environments.env_package.reasoning_gym.questions import _create_questions

    asked = []
    for _ in range(2):
        _create_questions.cache_clear()
        asked.append(
            [
                _create_questions("list_functions", "{}", 8, 0)[number]["question"]
                for number in range(8)
            ]
        )
    assert asked[0] == asked[1]


def test_an_answer_that_a_grader_cannot_read_is_wrong_and_breaks_nothing():
    pytest.importorskip("reasoning_gym")
    from agent_system.environments.env_package.reasoning_gym.package import (
        PACKAGE,
        ReasoningGymEnv,
    )

    env = ReasoningGymEnv(PACKAGE.read_settings({"task": "prime_factorization", "val_tasks": 2}))
    env.reset({"number": 0}, 0)
    _, reward, done, info = env.step("two * many")
    assert (reward, done, info["won"]) == (0.0, True, False)
