"""Tests of derived thoughts: they hold what the action needs, and follow from the prompt."""

import json
import random
import re
from collections import Counter, defaultdict

import pytest

from tests.helpers.expert_episodes import run_expert

pytest.importorskip("alfworld")

from agent_system.environments.env import Observation
from agent_system.environments.env_package.alfworld.derived_thoughts import (
    NEEDED_LEVELS,
    DerivedThoughtsExpert,
    RightActions,
)
from agent_system.environments.env_package.alfworld.package import EXPERT, PACKAGE
from agent_system.environments.env_package.alfworld.settings import TASK_TYPES
from agent_system.environments.env_package.alfworld.store import list_generated_tasks
from agent_system.environments.expert_protocol import Decision, Noise
from agent_system.environments.experts.demonstrations import get_expert, write_demonstrations
from rlvcr.levels import LEVELS

ROOM = (
    "You are in the middle of a room. Looking quickly around you, you see a drawer 1, a desk 1, "
    "a shelf 2, and a shelf 1.\n\nYour task is to: {}."
)
WINDOW = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("games")


def make_settings(store, **changes):
    base = {
        "data_dir": str(store),
        "source": "generated",
        "val_games": 30,
        "prompt": "compact",
        "task_types": list(TASK_TYPES),
        "receptacles": (5, 8),
        "max_steps": 60,
        "thoughts": "carried",
    }
    return PACKAGE.read_settings({**base, **changes})


def write_rows(store, **changes):
    """Return the turns of noisy expert episodes, one row per turn."""
    settings = make_settings(store, **changes)
    path = write_demonstrations(
        "alfworld",
        settings,
        store / "demos",
        30,
        num_workers=0,
        useless_share=0.2,
        needed_level_share=0.5,
        window=WINDOW,
    )
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(store):
    return write_rows(store)


def make_expert(task="put a mug in desk"):
    return DerivedThoughtsExpert(ROOM.format(task), random.Random(0))


def list_thoughts(decision: Decision):
    return [decision.thoughts[level].text for level in LEVELS]


def observe(expert, action, text):
    expert.observe(action, Observation(text))


# ---------------------------------------------------------------------- thoughts


def test_search_thought_lists_the_state_of_each_place():
    expert = make_expert()
    assert expert.find_right_actions() == RightActions(
        "begin", ("go to drawer 1", "go to shelf 2", "go to shelf 1")
    )
    observe(expert, "go to shelf 2", "You arrive at shelf 2. On the shelf 2, you see a pen 1.")
    observe(expert, "go to drawer 1", "You arrive at drawer 1. The drawer 1 is closed.")
    assert expert.find_right_actions() == RightActions("open", ("open drawer 1",))
    observe(expert, "open drawer 1", "You open the drawer 1. In it, you see nothing.")
    decision = expert.act()
    assert expert.find_right_actions() == RightActions("search", ("go to shelf 1",))
    assert decision.needed_level == 4
    assert list_thoughts(decision) == [
        "",
        "hold nothing.",
        "hold nothing. mug unseen.",
        "hold nothing. mug unseen. drawer 1 done, desk 1 goal, shelf 2 done, shelf 1 left.",
    ]


def test_seen_object_is_taken_and_held_object_is_brought():
    expert = make_expert("put two mug in desk")
    observe(
        expert, "go to shelf 2", "You arrive at shelf 2. On the shelf 2, you see a mug 2, a mug 1."
    )
    assert expert.find_right_actions() == RightActions(
        "take", ("take mug 2 from shelf 2", "take mug 1 from shelf 2")
    )
    assert expert.act().action == "take mug 2 from shelf 2", "the object that is listed first"
    observe(expert, "take mug 2 from shelf 2", "You pick up the mug 2 from the shelf 2.")
    decision = expert.act()
    assert (decision.action, decision.needed_level) == ("go to desk 1", NEEDED_LEVELS["bring"])
    assert decision.thoughts[3].text == "hold mug 2. to desk 1."
    observe(expert, "go to desk 1", "You arrive at desk 1. On the desk 1, you see nothing.")
    assert expert.find_right_actions() == RightActions("put", ("move mug 2 to desk 1",))
    observe(expert, "move mug 2 to desk 1", "You move the mug 2 to the desk 1.")
    decision = expert.act()
    assert (decision.action, decision.needed_level) == ("go to shelf 2", NEEDED_LEVELS["return"])
    assert decision.thoughts[3].text == "hold nothing, 1 home. mug 1 in shelf 2."


def test_wrongly_taken_object_is_put_back():
    expert = make_expert()
    observe(expert, "go to shelf 2", "You arrive at shelf 2. On the shelf 2, you see a pen 1.")
    observe(expert, "take pen 1 from shelf 2", "You pick up the pen 1 from the shelf 2.")
    assert expert.find_right_actions() == RightActions("put", ("move pen 1 to shelf 2",))


def test_level_4_thought_selects_one_of_several_places():
    for seed in range(8):
        expert = DerivedThoughtsExpert(ROOM.format("put a mug in desk"), random.Random(seed))
        decision = expert.act()
        assert decision.thoughts[4].action == "go to drawer 1"
        assert {decision.thoughts[level].action for level in (1, 2, 3)} == {decision.action}
        assert decision.is_right("go to shelf 1") and not decision.is_right("go to desk 1")


def test_noise_changes_the_action_and_not_the_thought():
    clean_decision = make_expert().act()
    expert = DerivedThoughtsExpert(
        ROOM.format("put a mug in desk"), random.Random(0), Noise(invalid_share=1.0)
    )
    decision = expert.act()
    assert decision.is_invalid and not decision.is_right(decision.thoughts[4].action)
    assert list_thoughts(decision) == list_thoughts(clean_decision)


def test_thought_does_not_contain_the_action(rows):
    rows_with_thought = [row for row in rows if row["levels"][0] > 1]
    assert len(rows_with_thought) > 100
    for row in rows_with_thought:
        thought, action = re.findall(r"<think>(.*)</think><action>(.*)</action>", read_reply(row))[
            0
        ]
        assert action not in thought


def test_thought_is_a_function_of_prompt_and_level(rows):
    by_prompt = defaultdict(set)
    for row in rows:
        thought = re.findall(r"<think>(.*)</think>", read_reply(row))[0]
        by_prompt[row["messages"][0]["content"], row["levels"][0]].add(thought)
    assert len(by_prompt) < len(rows), "some prompts must occur more than once"
    assert all(len(thoughts) == 1 for thoughts in by_prompt.values())


def test_search_thoughts_agree_with_the_prompt(rows):
    verdict_count = 0
    for row in rows:
        if row["levels"] != [4]:
            continue
        prompt = row["messages"][0]["content"]
        history = prompt.split("\n", 1)[1] if "\n" in prompt else ""
        for place, verdict in re.findall(r"(\w+ \d+) (done|goal|left)\b", read_reply(row)):
            was_seen = re.search(rf"(?<![\w]){place}: ", history) is not None
            assert was_seen == (verdict == "done"), (prompt, read_reply(row))
            verdict_count += 1
    assert verdict_count > 100


def read_reply(row):
    return row["messages"][-1]["content"]


# ---------------------------------------------------------------------- demonstrations


def test_every_turn_is_a_self_contained_row(rows):
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows)
    assert all(len(row["levels"]) == len(row["slack"]) == len(row["slips"]) == 1 for row in rows)
    assert not any("<think>" in row["messages"][0]["content"] for row in rows)
    prompts = [row["messages"][0]["content"] for row in rows]
    assert any("\nread: " in prompt and "\nnow: " in prompt for prompt in prompts)


def test_required_level_is_demonstrated_most_often(store, rows):
    levels = Counter(row["levels"][0] for row in rows)
    assert set(levels) == set(LEVELS)
    closed = [row for row in rows if row["messages"][0]["content"].endswith(" closed")]
    assert sum(row["levels"] == [1] for row in closed) > 0.5 * len(closed)


def test_window_length_is_respected(store):
    settings = make_settings(store)
    path = write_demonstrations(
        "alfworld", settings, store / "short", 6, num_workers=0, useless_share=0.2, window=1
    )
    prompts = [json.loads(line)["messages"][0]["content"] for line in path.open()]
    assert all(";" not in prompt for prompt in prompts)


def test_announced_thoughts_have_no_required_level(store):
    settings = make_settings(store, thoughts="announced")
    assert not get_expert("alfworld").names_needed_level(settings)


# ---------------------------------------------------------------------- environment


def test_expert_succeeds_and_observations_name_the_situation(store):
    settings = make_settings(store)
    env = PACKAGE.make(settings)
    situations, success_counts = Counter(), Counter()
    for task in list_generated_tasks(settings, "demo", 12):
        turns = run_expert(PACKAGE, env, settings, task)
        for turn in turns:
            assert turn.observation.needed_level == turn.decision.needed_level
            assert turn.info["is_action_valid"]
            situations[turn.observation.situation] += 1
        success_counts[task["kind"]] += turns[-1].done
    env.close()
    assert success_counts == {kind: 2 for kind in TASK_TYPES}
    assert set(situations) <= set(NEEDED_LEVELS) and situations["search"] > 10


def test_announced_thoughts_name_no_situation(store):
    settings = make_settings(store, thoughts="announced")
    env = PACKAGE.make(settings)
    observation = env.reset(list_generated_tasks(settings, "demo", 1)[0], 0)
    env.close()
    assert observation.needed_level is None and observation.situation == observation.state


def test_only_carried_thoughts_add_receptacle_symbols(store):
    names = EXPERT.symbols(make_settings(store))
    assert " desk 1" in names and " sinkbasin 1" in names and " cabinet 9" not in names
    assert list(EXPERT.symbols(make_settings(store, thoughts="announced"))) == []
