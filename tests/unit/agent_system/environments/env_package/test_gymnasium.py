"""Tests of Gymnasium environments as text.

They are solved through the collector, reproducible, and split by seeds. Environments without a text
version are refused.
"""

import pytest

from tests.helpers.refusals import has_problem

pytest.importorskip("minigrid")

from agent_system.environments.env_package.gymnasium.gym_envs import (
    NoTextDescriptionError,
    list_env_ids,
    make_text_description,
)
from agent_system.environments.env_package.gymnasium.package import PACKAGE, GymnasiumEnv
from agent_system.environments.env_registry import read_env_settings
from agent_system.environments.manager import make_envs
from tests.helpers.number_line_world import make_config
from tests.helpers.solvability import collect_successes, follow_script

read = PACKAGE.read_settings
SMALL = {"train_tasks": 12, "val_tasks": 4, "placement": "inline"}


def make_table_policy(section):
    """Return a policy that searches the transition table of a toy-text environment."""

    def policy(task):
        env = GymnasiumEnv(read(section))
        env.reset(task, 0)
        gym_env = env.gym_env.unwrapped
        paths = {int(gym_env.s): []}
        queue = [int(gym_env.s)]
        for position in queue:  # breadth-first search: the list grows during the loop
            for name, number in env.action_numbers.items():
                (_, next_position, env_reward, is_end) = gym_env.P[position][number][0]
                path = [*paths[position], name]
                if is_end and (env.description.success_condition == "end" or env_reward > 0):
                    return follow_script(path)
                if next_position not in paths and not is_end:
                    paths[next_position] = path
                    queue.append(next_position)
        raise AssertionError("there is no path")

    return policy


def make_bot_policy(section):
    """Return a policy that follows BabyAI's own bot."""
    from minigrid.utils.baby_ai_bot import BabyAIBot

    def policy(task):
        env = GymnasiumEnv(read(section))
        env.reset(task, 0)
        bot = BabyAIBot(env.gym_env)
        actions = []
        done = False
        while not done:
            action = bot.replan()
            assert action is not None
            actions.append(env.description.actions[int(action)])
            done = env.step(actions[-1])[2]
        return follow_script(actions)

    return policy


NOT_SLIPPERY = {"is_slippery": False}


@pytest.mark.parametrize(
    ("env_id", "policy", "options"),
    [
        ("Taxi-v4", make_table_policy, {}),
        ("CliffWalking-v1", make_table_policy, {}),
        ("FrozenLake-v1", make_table_policy, NOT_SLIPPERY),
        ("BabyAI-GoToLocal-v0", make_bot_policy, {}),
        ("BabyAI-UnlockPickup-v0", make_bot_policy, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_environment_is_solved_through_the_collector(env_id, policy, options):
    section = {"env_id": env_id, "options": options, **SMALL}
    data = collect_successes(
        "gymnasium", policy(section), max_steps=80, levels=env_id == "Taxi-v4", **section
    )
    assert (data.non_tensor_batch["episode_rewards"] == 1.0).all()


def test_splits_have_disjoint_seeds_and_groups_start_alike():
    config = make_config("gymnasium/MiniGrid-DoorKey-5x5-v0", kwargs=SMALL, n=3)
    train, val = make_envs(config)
    train.reset(train.gen_batch(1, 3))  # raises GroupMismatch unless they start alike
    train.close()
    seeds = {task["reset_seed"] for task in train.task_list}
    assert len(seeds) == 12 and not seeds & {task["reset_seed"] for task in val.task_list}
    more = read({"env_id": "MiniGrid-DoorKey-5x5-v0", "train_tasks": 20, "val_tasks": 4})
    assert PACKAGE.tasks(more, "train")[:12] == train.task_list, "a larger count appends tasks"


def run_episode(env, task, seed, actions):
    start = env.reset(task, seed)
    outcomes: list[tuple[object, ...]] = [(start.text, start.state)]
    for action in actions:
        observation, reward, done, info = env.step(action)
        outcomes.append((observation.text, observation.state, reward, done, info))
        if done:
            break
    return outcomes


@pytest.mark.parametrize(
    ("env_id", "action"),
    [("FrozenLake-v1", "right"), ("MiniGrid-Dynamic-Obstacles-6x6-v0", "turn left")],
)
def test_randomness_after_the_start_follows_the_env_seed(env_id, action):
    env = GymnasiumEnv(read({"env_id": env_id}))
    task, other = PACKAGE.tasks(env.settings, "train")[:2]
    first = run_episode(env, task, 5, [action] * 8)
    run_episode(env, other, 6, [action] * 8)
    assert run_episode(env, task, 5, [action] * 8) == first
    episodes = [run_episode(env, task, seed, [action] * 8) for seed in range(6)]
    assert {start[0] for start in episodes} == {first[0]}, "the task determines the start"
    assert any(outcomes != first for outcomes in episodes)


@pytest.mark.parametrize("action", ["", "fly", "3", "go forwards", "x" * 400])
def test_invalid_action_changes_nothing(action):
    env = GymnasiumEnv(read({"env_id": "Taxi-v4"}))
    start = env.reset(PACKAGE.tasks(env.settings, "train")[0], 0)
    observation, reward, done, info = env.step(action)
    assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": False})
    assert observation.anchor == start.anchor and observation.text != start.text


def test_grid_is_drawn_and_described():
    env = GymnasiumEnv(read({"env_id": "MiniGrid-Empty-5x5-v0"}))
    start = env.reset(PACKAGE.tasks(env.settings, "train")[0], 0)
    lines = start.text.splitlines()
    assert lines[:2] == [
        "Mission: get to the green goal square",
        "You face east and carry nothing.",
    ]
    assert lines[2:9] == [
        *["# # # # # # #"] * 4,
        "# # # . . G #",
        "# # # . . . #",
        "# # # A . . #",
    ]
    assert lines[9] == "You see: goal 2 ahead and 2 right."
    observation, _, _, _ = env.step("Turn Right")
    assert "You face south" in observation.text and observation.state != start.state
    for _ in range(3):
        observation, *_ = env.step("turn right")
    assert (observation.text, observation.state) == (start.text, start.state)


def test_taxi_lists_the_free_sides():
    env = GymnasiumEnv(read({"env_id": "Taxi-v4"}))
    for task in PACKAGE.tasks(env.settings, "val")[:20]:
        env.reset(task, 0)
        for action in ("south", "north", "east", "west"):
            before = env.reset(task, 0)
            sides = before.text.partition("Free sides: ")[2].partition(".")[0].split(", ")
            moved = env.step(action)[0].state != before.state
            assert moved == (action in sides), (before.text, action)


def test_reward_gym_gives_the_rewards_of_gymnasium():
    task = PACKAGE.tasks(read({}), "train")[0]
    for reward, expected in (("won", 0.0), ("gym", -1.0)):
        env = GymnasiumEnv(read({"reward": reward}))
        env.reset(task, 0)
        _, step_reward, _, info = env.step("south")
        assert (step_reward, info["score"]) == (expected, -1.0)


def test_pole_that_stands_until_the_last_turn_is_a_success():
    env = GymnasiumEnv(read({"env_id": "CartPole-v1", "max_steps": 6}))
    env.reset(PACKAGE.tasks(env.settings, "train")[0], 0)
    infos = [env.step(action)[2:] for action in ("left", "right") * 3]
    assert [done for done, _ in infos] == [False] * 5 + [True] and infos[-1][1]["won"]
    env = GymnasiumEnv(read({"env_id": "CartPole-v1", "max_steps": 100}))
    env.reset(PACKAGE.tasks(env.settings, "train")[0], 0)
    while not (outcome := env.step("left"))[2]:
        pass
    assert outcome[1] == 0.0 and not outcome[3]["won"]


def test_user_provided_description_actions_and_rules_are_used(tmp_path):
    file = tmp_path / "words.py"
    file.write_text(
        "def describe(observation, info, env):\n"
        "    return f'cell {observation} of {env.observation_space.n}'\n"
    )
    section = {
        "env_id": "FrozenLake-v1",
        "describe": {"path": str(file)},
        "actions": ["w", "s", "e", "n"],
        "rules": "Walk.",
        "options": NOT_SLIPPERY,
    }
    env = GymnasiumEnv(read(section))
    assert env.reset(PACKAGE.tasks(env.settings, "train")[0], 0).text == "cell 0 of 16"
    assert env.step("e")[0].text == "cell 1 of 16"
    system_prompt = PACKAGE.prompts(read(section)).system(False)
    assert system_prompt is not None and system_prompt.startswith("Walk.\nActions: w, s, e, n.")


def test_environment_without_description_shows_numbers():
    section = read({"env_id": "tests.helpers.textless_gymnasium:Bare-v0"})
    env = GymnasiumEnv(section)
    assert env.reset(PACKAGE.tasks(section, "train")[0], 0).text == "place: 0; left: 0.5 2"
    observation, reward, done, _ = env.step("1")
    assert (observation.text, reward, done) == ("place: 1; left: 0.5 1", 0.0, False)
    assert env.step("1")[1:3] == (1.0, True)


@pytest.mark.parametrize(
    ("section", "code", "key", "parts"),
    [
        ({"env_id": "Taxy-v4"}, "unknown_name", "env_id", ["'Taxy-v4'", "'Taxi-v4'"]),
        ({"env_id": "Pendulum-v1"}, "out_of_range", "env_id", ["Pendulum-v1", "Box"]),
        ({"actions": ["a", "b"]}, "out_of_range", "actions", ["['a', 'b']", 6]),
        (
            {"env_id": "Taxi-v4", "options": {"wings": 2}},
            "failed_call",
            "env_id",
            ["'Taxi-v4'", "wings"],
        ),
        (
            {"env_id": "tests.helpers.textless_gymnasium:Drawn-v0"},
            "out_of_range",
            "env_id",
            ["Box", "describe.path"],
        ),
    ],
)
def test_environment_without_a_text_version_is_refused(section, code, key, parts):
    refused = has_problem(code, f"env.gymnasium.{key}", *parts)
    with pytest.raises(NoTextDescriptionError, check=refused):
        make_text_description(read(section))


def test_variant_name_sets_env_id_and_many_are_listed():
    names = list_env_ids()
    assert len(names) == len(set(names)) > 150 and "BabyAI-GoToLocal-v0" in names
    settings = read_env_settings(make_config("gymnasium/Blackjack-v1", kwargs={}).env)
    assert getattr(settings, "env_id", None) == "Blackjack-v1"
