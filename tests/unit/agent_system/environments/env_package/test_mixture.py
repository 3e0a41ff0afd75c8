"""Tests of mixtures: parts by weight, each with its own settings, prompts and projection."""

import asyncio
from collections import Counter

import pytest

from agent_system.environments.env import Observation, select_prompts
from agent_system.environments.env_package.mixture.package import PACKAGE, MixturePrompts
from agent_system.environments.env_package.mixture.settings import MixtureSettings
from agent_system.environments.env_registry import (
    UnknownEnvironmentError,
    get_package,
    read_env_settings,
)
from agent_system.environments.manager import make_envs
from agent_system.environments.pool.threads import LocalSlot
from agent_system.environments.tasks import (
    TaskSchedule,
    build_weighted_part_order,
    interleave_mixture_tasks,
)
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings, check_level_prompts
from tests.helpers.expert_policies import GOLD
from tests.helpers.faulty_envs import FaultyEnv, OverlapEnv, fail
from tests.helpers.number_line_world import make_config
from tests.helpers.refusals import has_problem, mentions, suggests
from tests.helpers.solvability import follow_script, play_episodes
from verl.config.settings import ConfigError
from verl.config.settings.errors import UserError
from verl.trainer.launch.extensions import load_config

PARTS = {"frozen_lake": 2, "number_line": 1, "tools": 1}
KWARGS = {
    "frozen_lake": {"size": 3, "train_maps": 24, "val_maps": 6},
    "number_line": {"size": 6},
    "tools": {"train_tasks": 30, "val_tasks": 5},
}
SECTION = {"parts": PARTS, "kwargs": KWARGS, "placement": "inline"}


def make_managers(**env):
    return make_envs(make_config("mixture", kwargs=SECTION, **{"n": 2, **env}))


def count_parts(batch, size):
    return Counter(task["part"] for task in batch.non_tensor_batch["task"].tolist()[::size])


def test_round_holds_each_part_by_weight_and_evenly():
    assert build_weighted_part_order({"a": 2, "b": 1}) == ["a", "b", "a"]
    assert build_weighted_part_order({"a": 1, "b": 1, "c": 1}) == ["a", "b", "c"]
    round_ = build_weighted_part_order({"rare": 1, "often": 7})
    assert Counter(round_) == {"rare": 1, "often": 7}
    assert build_weighted_part_order({}) == []


def test_every_batch_holds_each_part_by_weight():
    train, _ = make_managers()
    task_counts: Counter = Counter()
    for step in range(1, 9):
        batch = train.gen_batch(step, 4)
        assert count_parts(batch, 2) == PARTS
        task_counts.update(task["task_id"] for task in batch.non_tensor_batch["task"].tolist()[::2])
    lakes = [name for name in task_counts if "frozen_lake" in name]
    assert len(lakes) == 16 and set(task_counts.values()) == {1}, (
        "an epoch of a part repeats no task"
    )


def test_small_part_is_repeated_in_whole_epochs():
    tasks = [{"task_id": f"{p}{n}", "part": p} for p, c in (("a", 3), ("b", 50)) for n in range(c)]
    schedule = TaskSchedule(tasks, {"a": 1, "b": 1}, shuffle=True, seed=(0, "train"))
    drawn_ids = [schedule.get_task(number)["task_id"] for number in range(24)]
    epochs = [drawn_ids[0:24:2][i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(epoch) == ["a0", "a1", "a2"] for epoch in epochs)
    assert len(set(drawn_ids[1:24:2])) == 12


def test_batch_does_not_depend_on_earlier_batches():
    first, again = make_managers()[0], make_managers()[0]
    for step in range(1, 7):
        first.gen_batch(step, 3)
    expected = first.gen_batch(7, 3).non_tensor_batch["task_id"].tolist()
    assert again.gen_batch(7, 3).non_tensor_batch["task_id"].tolist() == expected
    other = make_managers(seed=1)[0].gen_batch(7, 3).non_tensor_batch["task_id"].tolist()
    assert other != expected


def test_validation_set_is_divided_by_weight():
    _, val = make_managers(val_tasks=12)
    # Every part has enough tasks for its share, so the weights 2, 1 and 1 give 6, 3 and 3 tasks.
    parts = [task["part"] for task, _ in val.validation_set]
    assert parts == ["frozen_lake", "number_line", "tools", "frozen_lake"] * 3
    assert make_managers(val_tasks=12, seed=3)[1].panel_hash == val.panel_hash


def test_validation_set_continues_with_larger_parts_after_smaller_ones_are_exhausted():
    _, val = make_managers(val_tasks=20)
    # 3x3 lakes have 6 validation tasks here and the tools 5. The number line has 12.
    counts = Counter(task["part"] for task, _ in val.validation_set)
    assert counts == {"frozen_lake": 6, "number_line": 9, "tools": 5}


def test_interleaving_continues_without_exhausted_parts():
    parts = {"a": [{"task_id": "a0"}], "b": [{"task_id": f"b{n}"} for n in range(3)]}
    names = [task["task_id"] for task in interleave_mixture_tasks(parts, {"a": 1, "b": 1})]
    assert names == ["a0", "b0", "b1", "b2"]


def test_task_limit_is_divided_by_weight():
    train, _ = make_managers(train_tasks=8)
    assert Counter(task["part"] for task in train.task_list) == {
        "frozen_lake": 4,
        "number_line": 2,
        "tools": 2,
    }
    with pytest.raises(UserError, check=has_problem("no_rows", "", "'number_line'", "'tools'")):
        make_managers(train_tasks=1)


def solve_line(task):
    direction = "right" if task["target"] > task["start"] else "left"
    return follow_script([direction] * abs(task["target"] - task["start"]))


def solve_tools(task):
    return follow_script([f"<answer>{task['ground_truth']}</answer>"])


def make_policy(task):
    solve = {"frozen_lake": GOLD["frozen_lake"], "number_line": solve_line, "tools": solve_tools}
    return solve[task["part"]](task["task"])


@pytest.mark.parametrize(("history", "levels"), [("append", False), ("window", True)])
def test_all_parts_are_solved_and_success_is_reported_by_source(history, levels):
    data = play_episodes(
        "mixture", make_policy, groups=4, n=2, history=history, levels=levels, **SECTION
    )
    metrics = data.meta_info["metrics"]
    for source in ("frozen_lake", "number_line", "tools/shelf"):
        assert metrics[f"episode/{source}/success_rate"] == 1.0
    actions = {step.action for steps in data.non_tensor_batch["steps"] for step in steps}
    assert "right" in actions and any(action.startswith("<answer>") for action in actions)


def test_each_part_has_its_own_prompts_and_settings():
    train, _ = make_managers()
    observations, infos = train.reset(train.gen_batch(1, 4))
    train.close()
    assert isinstance(train.settings, MixtureSettings)
    prompts = MixturePrompts(train.settings)
    assert prompts.system(False) is None
    systems = {}
    for text, info in zip(observations["text"], infos, strict=True):
        system_prompt = select_prompts(prompts, Observation(text, info=info)).system(False)
        systems[info["part"]] = (system_prompt, text)
    assert set(systems) == set(PARTS)
    assert "frozen lake" in systems["frozen_lake"][0] and "<tools>" in systems["tools"][0]
    assert len(systems["frozen_lake"][1].splitlines()) == 3, (
        "the lake must have the configured size"
    )


def test_client_of_an_asynchronous_part_works_in_all_calls():
    part = "tests.helpers.faulty_envs:CLIENT"
    env = PACKAGE.make(PACKAGE.read_settings({"parts": [part]}))
    for episode in range(2):
        env.reset({"part": part, "task": {"task_id": "t"}}, episode)
        assert [env.step(action)[0].text for action in ("a", "b")] == ["a!", "b!"]
    env.close()


def test_asynchronous_part_works_inline():
    """With ``placement=inline`` the loop that calls the mixture also runs the part."""
    part = "tests.helpers.faulty_envs:CLIENT"
    slot = LocalSlot(PACKAGE, {"parts": [part]}, "inline")

    async def run_episode():
        reset = {"task": {"part": part, "task": {"task_id": "t"}}, "seed": 0}
        first = await slot.call("reset", reset, 20.0)
        texts = [(await slot.call("step", {"action": a}, 20.0))[0].text for a in ("a", "b")]
        await slot.close()
        return first.info["part"], texts

    assert asyncio.run(run_episode()) == (part, ["a!", "b!"])


def test_error_of_a_closed_part_does_not_keep_other_parts_open(monkeypatch):
    parts = ["tests.helpers.faulty_envs:OVERLAP", "tests.helpers.faulty_envs:PACKAGE"]
    env = PACKAGE.make(PACKAGE.read_settings({"parts": parts}))
    for part in parts:
        env.reset({"part": part, "task": {"task_id": "t"}}, 0)
    monkeypatch.setattr(FaultyEnv, "close", lambda _: fail())
    closed = OverlapEnv.closed
    with pytest.raises(ValueError):
        env.close()
    assert OverlapEnv.closed == closed + 1


def test_parts_read_their_own_config_sections():
    overrides = [
        "env.env_name=mixture",
        "env.mixture.parts={frozen_lake: 2, reasoning_gym/gcd: 1}",
        "env.frozen_lake.size=7",
        "env.reasoning_gym.val_tasks=3",
        "env.max_steps=9",
    ]
    settings = read_env_settings(load_config("ppo_trainer", overrides).env)
    kwargs = settings.model_dump()["kwargs"]
    assert kwargs["frozen_lake"]["size"] == 7 and kwargs["frozen_lake"]["max_steps"] == 9
    assert kwargs["reasoning_gym/gcd"]["task"] == "gcd"
    assert kwargs["reasoning_gym/gcd"]["val_tasks"] == 3


def test_named_parts_replace_the_default_parts():
    def read_weights(*overrides):
        settings = read_env_settings(
            load_config("ppo_trainer", ["env.env_name=mixture", *overrides]).env
        )
        return dict(PACKAGE.part_weights(PACKAGE.read_settings(settings.model_dump())))

    assert read_weights("env.mixture.parts={reasoning_gym: 1, sokoban: 2}") == {
        "reasoning_gym": 1,
        "sokoban": 2,
    }
    assert (
        read_weights()
        == read_weights("env.mixture.parts=null")
        == {"frozen_lake": 1, "number_line": 1}
    )


def test_memory_limit_is_the_largest_of_the_parts():
    graded = {"dataset": {"memory_gb": 3}, "reasoning_gym/gcd": {"memory_gb": 2}}
    section = {"parts": ["sokoban", *graded], "kwargs": graded}
    assert PACKAGE.read_settings(section).memory_limit_gb() == 3
    assert PACKAGE.read_settings({"parts": ["sokoban"]}).memory_limit_gb() is None
    assert get_package("dataset").read_settings({"memory_gb": 5}).memory_limit_gb() == 5


@pytest.mark.parametrize(
    ("section", "code", "key"),
    [
        ({"parts": {}}, "out_of_range", "env.mixture.parts"),
        ({"parts": {"mixture": 1}}, "out_of_range", "env.mixture.parts"),
        ({"parts": {"sokoban": 0}}, "out_of_range", "env.mixture.parts"),
        (
            {"parts": ["sokoban"], "kwargs": {"sokoban": {"walls": 3}}},
            "unknown_key",
            "env.sokoban.walls",
        ),
    ],
)
def test_invalid_parts_are_refused(section, code, key):
    with pytest.raises(ConfigError, check=has_problem(code, key)):
        read_env_settings(make_config("mixture", kwargs=section).env)


def test_unknown_part_is_refused_with_a_similar_name():
    with pytest.raises(UnknownEnvironmentError, check=suggests("sokoban", "'sokobann'")):
        read_env_settings(make_config("mixture", kwargs={"parts": ["sokobann"]}).env)


def test_mixture_has_the_limitations_of_its_parts():
    config = make_config("mixture", kwargs={"parts": ["sokoban", "dataset"]}, levels=True)
    with pytest.raises(ValueError, check=mentions("env.levels")):
        check_level_prompts(config, get_package("mixture"))
    both = {"parts": ["sokoban", "reasoning_gym"]}
    config = make_config("mixture", kwargs=both)
    rollout_settings = RolloutSettings.from_config(config, get_package("mixture"), is_train=True)
    assert rollout_settings.stop == ("</action>", "</answer>")
    images = PACKAGE.read_settings({"parts": ["sokoban"], "kwargs": {"sokoban": {"mode": "image"}}})
    assert PACKAGE.images(images) == ("parts", "sokoban", "parts whose observations are text")


@pytest.mark.parametrize(
    ("parts", "weights"),
    [
        (["number_line", "sokoban"], {"number_line": 1, "sokoban": 1}),
        (["my_lab.grid:PACKAGE=2", "sokoban"], {"my_lab.grid:PACKAGE": 2, "sokoban": 1}),
        (["textarena/Nim-v0 = 10"], {"textarena/Nim-v0": 10}),
        ({"number_line": 3}, {"number_line": 3}),
    ],
)
def test_weights_can_be_written_as_key_or_in_a_list(parts, weights):
    assert PACKAGE.read_settings({"parts": parts}).part_weights == weights


@pytest.mark.parametrize(
    "parts",
    [
        *(["a=0"], ["a=-1"], ["a=x"], ["a="], ["=2"], [""], ["a", "a=2"], [3], [None], [["a"]], []),
        *({"my_lab.grid": "PACKAGE: 2"}, {"a": 0}, {"a": "x"}, {"a": True}, ["mixture=2"], "a=2"),
        *(["a=\u00b2"], ["a=1.5"], ["a=1e3"]),
    ],
)
def test_other_spellings_of_weights_are_refused(parts):
    with pytest.raises(ConfigError, check=mentions("env.mixture.parts")):
        PACKAGE.read_settings({"parts": parts})
