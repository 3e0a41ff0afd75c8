"""A check finds what is wrong with rewards, and passes what is right."""

import asyncio
import io

import pytest
from rich.console import Console

from agent_system.environments.cli.check_episodes import (
    CheckedEnvironment,
    CheckEpisode,
    run_policy,
)
from agent_system.environments.cli.checking import (
    ORACLE,
    check_environment,
    find_reward_problems,
    find_transcript_differences,
)
from agent_system.environments.cli.command import main, print_findings, read_keys
from agent_system.environments.cli.policies import PathPolicy
from agent_system.environments.env import Observation
from agent_system.environments.env_registry import get_package
from agent_system.environments.tasks import select_validation_set

PLACE = "tests.helpers.doubtful_envs:PACKAGE"
TASKS, STEPS = 3, 14
POLICIES = ["oracle", "random", "empty", "repeating", "injecting"]


def test_a_sound_environment_passes_and_its_returns_are_shown(capsys):
    assert main(["check", "Number_Line", "--tasks", "3", "size=6", "--steps", "12"]) == 0
    shown = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:4] for line in shown[2:-1]}
    assert list(rows) == POLICIES
    assert rows["oracle"] == ["3", "3", "1.000"] and rows["empty"] == ["3", "0", "0.000"]
    assert all(len(line) <= 100 for line in shown)
    assert shown[-1].startswith("nothing is wrong")


def test_what_is_said_to_a_mixture_is_projected_by_the_part():
    package = get_package("mixture")
    settings = package.read_settings({"parts": ["number_line"]})
    panel = select_validation_set(package.tasks(settings, "val"), 1)
    game = CheckedEnvironment("mixture", package, settings, panel, 1)

    async def played():
        pool = game.create_pool()
        await pool.start()
        said = await run_policy(game, pool, "one", lambda _: lambda _: "<action>left</action>", 0)
        await pool.close()
        return said

    play = asyncio.run(played())
    assert (play.actions, play.well_formed, play.failure) == (["left"], [True], "")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("pays for nothing", "empty solved number_line/"),
        ("reads tags", "injecting solved number_line/"),
        ("unwinnable", "oracle did not solve number_line/"),
        ("breaks", "injecting made the environment fail on number_line/"),
        ("other", "another transcript in another process: after action 1, text is "),
        ("leaks", "another transcript in another process: after action 1, text is "),
    ],
)
def test_each_fault_is_found_and_said(fault, said):
    findings = check_environment(PLACE, {"fault": fault}, tasks=TASKS, steps=STEPS)
    assert any(said in sentence for sentence in findings.problems), findings.problems
    assert print_findings(findings, Console(file=io.StringIO())) == 1


def test_where_nobody_knows_how_to_win_that_is_said_and_no_fault():
    findings = check_environment(
        "tests.helpers.doubtful_envs:WITHOUT_EXPERT", {"fault": "none"}, tasks=TASKS, steps=STEPS
    )
    assert findings.problems == [] and any(
        "gold_path" in sentence for sentence in findings.open_questions
    )
    assert {play.policy for play in findings.episodes} == set(POLICIES) - {ORACLE}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "numberline"], "did you mean 'number_line'?"),
        (["check", "reasoning_gym/chain_sums"], "did you mean 'chain_sum'?"),
        (["check", "number_line", "sise=3"], "did you mean env.number_line.size"),
        (["check", "number_line", "size"], "allowed: KEY=VALUE"),
        (["play", "number_line", "--task", "100000"], "fix: --task 0"),
        (["check", "dataset"], "data.val_files=[FILE]"),
    ],
)
def test_words_that_cannot_be_followed_are_refused_with_a_way_out(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["list", "all"], ["check", "x", "--task", "a=1", "--no"], []])
def test_words_that_are_none_end_with_the_usage(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and "usage: " in capsys.readouterr().err


def test_keys_below_keys_are_read_as_values():
    written = read_keys(["reward.path=f.py", "reward.name=g", "size=5", "files=[a,b]"])
    assert written == {"reward": {"path": "f.py", "name": "g"}, "size": 5, "files": ["a", "b"]}


def moment(text, reward=0.0, won=False):
    return {"text": text, "reward": reward, "done": won, "won": won, "valid": True}


def played(policy, *moments, broken=""):
    actions = ["go"] * (len(moments) - 1)
    return CheckEpisode(
        policy, {"task_id": "t/1"}, 7, actions, [True] * len(actions), [*moments], broken
    )


def test_nothing_to_gain_is_a_fault_even_where_nobody_wins_wrongly():
    plays = [
        played("oracle", moment("a"), moment("b", 0.5, won=True)),
        played("empty", moment("a"), moment("b", 0.5)),
    ]
    (sentence,) = find_reward_problems(plays)
    assert "the mean return of empty is 0.5, that of oracle 0.5" in sentence


def test_transcripts_are_compared_moment_by_moment():
    here = played("random", moment("a"), moment("b"), moment("c", 1.0))
    assert find_transcript_differences([(here, here)]) == []
    for other, said in [
        (played("random", moment("a"), moment("b"), moment("c", 0.5)), "action 2, reward is "),
        (played("random", moment("x"), moment("b"), moment("c", 1.0)), "action 0, text is "),
        (played("random", moment("a"), moment("b")), "2 actions here, 1 there"),
        (played("random", moment("a"), broken="dead"), "the environment failed there: dead"),
    ]:
        (sentence,) = find_transcript_differences([(here, other)])
        assert said in sentence and "t/1 (seed 7)" in sentence


def test_a_known_way_leaves_out_what_is_not_possible_and_ends():
    policy = PathPolicy(["fly", "left", "search[x]"])
    listed = Observation("", info={"admissible_actions": ["left", "right"]})
    blanks = Observation("", info={"admissible_actions": ["search[<words>]"]})
    assert policy(listed) == "<action>left</action>"
    assert policy(blanks) == "<action>search[x]</action>"
    assert policy(listed) == ""
