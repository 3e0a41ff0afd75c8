"""A person plays from the terminal or from a pipe."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from agent_system.environments.cli.interactive import NoSuchTask, run_interactive
from tests.helpers.refusals import mentions


def played(name, typed, **how):
    out = io.StringIO()
    won = run_interactive(
        name, lines=io.StringIO(typed), console=Console(file=out, width=100), **how
    )
    return won, out.getvalue()


def solution(task=0):
    """Moves that win, read from the first observation."""
    _, shown = played("number_line", "", number=task)
    words = shown.partition("You are at ")[2].split()
    here, there = int(words[0].rstrip(".")), int(words[4].rstrip("."))
    return ("right\n" if there > here else "left\n") * abs(there - here)


def test_typed_moves_win_and_what_is_typed_is_shown():
    won, shown = played("Number_Line", solution())
    assert won and ("> left" in shown or "> right" in shown)
    assert "success after" in shown and "return 1" in shown and "valid actions: " in shown


def test_wrong_moves_are_said_to_be_impossible_and_the_end_of_input_leaves():
    won, shown = played("number_line", "fly\n\n")
    assert not won and shown.count("this action is not valid here") == 2
    assert "stopped after 2 actions; return 0" in shown


def test_the_number_of_steps_is_a_limit():
    won, shown = played("number_line", "fly\n" * 9, steps=3)
    assert not won and shown.count("> fly") == 3 and "return 0" in shown


def test_square_brackets_of_an_environment_are_text():
    _, shown = played("search", "search[nothing that exists]\n", kwargs={})
    assert "> search[nothing that exists]" in shown and "search[<words>]" in shown


def test_a_task_that_is_not_there_is_refused():
    with pytest.raises(NoSuchTask, check=mentions("--task 0")):
        played("number_line", "", number=10**6)


def test_the_part_of_a_mixture_introduces_itself():
    def introduction(name, **section):
        shown = played(name, "", kwargs=section)[1].partition("\n")[2]
        return shown.partition("You are at")[0]

    alone = introduction("number_line")
    assert "<action>" in alone
    assert introduction("mixture", parts=["number_line"]) == alone


def test_the_command_plays_from_a_pipe():
    command = [sys.executable, "-m", "agent_system.environments", "play", "number_line"]
    done = subprocess.run(
        command,
        input=solution(),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0 and "success after" in done.stdout, done.stderr
