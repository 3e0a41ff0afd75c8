"""Tests of experts and their demonstrations.

Experts succeed at training tasks and think differently on each level. Their demonstrations have
the form of rollouts.
"""

import json
import linecache
import random
import sys
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest

from agent_system.environments.env_registry import get_package
from agent_system.environments.expert_protocol import Decision, Noise, Thought
from agent_system.environments.experts import episode as expert_episode
from agent_system.environments.experts.demonstrations import NoExpertError, write_demonstrations
from agent_system.environments.experts.episode import LevelSampler
from agent_system.environments.experts.expert_helpers import add_noise, find_shortest_path
from rlvcr.levels import LEVELS, LevelCodec
from tests.helpers.expert_episodes import run_expert
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_tokenizer

SECTIONS = {
    "frozen_lake": {"max_steps": 12, "train_maps": 60, "val_maps": 20},
    "number_line": {"max_steps": 12, "size": 15},
    "sokoban": {"max_steps": 16, "search_depth": 8, "train_levels": 40, "val_levels": 10},
    "twenty_questions": {"max_steps": 20},
}
NOISE = Noise(useless_share=0.25, invalid_share=0.1)
NAMES = sorted(SECTIONS)


@pytest.fixture(autouse=True)
def skip_without_gymnasium(request):
    if "name" in request.fixturenames and request.getfixturevalue("name") == "frozen_lake":
        pytest.importorskip("gymnasium")


def run_episodes(name: str, split: str, noise: Noise, limit: int = 60, **section):
    """Yield (success, decisions, validity of each action) of one episode per task."""
    package = get_package(name)
    settings = package.read_settings({**SECTIONS[name], **section})
    env = package.make(settings)
    for number, task in enumerate(package.tasks(settings, split)[:limit]):
        turns = run_expert(package, env, settings, task, noise, number, settings.max_steps)
        decisions = [turn.decision for turn in turns]
        yield turns[-1].info["won"], decisions, [turn.info["is_action_valid"] for turn in turns]


@cache
def read_demonstrations(name: str, folder) -> list[dict]:
    path = write_demonstrations(
        name,
        get_package(name).read_settings(SECTIONS[name]),
        folder,
        60,
        num_workers=0,
        useless_share=NOISE.useless_share,
        invalid_share=NOISE.invalid_share,
    )
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demonstrations")


@pytest.mark.parametrize("name", NAMES)
def test_expert_solves_every_training_task_with_valid_actions(name):
    for is_success, _, valid in run_episodes(name, "train", Noise()):
        assert is_success and all(valid)


@pytest.mark.parametrize("name", ["frozen_lake", "number_line", "sokoban"])
def test_expert_solves_validation_tasks(name):
    assert all(is_success for is_success, _, _ in run_episodes(name, "val", Noise()))


@pytest.mark.parametrize("name", NAMES)
def test_noise_costs_success_or_turns_and_is_marked(name):
    clean = list(run_episodes(name, "train", Noise()))
    noisy = list(run_episodes(name, "train", NOISE))
    turn_count = sum(len(decisions) for _, decisions, _ in noisy)
    noisy_decisions = [decision for _, decisions, _ in noisy for decision in decisions]
    assert turn_count > 1.1 * sum(len(decisions) for _, decisions, _ in clean) or (
        sum(is_success for is_success, _, _ in noisy)
        < 0.9 * sum(is_success for is_success, _, _ in clean)
    )
    assert 0.1 < sum(decision.is_useless for decision in noisy_decisions) / turn_count < 0.4
    assert not any(decision.is_useless and decision.is_invalid for decision in noisy_decisions)
    assert any(decision.is_invalid for decision in noisy_decisions)
    if name != "twenty_questions":  # its noise is guesses: valid actions that are mostly wrong
        for _, decisions, valid in noisy:
            assert [decision.is_invalid for decision in decisions] == [
                not is_valid for is_valid in valid
            ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("noise", [Noise(0.9, 0.0), Noise(0.0, 0.9), Noise(0.5, 0.4)])
def test_expert_acts_until_the_environment_ends_the_episode(name, noise):
    for _, decisions, _ in run_episodes(name, "train", noise, limit=8, max_steps=300):
        assert all(decision.action for decision in decisions)


@pytest.mark.parametrize("name", NAMES)
def test_thoughts_grow_with_the_level_and_plan_names_the_action(name):
    texts_by_level: dict[int, set[str]] = {level: set() for level in LEVELS}
    for _, decisions, _ in run_episodes(name, "train", NOISE, limit=20):
        for decision in decisions:
            thoughts = [expert_episode.compose_thought(level, decision) for level in LEVELS]
            assert thoughts[0] == ""
            assert [len(text) for text in thoughts] == sorted({len(text) for text in thoughts})
            first = decision.plan.split(" then ")[0]
            is_action_named = name == "twenty_questions" or first.startswith(decision.action)
            assert is_action_named
            for level, text in zip(LEVELS, thoughts, strict=True):
                texts_by_level[level].add(text)
    # A constant thought would hold no information about the state.
    assert len(texts_by_level[2]) > 10
    assert len(texts_by_level[4]) > len(texts_by_level[2])


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_parse_strictly_with_balanced_levels(name, folder):
    tokenizer = make_tiny_tokenizer()
    codec = LevelCodec(tokenizer)
    project = get_package(name).project
    levels = Counter()
    for row in read_demonstrations(name, folder):
        replies = [entry["content"] for entry in row["messages"] if entry["role"] == "assistant"]
        assert len(replies) == len(row["levels"]) == len(row["slack"]) == len(row["slips"])
        for text, level in zip(replies, row["levels"], strict=True):
            step = codec.parse_turn(tokenizer.encode(text, add_special_tokens=False))
            assert (step.pattern_name, step.failure, step.level) == ("strict", None, level)
            assert (step.thought == "") == (level == 1)
            assert project(text)[1]
            levels[level] += 1
    assert set(levels) == set(LEVELS)
    assert max(levels.values()) < 1.6 * min(levels.values())


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_replay_to_success_on_training_tasks(name, folder):
    package = get_package(name)
    settings = package.read_settings(SECTIONS[name])
    env = package.make(settings)
    prompts = package.prompts(settings)
    train = {task["task_id"]: task for task in package.tasks(settings, "train")}
    for row in read_demonstrations(name, folder)[:10]:
        observation = env.reset(train[row["task_id"]], 0)
        messages = list(row["messages"])
        if prompts.system(True):
            assert messages.pop(0) == {"role": "system", "content": prompts.system(True)}
        assert messages[0]["content"] == prompts.first(observation, True)
        done, info = False, {}
        for number, entry in enumerate(messages[1::2]):
            observation, _, done, info = env.step(package.project(entry["content"])[0])
            if not done:
                assert messages[2 * number + 2]["content"] == prompts.turn(observation)
        assert done and info["won"]


def test_repeated_episodes_of_a_task_are_adjacent(folder):
    settings = get_package("number_line").read_settings(
        {**SECTIONS["number_line"], "train_tasks": 7}
    )
    path = write_demonstrations(
        "number_line", settings, folder, 40, num_workers=0, useless_share=0, invalid_share=0
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    order = [row["task_id"] for row in rows]
    assert len(rows) == 40 and len(set(order)) == 7
    changes = sum(before != after for before, after in pairwise(order))
    assert changes == 6, "holding out the last episodes must hold out few tasks"


def test_demonstrations_depend_on_the_seed_and_not_on_the_workers(folder, tmp_path):
    settings = get_package("number_line").read_settings(SECTIONS["number_line"])
    rows = read_demonstrations("number_line", folder)
    paths = [
        write_demonstrations(
            "number_line", settings, tmp_path, 60, seed, 2, NOISE.useless_share, LEVELS, 0.1
        )
        for seed in (0, 1)
    ]
    same, other = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    assert same == rows != other
    assert paths[0] != paths[1]


def test_missing_expert_error_names_environments_with_an_expert():
    with pytest.raises(NoExpertError, check=mentions("'shop'", "number_line", "twenty_questions")):
        write_demonstrations("shop", get_package("shop").read_settings(), "nowhere", 4)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.25), (0.5, 0.625), (1.0, 1.0)])
def test_required_level_is_drawn_at_the_configured_share(share, expected):
    draw = LevelSampler(LEVELS, random.Random(0), share)
    decision = Decision("go", needed_level=3)
    drawn = [draw(decision) for _ in range(4000)]
    assert drawn.count(3) / 4000 == pytest.approx(expected, abs=0.03)


def test_levels_are_uniform_where_the_required_level_is_absent():
    draw = LevelSampler((1, 2), random.Random(0), 1.0)
    drawn = [draw(Decision("go", needed_level=needed)) for needed in (3, None) for _ in range(500)]
    assert set(drawn) == {1, 2}
    assert LevelSampler((), random.Random(0), 1.0)(Decision("go", needed_level=3)) is None


def test_expert_thought_is_written_with_its_own_action():
    decision = Decision("go", "here", "tried nothing", "go", thoughts={4: Thought("so", "wait")})
    replies = [expert_episode.render_reply(level, decision) for level in (2, 4)]
    assert replies[0] == "<level>2</level><think>here.</think><action>go</action>"
    assert replies[1] == "<level>4</level><think>so</think><action>wait</action>"
    assert expert_episode.choose_action(4, decision) == "wait"
    assert expert_episode.choose_action(None, decision) == "go"


def test_unsolvable_episodes_are_refused_without_a_file(tmp_path):
    pytest.importorskip("gymnasium")
    lakes = get_package("frozen_lake").read_settings({"max_steps": 1, "train_maps": 9})
    with pytest.raises(ValueError, check=mentions(5, 1)):
        write_demonstrations("frozen_lake", lakes, tmp_path, 5, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_find_shortest_path_returns_the_path_or_none():
    def list_successors(number):
        return [("double", 2 * number), ("add", number + 1)]

    assert find_shortest_path(1, list_successors, lambda n: n == 9, 1000) == [
        "double",
        "double",
        "double",
        "add",
    ]
    assert find_shortest_path(1, list_successors, lambda n: n == 1, 1000) == []
    assert find_shortest_path(1, list_successors, lambda n: n < 0, 1000) is None
    assert find_shortest_path(1, {1: []}.__getitem__, lambda n: n == 2, 1000) is None


def test_noise_actions_occur_at_the_configured_shares():
    decision = Decision("go", "here", "tried nothing", "go then win")
    rng = random.Random(0)
    drawn = [add_noise(decision, rng, NOISE, ["wait"], ["fly"]) for _ in range(4000)]
    shares = Counter((noisy.action, noisy.is_useless, noisy.is_invalid) for noisy in drawn)
    assert set(shares) == {("go", False, False), ("wait", True, False), ("fly", False, True)}
    assert shares["wait", True, False] / 4000 == pytest.approx(NOISE.useless_share, abs=0.03)
    assert shares["fly", False, True] / 4000 == pytest.approx(NOISE.invalid_share, abs=0.02)
    assert {noisy.plan for noisy in drawn} == {"go then win", "wait", "fly"}
    assert add_noise(decision, rng, Noise(0.5, 0.5), [], []) == decision


def test_changed_file_of_a_user_package_gives_new_demonstrations(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    settings = get_package("number_line").read_settings({"max_steps": 12})

    def write_with(last_line: str) -> str:
        module = "agent_system.environments.env_package.number_line.package"
        (tmp_path / "own_line.py").write_text(f"from {module} import PACKAGE\n{last_line}\n")
        # Clear the caches, as a new process would start without them.
        sys.modules.pop("own_line", None)
        linecache.clearcache()
        return write_demonstrations("own_line:PACKAGE", settings, tmp_path, 4, num_workers=0).name

    first = write_with("# one")
    assert write_with("# one") == first != write_with("# two")
    sys.modules.pop("own_line")
