r"""Train the choice of the thinking level by supervised learning, as a baseline for RL.

    python experiments/train_level_choice.py experiments/policies/relay --out data/models/by_level
    python experiments/train_level_choice.py data/models/exam --config-name exam --samples 4 \
        --right 3 --unsolved deepest --labelled-share 0.5 --out data/models/exam_labelled

1. States are drawn from the expert's episodes of training tasks.
2. In every state the levels are forced in turn, from the lowest, each at most ``--samples`` times.
   The first level at which ``--right`` of the sampled actions are right (default: all) is the label
   of the state. States without such a level have no label, or with ``--unsolved deepest`` the
   highest level.
3. For each labelled state the policy is trained on a sampled turn with a right action at the level
   of the label, or on the expert's turn if there is none. Training on the level digit alone would
   make it forget its thoughts and actions. ``--labelled-share`` is the share of states that are
   trained at their label. The others are trained on the expert's turn at a random level.
4. Held-out episodes are run with the levels that the trained policy chooses.

With ``--unsolved deepest --labelled-share 0.5`` the result is a start policy for RL. In half of the
rows its level depends on the state, and all levels are still trained.

The cost is printed: sampled tokens and seconds of all steps. The environment needs an expert, and
``env.history=window``, as ``level_matrix.py`` does.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agent_system.environments.experts.episode import render_reply
from experiments.level_matrix import (
    FREE,
    DecisionState,
    MatrixEnvironment,
    Policy,
    PolicyTurn,
    collect_expert_states,
    run_episodes,
)
from rlvcr.levels import LEVELS
from verl.trainer.launch.extensions import load_config
from verl.utils.commands import UsageError, parse_positive_int, run_and_report_mistakes
from verl.utils.files import atomic_write

LEARNING_RATE = 3e-4
BATCH_SIZE = 64


def find_right_turns(
    states: Sequence[DecisionState],
    policy: Policy,
    num_samples: int,
    min_right: int,
) -> tuple[list[PolicyTurn | None], int]:
    """Return a turn with a right action for each state, and the number of sampled tokens.

    A right action is one that the expert accepts. The turn is at the lowest level that suffices:
    at least ``min_right`` of ``num_samples`` turns with this forced level have a right action. It
    is None if no level suffices.
    """
    right_turns: list[PolicyTurn | None] = [None] * len(states)
    num_sampled_tokens = 0
    # Start with the lowest level. States with a right turn are not sampled at higher levels.
    for level in LEVELS:
        unlabelled_states = [
            state_index for state_index, turn in enumerate(right_turns) if turn is None
        ]
        new_turns, num_level_tokens = _find_right_turns_at_level(
            [states[state_index] for state_index in unlabelled_states],
            policy,
            level,
            num_samples,
            min_right,
        )
        num_sampled_tokens += num_level_tokens
        for state_index, turn in zip(unlabelled_states, new_turns, strict=True):
            right_turns[state_index] = turn
    return right_turns, num_sampled_tokens


def _find_right_turns_at_level(
    states: Sequence[DecisionState],
    policy: Policy,
    level: int,
    num_samples: int,
    min_right: int,
) -> tuple[list[PolicyTurn | None], int]:
    """Return a right turn for each state, or None where too few are right, and sampled tokens."""
    last_right_turns: list[PolicyTurn | None] = [None] * len(states)
    right_counts = [0] * len(states)
    candidate_states = list(range(len(states)))
    num_sampled_tokens = 0
    for samples_left in range(num_samples - 1, -1, -1):
        turns = policy.sample_policy_turns(
            [states[state_index].prompt for state_index in candidate_states],
            [level] * len(candidate_states),
        )
        num_sampled_tokens += sum(turn.num_tokens for turn in turns)
        for state_index, turn in zip(candidate_states, turns, strict=True):
            if states[state_index].decision.is_right(turn.action):
                right_counts[state_index] += 1
                last_right_turns[state_index] = turn
        # Continue with states that have too few right turns so far, and enough samples left.
        candidate_states = [
            state_index
            for state_index in candidate_states
            if min_right - samples_left <= right_counts[state_index] < min_right
        ]
    return [
        turn if right_count >= min_right else None
        for turn, right_count in zip(last_right_turns, right_counts, strict=True)
    ], num_sampled_tokens


def build_rows(
    states: Sequence[DecisionState],
    right_turns: Sequence[PolicyTurn | None],
    policy: Policy,
    labelled_share: float,
    uses_deepest: bool,
    seed: int,
) -> list[tuple[list[int], Sequence[int]]]:
    """Return the rows to train on: prompt tokens and turn tokens of each state.

    A state has its right turn with probability ``labelled_share``, otherwise the expert's turn at a
    random level. A state without a right turn has the expert's turn at the highest level if
    ``uses_deepest`` is true, and no row otherwise.
    """
    rng = random.Random(seed)
    rows = []
    for state, right_turn in zip(states, right_turns, strict=True):
        if right_turn is None and not uses_deepest:
            continue
        if labelled_share < 1 and rng.random() >= labelled_share:
            turn_ids = policy.encode_reply(render_reply(rng.choice(LEVELS), state.decision))
        elif right_turn is None:
            turn_ids = policy.encode_reply(render_reply(LEVELS[-1], state.decision))
        else:
            turn_ids = right_turn.token_ids
        rows.append((policy.encode_prompt(state.prompt), turn_ids))
    return rows


def train_on_turns(
    directory: str, rows: Sequence[tuple[list[int], Sequence[int]]], epochs: int, seed: int
) -> PreTrainedModel:
    """Train the model in ``directory`` on the turn tokens of rows (prompt tokens, turn tokens)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    num_batches = -(-len(rows) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * num_batches)
    for epoch in range(epochs):
        losses = []
        for batch_indices in torch.randperm(len(rows)).split(BATCH_SIZE):
            batch = [rows[n] for n in batch_indices.tolist()]
            input_ids = pad_sequence(
                [torch.tensor([*prompt, *turn]) for prompt, turn in batch], True
            )
            labels = pad_sequence(
                [torch.tensor([-100] * len(prompt) + list(turn)) for prompt, turn in batch],
                batch_first=True,
                padding_value=-100,
            )
            lengths = torch.tensor([len(prompt) + len(turn) for prompt, turn in batch])
            is_token = torch.arange(input_ids.shape[1]) < lengths.unsqueeze(1)
            loss = model(input_ids, attention_mask=is_token.long(), labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}", flush=True)
    return model


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command. Raises ``UsageError`` for values that do not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("policy", help="directory of the policy (Hugging Face form)")
    parser.add_argument("--config-name", default="relay_16", help="config of the environment")
    parser.add_argument("--out", type=Path, required=True, help="directory for the trained policy")
    parser.add_argument("--tasks", type=parse_positive_int, default=256, help="training tasks")
    parser.add_argument("--samples", type=parse_positive_int, default=2, help="per state and level")
    parser.add_argument("--right", type=parse_positive_int, help="right samples; default: all")
    parser.add_argument(
        "--unsolved", choices=("skip", "deepest"), default="skip", help="label if no level suffices"
    )
    parser.add_argument("--labelled-share", type=float, default=1.0, help="rows at their label")
    parser.add_argument("--epochs", type=parse_positive_int, default=6)
    parser.add_argument("--val-tasks", type=parse_positive_int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="key=value of the config")
    args = parser.parse_intermixed_args(argv)
    if args.out.exists():
        raise UsageError(
            f"--out={args.out}: it exists; allowed: a new directory; fix: remove it", "file_exists"
        )
    args.right = args.right or args.samples
    if args.right > args.samples:
        raise UsageError(
            f"--right={args.right}; allowed: 1 to --samples={args.samples}", "out_of_range"
        )
    if not 0 <= args.labelled_share <= 1:
        raise UsageError(f"--labelled-share={args.labelled_share}; allowed: 0 to 1", "out_of_range")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    args = parse_arguments(argv)
    cfg = load_config(args.config_name, args.overrides)
    environment = MatrixEnvironment.from_config(cfg)
    start_time = time.monotonic()
    first_task = (args.seed - 1) * args.tasks
    tasks = environment.package.tasks(environment.settings, "train")[
        first_task : first_task + args.tasks
    ]
    policy = Policy(cfg, environment, args.policy)
    states = collect_expert_states(environment, tasks, noise=0.0)
    right_turns, num_sampled_tokens = find_right_turns(states, policy, args.samples, args.right)
    label_counts = [
        sum(turn is not None and turn.level == n for turn in right_turns) for n in LEVELS
    ]
    print(
        f"{len(states)} states, labels of levels 1 to 4: {label_counts}, "
        f"{num_sampled_tokens:,} sampled tokens"
    )
    rows = build_rows(
        states,
        right_turns,
        policy,
        args.labelled_share,
        uses_deepest=args.unsolved == "deepest",
        seed=args.seed,
    )
    model = train_on_turns(args.policy, rows, args.epochs, args.seed)
    model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.policy).save_pretrained(args.out)
    seconds = time.monotonic() - start_time
    val_tasks = environment.package.tasks(environment.settings, "val")[: args.val_tasks]
    episodes = run_episodes(environment, Policy(cfg, environment, str(args.out)), val_tasks, FREE)
    result = {
        "seed": args.seed,
        "states": len(states),
        "labels": label_counts,
        "sampled_tokens": num_sampled_tokens,
        "seconds": round(seconds),
        "success": sum(episode.is_success for episode in episodes) / len(episodes),
        "tokens_per_turn": sum(e.tokens for e in episodes) / sum(e.steps for e in episodes),
        "episodes": len(episodes),
    }
    with atomic_write(args.out / "level_choice.json") as file:
        file.write(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
