"""Stored plays are played again with their seeds, and exported step by step."""

import itertools
import json

import pytest
import yaml

from scripts import export_plays, reverify
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_tokenizer
from tests.helpers.winning import plan, play_episodes
from verl.record.rollout_log import rollout_lines
from verl.utils import jsonl

SLIPPERY = {"size": 4, "train_maps": 8, "val_maps": 4, "slippery": True}


def stored(path, env_name, history, split="train", **section):
    """A run directory with plays on ice, as a run leaves them."""

    def wander(task):
        return plan(itertools.cycle(["right", "down", "fly"]))

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
    lines = [json.loads(jsonl.dumps(line)) for line in rollout_lines(data, make_tiny_tokenizer())]
    write(path, lines)
    return lines


def write(path, lines, name="1"):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "rollouts" / f"{name}.jsonl").write_text(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    return path, stored(path, "frozen_lake", "append", **SLIPPERY)


@pytest.mark.parametrize("history", ["append", "window"])
def test_plays_of_a_run_are_the_same_again_slipping_included(tmp_path, history, capsys):
    lines = stored(tmp_path, "frozen_lake", history, **SLIPPERY)
    assert reverify.main([str(tmp_path)]) == 0
    count = len({line["traj_uid"] for line in lines})
    assert capsys.readouterr().out == f"{count} trajectories, 0 differ\n"


def test_validation_plays_have_the_seeds_of_the_panel():
    row = {"uid": "panel-lake/3", "task_id": "lake/3"}
    assert reverify.seed_of(row, 0) == reverify.seed_of(row, 9) != 0
    train = {"uid": "train-4-0-1", "task_id": "lake/3"}
    assert reverify.seed_of(train, 0) != reverify.seed_of(train, 9)
    with pytest.raises(ValueError, check=mentions("'my group'")):
        reverify.seed_of({"uid": "my group"}, 0)


def test_what_was_changed_is_named_and_broken_plays_are_left_out(run, tmp_path, capsys):
    path, lines = run
    lines = json.loads(json.dumps(lines[:3]))
    lines[0]["steps"][0]["reward"] += 0.5
    lines[1]["steps"][-1]["observation"] = "another world"
    lines[2]["aborted"] = True
    write(path, lines, "2")
    assert reverify.main([str(path), "--file", "2"]) == 1
    said = capsys.readouterr().out
    assert "reward of turn 0 was 0.5, now 0" in said and "observation of turn" in said
    assert "2 trajectories, 2 differ" in said
    unknown = [{**lines[0], "task_id": "frozen_lake/none"}]
    write(path, unknown, "3")
    assert reverify.main([str(path), "--file", "3.jsonl"]) == 1
    assert "'frozen_lake/none'" in capsys.readouterr().out


def test_a_return_or_an_outcome_that_was_changed_is_found(run, capsys):
    path, lines = run
    won = next(json.loads(json.dumps(line)) for line in lines)
    write(path, [{**won, "won": not won["won"]}, {**won, "traj_uid": "b", "return": 7.0}], "4")
    assert reverify.main([str(path), "--file", "4"]) == 1
    said = capsys.readouterr().out
    assert "success was" in said
    assert "return was 7, now" in said


@pytest.mark.parametrize("script", [reverify, export_plays])
def test_a_directory_without_plays_is_refused(script, tmp_path, capsys):
    words = [str(tmp_path)] if script is reverify else [str(tmp_path), str(tmp_path / "o.parquet")]
    assert script.main(words) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_every_step_is_a_row_of_the_export(tmp_path):
    pandas = pytest.importorskip("pandas")
    lines = stored(tmp_path, "frozen_lake", "append", **SLIPPERY)
    lines[0]["steps"][0] |= {"token_credit": [["<action>", 0.5], ["up", -1.0]], "contexts": [1]}
    write(tmp_path, lines, "2")
    write(tmp_path, lines[:1], "val_2")
    assert export_plays.main([str(tmp_path), str(tmp_path / "plays.parquet")]) == 0
    table = pandas.read_parquet(tmp_path / "plays.parquet")
    steps = sum(len(line["steps"]) for line in lines)
    assert len(table) == 2 * steps + len(lines[0]["steps"])
    assert table.split.unique().tolist() == ["train", "val"]
    assert table.iteration.unique().tolist() == [1, 2]
    row = table[(table.iteration == 2) & (table.split == "train")].iloc[0]
    assert row.tokens.tolist() == ["<action>", "up"] and row.token_advantages.tolist() == [0.5, -1]
    assert json.loads(row.more)["contexts"] == [1] and row.action == lines[0]["steps"][0]["action"]
    assert row["return"] == lines[0]["return"] and row.prompt == lines[0]["prompt"]
