"""Tests of single-turn data: rows become tasks, and a failing grader is an error."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from agent_system.environments.env import Observation
from agent_system.environments.env_package.dataset.answers import extract_answer
from agent_system.environments.env_package.dataset.grading import (
    InvalidGradeError,
    compare_with_truth,
    read_grade,
)
from agent_system.environments.env_package.dataset.package import PACKAGE
from agent_system.environments.pool import wire as pool_wire
from tests.helpers.refusals import has_problem, mentions
from verl.utils.message_rows import InvalidRowError
from verl.utils.tables import read_rows

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "6 x 7?"}]
ROW = {
    "data_source": "sums",
    "prompt": MESSAGES,
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 7},
}


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, *rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return str(path)


def read_settings(path, **fields):
    return PACKAGE.read_settings({"train_files": [path], "val_files": [path]} | fields)


@pytest.mark.parametrize("write, name", [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")])
def test_jsonl_and_parquet_rows_give_the_same_tasks(tmp_path, write, name):
    plain = {"prompt": [{"role": "user", "content": "2?"}], "reward_model": {"ground_truth": "2"}}
    settings = read_settings(
        write(tmp_path / name, ROW, plain | {"data_source": None, "extra_info": None})
    )
    first, second = PACKAGE.tasks(settings, "train")
    assert first == {
        "task_id": "dataset/train/0",
        "data_source": "sums",
        "messages": MESSAGES,
        "ground_truth": "42",
        "extra_info": {"index": 7},
    }
    assert second["data_source"] == "a" and second["extra_info"] == {}
    assert PACKAGE.tasks(settings, "val")[0]["task_id"] == "dataset/val/0"
    json.dumps([first, second])  # tasks are sent as JSON


def test_files_are_concatenated_and_column_names_are_configurable(tmp_path):
    first_path = write_jsonl(
        tmp_path / "one.jsonl", {"question": "1?", "ground_truth": 1, "from": "x"}
    )
    second_path = write_jsonl(tmp_path / "two.jsonl", {"question": "2?", "ground_truth": 2})
    settings = PACKAGE.read_settings(
        {
            "train_files": [first_path, second_path],
            "prompt_key": "question",
            "reward_fn_key": "from",
        }
    )
    tasks = PACKAGE.tasks(settings, "train")
    assert [task["messages"][0]["content"] for task in tasks] == ["1?", "2?"]
    assert [task["data_source"] for task in tasks] == ["x", "two"]
    assert [task["ground_truth"] for task in tasks] == [1, 2]


def test_some_rows_without_ground_truth_give_a_warning(tmp_path, caplog):
    reward = {"reward": {"path": "mine.py"}}
    row_without_truth = {"prompt": "2?"}
    file = write_jsonl(tmp_path / "a.jsonl", ROW, row_without_truth)
    assert len(PACKAGE.tasks(read_settings(file, **reward), "train")) == 2
    (message,) = caplog.messages
    assert message.startswith("data.train_files: 1 of 2 rows") and "dataset/train/1" in message
    caplog.clear()
    for number, rows in enumerate(([ROW, ROW], [row_without_truth])):
        PACKAGE.tasks(read_settings(write_jsonl(tmp_path / str(number), *rows), **reward), "val")
    assert not caplog.messages


def test_user_provided_dataset_class_gives_the_rows(tmp_path):
    file = tmp_path / "rows.py"
    file.write_text(
        "class Rows:\n"
        "    def __init__(self, files): self.files = files\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, n):\n"
        "        return {'prompt': f'{self.files[0]} {n}?', 'ground_truth': n}\n"
    )
    custom_cls = {"path": str(file), "name": "Rows"}
    tasks = PACKAGE.tasks(
        PACKAGE.read_settings({"train_files": ["any"], "custom_cls": custom_cls}), "train"
    )
    assert [task["messages"][0]["content"] for task in tasks] == ["any 0?", "any 1?", "any 2?"]


@pytest.mark.parametrize(
    ("row", "code", "parts"),
    [
        ({"question": "?"}, "missing_column", ["prompt_key", "question"]),
        ({"prompt": []}, "wrong_cell", []),
        ({"prompt": [{"role": "robot", "content": "?"}]}, "wrong_cell", ["robot", "system, user"]),
        ({"prompt": [{"role": "user", "content": ["?"]}]}, "wrong_cell", ["content"]),
        (
            {"prompt": [*MESSAGES, {"role": "assistant", "content": "4"}]},
            "wrong_cell",
            ["assistant"],
        ),
    ],
)
def test_row_without_a_valid_prompt_is_named(tmp_path, row, code, parts):
    path = write_jsonl(tmp_path / "bad.jsonl", row)
    expected = has_problem(code, "data.train_files", "row 0", *parts)
    with pytest.raises(InvalidRowError, check=expected) as refused:
        PACKAGE.tasks(read_settings(path), "train")
    assert refused.value.column == "prompt"


@pytest.mark.parametrize(
    "cells, truth",
    [
        ({"ground_truth": "4"}, "4"),
        ({"reward_model": {"ground_truth": None}, "ground_truth": "4"}, "4"),
        ({"reward_model": {"style": "rule", "ground_truth": 4}, "ground_truth": "5"}, 4),
        ({"reward_model": '{"ground_truth": ["4", "four"]}'}, ["4", "four"]),
        ({"reward_model": None, "ground_truth": 0}, 0),
        ({"ground_truth": True}, True),
    ],
)
def test_truth_is_read_from_either_column(tmp_path, cells, truth):
    (task,) = PACKAGE.tasks(
        read_settings(write_jsonl(tmp_path / "a.jsonl", {"prompt": "2+2?"} | cells)), "val"
    )
    assert task["ground_truth"] == truth


@pytest.mark.parametrize(
    "cells, column",
    [
        ({}, "ground_truth"),
        ({"answer": "4"}, "ground_truth"),
        ({"ground_truth": ""}, "ground_truth"),
        ({"ground_truth": []}, "ground_truth"),
        ({"ground_truth": ["4", None]}, "ground_truth"),
        ({"ground_truth": {"target": 11, "numbers": [3, 4]}}, "ground_truth"),
        ({"reward_model": {"style": "sandbox", "ground_truth": "4"}}, "reward_model"),
        ({"reward_model": "4"}, "reward_model"),
        ({"ground_truth": "4", "extra_info": "about"}, "extra_info"),
        ({"ground_truth": "4", "extra_info": [1]}, "extra_info"),
    ],
)
def test_ungradable_row_is_refused_with_key_file_and_column(tmp_path, cells, column):
    path = write_jsonl(tmp_path / "a.jsonl", ROW, {"prompt": "2+2?"} | cells)
    expected = has_problem("wrong_cell", "data.train_files", path, "row 1")
    with pytest.raises(InvalidRowError, check=expected) as refused:
        PACKAGE.tasks(read_settings(path), "train")
    assert refused.value.column == column


def test_user_provided_grader_accepts_any_truth(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "2?"}, {"prompt": "3?", "ground_truth": {}})
    settings = read_settings(path, reward={"path": "grade.py"})
    assert [task["ground_truth"] for task in PACKAGE.tasks(settings, "train")] == [None, {}]


ROWS_OF_PANDAS = """
import numpy as np, pandas, datetime, decimal
TABLE = pandas.DataFrame({
    "prompt": [np.array([{"role": "user", "content": "2?"}], dtype=object)] * 2,
    "ground_truth": [np.array(["2", "two"], dtype=object)] * 2,
    "data_source": ["sums", float("nan")],
    "extra_info": [{"when": datetime.date(2020, 1, 2), "cost": decimal.Decimal("1.5")}, None],
})
class Pandas:
    def __init__(self, files): pass
    def __len__(self): return len(TABLE)
    def __getitem__(self, n): return TABLE.iloc[n]
class TooLong(Pandas):
    def __len__(self): return 3
class Empty(Pandas):
    def __len__(self): return 0
class NoLength:
    def __init__(self, files): pass
class Fails(Pandas):
    def __getitem__(self, n): raise RuntimeError("database down")
class Lists(Pandas):
    def __getitem__(self, n): return 5
def Texts(files): return ["a", "b"]
"""


def test_pandas_rows_become_plain_tasks(tmp_path):
    (tmp_path / "own.py").write_text(ROWS_OF_PANDAS)
    custom_cls = {"path": str(tmp_path / "own.py"), "name": "Pandas"}
    first, second = PACKAGE.tasks(read_settings("any", custom_cls=custom_cls), "train")
    assert first["messages"] == [{"role": "user", "content": "2?"}]
    assert first["ground_truth"] == ["2", "two"] and first["data_source"] == "sums"
    assert first["extra_info"] == {"when": "2020-01-02", "cost": 1.5}
    assert (second["data_source"], second["extra_info"]) == ("Pandas", {})
    json.dumps([first, second])


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("TooLong", "failed_call"),
        ("Empty", "no_rows"),
        ("NoLength", "failed_call"),
        ("Fails", "failed_call"),
        ("Lists", "failed_call"),
        ("Texts", "failed_call"),
    ],
)
def test_dataset_class_without_valid_rows_is_named(tmp_path, name, code):
    (tmp_path / "own.py").write_text(ROWS_OF_PANDAS)
    custom_cls = {"path": str(tmp_path / "own.py"), "name": name}
    with pytest.raises(
        InvalidRowError, check=has_problem(code, "data.custom_cls.name", f"'{name}'")
    ):
        PACKAGE.tasks(read_settings("any", custom_cls=custom_cls), "train")


def test_unreadable_file_is_named(tmp_path):
    with pytest.raises(InvalidRowError, check=has_problem("missing_key", "data.val_files")):
        PACKAGE.tasks(PACKAGE.read_settings({"train_files": ["a.jsonl"]}), "val")
    with pytest.raises(FileNotFoundError, check=mentions("nowhere.parquet")):
        list(read_rows(tmp_path / "nowhere.parquet"))
    unreadable = has_problem("unreadable_file", "", "table.csv", ".parquet")
    with pytest.raises(ValueError, check=unreadable):
        list(read_rows(tmp_path / "table.csv"))
    broken = tmp_path / "broken.parquet"
    broken.write_text("no table")
    with pytest.raises(ValueError, check=has_problem("unreadable_file", "", "broken.parquet")):
        list(read_rows(broken))
    lines = tmp_path / "lines.jsonl"
    for text, line in (("{}\n{", "line 2"), ("[]", "line 1")):
        lines.write_text(text)
        with pytest.raises(ValueError, check=has_problem("unreadable_file", "", line)):
            list(read_rows(lines))


@pytest.mark.parametrize(
    "solution, truth, is_right",
    [
        ("so it is \\boxed{42}", "42", True),
        ("6 x 7 = 42\n#### 42", 42, True),
        ("<answer> 42 </answer>", "42", True),
        ("I think 41", "42", False),
        ("\\boxed{41}, no: \\boxed{42}", "42", True),
        ("\\boxed{42}, no: \\boxed{41}", "42", False),
        ("the result is $\\frac{1}{2}$", "0.5", True),
        ("\\boxed{1 + x^2}", "x^2+1", True),
        ("1,234", "1234", True),
        ("It is Paris.", "Paris", True),
        ("\\boxed{pairs}", "Paris", False),
        ("\\boxed{paris}", "Paris", True),
        ("<answer>Lyon</answer> Paris", "Paris", False),
        ("\\boxed{7}", ["6", "7"], True),
        ("", "42", False),
    ],
)
def test_answers_are_compared_by_value_and_by_whole_words(solution, truth, is_right):
    assert compare_with_truth("d", solution, truth, {}) == float(is_right)


@pytest.mark.parametrize("truth", [None, "", [], ["1", None]])
def test_missing_truth_gives_no_grade(truth):
    with pytest.raises(InvalidGradeError, check=mentions("data_source 'd'")):
        compare_with_truth("d", "1", truth, {})


def test_last_mark_holds_the_answer():
    answers = [
        extract_answer(text) for text in ("#### 3\nor <answer>4</answer>", "\\boxed{}", "no")
    ]
    assert [
        (answer.candidate_texts[0], answer.has_answer_mark) for answer in answers if answer
    ] == [
        ("4", True),
        ("", True),
        ("no", False),
    ]


@pytest.mark.parametrize(
    "result, score, is_right",
    [
        (1, 1.0, True),
        (0.3, 0.3, False),
        (True, 1.0, True),
        (np.float32(1.0), 1.0, True),
        ({"score": -1.0}, -1.0, False),
        ({"score": 0.1, "acc": True}, 0.1, True),
        ({"score": 1.0, "acc": False}, 1.0, False),
    ],
)
def test_valid_grader_result_is_read(result, score, is_right):
    grade = read_grade(result, "t")
    assert (grade.score, grade.is_right) == (pytest.approx(score), is_right)


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1",
        float("nan"),
        float("inf"),
        10**400,
        {},
        {"score": None},
        {"score": float("nan")},
        {"score": 1.0, "format": float("nan")},
    ],
)
def test_invalid_grader_result_is_refused(result):
    with pytest.raises(InvalidGradeError, check=mentions("t: ")):
        read_grade(result, "t")


def test_score_is_the_weighted_sum_of_rewards():
    rewards = {"accuracy": True, "format": 0.5, "note": "fine"}
    grade = read_grade(rewards, "t", {"accuracy": 1.0, "format": 0.2})
    assert grade.score == pytest.approx(1.1) and grade.is_right
    assert set(grade.rewards) == {"accuracy", "format", "score"}
    assert read_grade(rewards | {"acc": False}, "t", {"format": 4.0}).is_right is False
    for weights in ({"fromat": 1.0}, {"note": 1.0}):
        with pytest.raises(InvalidGradeError, check=mentions("accuracy", "format")):
            read_grade(rewards, "t", weights)
    with pytest.raises(InvalidGradeError, check=mentions("'accuracy'")):
        read_grade(0.5, "t", {"accuracy": 1.0})


def test_episode_shows_the_row_and_ends_with_the_grade(tmp_path):
    settings = read_settings(write_jsonl(tmp_path / "a.jsonl", ROW))
    env = PACKAGE.make(settings)
    (task,) = PACKAGE.tasks(settings, "train")
    observation = env.reset(task, seed=0)
    assert (observation.text, observation.opening) == ("6 x 7?", MESSAGES[:1])
    assert Observation(*pool_wire.pack_observation(observation)) == observation
    for answer, reward, valid in (("\\boxed{42}", 1.0, True), ("7", 0.0, True), ("", 0.0, False)):
        env.reset(task, seed=0)
        _, step_reward, done, info = env.step(answer)
        assert (step_reward, done, info["won"], info["is_action_valid"]) == (
            reward,
            True,
            reward == 1.0,
            valid,
        )
    assert PACKAGE.project("  a\nb ") == ("a\nb", True)


def test_client_of_a_grader_works_in_all_environments_of_a_process(tmp_path):
    file = tmp_path / "graders.py"
    file.write_text(
        "from tests.helpers.faulty_envs import EchoClient\n"
        "client = EchoClient()\n"
        "async def grade(data_source, solution_str, ground_truth, extra_info):\n"
        "    if not hasattr(client, 'task'): await client.start()\n"
        "    return float(await client.ask(solution_str) == '42!')\n"
    )
    reward_section = {"path": str(file), "name": "grade"}
    settings = read_settings(write_jsonl(tmp_path / "a.jsonl", ROW), reward=reward_section)
    (task,) = PACKAGE.tasks(settings, "train")
    for answer, reward in (("42", 1.0), ("43", 0.0), ("42", 1.0)):
        env = PACKAGE.make(settings)
        env.reset(task, seed=0)
        assert env.step(answer)[1] == reward


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_user_provided_grader_gives_the_reward(tmp_path, kind):
    file = tmp_path / "graders.py"
    file.write_text(
        f"{kind} grade(data_source, solution_str, ground_truth, extra_info, bonus=0):\n"
        "    assert (data_source, ground_truth, extra_info) == ('sums', '42', {'index': 7})\n"
        "    if solution_str == 'crash': raise RuntimeError('grader down')\n"
        "    return {'score': len(solution_str) + bonus, 'acc': solution_str == '42'}\n"
    )
    reward_section = {"path": str(file), "name": "grade", "reward_kwargs": {"bonus": 10}}
    settings = read_settings(write_jsonl(tmp_path / "a.jsonl", ROW), reward=reward_section)
    env = PACKAGE.make(settings)
    (task,) = PACKAGE.tasks(settings, "train")
    env.reset(task, seed=0)
    _, step_reward, _, info = env.step("42")
    assert step_reward == 12 and info["won"]
    with pytest.raises(RuntimeError, match="grader down"):
        env.step("crash")
