"""Tests of ``scripts/show_trajectory.py``: levels and credit in colour, thoughts with scores."""

import json
import re
from io import StringIO

import pytest
from rich.console import Console

from scripts.show_trajectory import LEVEL_STYLES, get_advantage_style, main, print_trajectory
from tests.helpers.fake_run import fake_run
from tests.helpers.refusals import mentions
from verl.record.report.trajectory_chunks import read_trajectories
from verl.utils import jsonl


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("runs") / "run", steps=6, validate_every=3)


def print_row(row, **options):
    """Return the printed text, and its segments with their styles."""
    console = Console(
        width=160, force_terminal=True, color_system="truecolor", record=True, file=StringIO()
    )
    print_trajectory(row, console, **{"prompt": False, "contexts": False, **options})
    segments = [(segment.text, str(segment.style or "")) for segment in console._record_buffer]
    return "".join(text for text, _ in segments), segments


def first_row(run_dir):
    return read_trajectories(run_dir / "rollouts" / "6.jsonl")[0]


def test_every_turn_is_shown_with_level_action_and_credit(run_dir):
    row = first_row(run_dir)
    text, _ = print_row(row)
    lines = text.splitlines()
    for step in row["steps"]:
        (head,) = [
            line for line in lines if line.startswith(f"{step['step'] + 1:>3}  {step['level']} ")
        ]
        assert step["action"] in head and f"advantage {step['advantage']:+.2f}" in head
        assert f"thinking {step['think_advantage']:+.2f}" in head
        assert ("not valid" in head) == (not step["is_action_valid"])
    assert (
        f"{len(row['steps'])} steps, {sum(s['num_tokens'] for s in row['steps'])} sampled tokens"
        in text
    )
    assert (
        "Interact with a household" not in text
        and "Interact with a household" in print_row(row, prompt=True)[0]
    )


def test_tokens_have_the_colour_of_their_credit(run_dir):
    row = first_row(run_dir)
    row["steps"] = [
        {
            **row["steps"][0],
            "token_credit": [["<level>", 0.0], ["2", 0.9], ["up", 0.45], ["down", -0.9]],
        }
    ]
    segments = print_row(row)[1]
    styles = dict(segments)
    assert styles["2"] == get_advantage_style(1.0) != styles["up"] == get_advantage_style(0.5)
    assert styles["down"] == get_advantage_style(-1.0)
    assert [style for text, style in segments if "<level>" in text] == [""]

    def parse_colour(style):
        return list(map(int, re.findall(r"\d+", style)))

    assert parse_colour(styles["2"])[1] > max(
        parse_colour(styles["2"])[0], parse_colour(styles["2"])[2]
    )
    assert parse_colour(styles["down"])[0] > max(parse_colour(styles["down"])[1:])


def test_levels_have_different_styles(run_dir):
    _, segments = print_row(first_row(run_dir), contexts=True)
    levels = {f" {level} " for level in LEVEL_STYLES}
    level_styles = {
        text.strip(): style.removeprefix("bold ") for text, style in segments if text in levels
    }
    assert level_styles == {str(level): style for level, style in LEVEL_STYLES.items()}


def test_contexts_show_four_thoughts_with_costs_and_scores(run_dir):
    row = first_row(run_dir)
    text, _ = print_row(row, contexts=True)
    for step in row["steps"]:
        for context in step["contexts"]:
            thought = (context["thought"] or "-") + (" (sampled)" if context["original"] else "")
            numbers = [context["cost"], context["score_logprob"], context["score_entropy"]]
            cells = [
                str(context["level"]),
                thought,
                str(context["tokens"]),
                *(f"{n:.2f}" for n in numbers),
            ]
            assert re.search(r"\s+".join(map(re.escape, cells)), text), cells
    assert text.count("(sampled)") == len(row["steps"])


def test_contexts_with_old_column_names_are_shown_equally(run_dir):
    row = first_row(run_dir)
    older = json.loads(
        json.dumps(row)
        .replace("score_mean_prob", "score_prob")
        .replace("score_geometric_prob", "score_seq_prob")
    )
    assert older != row
    assert print_row(older, contexts=True) == print_row(row, contexts=True)


def test_parse_failures_and_forced_levels_are_named(run_dir):
    row = first_row(run_dir)
    row["steps"] = [
        {**row["steps"][0], "level": None, "parse_failure": "missing_level", "contexts": []},
        {**row["steps"][1], "level_forced": True, "think_cost": -0.125},
    ]
    text, _ = print_row(row, contexts=True)
    assert " ?  " in text and "missing level" in text
    assert "level forced" in text and "of it cost -0.12" in text


def test_markup_in_texts_is_not_interpreted(run_dir):
    row = {**first_row(run_dir), "task_id": "[bold]task[/]"}
    row["steps"] = [
        {**row["steps"][0], "observation": "a [red]door[/red]", "token_credit": [["[b]", 0.1]]}
    ]
    text, _ = print_row(row)
    assert "[bold]task[/]" in text and "a [red]door[/red]" in text and "[b]" in text


def test_control_characters_do_not_reach_the_terminal(run_dir):
    hostile = "\x1b]0;title\x07\x9b2J\ud800"
    row = {**first_row(run_dir), "task_id": hostile, "return": "[/]"}
    row["steps"] = [
        {**row["steps"][0], "observation": hostile, "action": hostile, "token_credit": []},
        {**row["steps"][1], "token_credit": [[hostile, 0.1]]},
    ]
    text, _ = print_row(row, prompt=True, contexts=True)
    assert text.count(r"\x1b]0;title\x07\x9b2J\ud800") == 4 and "return [/]" in text
    assert not {"\x1b", "\x07", "\x9b", "\ud800"} & set(text)


def test_command_line_selects_files_and_trajectories(run_dir, capsys, tmp_path):
    def show(*arguments):
        main([str(word) for word in arguments])
        return capsys.readouterr().out

    assert show(run_dir).startswith("success ")
    assert show(run_dir, "--lost").startswith("no success ")
    assert show(run_dir, "--step", 1) != show(run_dir)
    group = show(run_dir, "--uid", "train-6-0-0")
    assert group.count("train-6-0-0-") == 8
    assert "train-6-0-0-3" in show(run_dir / "rollouts" / "6.jsonl", "-n", 3).splitlines()[0]
    validation = show(run_dir, "--val")
    assert "advantage" not in validation and "more likely" not in validation
    with pytest.raises(SystemExit, check=mentions(99)):
        main([str(run_dir), "--step", "99"])
    jsonl.write(tmp_path / "1.jsonl", [])
    with pytest.raises(SystemExit):
        main([str(tmp_path / "1.jsonl")])


def test_rows_of_one_trajectory_are_shown_together(run_dir, tmp_path, capsys):
    row = first_row(run_dir)
    jsonl.write(
        tmp_path / "6.jsonl", ({**row, "steps": [step]} for step in row["steps"])
    )  # window history
    main([str(tmp_path / "6.jsonl"), "-n", "0"])
    assert f"{len(row['steps'])} steps, " in capsys.readouterr().out


def test_pipe_shows_the_return_of_a_long_task_name(tmp_path, capsys):
    row = {
        "task_id": "alfworld/pick_two_obj_and_place/" + "x" * 60,
        "traj_uid": "train-1-0-0-0",
        "return": 0.25,
        "won": False,
        "steps": [],
    }
    jsonl.write(tmp_path / "1.jsonl", [row])
    main([str(tmp_path / "1.jsonl")])
    assert "return 0.25" in capsys.readouterr().out
