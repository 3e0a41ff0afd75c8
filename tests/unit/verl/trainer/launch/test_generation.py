"""``main_generation`` writes n answers for every prompt of a file."""

import json
import os
import re
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from tests.helpers.jobs import ROOT
from tests.helpers.refusals import has_problem, raise_mistakes
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.settings import ConfigError
from verl.trainer import main_generation
from verl.utils.tables import read_rows
from verl.workers.rollout.hf import HFEngine

ROWS = [
    {"prompt": "Where is the mug?", "id": 7},
    {"prompt": [{"role": "user", "content": "Where is the egg?"}], "id": 8},
]
HANGING = """
import sys, time
from transformers import Qwen3ForCausalLM  # loading gives no heartbeat, so slow imports come first
from verl.trainer import main_generation
from verl.utils import watchdog
from verl.workers.rollout.hf import HFEngine
def hang(engine):
    while True:
        time.sleep(600)
HFEngine.step = hang
watchdog.POLL_S = 0.1
sys.exit(main_generation.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1, std=0.2)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments_for(policy, path, *extra: str) -> list[str]:
    engine = ("rollout.name=hf", "rollout.dtype=float32", "rollout.num_threads=1")
    lengths = ("data.max_prompt_length=64", "data.max_response_length=8")
    return [f"model.path={policy}", f"data.path={path}", *engine, *lengths, *extra]


def test_answers_are_written_next_to_the_prompts(policy, tmp_path, capsys):
    path = write_jsonl(tmp_path / "prompts.jsonl", ROWS)
    assert main_generation.main(arguments_for(policy, path, "data.n_samples=3")) == 0
    target = tmp_path / "prompts.generated.jsonl"
    assert capsys.readouterr().out == f"{target}\n"
    rows = list(read_rows(target))
    assert [{k: row[k] for k in ("prompt", "id")} for row in rows] == ROWS
    assert [len(row["responses"]) for row in rows] == [3, 3]
    first = rows[0]["responses"]
    assert len(set(first)) == 3  # at temperature 1 a random policy gives different answers
    tokenizer = AutoTokenizer.from_pretrained(policy)
    assert all(1 <= len(tokenizer(text).input_ids) <= 12 for text in first)
    # The same seed gives the same answers, another seed gives others.
    again = ["data.n_samples=3", f"data.output_path={tmp_path / 'again.jsonl'}"]
    assert main_generation.main(arguments_for(policy, path, *again)) == 0
    assert list(read_rows(tmp_path / "again.jsonl")) == rows
    assert main_generation.main(arguments_for(policy, path, *again, "rollout.seed=1")) == 2
    replaced = [*again, "rollout.seed=1", "data.overwrite=true"]
    assert main_generation.main(arguments_for(policy, path, *replaced)) == 0
    assert list(read_rows(tmp_path / "again.jsonl")) != rows


def test_parquet_files_and_greedy_answers(policy, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"question": "Where is the mug?"}, {"question": "Where is the egg?"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    options = ("data.prompt_key=question", "rollout.do_sample=false")
    target = ("data.response_key=answers",)
    command = arguments_for(policy, tmp_path / "prompts.parquet", *options, *target)
    assert main_generation.main(command) == 0
    generated = list(read_rows(tmp_path / "prompts.generated.parquet"))
    assert [row["question"] for row in generated] == [row["question"] for row in rows]
    assert all(len(row["answers"]) == 1 for row in generated)


@pytest.mark.parametrize(
    ("extra", "check"),
    [
        (
            ["data.prompt_key=question"],
            has_problem("missing_column", "data.path", "row 0", "'question'", "prompt, id"),
        ),
        (
            ["data.max_prompt_length=4"],
            has_problem("does_not_fit", "data.max_prompt_length", "row 0"),
        ),
        (["data.output_path=answers.txt"], has_problem("out_of_range", "data.output_path")),
        (["data.path=nowhere.jsonl"], has_problem("missing_file", "data.path", "'nowhere.jsonl'")),
        (["model.path=no/such/dir"], has_problem("missing_file", "model.path", "'no/such/dir'")),
        (["data.n_sample=3"], has_problem("unknown_key", "data.n_sample", "data.n_samples")),
        (["data.n_samples=0"], has_problem("out_of_range", "data.n_samples")),
        *(
            (
                ["data.n_samples=2", f"rollout.{greedy}"],
                has_problem("conflicting_keys", "data.n_samples", greedy),
            )
            for greedy in ("do_sample=false", "temperature=0", "top_k=1")
        ),
        (["rollout.n=4"], has_problem("no_effect", "rollout.n", "data.n_samples=4")),
        (
            ["rollout.val_kwargs.n=4"],
            has_problem("no_effect", "rollout.val_kwargs.n", "data.n_samples"),
        ),
        (
            ["rollout.val_kwargs.temperature=0.5"],
            has_problem("no_effect", "rollout.val_kwargs.temperature", "rollout.temperature"),
        ),
        (["rollout.top_p=0"], has_problem("out_of_range", "rollout.top_p", "rollout.top_p=1.0")),
        (["rollout.top_k=0"], has_problem("out_of_range", "rollout.top_k", "rollout.top_k=-1")),
        (
            ["rollout.temperature=0.001"],
            has_problem("out_of_range", "rollout.temperature", "rollout.temperature=0.01"),
        ),
    ],
)
def test_invalid_generation_is_refused(policy, tmp_path, monkeypatch, extra, check):
    path = write_jsonl(tmp_path / "prompts.jsonl", ROWS)
    raise_mistakes(monkeypatch)
    with pytest.raises(ConfigError, check=check):
        main_generation.main(arguments_for(policy, path, *extra))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"prompt": 5}, "wrong_cell"),
        ({"prompt": None}, "wrong_cell"),
        ({"prompt": " "}, "wrong_cell"),
        ({"prompt": "what?", "images": ["a.png"]}, "no_effect"),
        ({"prompt": "what?", "responses": ["that"]}, "conflicting_keys"),
    ],
)
def test_unusable_rows_are_refused(policy, tmp_path, monkeypatch, row, code):
    path = write_jsonl(tmp_path / "prompts.jsonl", [row])
    raise_mistakes(monkeypatch)
    with pytest.raises(ConfigError, check=has_problem(code, "data.path")):
        main_generation.main(arguments_for(policy, path))


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("data.response_key=", "invalid_syntax"),
        ("data.output_path=/proc/a.jsonl", "not_writable"),
        (f"data.output_path=/tmp/{'x' * 300}.jsonl", "not_writable"),
        ("data.output_path=/etc/passwd/a.jsonl", "not_writable"),
        ("data.path=", "missing_key"),
        ("data.path=a,b", "invalid_syntax"),
        ("data.path=${nowhere}", "invalid_syntax"),
        ("rollout.name=vlm", "unknown_name"),
        ("rollout.name=json:Engine", "unknown_name"),
        ("rollout.name=json:dumps", "failed_call"),
        ("rollout.max_model_len=2", "does_not_fit"),
    ],
)
def test_mistakes_are_refused_with_code_and_key(policy, tmp_path, monkeypatch, override, code):
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "what?"}])
    arguments = arguments_for(policy, path, override)
    assert main_generation.main(arguments) == 2
    raise_mistakes(monkeypatch)
    with pytest.raises(ConfigError, check=has_problem(code, override.partition("=")[0])):
        main_generation.main(arguments)
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([{"prompt": "a", "extra_info": {}}], "out.parquet"),
        ([{"prompt": "a"}, {"prompt": "b", "hint": {"of": "h"}}], "out.parquet"),
        ([{"prompt": "a", "answer": 5}, {"prompt": "b", "answer": "x"}], "out.jsonl"),
        ([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}], "out.jsonl"),
        ([{"prompt": "a", "n": 2**70}], "out.jsonl"),
    ],
)
def test_rows_with_different_columns_keep_all_columns(policy, tmp_path, capsys, rows, name):
    path = write_jsonl(tmp_path / "prompts.jsonl", rows)
    target = f"data.output_path={tmp_path / 'out.parquet'}"
    assert main_generation.main(arguments_for(policy, path, target)) == 0
    assert capsys.readouterr().out == f"{tmp_path / name}\n"
    for written, row in zip(read_rows(tmp_path / name), rows, strict=True):
        assert len(written.pop("responses")) == 1
        # In a table, a missing value and an object without keys are null.
        assert {key: value or {} for key, value in written.items() if value or key in row} == row
    assert {file.name for file in tmp_path.iterdir()} == {"prompts.jsonl", name}


def test_answers_of_a_failed_generation_are_kept(policy, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "prompts.jsonl", ROWS)
    step = HFEngine.step

    def step_then_fail(engine):
        results = step(engine)
        if results:
            patch.setattr(HFEngine, "has_work", lambda _: 1 / 0)
        return results

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(HFEngine, "step", step_then_fail)
        main_generation.main(arguments_for(policy, path, "data.n_samples=2"))
    partial = list(read_rows(tmp_path / "prompts.generated.partial.jsonl"))
    assert partial and all(set(answer) == {"row", "sample", "responses"} for answer in partial)
    # Another run renames the partial file.
    assert main_generation.main(arguments_for(policy, path, "data.n_samples=2")) == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        "prompts.jsonl",
        "prompts.generated.jsonl",
        "prompts.generated.partial.1.jsonl",
    }


def test_prompts_file_is_never_overwritten(policy, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "prompts.jsonl", ROWS)
    raise_mistakes(monkeypatch)
    with pytest.raises(ConfigError, check=has_problem("file_exists", "data.output_path")):
        main_generation.main(arguments_for(policy, path, f"data.output_path={path}"))
    assert list(read_rows(path)) == ROWS


def test_output_whose_other_files_belong_to_the_user_is_refused(policy, tmp_path, capsys):
    output = f"data.output_path={tmp_path / 'a.jsonl'}"
    partial = write_jsonl(tmp_path / "a.partial.jsonl", ROWS)
    assert main_generation.main(arguments_for(policy, partial, output)) == 2
    (tmp_path / "a.logs").write_text("mine")
    path = write_jsonl(tmp_path / "prompts.jsonl", ROWS)
    assert main_generation.main(arguments_for(policy, path, output)) == 2
    assert "data.output_path=" in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == {partial.name, "a.logs", path.name}


def test_hanging_engine_ends_the_command(policy, tmp_path):
    path = write_jsonl(tmp_path / "prompts.jsonl", ROWS)
    module = tmp_path / "hanging.py"
    module.write_text(HANGING)
    timeouts = ("trainer.waiting_log_s=0.5", "trainer.stall_timeout_s=8")
    command = [sys.executable, str(module), *arguments_for(policy, path, *timeouts)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environ)
    assert result.returncode == 1, result.stderr
    assert re.search(r"Stalled: generation .*\d+ s", result.stderr)
    (stacks,) = (tmp_path / "prompts.generated.logs").iterdir()
    assert "in hang" in stacks.read_text()
    assert not (tmp_path / "prompts.generated.jsonl").exists()
