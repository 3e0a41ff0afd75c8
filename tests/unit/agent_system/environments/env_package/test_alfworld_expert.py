"""The expert wins from observations alone, and its demonstrations look like rollouts."""

import json
import random
from collections import Counter

import pytest

from tests.helpers.refusals import mentions

pytest.importorskip("alfworld")

import itertools

from agent_system.environments.env_package.alfworld import layout
from agent_system.environments.env_package.alfworld.expert import (
    AlfworldExpert,
    parse_task,
)
from agent_system.environments.env_package.alfworld.package import PACKAGE
from agent_system.environments.env_package.alfworld.prompts import project_command
from agent_system.environments.env_package.alfworld.settings import TASK_TYPES, TaskGoal
from agent_system.environments.env_package.alfworld.store import (
    GeneratedGames,
    list_generated_tasks,
)
from agent_system.environments.expert_protocol import Decision, Noise
from agent_system.environments.experts import demonstrations
from agent_system.environments.experts import episode as expert_episode
from tests.helpers.winning import plan, wins


def section(tmp_path, **changes):
    base = {
        "data_dir": str(tmp_path),
        "source": "generated",
        "val_games": 30,
        "prompt": "compact",
        "task_types": list(TASK_TYPES),
    }
    return PACKAGE.read_settings({**base, **changes})


def demonstration_tasks(asked):
    """The 12 games that 36 episodes are played on."""
    return list_generated_tasks(asked, "demo", 12)


def play(env, task, slack=0.0, slips=0.0, seed=0, limit=60):
    """Won?, the decisions, and how many of them the engine did not know."""
    observation = env.reset(task, 0)
    expert = AlfworldExpert(observation.text, random.Random(seed), Noise(slack, slips))
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


def test_every_template_sentence_is_understood():
    for kind, official in TASK_TYPES.items():
        for template in layout.load_goals()[official]["templates"]:
            asked = parse_task(
                template.format(obj="mug", recep="desk", toggle="desklamp", mrecep="")
            )
            place, lamp = ("", "desklamp") if kind == "light" else ("desk", "")
            assert asked == TaskGoal(kind, "mug", place, lamp)
    with pytest.raises(ValueError):
        parse_task("bring me something nice")


@pytest.mark.parametrize("receptacles", [(3, 5), (8, 20)])
def test_expert_wins_every_task_type(tmp_path, receptacles):
    asked = section(tmp_path, receptacles=receptacles)
    env, won = PACKAGE.make(asked), Counter()
    for task in PACKAGE.tasks(asked, "val"):
        success, _, invalid = play(env, task)
        won[task["kind"]] += success
        assert invalid == 0
    env.close()
    assert sum(won.values()) >= 29  # 95% of 30
    assert set(won) == set(TASK_TYPES)


@pytest.mark.parametrize(
    ("split", "history", "levels"), [("train", "append", True), ("val", "window", False)]
)
def test_every_task_type_is_won_through_the_collector(tmp_path, split, history, levels):
    asked = section(tmp_path, train_games=12, val_games=12)
    env = PACKAGE.make(asked)
    data = wins(
        "alfworld",
        lambda task: plan([decision.action for decision in play(env, task)[1]]),
        groups=12,
        n=2,
        history=history,
        levels=levels,
        split=split,
        **asked.model_dump(mode="json", exclude_unset=True),
    )
    env.close()
    assert {source.split("/")[1] for source in data.non_tensor_batch["data_source"]} == set(
        TASK_TYPES
    )
    assert (
        len(set(data.non_tensor_batch["uid"])) == 12
    )  # whose members started alike, or else GroupMismatch


def test_slack_is_valid_and_costs_steps(tmp_path):
    asked = section(tmp_path, val_games=12)
    env = PACKAGE.make(asked)
    idle, total, shortest = 0, 0, 0
    for task in PACKAGE.tasks(asked, "val"):
        shortest += len(play(env, task)[1])
        _, decisions, invalid = play(env, task, slack=0.4, seed=1)
        assert invalid == 0
        idle += sum(decision.is_useless for decision in decisions)
        total += len(decisions)
    env.close()
    assert 0.25 < idle / total < 0.55
    assert total > 1.2 * shortest


def test_slips_fail_are_named_and_do_not_mislead_the_expert(tmp_path):
    asked = section(tmp_path, val_games=18)
    env = PACKAGE.make(asked)
    for number, task in enumerate(PACKAGE.tasks(asked, "val")):
        won, decisions, invalid = play(env, task, slips=0.3, seed=number)
        assert won
        assert invalid == sum(decision.is_invalid for decision in decisions)
        for before, after in itertools.pairwise(decisions):
            assert (after.tried == f"failed {before.action}") == before.is_invalid
    env.close()


def test_thoughts_grow_with_the_level_and_the_plan_names_the_action():
    decision = Decision(
        "go to desk 1", "need mug", "tried nothing", "go to desk 1 then look for mug"
    )
    thoughts = [expert_episode.write_thought(level, decision) for level in (1, 2, 3, 4)]
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
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("demonstrations")
    asked = section(root / "games")
    return (
        root,
        asked,
        demonstrations.write_demonstrations("alfworld", asked, root / "demos", 36, 3, 0, 0.3),
    )


def test_demonstrations_hold_balanced_levels_in_rollout_form(written):
    _, _, path = written
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) >= 18
    levels = Counter(level for row in rows for level in row["levels"])
    assert max(levels.values()) <= 1.5 * min(
        levels.values()
    )  # drawn independently, some 300 of them
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * len(row["levels"])
        for level, message in zip(row["levels"], row["messages"][1::2], strict=True):
            assert message["content"].startswith(f"<level>{level}</level><think>")
            assert ("<think></think>" in message["content"]) == (level == 1)
            assert project_command(message["content"])[1]


def test_demonstrations_replay_to_a_win(written):
    """What a policy that repeats the answers would see is what the rows say it sees."""
    _, asked, path = written
    row = json.loads(path.read_text().splitlines()[-1])
    tasks = {task["task_id"]: task for task in demonstration_tasks(asked)}
    env, prompts = PACKAGE.make(asked), PACKAGE.prompts(asked)
    observation = env.reset(tasks[row["task_id"]], 0)
    done = False
    reward = 0.0
    assert row["messages"][0]["content"] == prompts.first(observation, True)
    for number, message in enumerate(row["messages"][1::2]):
        observation, reward, done, _ = env.step(project_command(message["content"])[0])
        if not done:
            assert row["messages"][2 * number + 2]["content"] == prompts.turn(observation)
    assert done and reward == 1.0
    env.close()


def test_demonstrations_keep_to_training_floor_plans(written):
    _, asked, _ = written
    hashes = {
        task["hash"]
        for split in ("train", "val")
        for task in PACKAGE.tasks(asked.model_copy(update={"train_games": 30}), split)
    }
    assert hashes.isdisjoint(task["hash"] for task in demonstration_tasks(asked))
    entries = GeneratedGames(asked, "demo", 12).read_index()
    assert {game["scene"] for game in entries} <= set(layout.load_constants().TRAIN_SCENE_NUMBERS)


def test_demonstrations_are_used_again_and_do_not_depend_on_the_workers(written):
    root, asked, path = written
    before = path.stat().st_mtime_ns
    assert (
        demonstrations.write_demonstrations("alfworld", asked, root / "demos", 36, 3, 0, 0.3)
        == path
    )
    assert path.stat().st_mtime_ns == before
    elsewhere = demonstrations.write_demonstrations(
        "alfworld", asked, root / "other", 36, 3, 2, 0.3
    )
    assert elsewhere.name == path.name and elsewhere.read_text() == path.read_text()


def test_demonstrations_without_levels_are_bare_actions(written):
    root, asked, path = written
    plain = demonstrations.write_demonstrations(
        "alfworld", asked, root / "demos", 3, 3, 0, 0.0, levels=()
    )
    assert plain != path
    message = json.loads(plain.read_text().splitlines()[0])["messages"][1]["content"]
    assert message.startswith("<action>") and project_command(message)[1]


def test_impossible_demonstrations_say_so(tmp_path):
    with pytest.raises(ValueError, check=mentions("1..4")):
        demonstrations.write_demonstrations(
            "alfworld", section(tmp_path), tmp_path, 4, 0, 0, 0.3, levels=(5,)
        )
