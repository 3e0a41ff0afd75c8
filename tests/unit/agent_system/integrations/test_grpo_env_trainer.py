"""``GRPOEnvTrainer``: its batches for TRL, its refusals, and that training on trials changes a
policy.
"""

import subprocess
import sys

import pytest
import torch

from tests.helpers.refusals import mentions

pytest.importorskip("trl")

from agent_system.environments.env import EnvFailure
from agent_system.environments.multistep import MultistepEnv
from agent_system.integrations.trl.policies import TurnSampling
from tests.helpers.multistep import Speaker
from tests.helpers.tiny_model import make_tiny_tokenizer
from tests.helpers.trl_trainer import GROUP, make_trainer

ROWS = [{"solution": word} for word in ("dog", "cat") for _ in range(GROUP)]


def test_trl_batch_of_a_trial(tmp_path):
    """The prompt ends before the first sampled token. The completion is attended to as a
    whole, and trained on its sampled tokens.
    """
    trainer = make_trainer(tmp_path)
    output = trainer._generate_and_score_completions(ROWS)
    trials = trainer._trials
    tokenizer, env = trainer.env.tokenizer, trainer.env
    assert len(set(trials["session_ids"])) == len(ROWS)
    for row in range(len(ROWS)):
        prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
        length = int(output["completion_mask"][row].sum())
        completion = output["completion_ids"][row][:length].tolist()
        agent = output["tool_mask"][row][:length].tolist()
        ids, start = trials["full_token_ids"][row], trials["prompt_lengths"][row]
        assert prompt == ids[:start] and completion[: len(ids) - start] == ids[start:]
        assert agent[: len(ids) - start] == trials["completion_only_mask"][row][start:]
        assert agent[0] == 1, "the split is at the first sampled token"
        assert not any(agent[len(ids) - start :]), (
            "an end token that was not sampled is not trained"
        )
        assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
        assert (
            env.completed_episodes[trials["session_ids"][row]]["task_info"]["solution"]
            == ROWS[row]["solution"]
        )
    sampled = output["completion_mask"] * output["tool_mask"]
    assert 0 < int(sampled.sum()) < int(output["completion_mask"].sum())
    assert output["num_items_in_batch"] == sampled.sum()


def test_sampling_log_probs_are_those_of_the_policy(tmp_path):
    """On sampled tokens, old log-probs from sampling equal a forward pass of the trainer."""
    trainer = make_trainer(tmp_path, temperature=0.8)
    output = trainer._generate_and_score_completions(ROWS)
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    width = output["completion_ids"].shape[1]
    with torch.no_grad():
        scored, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attention, width
        )
    sampled = (output["completion_mask"] * output["tool_mask"]).bool()
    torch.testing.assert_close(
        output["old_per_token_logps"][sampled], scored[sampled], atol=1e-4, rtol=0
    )


def test_advantages_compare_the_members_of_a_group(tmp_path):
    trainer = make_trainer(tmp_path, scale_rewards="none")
    output = trainer._generate_and_score_completions(ROWS)
    rewards = torch.tensor(
        [float(len(m[-1]["content"])) for m in trainer._trials["final_completion_messages"]]
    )
    groups = rewards.view(-1, GROUP)
    torch.testing.assert_close(
        output["advantages"], (groups - groups.mean(1, keepdim=True)).flatten()
    )
    assert output["advantages"].abs().sum() > 0


def test_reward_functions_get_session_ids_columns_and_prompt(tmp_path):
    arguments = {}

    def reward(prompts, completions, session_ids, solution, **columns):
        arguments.update(
            prompts=prompts, completions=completions, session_ids=session_ids, solution=solution
        )
        return [0.0] * len(completions)

    trainer = make_trainer(tmp_path, rewards=[reward])
    trainer._generate_and_score_completions(ROWS)
    assert arguments["solution"] == [row["solution"] for row in ROWS]
    assert arguments["session_ids"] == trainer._trials["session_ids"]
    assert arguments["prompts"][0] == [
        {"role": "system", "content": "Ask."},
        {"role": "user", "content": "I am thinking of a word. 3 left."},
    ]
    assert [len(messages) for messages in arguments["completions"]] == [1] * len(ROWS)


def test_default_reward_is_the_rubric_of_the_environment(tmp_path):
    trainer = make_trainer(tmp_path, trainer={"reward_funcs": None})
    assert trainer.reward_func_names == ["trial_reward"]
    trainer._generate_and_score_completions(ROWS)
    assert trainer._metrics["train"]["rewards/trial_reward/mean"] == [0.0]


def test_training_raises_the_reward(tmp_path):
    """The reward is the share of letters in the first half of the alphabet; few steps are
    enough.
    """

    def share_of_early_letters(completions, **columns):
        text = ["".join(c for c in m[-1]["content"].lower() if c.isalpha()) for m in completions]
        return [sum(c < "n" for c in t) / max(1, len(t)) for t in text]

    trainer = make_trainer(
        tmp_path, rewards=share_of_early_letters, max_steps=16, learning_rate=2e-2, logging_steps=1
    )
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 16 and sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1, rewards
    assert any(
        not torch.equal(before[name], value) for name, value in trainer.model.state_dict().items()
    )


def test_later_updates_use_the_sampling_log_probs(tmp_path):
    trainer = make_trainer(
        tmp_path,
        per_device_train_batch_size=GROUP,
        steps_per_generation=2,
        max_steps=4,
        learning_rate=5e-2,
        logging_steps=1,
    )
    trainer.train()
    ratios = [
        entry["clip_ratio/region_mean"] for entry in trainer.state.log_history if "loss" in entry
    ]
    assert trainer.state.global_step == 4 and max(ratios) > 0


def test_both_loss_paths_give_equal_weights(tmp_path):
    weights = []
    for path in ("trl", "full_sequence"):
        trainer = make_trainer(tmp_path / path, trainer={"loss_path": path}, max_steps=2)
        trainer.train()
        weights.append(trainer.model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-5, rtol=1e-3)


def test_evaluation_uses_the_held_out_words(tmp_path):
    trainer = make_trainer(
        tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2 * GROUP
    )
    words = set(trainer.env.get_eval_dataset()["solution"])
    metrics = trainer.evaluate()
    assert "eval_reward" in metrics and {row["solution"] for row in trainer._rows} <= words


def test_trial_of_several_episodes_is_one_completion(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.env.episodes_per_trial, trainer.env.free_shots = 2, 1
    trainer.max_completion_length = 400
    trainer._generate_and_score_completions(ROWS)
    assert {len(turns) for turns in trainer._trials["turn_rewards"]} == {2}
    assert all(len(spans) == 2 for spans in trainer._trials["episode_boundaries"])


# ---- other agents -------------------------------------------------------------------------------


def test_default_turn_limit_fits_all_turns_of_a_trial(tmp_path):
    trainer = make_trainer(tmp_path, trainer={"max_turn_tokens": None}, max_completion_length=600)
    assert trainer.max_turn_tokens == 600 // (2 * 3)
    trainer.train()
    records = trainer.env.completed_episodes.values()
    assert (
        max(
            sum(message["role"] == "assistant" for message in record["messages"])
            for record in records
        )
        == 3
    )


def test_text_that_was_not_sampled_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, trainer={"agent": Speaker("Is it alive?", "[dog]")})
    with pytest.raises(ValueError, check=mentions("allow_retokenized=True")):
        trainer._generate_and_score_completions(ROWS)
    trainer.allow_retokenized = True
    output = trainer._generate_and_score_completions(ROWS)
    assert "old_per_token_logps" not in output, "text has no sampling log-probs"


class FailsInTwoTrials(MultistepEnv):
    """The first trial of a batch fails in its first step, the second at its start."""

    def _initialize_episode(self, session_id, task_info):
        if session_id.endswith("-1"):
            raise EnvFailure("error", "no start")
        return {"n": 0}

    def _format_prompt(self, state, step):
        return "Say something."

    def _step_episode(self, session_id, action):
        if session_id.endswith("-0"):
            raise EnvFailure("error", "no step")
        return {"n": 1}, float(len(action)), True, {}


def test_aborted_trials_have_advantage_zero(tmp_path, caplog):
    env = FailsInTwoTrials(make_tiny_tokenizer())
    env.stop = tuple("abcdefghijklmnopqrstuvwxyz")
    trainer = make_trainer(
        tmp_path, env, trainer={"reward_funcs": None, "train_dataset": make_dataset(8)}
    )
    output = trainer._generate_and_score_completions([{"n": n} for n in range(8)])
    assert output["advantages"][:2].tolist() == [0.0, 0.0]
    sampled = (output["completion_mask"] * output["tool_mask"]).sum(-1)
    assert sampled[1] == 0 and torch.isfinite(trainer.compute_loss(trainer.model, output))


def make_dataset(rows: int):
    from datasets import Dataset

    return Dataset.from_dict({"n": list(range(rows))})


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "trainer", "parts"),
    [
        ({"remove_unused_columns": True}, {}, ["remove_unused_columns"]),
        ({"repetition_penalty": 1.2}, {}, ["repetition_penalty"]),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}, ["chat_template"]),
        ({}, {"old_logps": "guess"}, ["old_logps='guess'", "sampling, recompute"]),
        ({}, {"loss_path": "other"}, ["loss_path='other'"]),
        ({"loss_type": "cispo"}, {"loss_path": "full_sequence"}, ["loss_type", "grpo"]),
        ({"entropy_coef": 0.1}, {"loss_path": "full_sequence"}, ["entropy"]),
        ({}, {"processing_class": make_tiny_tokenizer(300)}, ["processing_class"]),
        ({}, {"max_turn_tokens": 161}, ["max_tokens=161", "max_completion_length=160"]),
        ({}, {"sampling_params": TurnSampling(200)}, ["max_tokens=200"]),
        ({}, {"sampling_params": TurnSampling(12, temperature=0.5)}, ["temperature=0.5"]),
    ],
)
def test_impossible_options_are_refused(tmp_path, options, trainer, parts):
    with pytest.raises(ValueError, check=mentions(*parts)):
        make_trainer(tmp_path, trainer=trainer, **options)


@pytest.mark.parametrize(
    ("sampling", "uses_rollout_logprobs"),
    [
        (None, True),
        (TurnSampling(12), True),
        (TurnSampling(12, top_p=0.9), False),
        (TurnSampling(12, top_k=5), False),
    ],
)
def test_truncated_sampling_gives_no_old_log_probs(tmp_path, sampling, uses_rollout_logprobs):
    """The loss computes log-probs of the whole distribution."""
    trainer = make_trainer(tmp_path, trainer={"sampling_params": sampling})
    output = trainer._generate_and_score_completions([{"n": n} for n in range(2 * GROUP)])
    assert (output.get("old_per_token_logps") is not None) == uses_rollout_logprobs


def test_environment_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, check=mentions("tokenizer")):
        make_trainer(tmp_path, FailsInTwoTrials())


def test_without_trl_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['trl'] = None\n"
        "import agent_system.integrations.trl as home\n"
        "try: home.GRPOEnvTrainer\n"
        "except ImportError as error: sys.exit(0 if '.[trl]' in str(error) else str(error))\n"
        "sys.exit('no error')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_the_adapter_does_not_import_trl():
    code = (
        "import sys, agent_system.integrations.trl; "
        "sys.exit(any(m in sys.modules for m in ('trl', 'torch')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
