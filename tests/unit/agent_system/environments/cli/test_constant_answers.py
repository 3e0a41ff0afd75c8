"""Tests of ``check``: it reports answers that succeed without reading the observation."""

import random
import re

import pytest

from agent_system.environments.cli.checking import check_environment, is_majority_solved
from agent_system.environments.cli.command import main
from agent_system.environments.cli.policies import (
    INJECTIONS,
    InjectionPolicy,
    list_constant_action_candidates,
    make_random_policy,
)
from agent_system.environments.env import Observation
from agent_system.environments.env_registry import get_package
from agent_system.environments.expert_protocol import EpisodeStart
from agent_system.environments.settings import EnvSettings
from tests.helpers.refusals import missing_parts

HELPERS = "tests.helpers.answer_envs"


def test_constant_that_succeeds_at_most_tasks_is_reported():
    findings = check_environment(f"{HELPERS}:PACKAGE", {"fault": "skewed"})
    assert findings.constant is not None
    assert (findings.constant.action, findings.constant.num_successes) == ("Yes", 7)
    assert any(not missing_parts(text, "'Yes'", "7 of 10") for text in findings.problems)


def test_grader_that_accepts_nan_is_reported():
    findings = check_environment(f"{HELPERS}:PACKAGE", {"fault": "nan", "count": 2})
    assert any(
        problem.startswith("injecting ") and "'nan'" in problem for problem in findings.problems
    )
    actions = {
        action
        for episode in findings.episodes
        if episode.policy == "injecting"
        for action in episode.actions
    }
    assert len(actions) > 1


@pytest.mark.parametrize(
    ("name", "problem_count", "question_count"),
    [("PACKAGE", 0, 0), ("UNFORMATTED", 0, 1), ("MISFORMATTED", 1, 0)],
)
def test_oracle_actions_are_executed_in_any_format(name, problem_count, question_count):
    findings = check_environment(f"{HELPERS}:{name}", {"count": 2})
    assert all(episode.is_success for episode in findings.episodes if episode.policy == "oracle")
    assert sum("project(" in sentence for sentence in findings.problems) == problem_count
    assert sum("project(" in sentence for sentence in findings.open_questions) == question_count


@pytest.mark.parametrize(
    ("successes", "episodes", "all_tasks", "expected"),
    [
        *[(1, 2, True, False), (2, 3, True, True), (6, 10, True, True), (5, 10, True, False)],
        *[(3, 3, False, False), (6, 8, False, False), (7, 8, False, True), (8, 8, False, True)],
        *[(21, 32, False, False), (22, 32, False, True), (0, 0, False, False), (0, 0, True, False)],
    ],
)
def test_is_most_requires_more_than_half_beyond_chance(successes, episodes, all_tasks, expected):
    assert is_majority_solved(successes, episodes, all_tasks) == expected


def test_constants_come_from_answers_and_observations():
    observations = [
        Observation("Bid [Bid 3] or [pass].", info={"admissible_actions": ["look", "go <place>"]}),
        Observation("Now [pass]."),
    ]
    constants = list_constant_action_candidates(["7", "5", "7"], observations)
    assert constants[:5] == ["7", "5", "look", "[pass]", "[Bid 3]"]
    assert {"Yes", "No", "True", "False", "0", "1", "A"} <= set(constants)


@pytest.mark.parametrize(
    ("listed", "is_tried"),
    [(["look", "wait"], False), (["look", "go <place>"], True), ([], True)],
)
def test_answers_outside_of_a_complete_list_are_not_tried(listed, is_tried):
    observation = Observation("Say [yes].", info={"admissible_actions": listed})
    constants = set(list_constant_action_candidates(["look", "up"], [observation]))
    assert {"look", "up"} <= constants
    assert ({"True", "[yes]"} <= constants) == is_tried
    assert is_tried or not {"True", "[yes]"} & constants


def test_every_injection_is_sent_with_and_without_tags():
    policy = InjectionPolicy(get_package("number_line"))
    actions = set()
    while policy.num_unused:
        actions.add(policy(None)(Observation("")))  # pyright: ignore[reportArgumentType]  unused
    assert actions == {form for text in INJECTIONS for form in (text, f"<action>{text}</action>")}
    assert {"nan", "inf", "1e999", "[oracle_answer]", ""} <= actions


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
    ["check", f"{HELPERS}:PACKAGE", "fault=no path"],
    ["check", f"{HELPERS}:PACKAGE", "count=0"],
    ["check", "tools", "functions=[returns:TAKES]"],
    ["check", "tools", "mcp_servers=[{command: nothing}]"],
    ["check", "tools", "functions=[returns:nothing]", "val_files=[rows.jsonl]"],
    ["check", "tools", "functions=[nowhere:f]", "val_files=[rows.jsonl]"],
    ["check", "tools", "functions=[syntax_error:f]", "val_files=[rows.jsonl]"],
    ["check", "tools", "functions=[leaves:f]", "val_files=[rows.jsonl]"],
    ["play", "tools", "functions=[returns:nothing]", "val_files=[rows.jsonl]"],
    ["check", "mixture", "parts=[number_line=0]"],
    ["check", "mixture", "parts=[number_line, number_line]"],
    ["check", "mixture", "parts=[nowhere]"],
]


@pytest.mark.parametrize("arguments", MISTAKES, ids=lambda arguments: " ".join(arguments)[:60])
def test_mistake_prints_one_sentence_and_exits_with_2(arguments, tmp_path, monkeypatch, capsys):
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
    status = main(arguments)
    output = capsys.readouterr()
    if arguments[-1] == "count=0":
        assert status == 1 and " val " in output.out
        return
    assert status == 2 and output.err.strip() and "Traceback" not in output.err
    assert len(output.err) < 2000


@pytest.mark.parametrize(
    "arguments", [["--tasks", "-1"], ["--tasks", "0"], ["--tasks", "x"], ["--steps", "0"]]
)
@pytest.mark.parametrize("command", ["check"])
def test_numbers_below_one_are_refused(command, arguments):
    with pytest.raises(SystemExit) as exit_info:
        main([command, "number_line", *arguments])
    assert exit_info.value.code == 2


@pytest.mark.parametrize("task", ["-1", "1.5", "9" * 20])
def test_tasks_are_numbered_from_0(task):
    with pytest.raises(SystemExit) as exit_info:
        main(["play", "number_line", "--task", task])
    assert exit_info.value.code == 2


def test_listing_tasks_has_a_time_limit(monkeypatch, capsys):
    monkeypatch.setattr("agent_system.environments.cli.limits.MAX_SECONDS", 0.3)
    assert main(["check", "number_line", "size=100000000000"]) == 2
    assert "fix: " in capsys.readouterr().err


def test_other_policies_run_although_solutions_take_too_long(monkeypatch):
    monkeypatch.setattr("agent_system.environments.cli.limits.MAX_SECONDS", 1.0)
    findings = check_environment(f"{HELPERS}:PACKAGE", {"fault": "slow path", "count": 2})
    assert {episode.policy for episode in findings.episodes} >= {"random", "empty", "injecting"}
    assert not findings.problems
    assert any("gold_path" in one and "over 1 s" in one for one in findings.open_questions)


def test_the_episodes_of_the_best_constant_are_repeated_in_another_process():
    findings = check_environment(f"{HELPERS}:UNREPEATABLE", {"fault": "skewed"})
    assert findings.constant is not None and findings.constant.action == "Yes"
    assert any(not missing_parts(text, "constant", "seed") for text in findings.problems)


def test_the_random_policy_varies_the_moves_that_a_game_shows():
    first = Observation("[place 1 A]")
    policy = make_random_policy(EpisodeStart(EnvSettings(), {}, first, random.Random(0)))
    texts = [policy(Observation(text)) for text in ["[place 1 A]", *[""] * 30]]
    assert all(re.fullmatch(r"<action>\[place \d [A-H]\]</action>", text) for text in texts)
    assert len(set(texts)) > 10 and "<action>[place 1 A]</action>" in texts
