"""Tests of ``check``: it reports faulty rewards and accepts sound environments."""

import asyncio
import io

import pytest
from rich.console import Console

from agent_system.environments.cli.check_episodes import (
    CheckedEnvironment,
    ScriptedEpisode,
    run_policy,
)
from agent_system.environments.cli.checking import (
    ORACLE_POLICY,
    check_environment,
    find_reward_problems,
    find_transcript_differences,
)
from agent_system.environments.cli.command import main, parse_config_overrides, print_findings
from agent_system.environments.cli.policies import FixedActionsPolicy
from agent_system.environments.env import Observation
from agent_system.environments.env_registry import get_package
from agent_system.environments.tasks import select_validation_set
from tests.helpers.refusals import FIX, SUGGESTION, missing_parts

PACKAGE_PATH = "tests.helpers.unreliable_envs:PACKAGE"
TASKS, STEPS = 3, 14
POLICIES = ["oracle", "random", "empty", "repeating", "injecting"]


def test_sound_environment_passes_and_its_returns_are_shown(capsys):
    assert main(["check", "Number_Line", "--tasks", "3", "size=6", "--steps", "12"]) == 0
    output = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:4] for line in output[2:-1]}
    assert not any("WRONG" in line for line in output)
    assert list(rows) == POLICIES
    assert rows["oracle"] == ["3", "3", "1.000"] and rows["empty"] == ["3", "0", "0.000"]
    assert all(len(line) <= 100 for line in output)


def test_reply_to_a_mixture_is_projected_by_the_part():
    package = get_package("mixture")
    settings = package.read_settings({"parts": ["number_line"]})
    validation_set = select_validation_set(package.tasks(settings, "val"), 1)
    checked = CheckedEnvironment("mixture", package, settings, validation_set, 1)

    async def run_one_episode():
        pool = checked.create_pool()
        await pool.start()
        episode = await run_policy(
            checked, pool, "one", lambda _: lambda _: "<action>left</action>", 0
        )
        await pool.close()
        return episode

    result = asyncio.run(run_one_episode())
    assert (result.actions, result.well_formed, result.failure) == (["left"], [True], "")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("pays for nothing", ["empty ", "return 1"]),
        ("reads tags", ["injecting ", "return 1"]),
        ("unwinnable", ["oracle ", "return 0"]),
        ("no won", ["won"]),
        ("breaks", ["injecting ", "error: "]),
        ("other", ["action 1", "text", "seed"]),
        ("leaks", ["action 1", "text", "seed"]),
    ],
)
def test_each_fault_is_reported(fault, expected):
    findings = check_environment(PACKAGE_PATH, {"fault": fault}, num_tasks=TASKS, max_steps=STEPS)
    assert any(
        not missing_parts(sentence, "number_line/", *expected) for sentence in findings.problems
    ), findings.problems
    assert print_findings(findings, Console(file=io.StringIO())) == 1


@pytest.mark.parametrize("error", ["ValueError", "SystemExit"])
def test_environment_that_cannot_be_closed_fails_the_check(error, capsys):
    arguments = [PACKAGE_PATH, "--tasks", "1", "--steps", str(STEPS), "fault=none"]
    assert main(["check", *arguments, f"close_error={error}"]) == 1
    output = capsys.readouterr()
    (problem,) = [line for line in output.out.splitlines() if line.startswith("WRONG: ")]
    error_text = f"{error}('the engine is gone')"
    assert not missing_parts(problem, "close()", error_text, "unreliable_envs.py, line", FIX)
    assert not output.err


def test_equal_failures_are_described_once():
    findings = check_environment(PACKAGE_PATH, {"fault": "raises"}, num_tasks=2, max_steps=STEPS)
    (sentence,) = [text for text in findings.problems if "no step succeeds" in text]
    num_failures = sum(bool(episode.failure) for episode in findings.episodes)
    assert sentence.startswith("oracle ") and "(oracle 1, " in sentence
    assert not missing_parts(sentence, "number_line/", 1, num_failures - 1)
    assert num_failures >= 2 * len(POLICIES)


def test_check_ends_when_a_call_hangs(monkeypatch):
    monkeypatch.setattr("agent_system.environments.cli.check_episodes.STEP_TIMEOUT_S", 1.0)
    findings = check_environment(PACKAGE_PATH, {"fault": "hangs"}, num_tasks=2, max_steps=STEPS)
    (sentence,) = findings.problems
    assert sentence.startswith("oracle ") and not missing_parts(sentence, "number_line/", "1 s")
    assert len(findings.episodes) == 1 and findings.episodes[0].has_hung


@pytest.mark.parametrize(
    ("package", "parts"),
    [
        ("FAULTY_EXPERT", ["policy oracle", "list index out of range", "unreliable_envs.py, line"]),
        ("MAKE_WITHOUT_SETTINGS", ["make(settings)", "takes 0 positional arguments"]),
    ],
)
def test_error_of_the_package_names_its_part(package, parts, capsys):
    name = f"tests.helpers.unreliable_envs:{package}"
    assert main(["check", name, "--tasks", "1", "fault=none"]) == 2
    output = capsys.readouterr().err
    assert all(part in output for part in [*parts, "; fix: "])


def test_different_failures_are_described_separately():
    episodes = [
        make_episode(policy, make_record("a"), failure=failure)
        for policy, failure in [("random", "dead"), ("empty", "late"), ("empty", "dead")]
    ]
    twice, once = find_reward_problems(episodes)
    assert not missing_parts(twice, "random ", "t/1", "(empty 1): dead")
    assert not missing_parts(once, "empty ", "t/1", ": late") and "(" not in once


def test_solution_may_come_from_a_coroutine():
    path = "tests.helpers.unreliable_envs:ASYNC_GOLD"
    findings = check_environment(path, {"fault": "none"}, num_tasks=2, max_steps=STEPS)
    assert findings.problems == [] and findings.episodes[0].policy == ORACLE_POLICY


def test_missing_expert_is_an_open_question_and_no_problem():
    findings = check_environment(
        "tests.helpers.unreliable_envs:WITHOUT_EXPERT",
        {"fault": "none"},
        num_tasks=TASKS,
        max_steps=STEPS,
    )
    assert findings.problems == [] and any(
        "gold_path" in sentence for sentence in findings.open_questions
    )
    assert {episode.policy for episode in findings.episodes} == set(POLICIES) - {ORACLE_POLICY}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["check", "numberline"], f"{SUGGESTION}'number_line'?"),
        (["check", "reasoning_gym/chain_sums"], f"{SUGGESTION}'chain_sum'?"),
        (["check", "number_line", "sise=3"], f"{SUGGESTION}env.number_line.size"),
        (["check", "number_line", "size"], "KEY=VALUE"),
        (["play", "number_line", "--task", "100000"], f"{FIX}--task 0"),
        (["check", "dataset"], "data.val_files=[FILE]"),
        (["check", "gymnasium", "env_id=CarPole-v1"], f"{SUGGESTION}'CartPole-v1'?"),
    ],
)
def test_wrong_argument_is_refused_with_a_fix(arguments, expected, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr().err
    assert expected in output and "correct it" not in output  # no fault of the package


@pytest.mark.parametrize(
    "arguments", [["list", "all"], ["check", "x", "--task", "a=1", "--no"], []]
)
def test_unparsable_arguments_print_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2 and "usage: " in capsys.readouterr().err


def test_dotted_keys_are_read_as_nested_values():
    values = parse_config_overrides(["reward.path=f.py", "reward.name=g", "size=5", "files=[a,b]"])
    assert values == {"reward": {"path": "f.py", "name": "g"}, "size": 5, "files": ["a", "b"]}


def make_record(text, reward=0.0, won=False):
    return {"text": text, "reward": reward, "done": won, "won": won, "valid": True}


def make_episode(policy, *records, failure=""):
    actions = ["go"] * (len(records) - 1)
    return ScriptedEpisode(
        policy, {"task_id": "t/1"}, 7, actions, [True] * len(actions), [*records], failure
    )


def test_oracle_without_a_higher_return_is_a_problem():
    episodes = [
        make_episode("oracle", make_record("a"), make_record("b", 0.5, won=True)),
        make_episode("empty", make_record("a"), make_record("b", 0.5)),
    ]
    (sentence,) = find_reward_problems(episodes)
    assert not missing_parts(sentence, "empty", "oracle") and sentence.count("0.5") == 2


def test_transcripts_are_compared_turn_by_turn():
    reference = make_episode("random", make_record("a"), make_record("b"), make_record("c", 1.0))
    assert find_transcript_differences([(reference, reference)]) == []
    for changed, expected in [
        (
            make_episode("random", make_record("a"), make_record("b"), make_record("c", 0.5)),
            "action 2, reward is ",
        ),
        (
            make_episode("random", make_record("x"), make_record("b"), make_record("c", 1.0)),
            "action 0, text is ",
        ),
        (make_episode("random", make_record("a"), make_record("b")), "2 actions here, 1 there"),
        (
            make_episode("random", make_record("a"), failure="dead"),
            "the environment failed there: dead",
        ),
    ]:
        (sentence,) = find_transcript_differences([(reference, changed)])
        assert expected in sentence and "t/1 (seed 7)" in sentence


def test_path_policy_skips_impossible_actions_and_ends():
    policy = FixedActionsPolicy(["fly", "left", "search[x]"])
    with_list = Observation("", info={"admissible_actions": ["left", "right"]})
    with_template = Observation("", info={"admissible_actions": ["search[<words>]"]})
    assert policy(with_list) == "<action>left</action>"
    assert policy(with_template) == "<action>search[x]</action>"
    assert policy(with_list) == ""
