"""One pass over rows and their branches: log-probs and entropies of the rows, scores of branches
and spans.

    row   [prompt ... sampled tokens ...]      -> log_probs, entropy [B, R] at the rollout temperature
    span  tokens [start, end) of the row       -> one record at temperature 1
    branch row[0:start) + token_ids            -> one record at temperature 1 over token_ids[target_start:]

A record is ``{"step", "level", "logprob", "entropy", "prob", "seq_prob", "num_tokens"}``: mean
log-prob, mean entropy, mean token probability, exp of the mean log-prob, and the number of targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.models.branch_attention import Branch, PackedBranches, naive_sequences
from verl.models.token_scores import Targets, TokenScores
from verl.protocol import DataProto, object_array
from verl.workers.collectives import max_over_ranks
from verl.workers.engine import TrainEngine
from verl.workers.rows import Rows, micro_batches


@dataclass
class RowScores:
    """``log_probs``, ``entropy`` [B, R] on the CPU, zero where nothing was sampled; records per
    row, if asked for.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    branch_scores: np.ndarray | None = None
    span_scores: np.ndarray | None = None


@torch.no_grad()
def score_rows(
    engine: TrainEngine,
    data: DataProto,
    temperature: float = 1.0,
    max_rows: int | None = None,
    max_tokens: int | None = None,
) -> RowScores:
    """Score all rows in micro-batches of ``max_rows`` rows or ``max_tokens`` tokens (branches
    included).

    Raises ``ValueError`` for a branch or span outside its row. Every rank of the engine must call
    it.
    """
    rows = Rows(data, engine.device)
    branches, spans = _column(data, "branches"), _column(data, "spans")
    out = RowScores(torch.zeros(rows.mask.shape), torch.zeros(rows.mask.shape))
    if branches is not None or spans is not None:
        out.branch_scores = object_array([[] for _ in range(len(rows))])
        out.span_scores = object_array([[] for _ in range(len(rows))])
    branches = branches or [[] for _ in range(len(rows))]
    spans = spans or [[] for _ in range(len(rows))]
    sizes = [
        n + sum(len(b["token_ids"]) for b in row)
        for n, row in zip(rows.lengths, branches, strict=True)
    ]
    cuts = micro_batches(sizes, max_rows, max_tokens)
    with engine.resident():
        passes = int(max_over_ranks([len(cuts)])[0])
        for number in range(passes):
            # a rank that has finished repeats a row, since every pass is a collective operation
            index = cuts[number] if number < len(cuts) else [0]
            _score_micro_batch(engine, rows, index, branches, spans, temperature, out)
    return out


def _column(data: DataProto, key: str) -> list[list[dict[str, Any]]] | None:
    return (
        [list(row) for row in data.non_tensor_batch[key]] if key in data.non_tensor_batch else None
    )


def _score_micro_batch(
    engine, rows: Rows, index: list[int], branches, spans, temperature: float, out: RowScores
) -> None:
    mine = [branches[row] for row in index]
    packed = rows.pack(index, [[Branch(b["start"], b["token_ids"]) for b in row] for row in mine])
    groups = [
        rows.targets(packed, index, temperature),
        *_segment_targets(rows, packed, index, mine, [spans[row] for row in index]),
    ]
    plain, of_branches, of_spans = engine.module(
        packed.input_ids, packed.position_ids, packed.layout, groups
    )
    where = torch.as_tensor(index)
    out.log_probs[where] = rows.unpack(plain.log_probs, index).cpu()
    out.entropy[where] = rows.unpack(plain.entropy, index).cpu()
    if out.branch_scores is None:
        return
    branch_records = _records([b for row in mine for b in row], of_branches, _branch_size)
    span_records = _records(
        [s for row in index for s in spans[row]], of_spans, lambda s: s["end"] - s["start"]
    )
    for row in index:
        out.branch_scores[row] = [next(branch_records) for _ in branches[row]]
        out.span_scores[row] = [next(span_records) for _ in spans[row]]


def _branch_size(branch: dict[str, Any]) -> int:
    return len(branch["token_ids"]) - branch["target_start"]


def _segment_targets(
    rows: Rows,
    packed: PackedBranches,
    index: list[int],
    branches: list[list[dict]],
    spans: list[list[dict]],
) -> tuple[Targets, Targets]:
    """Targets of all branches and of all spans of a micro-batch, each in order, at temperature 1."""
    before: list[torch.Tensor] = [torch.zeros(0, dtype=torch.long)]
    tokens: list[torch.Tensor] = [torch.zeros(0, dtype=torch.long)]
    for row_branches, offset, firsts in zip(
        branches, packed.offsets, packed.branch_offsets, strict=True
    ):
        for branch, first in zip(row_branches, firsts, strict=True):
            ids = torch.as_tensor(branch["token_ids"], dtype=torch.long)
            if not 0 <= branch["target_start"] < len(ids):
                raise ValueError(
                    f"branch target_start {branch['target_start']} is outside its {len(ids)} tokens"
                )
            position = torch.arange(first - 1, first - 1 + len(ids))
            position[0] = (
                offset + branch["start"] - 1
            )  # the row's token before the branch predicts its first
            before.append(position[branch["target_start"] :])
            tokens.append(ids[branch["target_start"] :])
    of_branches = Targets(torch.cat(before).to(rows.device), torch.cat(tokens).to(rows.device))
    before, tokens = before[:1], tokens[:1]
    for row, row_spans, offset in zip(index, spans, packed.offsets, strict=True):
        for span in row_spans:
            start, end = span["start"], span["end"]
            if not 0 < start < end <= rows.lengths[row]:
                raise ValueError(
                    f"span [{start}, {end}) is outside 1..{rows.lengths[row]}, the tokens of row {row}"
                )
            before.append(torch.arange(offset + start - 1, offset + end - 1))
            tokens.append(rows.tokens[row][start:end])
    return of_branches, Targets(
        torch.cat(before).to(rows.device), torch.cat(tokens).to(rows.device)
    )


def _records(segments: Sequence[dict[str, Any]], scores: TokenScores, size_of):
    """Iterator over one record per segment, whose tokens lie behind one another in ``scores``."""
    sizes = torch.tensor([size_of(segment) for segment in segments], dtype=torch.long)
    owner = torch.repeat_interleave(torch.arange(len(segments)), sizes)
    per_token = (
        torch.stack([scores.log_probs, scores.entropy, scores.log_probs.exp()], dim=1)
        .double()
        .cpu()
    )
    means = torch.zeros(len(segments), 3, dtype=torch.float64).index_add_(0, owner, per_token)
    means = means / sizes[:, None].clamp(min=1)
    values = [*means.unbind(1), means[:, 0].exp()]
    for segment, size, logprob, entropy, prob, seq_prob in zip(
        segments, sizes.tolist(), *(column.tolist() for column in values), strict=True
    ):
        yield {
            "step": segment["step"],
            "level": segment["level"],
            "logprob": logprob,
            "entropy": entropy,
            "prob": prob,
            "seq_prob": seq_prob,
            "num_tokens": size,
        }


@torch.no_grad()
def score_branches_naively(engine: TrainEngine, data: DataProto) -> np.ndarray:
    """Reference for ``branch_scores``: one forward of ``row[:start] + token_ids`` for each branch,
    one at a time.
    """
    rows = Rows(data, engine.device)
    branches = _column(data, "branches") or [[] for _ in range(len(rows))]
    plain = [[Branch(b["start"], b["token_ids"]) for b in row] for row in branches]
    found = object_array([[] for _ in range(len(rows))])
    with engine.resident():
        for row, sequences in enumerate(naive_sequences(rows.tokens, plain)):
            found[row] = [
                _score_alone(engine, sequence, branch)
                for sequence, branch in zip(sequences, branches[row], strict=True)
            ]
    return found


def _score_alone(
    engine: TrainEngine, sequence: torch.Tensor, branch: dict[str, Any]
) -> dict[str, Any]:
    packed = Rows.pack_alone(sequence, engine.device)
    first = branch["start"] + branch["target_start"]
    index = torch.arange(first - 1, len(sequence) - 1, device=engine.device)
    targets = Targets(index, sequence[first:].to(engine.device))
    scores = engine.module(packed.input_ids, packed.position_ids, packed.layout, [targets])[0]
    return next(_records([branch], scores, _branch_size))
