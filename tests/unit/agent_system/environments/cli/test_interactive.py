"""Tests of ``play``: a person solves tasks from the terminal or through a pipe."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from agent_system.environments.cli.interactive import NoSuchTaskError, run_interactive
from tests.helpers.refusals import mentions, missing_parts


def run_typed(name, typed, **options):
    stream = io.StringIO()
    is_success = run_interactive(
        name, lines=io.StringIO(typed), console=Console(file=stream, width=100), **options
    )
    return is_success, stream.getvalue()


def read_solution(task=0):
    """Return the moves that solve the task, read from the first observation."""
    _, output = run_typed("number_line", "", task_number=task)
    words = output.partition("You are at ")[2].split()
    position, target = int(words[0].rstrip(".")), int(words[4].rstrip("."))
    return ("right\n" if target > position else "left\n") * abs(target - position)


def test_typed_moves_succeed_and_are_echoed():
    is_success, output = run_typed("Number_Line", read_solution())
    assert is_success and ("> left" in output or "> right" in output)
    assert "return 1" in output and "left, right" in output


def test_wrong_moves_are_reported_and_end_of_input_stops():
    is_success, output = run_typed("number_line", "fly\n\n")
    lines = output.splitlines()
    valid_lines = run_typed("number_line", "left\nright\n")[1].splitlines()
    # Each wrong move has a remark.
    assert not is_success and len(lines) == len(valid_lines) + 2
    assert not missing_parts(lines[-1], 2, 0)


def test_turn_limit_ends_the_episode():
    is_success, output = run_typed("number_line", "fly\n" * 9, max_steps=3)
    assert not is_success and output.count("> fly") == 3 and "return 0" in output


def test_square_brackets_are_printed_as_text():
    _, output = run_typed("search", "search[nothing that exists]\n", kwargs={})
    assert "> search[nothing that exists]" in output and "search[<words>]" in output


def test_texts_of_tasks_are_no_markup_and_no_control_characters(tmp_path):
    file = tmp_path / "rows.jsonl"
    prompt = [{"role": "user", "content": "\x1b]52;c;x\x07 [b]"}]
    row = {"prompt": prompt, "data_source": "s"}
    file.write_text(json.dumps({**row, "reward_model": {"ground_truth": "1"}}) + "\n")
    _, output = run_typed("dataset", "", kwargs={"val_files": [str(file)]})
    assert r"\x1b]52;c;x\x07 [b]" in output
    assert not {"\x1b", "\x07"} & set(output)


def test_unknown_task_number_is_refused():
    with pytest.raises(NoSuchTaskError, check=mentions("--task 0")):
        run_typed("number_line", "", task_number=10**6)


def test_part_of_a_mixture_prints_its_own_introduction():
    def read_introduction(name, **section):
        output = run_typed(name, "", kwargs=section)[1].partition("\n")[2]
        return output.partition("You are at")[0]

    expected = read_introduction("number_line")
    assert "<action>" in expected
    assert read_introduction("mixture", parts=["number_line"]) == expected


def test_command_reads_actions_from_a_pipe():
    command = [sys.executable, "-m", "agent_system.environments", "play", "number_line"]
    process = subprocess.run(
        command,
        input=read_solution(),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert process.returncode == 0 and "return 1" in process.stdout, process.stderr
