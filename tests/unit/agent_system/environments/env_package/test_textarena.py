"""Tests of TextArena.

Every game can be solved through the collector, starts are split by content, and no game uses the
network.
"""

import math
import random
import subprocess
import sys

import pytest

from tests.helpers.refusals import has_problem
from verl.config.settings.errors import UserError

pytest.importorskip("textarena")

from agent_system.environments.env_package.textarena.games import (
    EXCLUDED_GAMES,
    GAMES,
    GAMES_WITHOUT_RANDOM_OPPONENT,
    SUCCESSFUL_CONSTANT_MOVES,
    explain_unlisted_games,
    list_game_remarks,
    list_games,
)
from agent_system.environments.env_package.textarena.opponent import draw_move
from agent_system.environments.env_package.textarena.package import (
    PACKAGE,
    TextArenaEnv,
    list_tasks,
)
from agent_system.environments.manager import make_envs
from agent_system.environments.pool.environment_pool import EnvironmentPool
from tests.helpers.library_expert_policies import TEXTARENA
from tests.helpers.number_line_world import make_config
from tests.helpers.solvability import collect_successes

read = PACKAGE.read_settings

SMALL = {"train_games": 12, "val_games": 4}


@pytest.mark.parametrize(
    ("history", "levels"),
    [("append", False), ("window", True)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("game", GAMES)
def test_game_is_solved_through_the_collector(game, history, levels):
    data = collect_successes(
        "textarena", TEXTARENA[game], history=history, levels=levels, game=game, **SMALL
    )
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
def test_groups_start_alike_and_splits_have_disjoint_starts(game):
    train, val = make_envs(make_config("textarena", kwargs={"game": game, **SMALL}, n=3))
    train.reset(train.gen_batch(1, 3))  # raises GroupMismatch unless they start alike
    train.close()
    env = TextArenaEnv(read({"game": game, **SMALL}))

    def starts(tasks):
        start_keys = set()
        for task in tasks:
            first = env.reset(task, 0)
            start_keys.add(
                (
                    env.compute_start_hash(),
                    first.text if game in ("FrozenLake", "LightsOut") else "",
                )
            )
        return start_keys

    assert len(starts(train.task_list)) == 12 and len(starts(val.task_list)) == 4
    assert not starts(train.task_list) & starts(val.task_list)
    assert list_tasks(read({"game": game, "train_games": 15}), "train")[:12] == train.task_list, (
        "a larger count appends games"
    )


def test_games_in_one_process_are_isolated():
    section = {"game": "FrozenLake"}
    task, other = list_tasks(read(section), "train")[:2]
    alone, with_neighbour, neighbour = (TextArenaEnv(read(section)) for _ in range(3))
    random.seed(3)
    expected = random.Random(3).random()
    texts_alone = [
        alone.reset(task).anchor,
        *(alone.step(move)[0].text for move in ("down", "up", "down")),
    ]
    texts_with_neighbour = [with_neighbour.reset(task).anchor]
    for move in ("down", "up", "down"):
        neighbour.reset(other, 0)
        texts_with_neighbour.append(with_neighbour.step(move)[0].text)
    assert texts_alone == texts_with_neighbour and random.random() == expected


@pytest.mark.parametrize("action", ["", "north", "[[", "[up up]", "500", "x" * 400, "\n"])
@pytest.mark.parametrize("game", GAMES)
def test_second_invalid_move_ends_the_game(game, action):
    env = TextArenaEnv(read({"game": game}))
    start = env.reset(list_tasks(read({"game": game, **SMALL}), "train")[0])
    observation, reward, done, info = env.step(action)
    assert (reward, done, info["won"], info["is_action_valid"]) == (0.0, False, False, False)
    assert observation.anchor == start.anchor and "invalid move" in observation.text
    observation, reward, done, info = env.step(action)
    assert (reward, done, info["won"], info["is_action_valid"]) == (0.0, True, False, False)


def test_max_turns_limits_the_turns_exactly():
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


def test_admissible_moves_are_valid():
    for game in ("GuessTheNumber", "FrozenLake", "LightsOut"):
        env = TextArenaEnv(read({"game": game}))
        task = list_tasks(read({"game": game, **SMALL}), "train")[0]
        for move in env.reset(task).info["admissible_actions"]:
            env.reset(task, 0)
            assert env.step(move)[3]["is_action_valid"], (game, move)


@pytest.mark.parametrize(
    ("game", "alternative"),
    [("TicTacTo-v0", "'TicTacToe-v0'"), ("Wordle-v0", "GuessTheNumber, FrozenLake")],
)
def test_unknown_or_excluded_game_is_refused_with_an_alternative(game, alternative):
    refused = has_problem("unknown_name", "env.textarena.game", f"'{game}'", alternative)
    with pytest.raises(UserError, check=refused):
        make_envs(make_config("textarena", kwargs={"game": game}))


def run_random_moves(env, number, seed, turns=12):
    """Return the outcomes of random moves until the game ends."""
    first = env.reset({"number": number}, seed)
    rng = random.Random(number)
    texts = [first.text]
    outcomes: list[tuple[object, ...]] = [(first.text, first.state)]
    for _ in range(turns):
        move = draw_move(env.game, texts, rng)
        observation, reward, done, info = env.step(move)
        texts.append(observation.text)
        outcomes.append((move, observation.text, reward, done, info))
        if done:
            break
    return outcomes


@pytest.mark.parametrize("game", ["2048-v0", "TicTacToe-v0", "KuhnPoker-v0", "PigDice-v0-short"])
def test_episode_depends_only_on_task_and_seed(game):
    env, other = (TextArenaEnv(read({"game": game})) for _ in range(2))
    first = run_random_moves(env, 3, 7)
    random.seed(1)
    expected = random.Random(1).random()
    run_random_moves(other, 4, 9)
    assert run_random_moves(env, 3, 7) == first and random.random() == expected
    episodes = [run_random_moves(env, 3, seed) for seed in range(5)]
    assert {outcomes[0] for outcomes in episodes} == {first[0]} or env.seat == 1
    assert any(outcomes != first for outcomes in episodes), (
        "randomness after the start must follow the seed"
    )


def test_policy_takes_either_seat_and_beats_a_script(tmp_path):
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
    assert env.seat == 1 and "X" in second.text, "the opponent has moved first"


def test_second_invalid_move_against_an_opponent_loses():
    env = TextArenaEnv(read({"game": "ConnectFour-v0"}))
    env.reset({"number": 0})
    _, _, done, info = env.step("[99]")
    assert not done and not info["is_action_valid"]
    _, reward, done, info = env.step("[99]")
    assert (reward, done, info["won"], info["score"]) == (0.0, True, False, -1.0)


def test_splits_of_other_games_have_disjoint_seeds():
    settings = read({"game": "TicTacToe-v0", **SMALL})
    train, val = (
        {task["number"] for task in list_tasks(settings, split)} for split in ("train", "val")
    )
    assert len(train) == 12 and len(val) == 4 and not train & val


def test_list_names_the_games_without_further_settings():
    listed = PACKAGE.variants()
    assert len(listed) == len(set(listed)) > 130
    assert not [
        name
        for name in listed
        if name.startswith((*EXCLUDED_GAMES, *GAMES_WITHOUT_RANDOM_OPPONENT))
    ]
    assert set(list_games()) - set(listed) and "Sudoku-v0-easy" in listed


def test_no_game_uses_the_network():
    code = (
        "import socket\n"
        "def refuse(*args, **kwargs): raise SystemExit(f'a game used the network: {args}')\n"
        "socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse\n"
        "from agent_system.environments.env_package.textarena.games import GAMES\n"
        "from agent_system.environments.env_package.textarena.package import PACKAGE\n"
        "for game in GAMES:\n"
        "    env = PACKAGE.make(PACKAGE.read_settings({'game': game}))\n"
        "    settings = PACKAGE.read_settings({'game': game, 'train_games': 2})\n"
        "    env.reset(PACKAGE.tasks(settings, 'train')[0])\n"
        "    env.step('1')\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr[-500:]


def test_unreadable_move_loses_without_an_error():
    env = TextArenaEnv(read({"game": "SpiteAndMalice-v0"}))
    env.reset({"number": 0}, 0)
    _, reward, done, info = env.step("[play]")
    assert (reward, done, info["won"], info["is_action_valid"]) == (0.0, True, False, False)


@pytest.mark.parametrize(
    ("rewards", "is_success"),
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
def test_only_finite_game_rewards_count(rewards, is_success, monkeypatch):
    env = TextArenaEnv(read({"game": "TicTacToe-v0"}))
    env.reset({"number": 0}, 0)

    def step(_move):
        env.game.state.done, env.game.state.rewards = True, rewards

    monkeypatch.setattr(env.game, "step", step)
    _, reward, done, info = env.step("[4]")
    assert (reward, done, info["won"]) == (float(is_success), True, is_success)
    assert math.isfinite(info["score"])


def test_games_with_a_winning_constant_move_are_known():
    listed, hidden = set(PACKAGE.variants()), explain_unlisted_games()
    assert set(SUCCESSFUL_CONSTANT_MOVES) <= listed and set(list_game_remarks()) == set(
        SUCCESSFUL_CONSTANT_MOVES
    )
    assert not set(hidden) & listed and set(hidden) <= set(list_games()) and all(hidden.values())
    assert {"PigDice-v0-100", "PigDice-v0-500", "TruthAndDeception-v0"} <= set(hidden)
    for move, win_count, episode_count in SUCCESSFUL_CONSTANT_MOVES.values():
        assert move and 2 * win_count > episode_count
