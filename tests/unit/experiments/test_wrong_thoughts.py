"""Tests of the classification of wrong thoughts in relay, and of its table."""

import json

import pytest

from experiments import wrong_thoughts
from tests.helpers.refusals import mentions

DOOR = "Door 1 of 16. Arrows: a>b b>c c>d d>a. You are at a. Go 2 arrows on."


def make_step(thought: str, action: str, level: int | None = 2, advantage=None, entropy=None):
    contexts = [
        {"original": False, "score_entropy": 9.0},
        {"original": True, "score_entropy": entropy},
    ]
    return {
        "observation": DOOR,
        "response": f"<level>{level}</level><think>{thought}</think><action>{action}</action>",
        "action": action,
        "level": level,
        "think_advantage": advantage,
        "contexts": contexts if entropy is not None else None,
    }


@pytest.mark.parametrize(
    ("thought", "action", "thought_right", "action_right"),
    [
        ("1=b 2=c", "c", True, True),
        ("1=b 2=c", "d", True, False),
        ("1=c 2=d", "d", False, False),
        ("1=c 2=d", "c", False, True),
        ("", "c", True, True),
        ("1=b 2=c 3=d 4=a 5=b", "c", True, True),
    ],
)
def test_thought_is_right_if_it_follows_the_arrows(thought, action, thought_right, action_right):
    classified = wrong_thoughts.classify_turn(make_step(thought, action))
    assert classified.kind == wrong_thoughts.TurnKind(2, thought_right, action_right)


def test_table_by_hand(tmp_path, capsys):
    steps = [
        make_step("1=b 2=c", "c", advantage=0.5, entropy=0.25),
        make_step("1=b 2=c", "c", advantage=1.0, entropy=0.75),
        make_step("1=c 2=d", "d", advantage=-1.0, entropy=0.1),
        make_step("", "c", level=None),
        make_step("1=b", "c", level=1),
    ]
    (tmp_path / "rollouts").mkdir()
    for number, part in ((1, steps[:2]), (3, steps[2:])):
        (tmp_path / "rollouts" / f"{number}.jsonl").write_text(json.dumps({"steps": part}) + "\n")
    assert wrong_thoughts.main([str(tmp_path), "--steps", "1,3"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 1 | right | right | 1 | 1.000 |  |  |",
        "| 2 | right | right | 2 | 0.667 | +0.75 | +0.50 |",
        "| 2 | wrong | wrong | 1 | 0.333 | -1.00 | +0.10 |",
    ]
    with pytest.raises(SystemExit, check=mentions("2.jsonl")):
        wrong_thoughts.main([str(tmp_path), "--steps", "1-3"])
