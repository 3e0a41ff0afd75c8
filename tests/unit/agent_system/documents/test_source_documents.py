"""Tests that all calls and keys of the two design documents of this framework exist.

Document 002 describes environments that own the interaction. Its parts "Testing & Compatibility"
and plan are tested. Document 004 describes the training flow of RLVCR.
"""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_system.agents import DirectOutputAgent
from agent_system.environments.env_package.twenty_questions import TwentyQuestionsEnv
from agent_system.environments.multistep import MultistepEnv
from agent_system.multi_turn_rollout import TrajectoryCollector
from agent_system.multi_turn_rollout import trajectory_generator as players
from rlvcr import core_rlvcr
from rlvcr.levels import LevelCodec
from tests.helpers.multistep import CountTo, OldModel, Speaker
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.trainer.launch.extensions import load_config
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn

ROOT = Path(__file__).resolve().parents[4]
TRIAL_KEYS = (
    "full_token_ids",
    "full_attention_mask",
    "completion_only_mask",
    "final_completion_messages",
    "session_ids",
)


class OlderGame(MultistepEnv):
    """Subclass in the form of the document: the step gets the state and ``llm_action``."""

    def _initialize_episode(self, session_id, task_info):
        return {"solution": task_info["solution"], "asked": 0, "done": False}

    def _format_prompt(self, state, step):
        return f"Question {state['asked'] + 1}?"

    def _step_episode(self, session_id, state, llm_action):  # pyright: ignore[reportIncompatibleMethodOverride]  the older form
        right = llm_action == state["solution"]
        after = {**state, "asked": state["asked"] + 1, "done": right}
        return after, float(right), right, {"said": llm_action}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def list_parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


# ---- 002, testing & compatibility ---------------------------------------------------------------


@pytest.mark.parametrize("cls", [MultistepEnv, TwentyQuestionsEnv])
def test_constructors_have_defaults_for_older_callers(cls):
    env = cls()
    assert (env.tokenizer, env.episodes_per_trial, env.free_shots) == (None, 1, 0)
    assert list_parameters(cls)[0] == "tokenizer"


def run_trials(game: MultistepEnv, tasks: list[Any], name: str | None, agent: Any) -> dict:
    """Call ``run_trial`` with its tasks by position, or by ``name``."""
    run_trial: Any = game.run_trial
    return (
        run_trial(tasks, agent=agent) if name is None else run_trial(**{name: tasks}, agent=agent)
    )


@pytest.mark.parametrize("name", ["prompts", "inputs", None])
def test_run_trial_accepts_the_arguments_of_older_callers(name):
    """Tasks come by the older name, the new one or by position; messages without a role or as
    text.
    """
    rows = [{"solution": "dog"}, {"solution": "dog"}]
    assert run_trials(OlderGame(), rows, name, Speaker("dog"))["rewards"] == [1.0, 1.0]
    agent = Speaker("yes")
    results = run_trials(MultistepEnv(), [[{"content": "Shall we?"}], "Shall we?"], name, agent)
    conversations = [messages for messages, _ in agent.seen]
    assert conversations == [[{"role": "user", "content": "Shall we?"}]] * 2
    for alias, key in (("ids", 0), ("mask", 2), ("messages", 3)):
        assert results[alias] == results[TRIAL_KEYS[key]]


def test_run_trial_refuses_ambiguous_and_empty_inputs():
    run_trial: Any = OlderGame().run_trial
    for kwargs in ({}, {"inputs": [{}], "prompts": [{}]}):
        with pytest.raises(TypeError, check=mentions("inputs", "prompts")):
            run_trial(**kwargs, agent=Speaker("x"))
    with pytest.raises(ValueError, check=mentions("['role']")):
        MultistepEnv().run_trial([[{"role": "user"}]], agent=Speaker("x"))


def test_run_trial_and_generate_accept_positional_arguments():
    results = CountTo().run_trial([[{"content": "Let us count."}]], OldModel(), None)
    assert len(results["session_ids"]) == 1
    assert MultistepEnv().generate(["Say something."], OldModel(), None)["messages"]


# ---- 002, the plan ------------------------------------------------------------------------------


def test_signatures_begin_as_in_the_plan():
    assert list_parameters(MultistepEnv.run_trial)[:4] == [
        "inputs",
        "llm",
        "sampling_params",
        "agent",
    ]
    kinds = [p.kind for p in inspect.signature(MultistepEnv.run_trial).parameters.values()]
    assert kinds[-1] is inspect.Parameter.VAR_KEYWORD
    assert list_parameters(MultistepEnv._run_complete_episode) == [
        "session_id",
        "llm",
        "sampling_params",
        "agent",
    ]
    assert list_parameters(MultistepEnv._initialize_episode) == ["session_id", "task_info"]
    assert list_parameters(MultistepEnv._format_prompt) == ["state", "step"]
    assert list_parameters(DirectOutputAgent.get_action)[:2] == ["messages", "agent_state"]


def test_run_trial_returns_the_documented_keys(tokenizer):
    game = OlderGame(tokenizer)
    results = game.run_trial(
        inputs=[{"solution": "dog"}, {"solution": "cat"}],
        llm=None,
        sampling_params=None,
        agent=Speaker("cat", "dog"),
    )
    assert set(TRIAL_KEYS) <= set(results)
    assert [len(results[key]) for key in TRIAL_KEYS] == [2] * 5
    first, second = (results[key] for key in ("full_token_ids", "completion_only_mask"))
    for ids, mask, attention in zip(first, second, results["full_attention_mask"], strict=True):
        assert len(ids) == len(mask) == len(attention) > 0
        assert set(attention) == {1} and set(mask) == {0, 1}
    sampled_texts = [
        tokenizer.decode([t for t, m in zip(*pair, strict=True) if m])
        for pair in zip(first, second, strict=True)
    ]
    assert sampled_texts == ["catdog", "cat"]
    assert results["final_completion_messages"][0] == [{"role": "assistant", "content": "dog"}]


def test_complete_episode_of_a_session(tokenizer):
    game = OlderGame(tokenizer, env_id="older", episodes_per_trial=3)
    game.active_states["mine"] = game._initialize_episode("mine", {"solution": "dog"})
    agent = Speaker("cat", "dog")
    episode = game._run_complete_episode("mine", None, None, agent)
    assert episode["llm_responses"] == episode["llm_actions"] == ["cat", "dog"]
    assert (episode["reward"], episode["session_id"]) == (1.0, "mine")
    assert episode["final_completion_messages"] == [{"role": "assistant", "content": "dog"}]
    lengths = {len(episode[key]) for key in TRIAL_KEYS[:3]}
    assert len(lengths) == 1 and sum(episode["completion_only_mask"]) > 0
    assert game.active_states["mine"]["done"] is True  # and may be initialised again
    assert game.trial_reward(session_ids=["mine"]) == [1.0]
    # Without a line "episode 1 of 3", because the caller runs a single episode.
    assert agent.seen[0][0] == [{"role": "user", "content": "Question 1?"}]
    with pytest.raises(KeyError, check=mentions("_initialize_episode")):
        game._run_complete_episode("another", agent=agent)
    with pytest.raises(ValueError, check=mentions("agent", "llm")):
        game._run_complete_episode("mine")


def test_steps_are_defined_and_called_in_both_forms():
    older, newer = OlderGame(), CountTo()
    for game, row, action in ((older, {"solution": "1"}, "1"), (newer, {"target": 1}, "1")):
        state = game._initialize_episode("s", row)
        step: Any = game._step_episode
        with_state = step("s", state, action)
        by_name = step("s", state=state, llm_action=action)
        game.active_states["s"] = state
        without = step("s", action)
        assert with_state[1:3] == by_name[1:3] == without[1:3] == (1.0, True)
        with pytest.raises(TypeError, check=mentions("session_id", "state", "llm_action")):
            step("s")
        with pytest.raises(TypeError, check=mentions(3)):
            step("s", state, action, "more")

    class LowercaseGame(OlderGame):
        def _step_episode(self, session_id, action):  # pyright: ignore[reportIncompatibleMethodOverride]  today's form
            parent: Any = super()
            return parent._step_episode(session_id, action.lower())

    results = LowercaseGame().run_trial([{"solution": "dog"}], agent=Speaker("DOG"))
    assert results["rewards"] == [1.0]


def test_dataset_has_only_solutions():
    datasets = pytest.importorskip("datasets")
    game = TwentyQuestionsEnv(words=["dog", "cat", "cow", "pig", "lion"])
    train, held_out = game.get_train_dataset(), game.get_eval_dataset()
    for dataset in (train, held_out):
        assert dataset.features == datasets.Features({"solution": datasets.Value("string")})
    assert set(train["solution"]) & set(held_out["solution"]) == set()


def test_agent_returns_a_text_and_its_state():
    text, state = DirectOutputAgent(OldModel(), None).get_action(
        [{"role": "user", "content": "?"}], {"turn": 1}
    )
    assert isinstance(text, str) and state == {"turn": 1}


def test_trainer_batch_has_the_documented_keys_and_loss(tmp_path):
    pytest.importorskip("trl")
    from tests.helpers.trl_trainer import make_trainer

    trainer = make_trainer(tmp_path)
    rows = [{"solution": word} for word in ("dog", "cat") for _ in range(4)]
    batch = trainer._generate_and_score_completions(rows)
    trials = trainer._trials
    ids, attention, mask = (
        batch[key] for key in ("prompt_completion_ids", "attention_mask", "completion_only_mask")
    )
    assert ids.shape == attention.shape == mask.shape
    for row in range(len(rows)):
        full = trials["full_token_ids"][row]
        row_tokens = ids[row][attention[row].bool()].tolist()
        assert row_tokens[: len(full)] == full  # followed by at most one token that ends the trial
        trained = ids[row][mask[row].bool()].tolist()
        flags = trials["completion_only_mask"][row]
        assert trained == [token for token, flag in zip(full, flags, strict=True) if flag]
    # compute_loss accepts a batch with only the keys of the plan.
    prompt = batch["prompt_ids"].shape[1]
    padded = torch.nn.functional.pad(batch["old_per_token_logps"], (prompt, 0))
    plan = {
        "prompt_completion_ids": ids,
        "attention_mask": attention,
        "completion_only_mask": mask,
        "old_per_token_logps": padded,
        "advantages": batch["advantages"],
        "num_items_in_batch": batch["num_items_in_batch"],
    }
    torch.testing.assert_close(
        trainer.compute_loss(trainer.model, plan), trainer.compute_loss(trainer.model, batch)
    )


# ---- 004, the flow of RLVCR ---------------------------------------------------------------------


def test_functions_and_files_of_the_flow_exist():
    assert callable(ray_trainer.RayPPOTrainer.fit) and callable(ray_trainer.compute_advantage)
    for name in (
        "multi_turn_loop",
        "rlvcr_multi_turn_loop",
        "vanilla_multi_turn_loop",
        "pack_collected_trajectories",
    ):
        assert callable(getattr(TrajectoryCollector, name))
    # A function of the collector workers, which sample alternatives during the rollout.
    assert callable(players.generate_alternative_thinking_levels)
    for file in (
        "verl/trainer/main_ppo.py",
        "verl/trainer/ppo/ray_trainer.py",
        "agent_system/multi_turn_rollout/rollout_loop.py",
        "rlvcr/core_rlvcr.py",
        "verl/config/ppo_trainer.yaml",
    ):
        assert (ROOT / file).is_file()


@pytest.mark.parametrize(("enable", "loop"), [(True, "rlvcr"), (False, "vanilla")])
def test_enable_selects_the_rollout_loop(enable, loop):
    calls = []
    config = load_config("ppo_trainer", [f"algorithm.rlvcr.enable={str(enable).lower()}"])
    collector: Any = SimpleNamespace(
        config=config,
        rlvcr_multi_turn_loop=lambda *arguments: calls.append("rlvcr"),
        vanilla_multi_turn_loop=lambda *arguments: calls.append("vanilla"),
    )
    tasks: Any = None
    TrajectoryCollector.multi_turn_loop(collector, tasks, tasks, tasks)
    assert calls == [loop]


def test_configuration_of_the_document():
    cfg = load_config(
        "ppo_trainer",
        [
            "algorithm.adv_estimator=rlvcr",
            "algorithm.rlvcr.enable=true",
            "algorithm.rlvcr.step_advantage_w=1.0",
            "algorithm.rlvcr.thinking_diversity_w=0.5",
            "algorithm.rlvcr.mode=mean_norm",
        ],
    )
    assert AdvantageEstimator.RLVCR == "rlvcr" == cfg.algorithm.adv_estimator
    function = get_adv_estimator_fn("rlvcr").function
    assert function is core_rlvcr.compute_rlvcr_outcome_advantage
    assert list_parameters(function)[:9] == [
        "token_level_rewards",
        "response_mask",
        "index",
        "traj_index",
        "thinking_level_entropies",
        "thinking_token_costs",
        "step_advantage_w",
        "thinking_diversity_w",
        "mode",
    ]
    defaults = inspect.signature(function).parameters
    assert defaults["step_advantage_w"].default == 1.0
    assert defaults["thinking_diversity_w"].default == 0.5
    assert defaults["mode"].default == "mean_norm"


def test_final_advantage_adds_the_weighted_thinking_advantage():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    thinking = torch.tensor([[0.5, 0.0], [-0.25, 0.0]])
    advantages, trajectory = core_rlvcr.compute_rlvcr_outcome_advantage(
        rewards,
        torch.ones(2, 2),
        ["task", "task"],
        ["a", "b"],
        thinking,
        torch.zeros(2, 2),
        step_advantage_w=0.5,
    )
    assert trajectory.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    assert torch.equal(advantages, trajectory + 0.5 * thinking)


def test_example_of_the_document_gives_four_sequences(tokenizer):
    """The policy chose level 3; the same action follows the thoughts of all four levels."""
    codec = LevelCodec(tokenizer)
    original = (
        "<level>3</level><think>I need to look around first</think><action>look around</action>"
    )
    parsed = codec.parse_turn(tokenizer(original, add_special_tokens=False)["input_ids"])
    assert (parsed.level, parsed.action) == (3, "look around")
    thoughts = {2: "Check state", 3: "I need to look around first", 4: "Analyze goal..."}
    contexts: dict[int, Any] = {1: codec.build_empty_thought()}
    for level, text in thoughts.items():
        sampled = tokenizer(f"{text}</think>", add_special_tokens=False)["input_ids"]
        contexts[level] = codec.build_forced_thought(level, sampled)
    assert {
        level: tokenizer.decode(c.token_ids) + "look around" for level, c in contexts.items()
    } == {
        # The document's level 1 has no block; here it is empty, so all levels share one format.
        1: "<level>1</level><think></think><action>look around",
        **{
            level: f"<level>{level}</level><think>{text}</think><action>look around"
            for level, text in thoughts.items()
        },
    }
