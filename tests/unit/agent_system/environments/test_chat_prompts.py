"""Tests of the prompts and the action projection that most environments share."""

import pytest

from agent_system.environments.chat_prompts import (
    MAX_ACTION_CHARS,
    ChatPrompts,
    CompactPrompts,
    project_action,
)
from agent_system.environments.env import Observation

FIRST = Observation("The task.", info={"admissible_actions": ["a", "b"]})
CURRENT = Observation("The present.", info={"admissible_actions": ["b", "c"]})


@pytest.mark.parametrize(
    ("text", "action", "well_formed"),
    [
        ("<think>hm</think><action> click[< prev] </action>", "click[< prev]", True),
        ("<level>1</level><action>go\n  up</action>", "go up", True),
        ("<action>up</action> or <action>down</action>", "up", False),
        ("<action>a <action>up</action>", "a <action>up", False),
        ("<action></action>", "", False),
        ("<action>up", "up", False),
        ("I think\nup", "up", False),
        ("", "", False),
        (f"<action>{'x' * (MAX_ACTION_CHARS + 1)}</action>", "x" * MAX_ACTION_CHARS, False),
    ],
)
def test_projection_returns_action_and_well_formedness(text, action, well_formed):
    assert project_action(text) == (action, well_formed)


def test_actions_are_listed_only_on_request():
    assert ChatPrompts("R", "a").first(FIRST, False) == "The task."
    assert (
        ChatPrompts("R", "a", list_actions=True).turn(CURRENT)
        == "The present.\nPossible actions: b, c"
    )


def test_window_shows_history_before_the_current_observation():
    history = [("Seen one.", "a"), ("Seen two.", "b")]
    assert ChatPrompts("R", "a").window(FIRST, history, CURRENT, False) == (
        "Seen one.\nYou did: a\n\nSeen two.\nYou did: b\n\nThe present."
    )


def test_keep_first_keeps_the_task_in_the_window():
    prompts = ChatPrompts("R", "a", keep_first=True)
    assert prompts.window(FIRST, [("Seen.", "a")], CURRENT, False).startswith("The task.\n\nSeen.")
    assert prompts.window(FIRST, [], FIRST, False) == "The task."
    assert prompts.window(FIRST, [("The task.", "a")], CURRENT, False).count("The task.") == 1


def test_window_holds_only_the_current_image():
    window = ChatPrompts("R", "a").window(
        FIRST, [("<image>", "up"), ("Nothing moves.\n<image>", "up")], Observation("<image>"), False
    )
    assert window == "You did: up\n\nNothing moves.\n\nYou did: up\n\n<image>"


def test_compact_prompts_hold_only_observations():
    prompts = CompactPrompts()
    assert prompts.system(True) is prompts.system(False) is None
    assert prompts.first(FIRST, True) == prompts.first(FIRST, False) == "The task."
    assert prompts.turn(CURRENT) == "The present."
    window = prompts.window(FIRST, [("Before.", "up")], CURRENT, True)
    assert window == "Before.\n> up\nThe present."
    window_with_task = CompactPrompts(keep_first=True).window(
        FIRST, [("Before.", "up")], CURRENT, True
    )
    assert window_with_task == "The task.\n" + window
    assert CompactPrompts(keep_first=True).window(FIRST, [], FIRST, True) == "The task."
