"""``GRPOEnvTrainer`` on a random tiny policy and a few words of twenty questions, for quick
tests.
"""

import importlib
import string
from pathlib import Path
from typing import Any

from tests.helpers.tiny_model import make_tiny_policy

WORDS = ["dog", "cat", "cow", "pig", "lion", "apple", "car", "piano"]
GROUP = 4


def import_trl_without_vllm() -> None:
    """Import TRL without vLLM. These tests do not use vLLM, and its import can take half a
    minute.
    """
    utils: Any = importlib.import_module("trl.import_utils")
    utils.is_vllm_available = lambda *args, **kwargs: False


def make_trainer(
    directory: Path,
    env: Any = None,
    rewards: Any = None,
    trainer: dict | None = None,
    with_vllm: bool = False,
    **options: Any,
):
    """Return a trainer with groups of ``GROUP`` trials and eight rows per step.

    ``options`` go to ``GRPOConfig``, ``trainer`` to the trainer. Without ``rewards`` the reward is
    the length of the last answer, so that the trials of a random policy differ.
    """
    if not with_vllm:
        import_trl_without_vllm()
    from transformers import AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig

    from agent_system.environments.env_package.twenty_questions import TwentyQuestionsEnv
    from agent_system.integrations.trl import GRPOEnvTrainer

    path = make_tiny_policy(directory / "policy", hidden=32, layers=1, std=0.2)
    if env is None:
        tokenizer = AutoTokenizer.from_pretrained(path)
        env = TwentyQuestionsEnv(
            tokenizer, system_prompt="Ask.", words=WORDS, max_steps_per_episode=3
        )
        env.stop = tuple(
            string.ascii_letters
        )  # a random policy samples one of these after a few tokens
    settings = {
        "output_dir": str(directory / "run"),
        "per_device_train_batch_size": 2 * GROUP,
        "num_generations": GROUP,
        "max_completion_length": 160,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = GRPOConfig(**(settings | options))
    defaults = {
        "max_turn_tokens": 12,
        "reward_funcs": answer_length if rewards is None else rewards,
    }
    trl_trainer = GRPOEnvTrainer(str(path), env, args=args, **(defaults | (trainer or {})))
    trl_trainer.current_gradient_accumulation_steps = (
        args.gradient_accumulation_steps
    )  # train() sets it
    trl_trainer.model.train()
    return trl_trainer


def answer_length(completions, session_ids, **columns) -> list[float]:
    """Return the length of the last answer in characters."""
    return [float(len(messages[-1]["content"])) for messages in completions]
