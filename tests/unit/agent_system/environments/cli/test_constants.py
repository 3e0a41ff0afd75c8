"""A check finds answers that succeed for policies that read nothing, in any format."""

import random
import re

import pytest

from agent_system.environments.cli.checking import check_environment, is_most
from agent_system.environments.cli.command import main
from agent_system.environments.cli.policies import (
    INJECTIONS,
    InjectionSequence,
    PolicyStart,
    candidate_constants,
    make_random_policy,
)
from agent_system.environments.env import Observation
from agent_system.environments.env_registry import get_package
from agent_system.environments.settings import EnvSettings

HOME = "tests.helpers.answer_envs"


def test_a_constant_that_succeeds_at_most_tasks_is_wrong_and_named():
    findings = check_environment(f"{HOME}:PACKAGE", {"fault": "skewed"})
    assert findings.constant is not None
    assert (findings.constant.action, findings.constant.successes) == ("Yes", 7)
    assert any("'Yes' succeeds at 7 of 10" in sentence for sentence in findings.problems)


def test_a_grader_that_takes_nan_is_found_although_an_episode_is_one_action():
    findings = check_environment(f"{HOME}:PACKAGE", {"fault": "nan", "count": 2})
    assert any(one.startswith("injecting solved") and "nan" in one for one in findings.problems)
    said = {
        action
        for play in findings.episodes
        if play.policy == "injecting"
        for action in play.actions
    }
    assert len(said) > 1


@pytest.mark.parametrize(
    ("name", "wrong", "left_open"),
    [("PACKAGE", 0, 0), ("UNFORMATTED", 0, 1), ("MISFORMATTED", 1, 0)],
)
def test_actions_of_the_oracle_are_stepped_whatever_the_format(name, wrong, left_open):
    findings = check_environment(f"{HOME}:{name}", {"count": 2})
    assert all(play.is_success for play in findings.episodes if play.policy == "oracle")
    assert sum("project(" in sentence for sentence in findings.problems) == wrong
    assert sum("project(" in sentence for sentence in findings.open_questions) == left_open


@pytest.mark.parametrize(
    ("successes", "plays", "all_tasks", "most"),
    [
        *[(1, 2, True, False), (2, 3, True, True), (6, 10, True, True), (5, 10, True, False)],
        *[(3, 3, False, False), (6, 8, False, False), (7, 8, False, True), (8, 8, False, True)],
        *[(21, 32, False, False), (22, 32, False, True), (0, 0, False, False), (0, 0, True, False)],
    ],
)
def test_most_is_more_than_half_beyond_chance(successes, plays, all_tasks, most):
    assert is_most(successes, plays, all_tasks) == most


def test_constants_come_from_answers_and_from_what_observations_list_or_show():
    shown = [
        Observation("Bid [Bid 3] or [pass].", info={"admissible_actions": ["look", "go <place>"]}),
        Observation("Now [pass]."),
    ]
    found = candidate_constants(["7", "5", "7"], shown)
    assert found[:5] == ["7", "5", "look", "[pass]", "[Bid 3]"]
    assert {"Yes", "No", "True", "False", "0", "1", "A"} <= set(found)


@pytest.mark.parametrize(
    ("listed", "tried"), [(["look", "wait"], False), (["look", "go <place>"], True), ([], True)]
)
def test_answers_outside_of_a_complete_list_of_actions_are_not_tried(listed, tried):
    observation = Observation("Say [yes].", info={"admissible_actions": listed})
    found = candidate_constants(["look", "up"], [observation])
    assert {"look", "up"} <= set(found)
    assert ({"True", "[yes]"} <= set(found)) == tried
    assert tried or not {"True", "[yes]"} & set(found)


def test_every_injection_is_said_with_and_without_tags():
    injecting = InjectionSequence(get_package("number_line"))
    said = set()
    while injecting.left:
        said.add(injecting(None)(Observation("")))  # pyright: ignore[reportArgumentType]  unused
    assert said == {form for text in INJECTIONS for form in (text, f"<action>{text}</action>")}
    assert {"nan", "inf", "1e999", "[oracle_answer]", ""} <= said


MISTAKES = [
    ["check", "number_line", "size=[1"],
    ["check", "number_line", "size={a: 1"],
    ["check", "number_line", "size=!!python/name:os.system"],
    ["check", "number_line", "size=" + "[" * 3000],
    ["check", "number_line", "size=&a [*a]"],
    ["check", "number_line", "size=\udcff"],
    ["check", "number_line", "size=5", "size=6"],
    ["check", "number_line", "=5"],
    ["check", "number_line", "a..b=5"],
    ["check", "number_line", "size=-1"],
    ["check", "number_line", "size=1e400"],
    ["check", "dataset", "reward=1", "reward.path=x"],
    ["check", "dataset", "reward.path=x", "reward=1"],
    ["check", "os:path"],
    ["check", "os:getcwd"],
    ["check", "os:abort"],
    ["check", ":PACKAGE"],
    ["check", "os.py:PACKAGE"],
    ["check", ""],
    ["check", "/"],
    ["check", "syntax_error:PACKAGE"],
    ["check", "raises:PACKAGE"],
    ["check", "leaves:PACKAGE"],
    ["check", "needs:PACKAGE"],
    ["check", "returns:PACKAGE"],
    ["check", "returns:TAKES"],
    ["play", "raises:PACKAGE"],
    ["check", f"{HOME}:PACKAGE", "fault=no path"],
    ["check", f"{HOME}:PACKAGE", "count=0"],
    ["check", "tools", "functions=[returns:TAKES]"],
    ["check", "tools", "mcp_servers=[{command: nothing}]"],
    ["check", "tools", "functions=[returns:nothing]", "val_files=[rows.jsonl]"],
    ["check", "tools", "functions=[nowhere:f]", "val_files=[rows.jsonl]"],
    ["check", "tools", "functions=[syntax_error:f]", "val_files=[rows.jsonl]"],
    ["play", "tools", "functions=[returns:nothing]", "val_files=[rows.jsonl]"],
    ["check", "mixture", "parts=[number_line=0]"],
    ["check", "mixture", "parts=[number_line, number_line]"],
    ["check", "mixture", "parts=[nowhere]"],
]


@pytest.mark.parametrize("words", MISTAKES, ids=lambda words: " ".join(words)[:60])
def test_a_mistake_gives_one_sentence_and_status_2(words, tmp_path, monkeypatch, capsys):
    for name, text in {
        "syntax_error.py": "def f(:\n",
        "raises.py": "raise RuntimeError('here')\n",
        "leaves.py": "raise SystemExit(0)\n",
        "needs.py": "import nothing_of_this_name\n",
        "returns.py": "def PACKAGE():\n    return 3\ndef TAKES(x):\n    return x\n",
        "rows.jsonl": '{"prompt": "2+2?", "ground_truth": "4"}\n',
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    status = main(words)
    said = capsys.readouterr()
    if words[-1] == "count=0":
        assert status == 1 and "no val tasks" in said.out
        return
    assert status == 2 and said.err.strip() and "Traceback" not in said.err
    assert len(said.err) < 2000


@pytest.mark.parametrize(
    "words", [["--tasks", "-1"], ["--tasks", "0"], ["--tasks", "x"], ["--steps", "0"]]
)
@pytest.mark.parametrize("command", ["check"])
def test_numbers_that_play_nothing_are_refused(command, words):
    with pytest.raises(SystemExit) as ended:
        main([command, "number_line", *words])
    assert ended.value.code == 2


@pytest.mark.parametrize("task", ["-1", "1.5", "9" * 20])
def test_tasks_are_numbered_from_0(task):
    with pytest.raises(SystemExit) as ended:
        main(["play", "number_line", "--task", task])
    assert ended.value.code == 2


def test_listing_tasks_has_a_bound(monkeypatch, capsys):
    monkeypatch.setattr("agent_system.environments.cli.limits.SECONDS", 0.3)
    assert main(["check", "number_line", "size=100000000000"]) == 2
    assert "fix: " in capsys.readouterr().err


def test_other_policies_run_although_solutions_take_too_long(monkeypatch):
    monkeypatch.setattr("agent_system.environments.cli.limits.SECONDS", 1.0)
    findings = check_environment(f"{HOME}:PACKAGE", {"fault": "slow path", "count": 2})
    assert {play.policy for play in findings.episodes} >= {"random", "empty", "injecting"}
    assert not findings.problems
    assert any("gold_path" in one and "over 1 s" in one for one in findings.open_questions)


def test_the_episodes_of_the_best_constant_are_repeated_in_another_process():
    findings = check_environment(f"{HOME}:UNREPEATABLE", {"fault": "skewed"})
    assert findings.constant is not None and findings.constant.action == "Yes"
    assert any("same actions of constant" in sentence for sentence in findings.problems)


def test_the_random_policy_varies_the_moves_that_a_game_shows():
    first = Observation("[place 1 A]")
    policy = make_random_policy(PolicyStart(EnvSettings(), {}, first, random.Random(0)))
    texts = [policy(Observation(text)) for text in ["[place 1 A]", *[""] * 30]]
    assert all(re.fullmatch(r"<action>\[place \d [A-H]\]</action>", text) for text in texts)
    assert len(set(texts)) > 10 and "<action>[place 1 A]</action>" in texts
