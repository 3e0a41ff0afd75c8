"""Compare log-probs and an update with and without the prefix tree, on trajectories of a config.

    python scripts/dev/bench/prefix_tree.py                 # configs/quickstart.yaml, all histories
    python scripts/dev/bench/prefix_tree.py --histories chat --tasks 4 --repeats 5
    python scripts/dev/bench/prefix_tree.py --scale 4       # a model with 4 times the sizes

For each value of ``env.history``, ``--tasks`` groups of trajectories are generated with the policy
of the config. The same training worker then computes log-probs and an update on their rows, with
and without merging rows that share prefixes. Both alternate ``--repeats`` times, and the fastest of
each is shown. With ``chat``, the template drops the thoughts of earlier turns, as those of
reasoning models do. With ``--scale N``, the rows of the policy are computed by a model with random
weights whose layers are N times as wide and N times as many.

* *possible*: tokens of the rows / tokens of the prefix tree of all rows of an optimizer step.
* *computed*: tokens of the rows / tokens that the passes of the update computed.
* *time*: CPU seconds without / CPU seconds with the tree. Other work on the machine changes them
  less than wall-clock seconds, which are also shown.
* *share*: part of the possible saving of time: (1 - 1 / time) / (1 - 1 / possible).
* *difference*: the largest one between the log-probs of both.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from agent_system.multi_turn_rollout.packing import build_rows, collate_rows
from scripts.dev.bench.scoring import PassCost
from scripts.dev.bench.workload import Workload
from verl.models.prefix_tree import sort_sequences
from verl.names import PrefixTree
from verl.protocol import DataProto
from verl.workers.actor import ActorWorker
from verl.workers.rows import Rows
from verl.workers.update import plan_mini_batches

HISTORIES = ("append", "window", "chat")
# Template of the quickstart's policy, without the thoughts of earlier turns.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- message['content'].split('</think>')[-1] + '<|end|>' -}}"
    "{%- else -%}{{- message['content'] -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
# Sizes of the model's config that ``--scale`` multiplies.
SCALED_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
)
HEADER = """\
| history | rows | tokens | possible | computed | log-probs: wall s, CPU s | time, share \
| update: wall s, CPU s | time, share | difference |
|---|---|---|---|---|---|---|---|---|---|"""


def generate_rows(history: str, args: argparse.Namespace) -> tuple[Workload, DataProto]:
    """Return the rows of ``args.tasks`` groups of trajectories, with random advantages."""
    overrides = [f"env.history={history}", "algorithm.adv_estimator=grpo", *args.overrides]
    workload = Workload(args.config_name, overrides, args.tasks)
    if history == "chat":
        workload.tokenizer.chat_template = CHAT_TEMPLATE

    async def collect() -> DataProto:
        collector = workload.make_collector()
        rollout = await collector.collect(workload.rollout_specs, workload.settings)
        await collector.close()
        await workload.engine.close()
        return collate_rows(build_rows(rollout.trajectories), workload.tokenizer.pad_token_id)

    data = asyncio.run(collect())
    mask = data.batch["response_mask"]
    rng = torch.Generator().manual_seed(0)
    data.batch["advantages"] = torch.randn(mask.shape, generator=rng) * mask
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"].clone()
    data.batch["row_shares"] = torch.ones(len(data))
    data.meta_info |= {"temperature": 1.0, "global_step": 1}
    return workload, data


def save_larger_model(path: str, scale: int, directory: str) -> str:
    """Save a model with random weights and larger sizes than ``path``. Return ``directory``."""
    config = AutoConfig.from_pretrained(path)
    for key in SCALED_SIZES:
        setattr(config, key, scale * getattr(config, key))
    config.layer_types = scale * config.layer_types
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(path).save_pretrained(directory)
    return directory


def compute_possible_token_ratio(data: DataProto, worker: ActorWorker) -> float:
    """Return tokens of all rows / tokens of their prefix trees (one tree per mini-batch)."""
    row_tokens = [row.numpy() for row in Rows(data).tokens]
    num_tokens = sum(map(len, row_tokens))
    actor_config = worker.config.actor
    num_shared_tokens = 0
    for rows in plan_mini_batches(data, actor_config, "update_actor", worker.seed, 1):
        num_shared_tokens += sum(sort_sequences([row_tokens[row] for row in rows]).shared_lengths)
    return num_tokens / (num_tokens - num_shared_tokens)


def compare_with_prefix_tree(history: str, args: argparse.Namespace) -> str:
    """Time the update with and without the prefix tree. Return the table's line of ``history``."""
    workload, data = generate_rows(history, args)
    worker_config = workload.cfg.actor_rollout_ref
    worker_config.actor.optim.lr = 0.0  # every update does the same work
    worker_config.actor.optim.warmup_style = "constant"
    with tempfile.TemporaryDirectory() as directory:
        if args.scale > 1 and worker_config.model.path:
            worker_config.model.path = save_larger_model(
                worker_config.model.path, args.scale, directory
            )
        worker = ActorWorker(worker_config, device="cpu", num_threads=args.threads)
        worker.init_model()
    num_tokens = sum(Rows(data).lengths)
    modes: tuple[PrefixTree, ...] = (False, True)
    scoring_costs = {mode: PassCost(num_tokens) for mode in modes}
    update_costs = {mode: PassCost(num_tokens) for mode in modes}
    log_probs: dict[PrefixTree, torch.Tensor] = {}
    token_ratios: dict[PrefixTree, float] = {}

    def score(mode: PrefixTree) -> None:
        log_probs[mode] = worker.compute_log_prob(data).batch["old_log_probs"]

    def train(mode: PrefixTree) -> None:
        metrics = worker.update_actor(data).meta_info["metrics"]
        token_ratios[mode] = metrics["perf/tree_token_ratio"]

    for _ in range(args.repeats):
        for mode in modes:
            worker.train_engine.prefix_tree = mode
            scoring_costs[mode].time_call(lambda mode=mode: score(mode))
            update_costs[mode].time_call(lambda mode=mode: train(mode))
    possible_ratio = compute_possible_token_ratio(data, worker)
    cells = [
        history,
        f"{len(data):,}",
        f"{num_tokens:,}",
        f"{possible_ratio:.2f}",
        f"{token_ratios[True]:.2f}",
    ]
    for costs in (scoring_costs, update_costs):
        cost_without_tree, cost_with_tree = costs[False], costs[True]
        time_ratio = cost_without_tree.cpu_s / cost_with_tree.cpu_s
        share_of_possible = (1 - 1 / time_ratio) / (1 - 1 / possible_ratio)
        wall_seconds_text = f"{cost_without_tree.wall_s:.2f} / {cost_with_tree.wall_s:.2f}"
        cells += [
            f"{wall_seconds_text}, {cost_without_tree.cpu_s:.2f} / {cost_with_tree.cpu_s:.2f}",
            f"**{time_ratio:.2f}**, {share_of_possible:.0%}",
        ]
    cells.append(f"{float((log_probs[True] - log_probs[False]).abs().max()):.0e}")
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command-line options and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-name", default="quickstart")
    parser.add_argument("--histories", nargs="+", choices=HISTORIES, default=list(HISTORIES))
    parser.add_argument("--tasks", type=int, default=8, help="groups of trajectories")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1, help="factor of the model's sizes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    print(HEADER, flush=True)
    for history in args.histories:
        print(compare_with_prefix_tree(history, args), flush=True)


if __name__ == "__main__":
    main()
