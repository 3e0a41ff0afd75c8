"""Compare the training worker with a plain loop in PyTorch and transformers.

    python scripts/dev/bench/plain_loop.py     # the quickstart's policy, two threads
    python scripts/dev/bench/plain_loop.py --model DIR --device cuda --rows 64 --mean 2000

Two passes are measured on the same rows and model: log-probs without gradient, and one GRPO update.
The update is one optimizer step with micro-batches of equally many tokens.

*Bare* is the plain loop. It pads micro-batches of rows of similar length, takes the log-softmax of
the logits, and steps AdamW. It has no checks and no metrics, and runs on one device. Rows of equal
length need no padding, which is its best case. Rows of different lengths are usual in training.

Both loops start with the same weights and end with the same weights up to rounding. The last column
shows the largest difference of log-probs. For the update it shows the distance between the two
final weights, divided by the distance from the initial to the final weights. The
passes alternate ``--repeats`` times, and the fastest one is shown. Token counts exclude padding.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.nn.functional import log_softmax
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.dev.bench.scoring import PassCost
from verl.protocol import DataProto
from verl.trainer.launch.extensions import load_config
from verl.workers.actor import ActorWorker
from verl.workers.rows import make_micro_batches

POLICY = "configs/policies/quickstart"
PROMPT_TOKENS = 64  # tokens before the first turn
TURN_TOKENS = 16  # sampled tokens of a turn, and tokens of an observation
GROUP_SIZE = 8  # rows of a group
Weights: TypeAlias = Mapping[str, Any]  # arrays or tensors


def make_rows(lengths: Sequence[int], vocab: int) -> DataProto:
    """Return rows of random tokens in which turns and observations alternate."""
    rng = torch.Generator().manual_seed(len(lengths))
    response_width = max(lengths) - PROMPT_TOKENS
    ids = torch.randint(10, vocab, (len(lengths), PROMPT_TOKENS + response_width), generator=rng)
    positions = torch.arange(response_width)
    is_response_token = positions < torch.as_tensor(lengths)[:, None] - PROMPT_TOKENS
    response_mask = (is_response_token & (positions // TURN_TOKENS % 2 == 0)).long()
    attention_mask = torch.cat(
        [torch.ones(len(lengths), PROMPT_TOKENS, dtype=torch.bool), is_response_token], dim=1
    )
    tensors = {
        "input_ids": ids * attention_mask,
        "attention_mask": attention_mask.long(),
        "responses": (ids * attention_mask)[:, PROMPT_TOKENS:],
        "response_mask": response_mask,
        "advantages": torch.randn(len(lengths), 1, generator=rng) * response_mask,
    }
    traj_uids = [f"trajectory {row}" for row in range(len(lengths))]
    columns = {
        "uid": [f"group {row // GROUP_SIZE}" for row in range(len(lengths))],
        "traj_uid": traj_uids,
    }
    return DataProto.from_dict(tensors, columns, {"temperature": 1.0, "global_step": 1})


class PlainTrainingLoop:
    """Plain training loop: a model, AdamW, and padded micro-batches."""

    def __init__(self, path: str, device: str, max_tokens: int, lr: float) -> None:
        # The type is Any, because type checkers reject the annotation of .to() in transformers.
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
        self.device = device
        self.max_tokens = max_tokens

    def iter_micro_batches(
        self, data: DataProto
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Yield the row indices and tensors of each micro-batch, cut to its longest row."""
        lengths = data.batch["attention_mask"].sum(-1).tolist()
        for row_indices in make_micro_batches(lengths, max_tokens=self.max_tokens):
            index = torch.as_tensor(row_indices)
            max_length = max(lengths[row] for row in row_indices)
            tensors = {name: value[index].to(self.device) for name, value in data.batch.items()}
            for name in ("input_ids", "attention_mask"):
                tensors[name] = tensors[name][:, :max_length]
            for name in ("responses", "response_mask", "advantages", "old_log_probs"):
                if name in tensors:
                    tensors[name] = tensors[name][:, : max_length - PROMPT_TOKENS]
            yield index, tensors

    def compute_log_probs(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return log-probs [B, R] of all response tokens, observations included."""
        out = self.model(tensors["input_ids"], attention_mask=tensors["attention_mask"])
        log_probs = log_softmax(out.logits[:, PROMPT_TOKENS - 1 : -1].float(), dim=-1)
        return log_probs.gather(-1, tensors["responses"][..., None])[..., 0]

    @torch.no_grad()
    def score(self, data: DataProto) -> torch.Tensor:
        """Return old log-probs [B, R] of the sampled tokens, zero elsewhere."""
        self.model.eval()
        old_log_probs = torch.zeros(data.batch["responses"].shape)
        for row_tensor, tensors in self.iter_micro_batches(data):
            log_probs = self.compute_log_probs(tensors) * tensors["response_mask"]
            old_log_probs[row_tensor, : log_probs.shape[1]] = log_probs.cpu()
        return old_log_probs

    def update(self, data: DataProto) -> None:
        """Do one clipped policy-gradient step on all rows, as a mean over sampled tokens."""
        self.model.train()
        num_sampled_tokens = data.batch["response_mask"].sum()
        for _, tensors in self.iter_micro_batches(data):
            ratio = (self.compute_log_probs(tensors) - tensors["old_log_probs"]).exp()
            advantages = tensors["advantages"]
            clipped_objective = torch.minimum(
                ratio * advantages, ratio.clamp(0.8, 1.28) * advantages
            )
            (-(clipped_objective * tensors["response_mask"]).sum() / num_sampled_tokens).backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_worker(args: argparse.Namespace) -> ActorWorker:
    """Return one training rank as ``main_ppo`` makes it."""
    overrides = [
        f"actor_rollout_ref.model.path={args.model}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batches=1",
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        "actor_rollout_ref.actor.clip_ratio_c=1e6",  # the plain loop has no dual clip
        f"actor_rollout_ref.actor.optim.lr={args.lr}",
        "actor_rollout_ref.actor.optim.warmup_style=constant",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={args.max_tokens}",
    ]
    worker_config = load_config("quickstart", overrides).actor_rollout_ref
    worker = ActorWorker(worker_config, device=args.device, num_threads=args.threads)
    worker.init_model()
    return worker


def compare_passes(args: argparse.Namespace, lengths: Sequence[int], name: str) -> list[str]:
    """Time the training worker and the plain loop, and compare their results.

    Both compute log-probs and one GRPO update of the same random rows of ``lengths`` tokens. Each
    of these two passes gives one returned line of the Markdown table, labelled with ``name``. The
    line has the speeds, their ratio, and the difference of the log-probs or of the final weights.
    """
    worker = make_worker(args)
    bare_loop = PlainTrainingLoop(args.model, args.device, args.max_tokens, args.lr)
    data = make_rows(lengths, worker.lm.config.vocab_size)
    old_weights = {name: torch.as_tensor(value).clone() for name, value in worker.export_weights()}
    num_tokens = sum(lengths)
    scoring_costs = {"ours": PassCost(num_tokens), "bare": PassCost(num_tokens)}
    update_costs = {"ours": PassCost(num_tokens), "bare": PassCost(num_tokens)}
    data.batch["old_log_probs"] = bare_loop.score(data)
    difference = (
        (worker.compute_log_prob(data).batch["old_log_probs"] - bare_loop.score(data)).abs().max()
    )
    for _ in range(args.repeats):
        scoring_costs["ours"].time_call(lambda: worker.compute_log_prob(data))
        scoring_costs["bare"].time_call(lambda: bare_loop.score(data))
        update_costs["ours"].time_call(lambda: worker.update_actor(data))
        update_costs["bare"].time_call(lambda: bare_loop.update(data))
    new_weights = [dict(worker.export_weights()), dict(bare_loop.model.state_dict())]
    return [
        _format_line(f"log-probs, {name}", scoring_costs, float(difference)),
        _format_line(
            f"update, {name}", update_costs, compute_relative_distance(old_weights, *new_weights)
        ),
    ]


def compute_relative_distance(before: Weights, ours: Weights, theirs: Weights) -> float:
    """Return ``|ours - theirs| / |theirs - before|``, with L2 norms over all weights."""
    squared_distance = squared_update_distance = 0.0
    for name, initial_weight in before.items():
        our_weight, their_weight = (
            torch.as_tensor(weights[name]).cpu() for weights in (ours, theirs)
        )
        squared_distance += float((our_weight - their_weight).square().sum())
        squared_update_distance += float((their_weight - initial_weight).square().sum())
    return (squared_distance / squared_update_distance) ** 0.5


def _format_line(name: str, costs: dict[str, PassCost], difference: float) -> str:
    our_cost, bare_cost = costs["ours"], costs["bare"]
    speed_cells = " | ".join(f"{cost.tokens / cost.wall_s:,.0f}" for cost in (our_cost, bare_cost))
    ratio_cells = (
        f"**{bare_cost.wall_s / our_cost.wall_s:.2f}** | {bare_cost.cpu_s / our_cost.cpu_s:.2f}"
    )
    return f"| {name} | {speed_cells} | {ratio_cells} | {difference:.0e} |"


HEADER = """\
| pass | ours, tokens/s | bare, tokens/s | ours / bare | by CPU seconds | difference |
|---|---|---|---|---|---|"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command-line options and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=POLICY, help="directory of a policy")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--mean", type=int, default=350, help="mean tokens of a row")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args(argv)
    rng = torch.Generator().manual_seed(0)
    # Lengths are uniform from 96 tokens upwards, with a mean of ``args.mean`` tokens.
    row_lengths = (
        PROMPT_TOKENS
        + 2 * TURN_TOKENS
        + torch.rand(args.rows, generator=rng) * 2 * (args.mean - 96)
    )
    print(HEADER)
    for name, lengths in (
        ("rows of one length", [args.mean] * args.rows),
        ("rows of a game's lengths", row_lengths.long().tolist()),
    ):
        for line in compare_passes(args, lengths, name):
            print(line, flush=True)


if __name__ == "__main__":
    main()
