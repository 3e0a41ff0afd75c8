"""Thoughts that carry what the action needs: read off the prompt, and worth what they cost."""

import json
import random
import re
from collections import Counter, defaultdict

import pytest

from tests.helpers.refusals import mentions

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
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Noise
from agent_system.environments.experts.demonstrations import write_demonstrations
from rlvcr.levels import LEVELS

ROOM = (
    "You are in the middle of a room. Looking quickly around you, you see a drawer 1, a desk 1, "
    "a shelf 2, and a shelf 1.\n\nYour task is to: {}."
)
WINDOW = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("games")


def section(store, **changes):
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


def demonstrate(store, **changes):
    """Steps of expert episodes with noise, as rows."""
    asked = section(store, **changes)
    path = write_demonstrations(
        "alfworld",
        asked,
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
    return demonstrate(store)


def reader(task="put a mug in desk"):
    return DerivedThoughtsExpert(ROOM.format(task), random.Random(0))


def thoughts_of(decision: Decision):
    return [decision.thoughts[level].text for level in LEVELS]


def see(player, action, text):
    player.observe(action, Observation(text))


# ---------------------------------------------------------------------- what is thought


def test_a_search_is_worked_out_place_by_place():
    player = reader()
    assert player.find_right_actions() == RightActions(
        "begin", ("go to drawer 1", "go to shelf 2", "go to shelf 1")
    )
    see(player, "go to shelf 2", "You arrive at shelf 2. On the shelf 2, you see a pen 1.")
    see(player, "go to drawer 1", "You arrive at drawer 1. The drawer 1 is closed.")
    assert player.find_right_actions() == RightActions("open", ("open drawer 1",))
    see(player, "open drawer 1", "You open the drawer 1. In it, you see nothing.")
    decision = player.act()
    assert player.find_right_actions() == RightActions("search", ("go to shelf 1",))
    assert decision.needed_level == 4
    assert thoughts_of(decision) == [
        "",
        "hold nothing.",
        "hold nothing. mug unseen.",
        "hold nothing. mug unseen. drawer 1 done, desk 1 goal, shelf 2 done, shelf 1 left.",
    ]


def test_what_was_seen_is_looked_up_and_what_is_held_brought_home():
    player = reader("put two mug in desk")
    see(player, "go to shelf 2", "You arrive at shelf 2. On the shelf 2, you see a mug 2, a mug 1.")
    assert player.find_right_actions() == RightActions(
        "take", ("take mug 2 from shelf 2", "take mug 1 from shelf 2")
    )
    assert player.act().action == "take mug 2 from shelf 2", "the one that is listed first"
    see(player, "take mug 2 from shelf 2", "You pick up the mug 2 from the shelf 2.")
    decision = player.act()
    assert (decision.action, decision.needed_level) == ("go to desk 1", NEEDED_LEVELS["bring"])
    assert decision.thoughts[3].text == "hold mug 2. to desk 1."
    see(player, "go to desk 1", "You arrive at desk 1. On the desk 1, you see nothing.")
    assert player.find_right_actions() == RightActions("put", ("move mug 2 to desk 1",))
    see(player, "move mug 2 to desk 1", "You move the mug 2 to the desk 1.")
    decision = player.act()
    assert (decision.action, decision.needed_level) == ("go to shelf 2", NEEDED_LEVELS["return"])
    assert decision.thoughts[3].text == "hold nothing, 1 home. mug 1 in shelf 2."


def test_what_was_taken_by_mistake_is_put_down():
    player = reader()
    see(player, "go to shelf 2", "You arrive at shelf 2. On the shelf 2, you see a pen 1.")
    see(player, "take pen 1 from shelf 2", "You pick up the pen 1 from the shelf 2.")
    assert player.find_right_actions() == RightActions("put", ("move pen 1 to shelf 2",))


def test_of_several_places_the_deepest_thought_arrives_at_one():
    for seed in range(8):
        player = DerivedThoughtsExpert(ROOM.format("put a mug in desk"), random.Random(seed))
        decision = player.act()
        assert decision.thoughts[4].action == "go to drawer 1"
        assert {decision.thoughts[level].action for level in (1, 2, 3)} == {decision.action}
        assert decision.is_right("go to shelf 1") and not decision.is_right("go to desk 1")


def test_noise_changes_the_action_and_no_thought():
    calm = reader().act()
    player = DerivedThoughtsExpert(
        ROOM.format("put a mug in desk"), random.Random(0), Noise(invalid_share=1.0)
    )
    decision = player.act()
    assert decision.is_invalid and not decision.is_right(decision.thoughts[4].action)
    assert thoughts_of(decision) == thoughts_of(calm)


def test_a_thought_says_no_action(rows):
    deep = [row for row in rows if row["levels"][0] > 1]
    assert len(deep) > 100
    for row in deep:
        thought, action = re.findall(r"<think>(.*)</think><action>(.*)</action>", said(row))[0]
        assert action not in thought


def test_thoughts_are_functions_of_the_prompt(rows):
    by_prompt = defaultdict(set)
    for row in rows:
        thought = re.findall(r"<think>(.*)</think>", said(row))[0]
        by_prompt[row["messages"][0]["content"], row["levels"][0]].add(thought)
    assert len(by_prompt) < len(rows), "some prompts come back"
    assert all(len(thoughts) == 1 for thoughts in by_prompt.values())


def test_scans_agree_with_what_the_prompt_shows(rows):
    scanned = 0
    for row in rows:
        if row["levels"] != [4]:
            continue
        prompt = row["messages"][0]["content"]
        read = prompt.split("\n", 1)[1] if "\n" in prompt else ""
        for place, verdict in re.findall(r"(\w+ \d+) (done|goal|left)\b", said(row)):
            looked_into = re.search(rf"(?<![\w]){place}: ", read) is not None
            assert looked_into == (verdict == "done"), (prompt, said(row))
            scanned += 1
    assert scanned > 100


def said(row):
    return row["messages"][-1]["content"]


# ---------------------------------------------------------------------- what is demonstrated


def test_every_step_is_a_row_that_stands_alone(rows):
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows)
    assert all(len(row["levels"]) == len(row["slack"]) == len(row["slips"]) == 1 for row in rows)
    assert not any("<think>" in row["messages"][0]["content"] for row in rows)
    prompts = [row["messages"][0]["content"] for row in rows]
    assert any("\nread: " in prompt and "\nnow: " in prompt for prompt in prompts)


def test_the_needed_level_is_demonstrated_most(store, rows):
    levels = Counter(row["levels"][0] for row in rows)
    assert set(levels) == set(LEVELS)
    closed = [row for row in rows if row["messages"][0]["content"].endswith(" closed")]
    assert sum(row["levels"] == [1] for row in closed) > 0.5 * len(closed)


def test_the_window_is_no_longer_than_asked(store):
    asked = section(store)
    path = write_demonstrations(
        "alfworld", asked, store / "short", 6, num_workers=0, useless_share=0.2, window=1
    )
    prompts = [json.loads(line)["messages"][0]["content"] for line in path.open()]
    assert all(";" not in prompt for prompt in prompts)


def test_announced_thoughts_tell_no_needed_level(store):
    asked = section(store, thoughts="announced")
    with pytest.raises(ValueError, check=mentions("needed_level_share")):
        write_demonstrations("alfworld", asked, store, 3, needed_level_share=0.5)


# ---------------------------------------------------------------------- in the environment


def test_the_expert_wins_and_the_environment_names_what_it_does(store):
    asked = section(store)
    env = PACKAGE.make(asked)
    kinds, won = Counter(), Counter()
    for task in list_generated_tasks(asked, "demo", 12):
        observation = env.reset(task, 0)
        start = EpisodeStart(asked, task, observation, random.Random(0))
        player = EXPERT.start(start)
        for _ in range(60):
            decision = player.act()
            assert observation.needed_level == decision.needed_level
            kinds[observation.situation] += 1
            observation, _, done, info = env.step(decision.action)
            assert info["is_action_valid"]
            if done:
                won[task["kind"]] += 1
                break
            player.observe(decision.action, observation)
    env.close()
    assert won == {kind: 2 for kind in TASK_TYPES}
    assert set(kinds) <= set(NEEDED_LEVELS) and kinds["search"] > 10


def test_announced_games_name_no_situation(store):
    asked = section(store, thoughts="announced")
    env = PACKAGE.make(asked)
    observation = env.reset(list_generated_tasks(asked, "demo", 1)[0], 0)
    env.close()
    assert observation.needed_level is None and observation.situation == observation.state


def test_receptacles_are_symbols_of_carried_thoughts_alone(store):
    names = EXPERT.symbols(section(store))
    assert " desk 1" in names and " sinkbasin 1" in names and " cabinet 9" not in names
    assert list(EXPERT.symbols(section(store, thoughts="announced"))) == []
