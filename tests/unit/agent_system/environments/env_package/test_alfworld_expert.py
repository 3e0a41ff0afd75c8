"""Tests of the ALFWorld expert, which reads only observations, and of its demonstrations."""

import json
import random
from collections import Counter

import pytest

pytest.importorskip("alfworld")

import itertools

from agent_system.environments.env_package.alfworld import layout
from agent_system.environments.env_package.alfworld.expert import (
    AlfworldExpert,
    parse_task,
)
from agent_system.environments.env_package.alfworld.package import PACKAGE
from agent_system.environments.env_package.alfworld.prompts import parse_game_command
from agent_system.environments.env_package.alfworld.settings import TASK_TYPES, TaskGoal
from agent_system.environments.env_package.alfworld.store import (
    GeneratedGames,
    list_generated_tasks,
)
from agent_system.environments.expert_protocol import Decision, Noise
from agent_system.environments.experts import demonstrations
from agent_system.environments.experts import episode as expert_episode
from tests.helpers.solvability import collect_successes, follow_script


def make_settings(tmp_path, **changes):
    base = {
        "data_dir": str(tmp_path),
        "source": "generated",
        "val_games": 30,
        "prompt": "compact",
        "task_types": list(TASK_TYPES),
    }
    return PACKAGE.read_settings({**base, **changes})


def list_demonstration_tasks(settings):
    """Return the 12 games that 36 episodes are generated from."""
    return list_generated_tasks(settings, "demo", 12)


def run_expert(env, task, useless_share=0.0, invalid_share=0.0, seed=0, limit=60):
    """Return (success, decisions, number of invalid actions) of one episode."""
    observation = env.reset(task, 0)
    expert = AlfworldExpert(
        observation.text, random.Random(seed), Noise(useless_share, invalid_share)
    )
    decisions = []
    invalid = 0
    for _ in range(limit):
        decisions.append(expert.act())
        observation, _, done, info = env.step(decisions[-1].action)
        invalid += not info["is_action_valid"]
        if done:
            return True, decisions, invalid
        expert.observe(decisions[-1].action, observation)
    return False, decisions, invalid


def test_every_template_sentence_is_parsed():
    for kind, official in TASK_TYPES.items():
        for template in layout.load_alfworld_goals()[official]["templates"]:
            goal = parse_task(
                template.format(obj="mug", recep="desk", toggle="desklamp", mrecep="")
            )
            place, lamp = ("", "desklamp") if kind == "light" else ("desk", "")
            assert goal == TaskGoal(kind, "mug", place, lamp)
    with pytest.raises(ValueError):
        parse_task("bring me something nice")


@pytest.mark.parametrize("receptacles", [(3, 5), (8, 20)])
def test_expert_solves_every_task_type(tmp_path, receptacles):
    settings = make_settings(tmp_path, receptacles=receptacles)
    env, success_counts = PACKAGE.make(settings), Counter()
    for task in PACKAGE.tasks(settings, "val"):
        is_success, _, invalid = run_expert(env, task)
        success_counts[task["kind"]] += is_success
        assert invalid == 0
    env.close()
    assert sum(success_counts.values()) >= 29  # 95% of 30
    assert set(success_counts) == set(TASK_TYPES)


@pytest.mark.parametrize(
    ("split", "history", "levels"), [("train", "append", True), ("val", "window", False)]
)
def test_every_task_type_is_solved_through_the_collector(tmp_path, split, history, levels):
    settings = make_settings(tmp_path, train_games=12, val_games=12)
    env = PACKAGE.make(settings)
    data = collect_successes(
        "alfworld",
        lambda task: follow_script([decision.action for decision in run_expert(env, task)[1]]),
        groups=12,
        n=2,
        history=history,
        levels=levels,
        split=split,
        **settings.model_dump(mode="json", exclude_unset=True),
    )
    env.close()
    assert {source.split("/")[1] for source in data.non_tensor_batch["data_source"]} == set(
        TASK_TYPES
    )
    assert (
        len(set(data.non_tensor_batch["uid"])) == 12
    )  # GroupMismatch unless the members start alike


def test_useless_actions_are_valid_and_cost_turns(tmp_path):
    settings = make_settings(tmp_path, val_games=12)
    env = PACKAGE.make(settings)
    useless, total, shortest = 0, 0, 0
    for task in PACKAGE.tasks(settings, "val"):
        shortest += len(run_expert(env, task)[1])
        _, decisions, invalid = run_expert(env, task, useless_share=0.4, seed=1)
        assert invalid == 0
        useless += sum(decision.is_useless for decision in decisions)
        total += len(decisions)
    env.close()
    assert 0.25 < useless / total < 0.55
    assert total > 1.2 * shortest


def test_invalid_actions_are_marked_and_do_not_mislead_the_expert(tmp_path):
    settings = make_settings(tmp_path, val_games=18)
    env = PACKAGE.make(settings)
    for number, task in enumerate(PACKAGE.tasks(settings, "val")):
        is_success, decisions, invalid = run_expert(env, task, invalid_share=0.3, seed=number)
        assert is_success
        assert invalid == sum(decision.is_invalid for decision in decisions)
        for before, after in itertools.pairwise(decisions):
            assert (after.tried == f"failed {before.action}") == before.is_invalid
    env.close()


def test_thoughts_grow_with_the_level_and_plan_names_the_action():
    decision = Decision(
        "go to desk 1", "need mug", "tried nothing", "go to desk 1 then look for mug"
    )
    thoughts = [expert_episode.compose_thought(level, decision) for level in (1, 2, 3, 4)]
    assert thoughts[0] == ""
    assert all(
        longer.startswith(shorter) and longer != shorter
        for shorter, longer in itertools.pairwise(thoughts)
    )
    assert decision.action in thoughts[3]
    assert (
        expert_episode.render_reply(1, decision)
        == "<level>1</level><think></think><action>go to desk 1</action>"
    )


@pytest.fixture(scope="module")
def demonstrations_file(tmp_path_factory):
    root = tmp_path_factory.mktemp("demonstrations")
    settings = make_settings(root / "games")
    return (
        root,
        settings,
        demonstrations.write_demonstrations("alfworld", settings, root / "demos", 36, 3, 0, 0.3),
    )


def test_demonstrations_have_balanced_levels_and_rollout_form(demonstrations_file):
    _, _, path = demonstrations_file
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) >= 18
    levels = Counter(level for row in rows for level in row["levels"])
    assert max(levels.values()) <= 1.5 * min(levels.values())  # about 300 independent draws
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * len(row["levels"])
        for level, message in zip(row["levels"], row["messages"][1::2], strict=True):
            assert message["content"].startswith(f"<level>{level}</level><think>")
            assert ("<think></think>" in message["content"]) == (level == 1)
            assert parse_game_command(message["content"])[1]


def test_demonstrations_replay_to_success(demonstrations_file):
    """Repeating the replies gives the observations that the rows contain."""
    _, settings, path = demonstrations_file
    row = json.loads(path.read_text().splitlines()[-1])
    tasks = {task["task_id"]: task for task in list_demonstration_tasks(settings)}
    env, prompts = PACKAGE.make(settings), PACKAGE.prompts(settings)
    observation = env.reset(tasks[row["task_id"]], 0)
    done = False
    reward = 0.0
    assert row["messages"][0]["content"] == prompts.first(observation, True)
    for number, message in enumerate(row["messages"][1::2]):
        observation, reward, done, _ = env.step(parse_game_command(message["content"])[0])
        if not done:
            assert row["messages"][2 * number + 2]["content"] == prompts.turn(observation)
    assert done and reward == 1.0
    env.close()


def test_demonstrations_use_only_training_floor_plans(demonstrations_file):
    _, settings, _ = demonstrations_file
    hashes = {
        task["hash"]
        for split in ("train", "val")
        for task in PACKAGE.tasks(settings.model_copy(update={"train_games": 30}), split)
    }
    assert hashes.isdisjoint(task["hash"] for task in list_demonstration_tasks(settings))
    entries = GeneratedGames(settings, "demo", 12).read_index()
    assert {game["scene"] for game in entries} <= set(
        layout.load_alfworld_constants().TRAIN_SCENE_NUMBERS
    )


def test_demonstrations_are_reused_and_do_not_depend_on_workers(demonstrations_file):
    root, settings, path = demonstrations_file
    before = path.stat().st_mtime_ns
    assert (
        demonstrations.write_demonstrations("alfworld", settings, root / "demos", 36, 3, 0, 0.3)
        == path
    )
    assert path.stat().st_mtime_ns == before
    elsewhere = demonstrations.write_demonstrations(
        "alfworld", settings, root / "other", 36, 3, 2, 0.3
    )
    assert elsewhere.name == path.name and elsewhere.read_text() == path.read_text()


def test_demonstrations_without_levels_hold_only_actions(demonstrations_file):
    root, settings, path = demonstrations_file
    plain = demonstrations.write_demonstrations(
        "alfworld", settings, root / "demos", 3, 3, 0, 0.0, levels=()
    )
    assert plain != path
    message = json.loads(plain.read_text().splitlines()[0])["messages"][1]["content"]
    assert message.startswith("<action>") and parse_game_command(message)[1]
