"""Compare two ways to score actions: one prefix-shared pass, and one sequence per thought.

A score of RLVCR is, for example, the log-prob of a turn's sampled action, given the history and a
thought. The action of every turn is scored after four thoughts: the sampled one, and one of each
other level.

    python scripts/dev/bench/scoring.py     # a policy of the quickstart's size, random weights
    python scripts/dev/bench/scoring.py --model DIR --contexts 300 1000 --rows 8 --device cuda

For each context length, three passes run on the same batch in turn, ``--repeats`` times. The
fastest repeat of each is shown.

* *old*: the old-log-prob pass alone.
* *shared*: the same pass with the alternative thoughts of every turn as branches, which share the
  row as their prefix. It gives old log-probs and scores.
* *naive*: the old-log-prob pass, then one sequence ``context + thought + action`` for each of the
  four thoughts of every turn, packed into micro-batches of the same size.

Tokens are forwarded tokens. CPU seconds are those of this process.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from verl.config.schema.sft import NewPolicyConfig
from verl.models.loader import load_causal_lm, prepare_for_training
from verl.models.policy import PolicyModel
from verl.protocol import DataProto, object_array
from verl.records import BranchRequest, SpanRequest
from verl.workers.branch_scores import LogProbsAndScores, compute_log_probs_and_scores
from verl.workers.engine import TrainEngine

VOCABULARY_SIZE = 800  # of the policy with random weights
PROMPT_TOKENS = 60  # tokens of the first prompt
TAG_TOKENS = 4  # tokens before a thought: a level and its tags
CLOSING_TOKENS = 2  # tokens between a thought and its action


@dataclass
class PassCost:
    """Cost of a pass: forwarded tokens, wall-clock seconds and CPU seconds."""

    tokens: int
    wall_s: float = float("inf")
    cpu_s: float = float("inf")

    def time_call(self, run: Callable[[], object]) -> None:
        """Call ``run`` and keep its time if it is the fastest so far."""
        wall_start_s = time.perf_counter()
        cpu_start_s = time.process_time()
        run()
        # Wait for the kernels, which run asynchronously: otherwise only their launch is measured.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall_s = time.perf_counter() - wall_start_s
        cpu_s = time.process_time() - cpu_start_s
        # Keep the fastest repeat: other work on the machine can only add time.
        if wall_s < self.wall_s:
            self.wall_s = wall_s
            self.cpu_s = cpu_s


def make_engine(args: argparse.Namespace) -> TrainEngine:
    """Return a training engine with the policy ``--model``, or with random weights."""
    if args.model:
        lm = load_causal_lm(args.model)
    else:
        from transformers import AutoModelForCausalLM, Qwen3Config

        policy_config = NewPolicyConfig()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(
                vocab_size=VOCABULARY_SIZE,
                hidden_size=policy_config.hidden_size,
                intermediate_size=policy_config.intermediate_size,
                num_hidden_layers=policy_config.num_hidden_layers,
                num_attention_heads=policy_config.num_attention_heads,
                num_key_value_heads=policy_config.num_key_value_heads,
                head_dim=policy_config.hidden_size // policy_config.num_attention_heads,
                max_position_embeddings=2 * max(args.contexts) + 512,
                tie_word_embeddings=policy_config.tie_word_embeddings,
            )
        )
        lm = prepare_for_training(model.float())
    return TrainEngine(PolicyModel(lm), device=args.device, dtype=args.dtype)


@dataclass
class _BatchRow:
    """Row of a batch. A span is a sampled action. A branch replaces the rest of the row."""

    ids: np.ndarray
    mask: list[int]
    spans: list[SpanRequest]
    branches: list[BranchRequest]


def make_batch(context: int, args: argparse.Namespace) -> DataProto:
    """Return rows of about ``context`` random tokens, each with all turns of an episode.

    Each turn has a span, its sampled action, and three branches: an alternative thought and the
    same action.
    """
    rng = np.random.default_rng(context)
    batch_rows = [_make_row(context, args, rng) for _ in range(args.rows)]
    rows = [(batch_row.ids, batch_row.mask) for batch_row in batch_rows]
    spans = [batch_row.spans for batch_row in batch_rows]
    return pack_rows(rows, spans, [batch_row.branches for batch_row in batch_rows])


def _make_row(context: int, args: argparse.Namespace, rng: np.random.Generator) -> _BatchRow:
    def draw_length(mean: int) -> int:
        return int(rng.integers(mean // 2, mean * 3 // 2 + 1))

    batch_row = _BatchRow(
        rng.integers(10, VOCABULARY_SIZE, 2 * context + 512), [0] * PROMPT_TOKENS, [], []
    )
    while len(batch_row.mask) < context:
        turn_start = len(batch_row.mask)
        thought_length = draw_length(args.thought)
        action_length = draw_length(args.action)
        action_start = turn_start + TAG_TOKENS + thought_length + CLOSING_TOKENS
        # The end-of-turn token is scored with the action.
        turn_end = action_start + action_length + 1
        turn_index = len(batch_row.spans)
        batch_row.spans.append(SpanRequest(action_start, turn_end, step=turn_index, label=1))
        for level in (2, 3, 4):
            prefix_length = TAG_TOKENS + int(rng.integers(0, 2 * args.thought + 1)) + CLOSING_TOKENS
            branch_tokens = (
                rng.integers(10, VOCABULARY_SIZE, prefix_length).tolist()
                + batch_row.ids[action_start:turn_end].tolist()
            )
            batch_row.branches.append(
                BranchRequest(
                    turn_start,
                    branch_tokens,
                    target_start=prefix_length,
                    step=turn_index,
                    label=level,
                )
            )
        observation_length = draw_length(args.observation)
        batch_row.mask += [1] * (turn_end - turn_start) + [0] * observation_length
    batch_row.ids = batch_row.ids[: len(batch_row.mask)]
    return batch_row


def pack_rows(
    rows: Sequence[tuple[np.ndarray | torch.Tensor, Sequence[int]]],
    spans: Sequence[Sequence[SpanRequest]],
    branches: Sequence[Sequence[BranchRequest]] | None = None,
) -> DataProto:
    """Pad rows of (ids, mask of sampled tokens) to a batch with prompts of one token."""
    width = max(len(mask) for _, mask in rows) - 1
    ids = torch.zeros(len(rows), width + 1, dtype=torch.long)
    attention = torch.zeros(len(rows), width + 1, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for row, (tokens, sampled_mask) in enumerate(rows):
        ids[row, : len(tokens)] = torch.as_tensor(tokens)
        attention[row, : len(tokens)] = 1
        mask[row, : len(tokens) - 1] = torch.as_tensor(sampled_mask[1:])
    tensors = {
        "input_ids": ids,
        "attention_mask": attention,
        "responses": ids[:, 1:],
        "response_mask": mask,
    }
    columns = {"spans": object_array(spans)}
    if branches is not None:
        columns["branches"] = object_array(branches)
    return DataProto.from_dict(tensors, columns)


def make_naive_batch(data: DataProto) -> DataProto:
    """Return one row ``context + thought + action`` for every thought of every turn."""
    rows = []
    spans = []
    columns = zip(data.non_tensor_batch["spans"], data.non_tensor_batch["branches"], strict=True)
    for row, (row_spans, row_branches) in enumerate(columns):
        tokens = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()]
        row_sequences = [(span, tokens[: span.end], span.start) for span in row_spans]
        for branch in row_branches:
            sequence = torch.cat([tokens[: branch.start], torch.tensor(branch.token_ids)])
            row_sequences.append((branch, sequence, branch.start + branch.target_start))
        for request, sequence, target_index in row_sequences:
            rows.append((sequence, [0] * len(sequence)))
            spans.append(
                [SpanRequest(target_index, len(sequence), step=request.step, label=request.label)]
            )
    return pack_rows(rows, spans)


def measure_passes(
    engine: TrainEngine, context: int, args: argparse.Namespace
) -> tuple[DataProto, dict[str, PassCost], float]:
    """Return a batch, the costs of the three passes, and the largest difference of scores."""
    data = make_batch(context, args)
    data_without_branches = data.select(list(data.batch.keys()), [])
    naive_data = make_naive_batch(data)
    row_tokens = int(data.batch["attention_mask"].sum())
    naive_tokens = int(naive_data.batch["attention_mask"].sum())
    num_branch_tokens = sum(
        len(b.token_ids) for row in data.non_tensor_batch["branches"] for b in row
    )
    costs = {
        "old": PassCost(row_tokens),
        "shared": PassCost(row_tokens + num_branch_tokens),
        "naive": PassCost(row_tokens + naive_tokens),
    }
    scores: dict[str, LogProbsAndScores] = {}

    def score(name: str, batch: DataProto) -> None:
        scores[name] = compute_log_probs_and_scores(engine, batch, max_tokens=args.max_tokens)

    passes = {
        "old": lambda: score("old", data_without_branches),
        "shared": lambda: score("shared", data),
        "naive": lambda: (score("old", data_without_branches), score("naive", naive_data)),
    }
    for _ in range(args.repeats):
        for name, run in passes.items():
            costs[name].time_call(run)
    return data, costs, find_largest_difference(scores["shared"], scores["naive"])


def find_largest_difference(shared: LogProbsAndScores, naive: LogProbsAndScores) -> float:
    """Return the largest absolute difference of log-probs and entropies between the two passes."""
    assert naive.span_scores is not None
    assert shared.span_scores is not None and shared.branch_scores is not None
    # ``make_naive_batch`` orders the records by row, with the spans of a row before its branches.
    naive_records = iter([record for row in naive.span_scores for record in row])
    largest_difference = 0.0
    for spans, branches in zip(shared.span_scores, shared.branch_scores, strict=True):
        for record in [*spans, *branches]:
            naive_record = next(naive_records)
            largest_difference = max(largest_difference, abs(record.logprob - naive_record.logprob))
            largest_difference = max(largest_difference, abs(record.entropy - naive_record.entropy))
    return largest_difference


HEADER = """\
| context | steps | tokens: old / shared / naive | wall s: old / shared / naive \
| CPU s: old / shared / naive \
| naive / shared: tokens, wall, CPU | shared / old: tokens, wall, **per real token** | difference |
|---|---|---|---|---|---|---|---|"""


def format_table_row(
    context: int, data: DataProto, costs: dict[str, PassCost], difference: float
) -> str:
    """Return one line of the Markdown table."""
    old_cost, shared_cost, naive_cost = costs["old"], costs["shared"], costs["naive"]
    num_turns = sum(len(row) for row in data.non_tensor_batch["spans"])
    token_time_ratio = (shared_cost.wall_s / shared_cost.tokens) / (
        old_cost.wall_s / old_cost.tokens
    )
    cells = [
        str(context),
        f"{num_turns} in {len(data)} rows",
        " / ".join(f"{cost.tokens:,}" for cost in costs.values()),
        " / ".join(f"{cost.wall_s:.2f}" for cost in costs.values()),
        " / ".join(f"{cost.cpu_s:.2f}" for cost in costs.values()),
        f"{naive_cost.tokens / shared_cost.tokens:.1f}, "
        f"{naive_cost.wall_s / shared_cost.wall_s:.1f}, "
        f"{naive_cost.cpu_s / shared_cost.cpu_s:.1f}",
        f"{shared_cost.tokens / old_cost.tokens:.2f}, "
        f"{shared_cost.wall_s / old_cost.wall_s:.2f}, **{token_time_ratio:.2f}**",
        f"{difference:.0e}",
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command-line options and print a Markdown table."""
    parser = argparse.ArgumentParser(description="Prefix-shared scoring against naive scoring.")
    parser.add_argument(
        "--model", help="policy directory; default: random weights in the quickstart's size"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[300, 1000, 3000], help="tokens of a row"
    )
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch")
    parser.add_argument("--thought", type=int, default=12, help="tokens of a thought, on average")
    parser.add_argument("--action", type=int, default=6, help="tokens of an action, on average")
    parser.add_argument(
        "--observation", type=int, default=20, help="tokens between two turns, on average"
    )
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    engine = make_engine(args)
    num_parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    setup_label = f"{args.dtype} on {engine.device}, {args.threads} threads"
    print(f"{num_parameters / 1e6:.1f} million parameters, {setup_label}\n\n{HEADER}")
    for context in args.contexts:
        print(format_table_row(context, *measure_passes(engine, context, args)), flush=True)


if __name__ == "__main__":
    main()
