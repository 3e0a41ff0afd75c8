"""Train a small policy on twenty questions with TRL's GRPO; print its success before and after.

    python scripts/train_twenty_questions.py                          # about 15 min on two cores
    python scripts/train_twenty_questions.py --model DIR --steps 200  # an existing policy

Without ``--model`` a new policy of half a million parameters first imitates a scripted expert,
which makes mistakes, on the training words. Reinforcement learning then uses the same words.
Success is measured on training and held-out words, at temperature 1. The policies are written to
``--out`` in Hugging Face format.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agent_system.agents import DirectOutputAgent
from agent_system.environments.env_package.twenty_questions import TwentyQuestionsEnv
from agent_system.environments.env_package.twenty_questions.expert import TwentyQuestionsExpert
from agent_system.environments.env_package.twenty_questions.game import select_split_words
from agent_system.environments.env_package.twenty_questions.knowledge import load_knowledge
from agent_system.environments.env_package.twenty_questions.package import PACKAGE
from agent_system.environments.experts.episode import ExpertEpisode, LevelSampler
from verl.utils.chat_template import find_stop_token_ids
from verl.utils.commands import UsageError, parse_positive_int, run_and_report_mistakes
from verl.utils.files import atomic_write
from verl.utils.seeds import derive_seed

if TYPE_CHECKING:
    from torch.nn import Module

NUM_WORDS = 48  # few enough words to train in minutes
MAX_TURN_TOKENS = 24  # sampled tokens of a turn at most
GROUP_SIZE = 8  # trajectories of a group


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; see ``--help``."""
    positive_int = parse_positive_int
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="policy to start from; default: a new one, made by imitation"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("data/models/twenty_questions"),
        help="directory of the policies",
    )
    parser.add_argument(
        "--words", type=positive_int, default=NUM_WORDS, help="possible secret words"
    )
    parser.add_argument("--turns", type=positive_int, default=12, help="turns per game")
    parser.add_argument("--episodes", type=positive_int, default=6000, help="games to imitate")
    parser.add_argument("--epochs", type=positive_int, default=3, help="epochs of imitation")
    parser.add_argument("--steps", type=positive_int, default=320, help="optimizer steps of GRPO")
    parser.add_argument(
        "--groups",
        type=positive_int,
        default=16,
        help=f"words per generation, {GROUP_SIZE} games each",
    )
    parser.add_argument(
        "--updates", type=positive_int, default=4, help="optimizer steps per generation"
    )
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate of GRPO")
    parser.add_argument("--games", type=positive_int, default=192, help="games per measurement")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ``UsageError`` if a run with ``args`` would end with an error."""
    if args.words < 2:
        raise UsageError(
            f"--words={args.words}; allowed: 2 or more; fix: --words 2", "out_of_range"
        )
    if not 0 < args.lr <= 1:
        raise UsageError(
            f"--lr={args.lr}; allowed: above 0, at most 1; fix: --lr 2e-4", "out_of_range"
        )
    if args.seed < 0:
        raise UsageError(f"--seed={args.seed}; allowed: 0 or more; fix: --seed 0", "out_of_range")
    if args.model and not (Path(args.model) / "config.json").is_file():
        raise UsageError(
            f"--model={args.model!r}: no config.json in it; allowed: the directory of a policy; "
            "fix: --model DIR",
            "no_model",
        )
    for name in ("result.json", "trained"):
        if (args.out / name).exists():
            raise UsageError(
                f"--out={str(args.out)!r}: holds {name} of an earlier run; allowed: a new "
                "directory; fix: --out DIR",
                "file_exists",
            )
    args.out.mkdir(parents=True, exist_ok=True)


def select_words(count: int) -> list[str]:
    """Select ``count`` words at even distances in the table of all words.

    The table is grouped by kind, so that its first ``count`` words would all be animals.
    """
    words = list(load_knowledge().things)
    return sorted(words[int(index * len(words) / count)] for index in range(min(count, len(words))))


def write_demonstrations(
    path: Path, episodes: int, words: list[str], max_steps: int, seed: int
) -> None:
    """Write ``episodes`` games of the expert about ``words``, each equally often, as JSON lines.

    Games without success are included. The expert makes mistakes on purpose, so that reinforcement
    learning can improve the policy.
    """
    words = sorted(words)
    settings = PACKAGE.settings(max_steps=max_steps)
    env = PACKAGE.make(settings)
    prompts = PACKAGE.prompts(settings)
    with atomic_write(path) as file:
        for episode_number in range(episodes):
            word = words[episode_number % len(words)]
            task = {"task_id": f"twenty_questions/{word}", "solution": word}
            rng = random.Random(derive_seed("twenty questions demonstration", seed, episode_number))
            expert = TwentyQuestionsExpert(
                words, rng, random_question_share=0.5, early_guess_probability=0.1
            )
            episode = ExpertEpisode(env, prompts, task, env.reset(task, 0), asks_for_levels=False)
            won = episode.run(expert, LevelSampler((), rng), max_steps)
            row = {"task_id": task["task_id"], "won": won, "messages": episode.messages}
            file.write(json.dumps(row) + "\n")


def train_by_imitation(args: argparse.Namespace, words: list[str], directory: Path) -> Path:
    """Train a new policy by imitation of the expert's games. Return its directory."""
    train_words = select_split_words("train", words)
    demonstrations_path = directory / "demonstrations.jsonl"
    write_demonstrations(demonstrations_path, args.episodes, train_words, args.turns, args.seed)
    policy_path = directory / "imitation"
    sft_arguments = [
        "--config-name=quickstart_sft",
        "env.env_name=twenty_questions",
        f"data.train_files=[{demonstrations_path}]",
        "data.env_loss_weight=0.0",
        f"model.save_path={policy_path}",
        f"trainer.default_local_dir={directory / 'imitation_run'}",
        f"trainer.total_epochs={args.epochs}",
        f"trainer.seed={args.seed}",
        "trainer.resume_mode=disable",
    ]
    # Run in a child process, so that Ray and its workers end before reinforcement learning.
    subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_sft", *sft_arguments], cwd=ROOT, check=True
    )
    return policy_path


def measure_success_and_turns(
    model: "Module", env: TwentyQuestionsEnv, words: list[str], num_games: int, seed: int
) -> tuple[float, float]:
    """Return success rate and turns per game of ``num_games`` games, at temperature 1.

    The number of games is rounded to a multiple of the number of ``words``.
    """
    from agent_system.integrations.trl.policies import TrainedModelSampler, TurnSampling

    tokenizer = env.tokenizer
    sampling = TurnSampling(MAX_TURN_TOKENS, stop=env.stop)
    end_ids = find_stop_token_ids(tokenizer)
    policy = TrainedModelSampler(lambda: nullcontext(model.eval()), tokenizer, end_ids, seed)
    rows = [{"solution": word} for word in words] * max(1, round(num_games / len(words)))
    results = env.run_trial(rows, agent=DirectOutputAgent(policy, sampling, tokenizer))
    num_turns = sum(len(rewards) for trial in results["turn_rewards"] for rewards in trial)
    return sum(results["rewards"]) / len(rows), num_turns / len(rows)


def measure_policy(
    model: "Module", env: TwentyQuestionsEnv, args: argparse.Namespace, label: str
) -> dict[str, float]:
    """Measure and print success and turns on training and held-out words."""
    measurements = {}
    datasets = {"train": env.get_train_dataset(), "held_out": env.get_eval_dataset()}
    for split, dataset in datasets.items():
        words = list(dataset["solution"])
        success_rate, turns_per_game = measure_success_and_turns(
            model, env, words, args.games, args.seed
        )
        measurements[f"{split}_success"] = success_rate
        measurements[f"{split}_turns"] = turns_per_game
    print(
        f"{label}: success {measurements['train_success']:.1%} on training words, "
        f"{measurements['held_out_success']:.1%} on held-out words; "
        f"{measurements['held_out_turns']:.1f} turns per game",
        flush=True,
    )
    return measurements


def train_with_grpo(args: argparse.Namespace, path: str, env: TwentyQuestionsEnv) -> Any:
    """Train the policy at ``path`` for ``args.steps`` optimizer steps; return the trainer."""
    from trl.trainer.grpo_config import GRPOConfig

    from agent_system.integrations.trl import GRPOEnvTrainer

    rows_per_generation = args.groups * GROUP_SIZE
    config = GRPOConfig(
        output_dir=str(args.out / "grpo_run"),
        seed=args.seed,
        max_steps=args.steps,
        # The rows of a generation are divided among its optimizer steps.
        per_device_train_batch_size=rows_per_generation // args.updates,
        steps_per_generation=args.updates,
        num_generations=GROUP_SIZE,
        # Half of these tokens are for the replies of the environment between the turns.
        max_completion_length=env.max_steps_per_episode * 2 * MAX_TURN_TOKENS,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        epsilon_high=0.28,
        logging_steps=args.updates,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        bf16=False,
    )
    trainer = GRPOEnvTrainer(path, env, args=config, max_turn_tokens=MAX_TURN_TOKENS)
    trainer.train()
    return trainer


def main(argv: list[str] | None = None) -> None:
    """Create or load the policy, then measure, train, measure again and save it."""
    args = parse_arguments(argv)
    start_time_s = time.perf_counter()
    check_arguments(args)
    words = select_words(args.words)
    initial_policy_path = args.model or str(train_by_imitation(args, words, args.out))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    env = TwentyQuestionsEnv(
        AutoTokenizer.from_pretrained(initial_policy_path),
        max_steps_per_episode=args.turns,
        words=words,
        seed=args.seed,
    )
    metrics_before = measure_policy(
        AutoModelForCausalLM.from_pretrained(initial_policy_path, dtype="float32"),
        env,
        args,
        "before",
    )
    trainer = train_with_grpo(args, initial_policy_path, env)
    metrics_after = measure_policy(trainer.model, env, args, "after")
    trainer.save_model(str(args.out / "trained"))
    seconds = time.perf_counter() - start_time_s
    result = {"before": metrics_before, "after": metrics_after, "seconds": seconds}
    (args.out / "result.json").write_text(json.dumps(result, indent=1))
    print(f"policy: {args.out / 'trained'} ({seconds:.0f} s in all)", flush=True)


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
