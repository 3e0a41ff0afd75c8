"""Train the choice of the thinking level by supervision, as a baseline for credit for levels.

    python experiments/train_router.py experiments/policies/relay --out data/models/router

1. States are drawn from the expert's episodes of training tasks.
2. In every state every level is forced ``--samples`` times. The label of the state is the lowest
   level at which all sampled actions are right. States without such a level have no label.
3. For each labelled state the policy is trained on a sampled turn with a right action at the level
   of the label. Training on the digit alone would make it forget its thoughts and actions.
4. Held-out episodes are run with the levels that the trained policy chooses.

The cost is printed: sampled tokens and seconds of all steps. The environment needs an expert, and
``env.history=window``, as ``level_matrix.py`` does.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from experiments.level_matrix import (
    FREE,
    DecisionState,
    MatrixEnvironment,
    Policy,
    SampledStep,
    StepSampler,
    collect_expert_states,
    run_episodes,
)
from rlvcr.levels import LEVELS
from verl.trainer.launch.extensions import load_config
from verl.utils.commands import UsageError, parse_positive_int, run_reporting_mistakes
from verl.utils.files import atomic_write

LEARNING_RATE = 3e-4
BATCH_SIZE = 64


def find_right_turns(
    states: Sequence[DecisionState], policy: StepSampler, samples: int
) -> tuple[list[SampledStep | None], int]:
    """Return a turn with a right action for each state, and the number of sampled tokens.

    The turn is at the lowest level that suffices: all ``samples`` turns with this forced level have
    a right action. It is None if no level suffices.
    """
    prompts = [state.prompt for state in states]
    right_turns: list[SampledStep | None] = [None] * len(states)
    tokens = 0
    # Start with the lowest level. States with a right turn are not sampled at higher levels.
    for level in LEVELS:
        candidates = [number for number, turn in enumerate(right_turns) if turn is None]
        right_by_state: dict[int, SampledStep] = {}
        for _ in range(samples):
            turns = policy.sample_steps([prompts[n] for n in candidates], [level] * len(candidates))
            tokens += sum(turn.tokens for turn in turns)
            right_by_state = {
                number: turn
                for number, turn in zip(candidates, turns, strict=True)
                if states[number].decision.is_right(turn.action)
            }
            candidates = list(right_by_state)
        for number in candidates:
            right_turns[number] = right_by_state[number]
    return right_turns, tokens


def train_on_turns(
    directory: str, rows: Sequence[tuple[list[int], Sequence[int]]], epochs: int, seed: int
) -> PreTrainedModel:
    """Train the model in ``directory`` on rows (prompt tokens, turn tokens).

    The loss includes the turn tokens only. Return the trained model.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    num_batches = -(-len(rows) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * num_batches)
    for epoch in range(epochs):
        losses = []
        for chosen in torch.randperm(len(rows)).split(BATCH_SIZE):
            batch = [rows[n] for n in chosen.tolist()]
            ids = pad_sequence([torch.tensor([*prompt, *turn]) for prompt, turn in batch], True)
            labels = pad_sequence(
                [torch.tensor([-100] * len(prompt) + list(turn)) for prompt, turn in batch],
                batch_first=True,
                padding_value=-100,
            )
            lengths = torch.tensor([len(prompt) + len(turn) for prompt, turn in batch])
            is_token = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
            loss = model(ids, attention_mask=is_token.long(), labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}", flush=True)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("policy", help="directory of the policy (Hugging Face form)")
    parser.add_argument("--config-name", default="relay_16", help="config of the environment")
    parser.add_argument("--out", type=Path, required=True, help="directory for the trained policy")
    parser.add_argument("--tasks", type=parse_positive_int, default=256, help="training tasks")
    parser.add_argument("--samples", type=parse_positive_int, default=2, help="per state and level")
    parser.add_argument("--epochs", type=parse_positive_int, default=6)
    parser.add_argument("--val-tasks", type=parse_positive_int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="key=value of the config")
    args = parser.parse_args(argv)
    if args.out.exists():
        raise UsageError(f"--out={args.out}: it exists; allowed: a new directory; fix: remove it")
    cfg = load_config(args.config_name, args.overrides)
    environment = MatrixEnvironment.from_config(cfg)
    began = time.monotonic()
    first_task = (args.seed - 1) * args.tasks
    tasks = environment.package.tasks(environment.settings, "train")[
        first_task : first_task + args.tasks
    ]
    policy = Policy(cfg, environment, args.policy)
    states = collect_expert_states(environment, tasks, noise=0.0)
    right_turns, tokens = find_right_turns(states, policy, args.samples)
    labelled_states = [
        (s, turn) for s, turn in zip(states, right_turns, strict=True) if turn is not None
    ]
    counts = [sum(turn.level == level for _, turn in labelled_states) for level in LEVELS]
    print(f"{len(states)} states, labels of levels 1 to 4: {counts}, {tokens:,} sampled tokens")
    rows = [(policy.encode_prompt(state.prompt), turn.token_ids) for state, turn in labelled_states]
    model = train_on_turns(args.policy, rows, args.epochs, args.seed)
    model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.policy).save_pretrained(args.out)
    seconds = time.monotonic() - began
    val_tasks = environment.package.tasks(environment.settings, "val")[: args.val_tasks]
    outcomes = run_episodes(environment, Policy(cfg, environment, str(args.out)), val_tasks, FREE)
    result = {
        "seed": args.seed,
        "states": len(states),
        "labels": counts,
        "sampled_tokens": tokens,
        "seconds": round(seconds),
        "success": sum(outcome.is_success for outcome in outcomes) / len(outcomes),
        "tokens_per_turn": sum(o.tokens for o in outcomes) / sum(o.steps for o in outcomes),
        "episodes": len(outcomes),
    }
    with atomic_write(args.out / "router.json") as file:
        file.write(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_reporting_mistakes(main))
