"""Tests that stored trajectories are replayed with their seeds, and exported turn by turn."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from scripts import export_plays, reverify
from tests.helpers.refusals import has_problem, mentions, missing_parts
from tests.helpers.solvability import follow_script, play_episodes
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.record.rollout_log import format_rollout_lines
from verl.utils import jsonl
from verl.utils.commands import UsageError

SLIPPERY = {"size": 4, "train_maps": 8, "val_maps": 4, "slippery": True}


def store_trajectories(path, env_name, history, split="train", **section):
    """Write a run directory with trajectories of ``env_name``, as a run does."""

    def wander(task):
        return follow_script(itertools.cycle(["right", "down", "fly"]))

    data = play_episodes(
        env_name,
        wander,
        groups=2,
        n=2,
        history=history,
        split=split,
        max_steps=8,
        **section,
    )
    (path / "rollouts").mkdir(exist_ok=True)
    env = {"env_name": env_name, env_name: None, "kwargs": section, "max_steps": 8, "seed": 0}
    (path / "config.yaml").write_text(yaml.safe_dump({"env": env}))
    lines = [
        json.loads(jsonl.dumps(line)) for line in format_rollout_lines(data, make_tiny_tokenizer())
    ]
    write_lines(path, lines)
    return lines


def write_lines(path, lines, name="1"):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "rollouts" / f"{name}.jsonl").write_text(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    return path, store_trajectories(path, "frozen_lake", "append", **SLIPPERY)


@pytest.mark.parametrize("history", ["append", "window"])
def test_replayed_trajectories_are_equal_with_slipping(tmp_path, history, capsys):
    lines = store_trajectories(tmp_path, "frozen_lake", history, **SLIPPERY)
    assert reverify.main([str(tmp_path)]) == 0
    count = len({line["traj_uid"] for line in lines})
    assert re.findall(r"\d+", capsys.readouterr().out) == [str(count), "0"]


def test_validation_trajectories_use_the_validation_seeds():
    row = {"uid": "panel-lake/3", "task_id": "lake/3"}
    assert reverify.derive_environment_seed(row, 0) == reverify.derive_environment_seed(row, 9) != 0
    train = {"uid": "train-4-0-1", "task_id": "lake/3"}
    assert reverify.derive_environment_seed(train, 0) != reverify.derive_environment_seed(train, 9)
    with pytest.raises(ValueError, check=mentions("'my group'")):
        reverify.derive_environment_seed({"uid": "my group"}, 0)


def test_changes_are_named_and_failed_trajectories_skipped(run, tmp_path, capsys):
    path, lines = run
    lines = json.loads(json.dumps(lines[:3]))
    lines[0]["steps"][0]["reward"] += 0.5
    lines[1]["steps"][-1]["observation"] = "another world"
    lines[2]["aborted"] = True
    write_lines(path, lines, "2")
    assert reverify.main([str(path), "--file", "2"]) == 1
    output = capsys.readouterr().out
    reward, observation, counts = output.splitlines()
    assert not missing_parts(reward, "reward", "turn 0", "0.5") and "observation" in observation
    assert re.findall(r"\d+", counts) == ["2", "2"]
    unknown = [{**lines[0], "task_id": "frozen_lake/none"}]
    write_lines(path, unknown, "3")
    assert reverify.main([str(path), "--file", "3.jsonl"]) == 1
    assert "'frozen_lake/none'" in capsys.readouterr().out


def test_changed_return_or_success_is_detected(run, capsys):
    path, lines = run
    original = next(json.loads(json.dumps(line)) for line in lines)
    write_lines(
        path,
        [{**original, "won": not original["won"]}, {**original, "traj_uid": "b", "return": 7.0}],
        "4",
    )
    assert reverify.main([str(path), "--file", "4"]) == 1
    success, total, _ = capsys.readouterr().out.splitlines()
    assert "success" in success and not missing_parts(total, "return", 7)


@pytest.mark.parametrize("script", [reverify, export_plays])
def test_directory_without_trajectories_is_refused(script, tmp_path):
    arguments = (
        [str(tmp_path)] if script is reverify else [str(tmp_path), str(tmp_path / "o.parquet")]
    )
    with pytest.raises(UsageError, check=mentions(tmp_path)):
        script.main(arguments)


def test_every_turn_is_a_row_of_the_export(tmp_path):
    pandas = pytest.importorskip("pandas")
    lines = store_trajectories(tmp_path, "frozen_lake", "append", **SLIPPERY)
    lines[0]["steps"][0] |= {"token_credit": [["<action>", 0.5], ["up", -1.0]], "contexts": [1]}
    write_lines(tmp_path, lines, "2")
    write_lines(tmp_path, lines[:1], "val_2")
    export_plays.main([str(tmp_path), str(tmp_path / "trajectories.parquet")])
    table = pandas.read_parquet(tmp_path / "trajectories.parquet")
    num_turns = sum(len(line["steps"]) for line in lines)
    assert len(table) == 2 * num_turns + len(lines[0]["steps"])
    assert table.split.unique().tolist() == ["train", "val"]
    assert table.iteration.unique().tolist() == [1, 2]
    row = table[(table.iteration == 2) & (table.split == "train")].iloc[0]
    assert row.tokens.tolist() == ["<action>", "up"] and row.token_advantages.tolist() == [0.5, -1]
    assert json.loads(row.more)["contexts"] == [1] and row.action == lines[0]["steps"][0]["action"]
    assert row["return"] == lines[0]["return"] and row.prompt == lines[0]["prompt"]


def test_summary_is_a_row_of_the_export(tmp_path):
    turn = {"step": 0, "response": "look", "num_tokens": 2}
    summary = {"step": 1, "response": "i saw a desk", "num_tokens": 4, "span": [5, 9]}
    (tmp_path / "rollouts").mkdir()
    credit = {"token_credit": [["i", 0.5], ["saw", 0.5]], "advantage": 0.5}
    lines = [
        {"traj_uid": "a", "steps": [turn], "summary": {**summary, **credit}},
        {"traj_uid": "a", "steps": [{**turn, "step": 1}]},
    ]
    write_lines(tmp_path, lines)
    export_plays.main([str(tmp_path), str(tmp_path / "out.parquet")])
    rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["step"], row["is_summary"]) for row in rows] == [(0, False), (1, True), (1, False)]
    assert rows[1]["response"] == "i saw a desk" and rows[1]["tokens"] == ["i", "saw"]
    assert rows[1]["advantage"] == 0.5 and json.loads(rows[1]["more"]) == {"span": [5, 9]}
    assert rows[1]["traj_uid"] == "a"


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "a: [",
        "env: 5",
        "env: {env_name: nope, max_steps: 5, seed: 0}",
        "env: {env_name: number_line, max_steps: x, seed: 0}",
        "env: {env_name: number_line, max_steps: 5, seed: 0, kwargs: 5}",
    ],
)
def test_config_that_no_run_wrote_is_named(run, tmp_path, text):
    copy = Path(shutil.copytree(run[0], tmp_path / "run"))
    (copy / "config.yaml").write_text(text)
    with pytest.raises(UsageError, check=mentions("config.yaml: ")):
        reverify.main([str(copy)])


@pytest.mark.parametrize("steps", [None, "x", [{"step": "x"}], [{"step": 1, "token_credit": 5}]])
def test_rows_that_no_run_wrote_leave_the_exported_file(run, tmp_path, steps):
    copy = Path(shutil.copytree(run[0], tmp_path / "run"))
    write_lines(copy, [{"traj_uid": "a", "steps": steps}])
    target = tmp_path / "out.parquet"
    target.write_text("mine")
    with pytest.raises(UsageError, check=has_problem("unreadable_file", "", "1.jsonl: ")):
        export_plays.main([str(copy), str(target), "--overwrite"])
    assert target.read_text() == "mine"
    assert {file.name for file in tmp_path.iterdir()} == {"run", target.name}
