"""TextArena: every game is won through the collector, starts are split by content, and nothing asks
for the network.
"""

import math
import random
import subprocess
import sys

import pytest

pytest.importorskip("textarena")

from agent_system.environments.env_package.textarena.games import (
    CONSTANT_MOVES,
    EXCLUDED_GAMES,
    GAMES,
    SCRIPTED_ONLY,
    game_remarks,
    list_games,
    unlisted_games,
)
from agent_system.environments.env_package.textarena.opponent import random_move
from agent_system.environments.env_package.textarena.package import (
    PACKAGE,
    TextArenaEnv,
    list_tasks,
)
from agent_system.environments.manager import make_envs
from agent_system.environments.pool.environment_pool import EnvironmentPool
from tests.helpers.library_gold import TEXTARENA
from tests.helpers.play import make_config
from tests.helpers.winning import wins

read = PACKAGE.read_settings

SMALL = {"train_games": 12, "val_games": 4}


@pytest.mark.parametrize(
    ("history", "levels"),
    [("append", False), ("window", True)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("game", GAMES)
def test_it_is_won_through_the_collector(game, history, levels):
    data = wins("textarena", TEXTARENA[game], history=history, levels=levels, game=game, **SMALL)
    assert (data.non_tensor_batch["episode_rewards"] == 1.0).all()


@pytest.mark.parametrize(
    ("section", "placement"),
    [
        ({"game": "Mastermind"}, "inline"),
        ({"game": "TicTacToe-v0"}, "process"),
        ({"game": "TicTacToe-v0", "placement": "thread"}, "thread"),
        ({"game": "Mastermind", "opponent": {"path": "mine.py"}}, "process"),
    ],
)
def test_games_with_an_opponent_run_in_processes(section, placement):
    assert EnvironmentPool("textarena", section, 1, 1).placement == placement


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

    assert len(starts(train.task_list)) == 12 and len(starts(val.task_list)) == 4
    assert not starts(train.task_list) & starts(val.task_list)
    assert list_tasks(read({"game": game, "train_games": 15}), "train")[:12] == train.task_list, (
        "more games are further games"
    )


def test_two_games_in_one_process_do_not_disturb_each_other_nor_the_process():
    section = {"game": "FrozenLake"}
    task, other = list_tasks(read(section), "train")[:2]
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
    start = env.reset(list_tasks(read({"game": game, **SMALL}), "train")[0])
    observation, reward, done, info = env.step(action)
    assert (reward, done, info["won"], info["is_action_valid"]) == (0.0, False, False, False)
    assert observation.anchor == start.anchor and "invalid move" in observation.text
    observation, reward, done, info = env.step(action)
    assert (reward, done, info["won"], info["is_action_valid"]) == (0.0, True, False, False)


def test_the_turns_are_limited_exactly():
    env = TextArenaEnv(read({"game": "GuessTheNumber", "max_turns": 2}))
    task = list_tasks(read({"game": "GuessTheNumber"}), "train")[0]
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
        task = list_tasks(read({"game": game, **SMALL}), "train")[0]
        for move in env.reset(task).info["admissible_actions"]:
            env.reset(task, 0)
            assert env.step(move)[3]["is_action_valid"], (game, move)


@pytest.mark.parametrize(
    ("game", "said"),
    [
        (
            "TicTacTo-v0",
            r"game='TicTacTo-v0'.*'TicTacToe-v0'",
        ),
        (
            "Wordle-v0",
            r"game='Wordle-v0'.*GuessTheNumber, FrozenLake",
        ),
    ],
)
def test_a_game_that_is_not_offered_is_refused_with_the_reason(game, said):
    with pytest.raises(ValueError, match=said):
        make_envs(make_config("textarena", kwargs={"game": game}))


def played(env, number, seed, turns=12):
    """What is seen with moves at random, until the game is over."""
    first = env.reset({"number": number}, seed)
    dice = random.Random(number)
    read = [first.text]
    seen: list[tuple[object, ...]] = [(first.text, first.state)]
    for _ in range(turns):
        move = random_move(env.game, read, dice)
        observation, reward, done, info = env.step(move)
        read.append(observation.text)
        seen.append((move, observation.text, reward, done, info))
        if done:
            break
    return seen


@pytest.mark.parametrize("game", ["2048-v0", "TicTacToe-v0", "KuhnPoker-v0", "PigDice-v0-short"])
def test_an_episode_follows_from_task_and_seed_alone(game):
    env, other = (TextArenaEnv(read({"game": game})) for _ in range(2))
    first = played(env, 3, 7)
    random.seed(1)
    expected = random.Random(1).random()
    played(other, 4, 9)
    assert played(env, 3, 7) == first and random.random() == expected
    draws = [played(env, 3, seed) for seed in range(5)]
    assert {seen[0] for seen in draws} == {first[0]} or env.seat == 1
    assert any(seen != first for seen in draws), "chance after the start follows the seed"


def test_the_policy_sits_on_either_seat_and_wins_against_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "def move(text, rng):\n"
        "    free = [n for n in (8, 7, 6, 5, 3, 2, 1, 0, 4) if str(n) in text.split('Board')[-1]]\n"
        "    return f'[{free[0]}]' if free else '[8]'\n"
    )
    env = TextArenaEnv(read({"game": "TicTacToe-v0", "opponent": {"path": str(script)}}))
    env.reset({"number": 0})
    assert (env.seat, env.seat_count) == (0, 2)
    assert env.step("0")[3]["is_action_valid"]
    _, reward, done, info = env.step("1")
    assert (reward, done, info["is_action_valid"]) == (0.0, False, True)
    _, reward, done, info = env.step("2")
    assert (reward, done, info["won"], info["score"]) == (1.0, True, True, 1.0)
    second = env.reset({"number": 1})
    assert env.seat == 1 and "X" in second.text, "the opponent has begun"


def test_a_broken_rule_against_an_opponent_is_refused_once_and_then_loses():
    env = TextArenaEnv(read({"game": "ConnectFour-v0"}))
    env.reset({"number": 0})
    _, _, done, info = env.step("[99]")
    assert not done and not info["is_action_valid"]
    _, reward, done, info = env.step("[99]")
    assert (reward, done, info["won"], info["score"]) == (0.0, True, False, -1.0)


def test_the_splits_of_other_games_have_other_seeds():
    settings = read({"game": "TicTacToe-v0", **SMALL})
    train, val = (
        {task["number"] for task in list_tasks(settings, split)} for split in ("train", "val")
    )
    assert len(train) == 12 and len(val) == 4 and not train & val


def test_the_list_names_what_can_be_played_as_it_is():
    listed = PACKAGE.variants()
    assert len(listed) == len(set(listed)) > 130
    assert not [name for name in listed if name.startswith((*EXCLUDED_GAMES, *SCRIPTED_ONLY))]
    assert set(list_games()) - set(listed) and "Sudoku-v0-easy" in listed


def test_nothing_asks_for_the_network():
    code = (
        "import socket\n"
        "def refuse(*args, **kwargs): raise SystemExit(f'the network was asked for: {args}')\n"
        "socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse\n"
        "from agent_system.environments.env_package.textarena.games import GAMES\n"
        "from agent_system.environments.env_package.textarena.package import PACKAGE\n"
        "for game in GAMES:\n"
        "    env = PACKAGE.make(PACKAGE.read_settings({'game': game}))\n"
        "    settings = PACKAGE.read_settings({'game': game, 'train_games': 2})\n"
        "    env.reset(PACKAGE.tasks(settings, 'train')[0])\n"
        "    env.step('1')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]


def test_a_move_that_a_game_cannot_read_loses_and_breaks_nothing():
    env = TextArenaEnv(read({"game": "SpiteAndMalice-v0"}))
    env.reset({"number": 0}, 0)
    _, reward, done, info = env.step("[play]")
    assert (reward, done, info["won"], info["is_action_valid"]) == (0.0, True, False, False)


@pytest.mark.parametrize(
    ("rewards", "won"),
    [
        ({0: 1, 1: -1}, True),
        ({0: math.nan, 1: -1}, False),
        ({0: math.inf, 1: 0}, False),
        ({0: 1, 1: "Invalid move"}, True),
        ({0: 1, 1: None}, True),
        ({0: 1, 1: math.inf}, True),
        ({0: "a text", 1: 0}, False),
        ({0: 1j, 1: 0}, False),
        (None, False),
    ],
)
def test_rewards_of_games_count_where_they_are_finite_numbers(rewards, won, monkeypatch):
    env = TextArenaEnv(read({"game": "TicTacToe-v0"}))
    env.reset({"number": 0}, 0)

    def step(_move):
        env.game.state.done, env.game.state.rewards = True, rewards

    monkeypatch.setattr(env.game, "step", step)
    _, reward, done, info = env.step("[4]")
    assert (reward, done, info["won"]) == (float(won), True, won)
    assert math.isfinite(info["score"])


def test_games_that_a_constant_wins_are_named_and_others_are_not_listed():
    listed, hidden = set(PACKAGE.variants()), unlisted_games()
    assert set(CONSTANT_MOVES) <= listed and set(game_remarks()) == set(CONSTANT_MOVES)
    assert not set(hidden) & listed and set(hidden) <= set(list_games()) and all(hidden.values())
    assert {"PigDice-v0-100", "PigDice-v0-500", "TruthAndDeception-v0"} <= set(hidden)
    for move, won, plays in CONSTANT_MOVES.values():
        assert move and 2 * won > plays
