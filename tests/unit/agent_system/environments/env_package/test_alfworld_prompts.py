"""Tests of the ALFWorld prompts and of the projection from reply to command."""

import pytest

from agent_system.environments.env import Observation
from agent_system.environments.env_package.alfworld.prompts import (
    CompactAlfworldPrompts,
    FullAlfworldPrompts,
    parse_game_command,
)

ROOM = (
    "You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 2, "
    "and a desk 1.\n\n"
    "Your task is to: put a mug in desk."
)
FIRST = Observation(ROOM, info={"admissible_actions": ["go to bed 1", "help", "look"]})


@pytest.mark.parametrize(
    ("text", "command", "well_formed"),
    [
        ("<level>1</level><think></think><action>go to desk 1</action>", "go to desk 1", True),
        ("<action> Go  to\ndesk 1. </action>", "go to desk 1", True),
        ("<action>look</action><action>inventory</action>", "look", False),
        ("<action>look", "look", False),
        ("<action></action>", "", False),
        ("I would\nlook", "look", False),
        ("", "", False),
        (f"<action>{'go ' * 100}</action>", ("go " * 100)[:120], False),
        ("<action>take <think>mug</action>", "take <think>mug", False),
    ],
)
def test_reply_is_projected_to_a_command(text, command, well_formed):
    assert parse_game_command(text) == (command, well_formed)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (
            "You arrive at desk 1. On the desk 1, you see a mug 2, and a pen 1.",
            "desk 1: mug 2, pen 1",
        ),
        ("You arrive at desk 1. On the desk 1, you see nothing.", "desk 1: nothing"),
        ("You arrive at drawer 2. The drawer 2 is closed.", "drawer 2 closed"),
        ("You open the drawer 2. The drawer 2 is open. In it, you see a key 1.", "drawer 2: key 1"),
        (
            "You arrive at drawer 2. The drawer 2 is open. In it, you see a key 1, a cd 2, "
            "and a cd 1.",
            "drawer 2: key 1, cd 2, cd 1",
        ),
        ("You pick up the mug 2 from the desk 1.", "You pick up the mug 2 from the desk 1"),
        ("Nothing happens.", "Nothing happens"),
        ("You are carrying: a mug 2.", "You are carrying: mug 2"),
    ],
)
def test_compact_turn_shortens_the_observation(text, short):
    assert CompactAlfworldPrompts().turn(Observation(text)) == short


def test_compact_first_message_holds_task_and_room():
    assert CompactAlfworldPrompts().first(FIRST, True) == "put a mug in desk. bed 1, desk 2, desk 1"
    assert CompactAlfworldPrompts().system(True) is None


def test_compact_window_shows_recent_turns():
    history = [
        (ROOM, "go to bed 1"),
        ("You arrive at bed 1. On the bed 1, you see nothing.", "look"),
    ]
    window = CompactAlfworldPrompts().window(FIRST, history, Observation("Nothing happens."), True)
    assert window == (
        "put a mug in desk. bed 1, desk 2, desk 1\n"
        "> go to bed 1\nbed 1: nothing > look\nNothing happens"
    )


def test_full_style_lists_actions_and_asks_for_levels_on_request():
    prompts = FullAlfworldPrompts()
    assert "<level>L</level>" in (prompts.system(True) or "")
    plain = prompts.system(False)
    assert plain and "level" not in plain
    assert prompts.first(FIRST, True).endswith("Possible actions: go to bed 1, look")
    window = prompts.window(
        FIRST, [(ROOM, "go to bed 1")], Observation("Seen.", info=FIRST.info), True
    )
    assert (
        window.index(ROOM)
        < window.index("You did: go to bed 1")
        < window.index("Now you see: Seen.")
    )
