"""Experts win what they play, think differently on each level, and their demonstrations look like
rollouts on training tasks.
"""

import json
import linecache
import random
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from agent_system.environments.env_registry import get_package
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Noise, Thought
from agent_system.environments.experts import demonstrations
from agent_system.environments.experts import episode as expert_episode
from agent_system.environments.experts.demonstrations import NoExpert, write_demonstrations
from agent_system.environments.experts.episode import LevelSampler
from agent_system.environments.experts.interface import add_noise, find_shortest_path
from rlvcr.levels import LEVELS, LevelCodec
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
def installed(request):
    if "name" in request.fixturenames and request.getfixturevalue("name") == "frozen_lake":
        pytest.importorskip("gymnasium")


def episodes(name: str, split: str, noise: Noise, limit: int = 60):
    """(won, decisions, whether each was valid) of an episode per task."""
    package = get_package(name)
    settings = package.read_settings(SECTIONS[name])
    env = package.make(settings)
    assert package.expert is not None
    for number, task in enumerate(package.tasks(settings, split)[:limit]):
        seen = env.reset(task, 0)
        player = package.expert.start(
            EpisodeStart(settings, task, seen, random.Random(number), noise)
        )
        decisions: list[Decision] = []
        valid: list[bool] = []
        done, info = False, {"won": False}
        while not done and len(decisions) < settings.max_steps:
            decisions.append(player.act())
            seen, _, done, info = env.step(decisions[-1].action)
            valid.append(info["is_action_valid"])
            if not done:
                player.observe(decisions[-1].action, seen)
        yield info["won"], decisions, valid


@cache
def written(name: str, folder) -> list[dict]:
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
def test_the_expert_wins_every_training_task_with_valid_actions(name):
    for won, _, valid in episodes(name, "train", Noise()):
        assert won and all(valid)


@pytest.mark.parametrize("name", ["frozen_lake", "number_line", "sokoban"])
def test_the_expert_wins_tasks_it_was_not_made_for(name):
    assert all(won for won, _, _ in episodes(name, "val", Noise()))


@pytest.mark.parametrize("name", NAMES)
def test_noise_costs_success_or_steps_and_is_marked(name):
    best = list(episodes(name, "train", Noise()))
    noisy = list(episodes(name, "train", NOISE))
    steps = sum(len(decisions) for _, decisions, _ in noisy)
    marked = [decision for _, decisions, _ in noisy for decision in decisions]
    assert steps > 1.1 * sum(len(decisions) for _, decisions, _ in best) or (
        sum(won for won, _, _ in noisy) < 0.9 * sum(won for won, _, _ in best)
    )
    assert 0.1 < sum(decision.is_useless for decision in marked) / steps < 0.4
    assert not any(decision.is_useless and decision.is_invalid for decision in marked)
    assert any(decision.is_invalid for decision in marked)
    if name != "twenty_questions":  # whose slips are guesses: possible, and most often wrong
        for _, decisions, valid in noisy:
            assert [decision.is_invalid for decision in decisions] == [not good for good in valid]


@pytest.mark.parametrize("name", NAMES)
def test_thoughts_grow_with_the_level_and_the_plan_names_the_action(name):
    told: dict[int, set[str]] = {level: set() for level in LEVELS}
    for _, decisions, _ in episodes(name, "train", NOISE, limit=20):
        for decision in decisions:
            thoughts = [expert_episode.write_thought(level, decision) for level in LEVELS]
            assert thoughts[0] == ""
            assert [len(text) for text in thoughts] == sorted({len(text) for text in thoughts})
            first = decision.plan.split(" then ")[0]
            named = name == "twenty_questions" or first.startswith(decision.action)
            assert named
            for level, text in zip(LEVELS, thoughts, strict=True):
                told[level].add(text)
    # A thought that is always the same tells nothing of the situation it is in.
    assert len(told[2]) > 10
    assert len(told[4]) > len(told[2])


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_parse_strictly_and_hold_balanced_levels(name, folder):
    tokenizer = make_tiny_tokenizer()
    codec = LevelCodec(tokenizer)
    project = get_package(name).project
    levels = Counter()
    for row in written(name, folder):
        said = [entry["content"] for entry in row["messages"] if entry["role"] == "assistant"]
        assert len(said) == len(row["levels"]) == len(row["slack"]) == len(row["slips"])
        for text, level in zip(said, row["levels"], strict=True):
            step = codec.parse_turn(tokenizer.encode(text, add_special_tokens=False))
            assert (step.parser, step.failure, step.level) == ("strict", None, level)
            assert (step.thought == "") == (level == 1)
            assert project(text)[1]
            levels[level] += 1
    assert set(levels) == set(LEVELS)
    assert max(levels.values()) < 1.6 * min(levels.values())


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_replay_to_a_win_on_training_tasks(name, folder):
    package = get_package(name)
    settings = package.read_settings(SECTIONS[name])
    env = package.make(settings)
    prompts = package.prompts(settings)
    train = {task["task_id"]: task for task in package.tasks(settings, "train")}
    for row in written(name, folder)[:10]:
        seen = env.reset(train[row["task_id"]], 0)
        messages = list(row["messages"])
        if prompts.system(True):
            assert messages.pop(0) == {"role": "system", "content": prompts.system(True)}
        assert messages[0]["content"] == prompts.first(seen, True)
        done, info = False, {}
        for number, entry in enumerate(messages[1::2]):
            seen, _, done, info = env.step(package.project(entry["content"])[0])
            if not done:
                assert messages[2 * number + 2]["content"] == prompts.turn(seen)
        assert done and info["won"]


def test_more_episodes_than_tasks_repeat_tasks_side_by_side(folder):
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
    assert changes == 6, "so that a hold-out of the last episodes takes few tasks"


def test_lines_do_not_depend_on_the_workers_but_on_the_seed(folder, tmp_path):
    settings = get_package("number_line").read_settings(SECTIONS["number_line"])
    rows = written("number_line", folder)
    paths = [
        write_demonstrations(
            "number_line", settings, tmp_path, 60, seed, 2, NOISE.useless_share, LEVELS, 0.1
        )
        for seed in (0, 1)
    ]
    same, other = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    assert same == rows != other
    assert paths[0] != paths[1]


def test_who_has_no_expert_hears_who_has():
    with pytest.raises(NoExpert, check=mentions("'shop'", "number_line", "twenty_questions")):
        write_demonstrations("shop", get_package("shop").read_settings(), "nowhere", 4)


def test_levels_the_expert_has_no_thoughts_for_are_refused(monkeypatch):
    package = get_package("number_line")
    assert package.expert is not None
    hasty = replace(package, expert=replace(package.expert, levels=(1, 2)))
    monkeypatch.setattr(demonstrations, "get_package", {"two_levels": hasty}.__getitem__)
    with pytest.raises(ValueError, check=mentions("1..2", 4, "[1, 2, 3, 4]")):
        write_demonstrations("two_levels", hasty.read_settings(), "nowhere", 4)


def test_a_share_of_needed_levels_is_refused_where_nobody_knows_them():
    said = r"needed_level_share=0\.5.*'number_line'"
    with pytest.raises(ValueError, match=said):
        write_demonstrations(
            "number_line",
            get_package("number_line").read_settings(),
            "nowhere",
            4,
            needed_level_share=0.5,
        )


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.25), (0.5, 0.625), (1.0, 1.0)])
def test_the_needed_level_is_drawn_as_often_as_asked(share, expected):
    draw = LevelSampler(LEVELS, random.Random(0), share)
    decision = Decision("go", needed_level=3)
    drawn = [draw(decision) for _ in range(4000)]
    assert drawn.count(3) / 4000 == pytest.approx(expected, abs=0.03)


def test_levels_are_drawn_uniformly_where_the_needed_one_is_not_among_them():
    draw = LevelSampler((1, 2), random.Random(0), 1.0)
    drawn = [draw(Decision("go", needed_level=needed)) for needed in (3, None) for _ in range(500)]
    assert set(drawn) == {1, 2}
    assert LevelSampler((), random.Random(0), 1.0)(Decision("go", needed_level=3)) is None


def test_what_an_expert_thinks_itself_is_written_with_the_action_that_follows_from_it():
    decision = Decision("go", "here", "tried nothing", "go", thoughts={4: Thought("so", "wait")})
    said = [expert_episode.render_reply(level, decision) for level in (2, 4)]
    assert said[0] == "<level>2</level><think>here.</think><action>go</action>"
    assert said[1] == "<level>4</level><think>so</think><action>wait</action>"
    assert expert_episode.choose_action(4, decision) == "wait"
    assert expert_episode.choose_action(None, decision) == "go"


def test_episodes_that_cannot_be_won_say_so(tmp_path):
    pytest.importorskip("gymnasium")
    lakes = get_package("frozen_lake").read_settings({"max_steps": 1, "train_maps": 9})
    with pytest.raises(ValueError, check=mentions(5, 1)):
        write_demonstrations("frozen_lake", lakes, tmp_path, 5, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_shortest_way_is_found_or_given_up():
    def after(number):
        return [("double", 2 * number), ("add", number + 1)]

    assert find_shortest_path(1, after, lambda n: n == 9, 1000) == [
        "double",
        "double",
        "double",
        "add",
    ]
    assert find_shortest_path(1, after, lambda n: n == 1, 1000) == []
    assert find_shortest_path(1, after, lambda n: n < 0, 1000) is None
    assert find_shortest_path(1, {1: []}.__getitem__, lambda n: n == 2, 1000) is None


def test_disturbed_actions_come_as_often_as_asked():
    best = Decision("go", "here", "tried nothing", "go then win")
    rng = random.Random(0)
    drawn = [add_noise(best, rng, NOISE, ["wait"], ["fly"]) for _ in range(4000)]
    shares = Counter(
        (decision.action, decision.is_useless, decision.is_invalid) for decision in drawn
    )
    assert set(shares) == {("go", False, False), ("wait", True, False), ("fly", False, True)}
    assert shares["wait", True, False] / 4000 == pytest.approx(NOISE.useless_share, abs=0.03)
    assert shares["fly", False, True] / 4000 == pytest.approx(NOISE.invalid_share, abs=0.02)
    assert {decision.plan for decision in drawn} == {"go then win", "wait", "fly"}
    assert add_noise(best, rng, Noise(0.5, 0.5), [], []) == best


def test_an_environment_of_ones_own_is_demonstrated_anew_once_its_file_is_another(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    settings = get_package("number_line").read_settings({"max_steps": 12})

    def written(last_line: str) -> str:
        module = "agent_system.environments.env_package.number_line.package"
        (tmp_path / "own_line.py").write_text(f"from {module} import PACKAGE\n{last_line}\n")
        # As in another process.
        sys.modules.pop("own_line", None)
        linecache.clearcache()
        return write_demonstrations("own_line:PACKAGE", settings, tmp_path, 4, num_workers=0).name

    first = written("# one")
    assert written("# one") == first != written("# two")
    sys.modules.pop("own_line")
