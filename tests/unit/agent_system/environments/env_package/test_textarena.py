"""TextArena: every game is won through the collector, starts are split by content, and nothing asks
for the network.
"""

import random
import subprocess
import sys

import pytest

pytest.importorskip("textarena")

from agent_system.environments.env_package.textarena.package import (
    GAMES,
    PACKAGE,
    TextArenaEnv,
    tasks,
)
from agent_system.environments.manager import make_envs
from tests.helpers.library_gold import TEXTARENA
from tests.helpers.play import make_config
from tests.helpers.winning import wins

read = PACKAGE.read

SMALL = {"train_games": 12, "val_games": 4}


@pytest.mark.parametrize(
    ("history", "levels"),
    [("append", False), ("append", True), ("window", True)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("game", GAMES)
def test_it_is_won_through_the_collector(game, history, levels):
    data = wins("textarena", TEXTARENA[game], history=history, levels=levels, game=game, **SMALL)
    assert (data.non_tensor_batch["episode_rewards"] == 1.0).all()


@pytest.mark.parametrize("game", GAMES)
def test_groups_start_alike_and_train_and_val_hold_different_starts(game):
    train, val = make_envs(make_config("textarena", kwargs={"game": game, **SMALL}, n=3))
    train.reset(train.gen_batch(1, 3))  # raises GroupMismatch unless they start alike
    train.close()
    env = TextArenaEnv(read({"game": game, **SMALL}))

    def starts(tasks):
        found = set()
        for task in tasks:
            first = env.reset(task, 0)
            found.add((env.start_hash(), first.text if game in ("FrozenLake", "LightsOut") else ""))
        return found

    assert len(starts(train.tasks)) == 12 and len(starts(val.tasks)) == 4
    assert not starts(train.tasks) & starts(val.tasks)
    assert tasks(read({"game": game, "train_games": 15}), "train")[:12] == train.tasks, (
        "more games are further games"
    )


def test_two_games_in_one_process_do_not_disturb_each_other_nor_the_process():
    section = {"game": "FrozenLake"}
    task, other = tasks(read(section), "train")[:2]
    alone, beside, neighbour = (TextArenaEnv(read(section)) for _ in range(3))
    random.seed(3)
    expected = random.Random(3).random()
    seen = [
        alone.reset(task).anchor,
        *(alone.step(move)[0].text for move in ("down", "up", "down")),
    ]
    seen_beside = [beside.reset(task).anchor]
    for move in ("down", "up", "down"):
        neighbour.reset(other, 0)
        seen_beside.append(beside.step(move)[0].text)
    assert seen == seen_beside and random.random() == expected


@pytest.mark.parametrize("action", ["", "north", "[[", "[up up]", "500", "x" * 400, "\n"])
@pytest.mark.parametrize("game", GAMES)
def test_a_broken_rule_is_refused_once_and_ends_the_game_the_second_time(game, action):
    env = TextArenaEnv(read({"game": game}))
    start = env.reset(tasks(read({"game": game, **SMALL}), "train")[0])
    observation, reward, done, info = env.step(action)
    assert (reward, done, info["won"], info["is_action_valid"]) == (0.0, False, False, False)
    assert observation.anchor == start.anchor and "invalid move" in observation.text
    observation, reward, done, info = env.step(action)
    assert (reward, done, info["won"], info["is_action_valid"]) == (0.0, True, False, False)


def test_the_turns_are_limited_exactly():
    env = TextArenaEnv(read({"game": "GuessTheNumber", "max_turns": 2}))
    task = tasks(read({"game": "GuessTheNumber"}), "train")[0]
    env.reset(task, 0)
    hidden = env.game.game_number
    wrong = [n for n in range(1, 101) if n != hidden][:2]
    assert not env.step(str(wrong[0]))[2]
    _, reward, done, info = env.step(str(wrong[1]))
    assert (reward, done, info["won"], info["is_action_valid"]) == (0.0, True, False, True)
    env.reset(task, 0)
    env.step(str(wrong[0]))
    assert env.step(str(hidden))[1:3] == (1.0, True)


def test_admissible_moves_are_accepted():
    for game in ("GuessTheNumber", "FrozenLake", "LightsOut"):
        env = TextArenaEnv(read({"game": game}))
        task = tasks(read({"game": game, **SMALL}), "train")[0]
        for move in env.reset(task).info["admissible_actions"]:
            env.reset(task, 0)
            assert env.step(move)[3]["is_action_valid"], (game, move)


def test_an_unknown_game_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError,
        match=r"env.textarena.game='Wordle': .*allowed: one of GuessTheNumber, FrozenLake",
    ):
        make_envs(make_config("textarena", kwargs={"game": "Wordle"}))


def test_nothing_asks_for_the_network():
    code = (
        "import socket\n"
        "def refuse(*args, **kwargs): raise SystemExit(f'the network was asked for: {args}')\n"
        "socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse\n"
        "from agent_system.environments.env_package.textarena.package import GAMES, PACKAGE\n"
        "for game in GAMES:\n"
        "    env = PACKAGE.make(PACKAGE.read({'game': game}))\n"
        "    env.reset(PACKAGE.tasks(PACKAGE.read({'game': game, 'train_games': 2}), 'train')[0])\n"
        "    env.step('1')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
