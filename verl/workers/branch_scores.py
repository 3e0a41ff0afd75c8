"""Score rows, branches (alternative continuations) and spans (token ranges) in shared forwards.

row   [prompt ... sampled tokens ...]   -> log_probs, entropy [B, R], at the rollout temperature
span  tokens [start, end) of the row    -> one score at temperature 1
branch row[0:start) + token_ids         -> one score at temperature 1 over
                                           token_ids[target_start:]

Equal branches of a batch are computed once.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from verl.models.branch_attention import PackedBranches, naive_sequences
from verl.models.token_scores import Targets, TokenScores
from verl.protocol import DataProto, object_array
from verl.records import Branch, SegmentScore, Span
from verl.workers.engine import TrainEngine
from verl.workers.mini_batches import score_micro_batches
from verl.workers.rows import MicroBatchLimits, Rows


@dataclass
class RowScores:
    """Scores of the rows of a batch.

    ``log_probs`` and ``entropy`` are [B, R] on the CPU, zero where no token was sampled.
    ``branch_scores`` and ``span_scores`` [B] hold a list of ``SegmentScore`` per row. They are None
    for a batch without branches and spans.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    branch_scores: np.ndarray | None = None
    span_scores: np.ndarray | None = None


def score_rows(
    engine: TrainEngine,
    data: DataProto,
    temperature: float = 1.0,
    max_rows: int | None = None,
    max_tokens: int | None = None,
) -> RowScores:
    """Score all rows in micro-batches of ``max_rows`` rows or ``max_tokens`` tokens.

    The tokens of a row include those of its branches. ``branches`` and ``spans`` in
    ``non_tensor_batch`` hold the ``Branch`` and ``Span`` objects of each row. Raises ``ValueError``
    for a span outside its row. Every rank of the engine must call this function.
    """
    scorer = _BatchScorer(engine, data, temperature)
    limits = MicroBatchLimits(max_rows=max_rows, max_tokens=max_tokens)
    score_micro_batches(engine, scorer.row_sizes(), limits, scorer.score_micro_batch)
    return scorer.collect_scores()


def _list_column(data: DataProto, key: str) -> list[list[Any]]:
    if key not in data.non_tensor_batch:
        return [[] for _ in range(len(data))]
    return [list(row) for row in data.non_tensor_batch[key]]


class _BatchScorer:
    """Rows, branches and spans of one batch, and their scores so far."""

    def __init__(self, engine: TrainEngine, data: DataProto, temperature: float) -> None:
        self.rows = Rows(data, engine.device)
        self._requested: list[list[Branch]] = _list_column(data, "branches")
        self.branches, self._owners = merge_equal_branches(self._requested, self.rows.tokens)
        self.spans: list[list[Span]] = _list_column(data, "spans")
        self._engine = engine
        self._temperature = temperature
        self._has_segments = bool({"branches", "spans"} & set(data.non_tensor_batch))
        self._log_probs = torch.zeros(self.rows.mask.shape)
        self._entropy = torch.zeros(self.rows.mask.shape)
        self._branch_scores = object_array([[] for _ in range(len(self.rows))])
        self._span_scores = object_array([[] for _ in range(len(self.rows))])

    def row_sizes(self) -> list[int]:
        """Return the number of tokens that each row costs, including its branches."""
        return list(map(self._engine.module.path.count_tokens, self.rows.lengths, self.branches))

    def score_micro_batch(self, index: list[int]) -> None:
        """Score the rows ``index``, their branches and their spans in one forward."""
        branches = [self.branches[row] for row in index]
        spans = [self.spans[row] for row in index]
        packed = self.rows.pack_rows(index, branches)
        groups = [
            self.rows.sampled_targets(packed, index, self._temperature),
            _branch_targets(packed, branches, self.rows.device),
            _span_targets(self.rows, packed, index, spans),
        ]
        row_token_scores, branch_token_scores, span_token_scores = self._engine.module(
            packed.input_ids, packed.position_ids, packed.layout, groups
        )
        row_index = torch.as_tensor(index)
        self._log_probs[row_index] = self.rows.scatter_to_responses(
            row_token_scores.log_probs, index
        ).cpu()
        self._entropy[row_index] = self.rows.scatter_to_responses(
            row_token_scores.required_entropy, index
        ).cpu()
        if not self._has_segments:
            return
        branch_scores = _segment_scores([b for row in branches for b in row], branch_token_scores)
        span_scores = _segment_scores([s for row in spans for s in row], span_token_scores)
        for row in index:
            self._branch_scores[row] = [next(branch_scores) for _ in self.branches[row]]
            self._span_scores[row] = [next(span_scores) for _ in self.spans[row]]

    def collect_scores(self) -> RowScores:
        """Return the scores that ``score_micro_batch`` has stored, for all rows of the batch."""
        if not self._has_segments:
            return RowScores(self._log_probs, self._entropy)
        branch_scores = object_array(
            [
                [
                    replace(self._branch_scores[row][index], step=branch.step, label=branch.label)
                    for branch, (row, index) in zip(branches, owners, strict=True)
                ]
                for branches, owners in zip(self._requested, self._owners, strict=True)
            ]
        )
        return RowScores(self._log_probs, self._entropy, branch_scores, self._span_scores)


def merge_equal_branches(
    branches: Sequence[Sequence[Branch]], row_tokens: Sequence[torch.Tensor]
) -> tuple[list[list[Branch]], list[list[tuple[int, int]]]]:
    """Return the branches of each row without repetitions, and the owner of each given branch.

    Branches with the same tokens after the same prefix have equal scores. An owner is a row and an
    index in that row's remaining branches. Members of a group in the same state share prefixes, and
    with equal actions also contexts. ``row_tokens`` [B] are rows without padding.
    """
    first_of: dict[tuple[bytes, tuple[int, ...], int], tuple[int, int]] = {}
    kept: list[list[Branch]] = [[] for _ in branches]
    owners: list[list[tuple[int, int]]] = [[] for _ in branches]
    for row, (row_branches, tokens) in enumerate(zip(branches, row_tokens, strict=True)):
        array = tokens.numpy()
        prefixes = {
            start: hashlib.sha256(array[:start].tobytes()).digest()
            for start in {branch.start for branch in row_branches}
        }
        for branch in row_branches:
            key = (prefixes[branch.start], tuple(branch.token_ids), branch.target_start)
            owner = first_of.setdefault(key, (row, len(kept[row])))
            if owner == (row, len(kept[row])):
                kept[row].append(branch)
            owners[row].append(owner)
    return kept, owners


def _branch_targets(
    packed: PackedBranches, branches: Sequence[Sequence[Branch]], device: str
) -> Targets:
    """Return the branch tokens to score in a micro-batch, in order, at temperature 1."""
    predicting_positions: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    rows_with_offsets = zip(branches, packed.offsets, packed.branch_offsets, strict=True)
    for row_branches, offset, firsts in rows_with_offsets:
        for branch, first_position in zip(row_branches, firsts, strict=True):
            ids = torch.as_tensor(branch.token_ids, dtype=torch.long)
            if not 0 <= branch.target_start < len(ids):
                raise ValueError(
                    f"branch target_start {branch.target_start} is outside its {len(ids)} tokens"
                )
            position = torch.arange(first_position - 1, first_position - 1 + len(ids))
            # The first token of a branch is predicted by the token of the row before the branch.
            # In the packed sequence, the preceding token may belong to another branch.
            position[0] = offset + branch.start - 1
            predicting_positions.append(position[branch.target_start :])
            tokens.append(ids[branch.target_start :])
    return _concat_targets(predicting_positions, tokens, device)


def _span_targets(
    rows: Rows, packed: PackedBranches, index: Sequence[int], spans: Sequence[Sequence[Span]]
) -> Targets:
    """Return the span tokens to score in a micro-batch, in order, at temperature 1."""
    predicting_positions: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    for row, row_spans, offset in zip(index, spans, packed.offsets, strict=True):
        length = rows.lengths[row]
        for span in row_spans:
            if not 0 < span.start < span.end <= length:
                raise ValueError(
                    f"span [{span.start}, {span.end}) is outside 1..{length}, "
                    f"the tokens of row {row}"
                )
            predicting_positions.append(
                torch.arange(offset + span.start - 1, offset + span.end - 1)
            )
            tokens.append(rows.tokens[row][span.start : span.end])
    return _concat_targets(predicting_positions, tokens, rows.device)


def _concat_targets(
    predicting_positions: list[torch.Tensor], tokens: list[torch.Tensor], device: str
) -> Targets:
    empty = torch.zeros(0, dtype=torch.long)
    return Targets(
        torch.cat([empty, *predicting_positions]).to(device), torch.cat([empty, *tokens]).to(device)
    )


def _segment_scores(
    segments: Sequence[Branch | Span], scores: TokenScores
) -> Iterator[SegmentScore]:
    """Yield one score per branch or span, averaged over its tokens.

    ``scores`` holds the tokens of all ``segments`` in order.
    """
    sizes = torch.tensor([segment.num_targets for segment in segments], dtype=torch.long)
    owner = torch.repeat_interleave(torch.arange(len(segments)), sizes)
    per_token = torch.stack(
        [scores.log_probs, scores.required_entropy, scores.log_probs.exp()], dim=1
    )
    # summed in float64: a float32 sum of a long segment would depend on the order of its tokens
    means = torch.zeros(len(segments), 3, dtype=torch.float64)
    means.index_add_(0, owner, per_token.double().cpu())
    means = means / sizes[:, None].clamp(min=1)
    columns = [*means.unbind(1), means[:, 0].exp()]
    values = zip(*(column.tolist() for column in columns), strict=True)
    for segment, numbers in zip(segments, values, strict=True):
        logprob, entropy, mean_prob, geometric_prob = numbers
        yield SegmentScore(
            step=segment.step,
            label=segment.label,
            logprob=logprob,
            entropy=entropy,
            mean_prob=mean_prob,
            geometric_prob=geometric_prob,
            num_tokens=segment.num_targets,
        )


@torch.no_grad()
def score_branches_naively(engine: TrainEngine, data: DataProto) -> np.ndarray:
    """Return ``branch_scores`` by one separate forward of ``row[:start] + token_ids`` per branch.

    This is the slow reference for ``score_rows``.
    """
    rows = Rows(data, engine.device)
    branches: list[list[Branch]] = _list_column(data, "branches")
    scores = object_array([[] for _ in range(len(rows))])
    with engine.model_on_device():
        for row, sequences in enumerate(naive_sequences(rows.tokens, branches)):
            pairs = zip(sequences, branches[row], strict=True)
            scores[row] = [_score_alone(engine, sequence, branch) for sequence, branch in pairs]
    return scores


def _score_alone(engine: TrainEngine, sequence: torch.Tensor, branch: Branch) -> SegmentScore:
    packed = Rows.pack_single(sequence, engine.device)
    first_target = branch.start + branch.target_start
    index = torch.arange(first_target - 1, len(sequence) - 1, device=engine.device)
    targets = Targets(index, sequence[first_target:].to(engine.device))
    scores = engine.module(packed.input_ids, packed.position_ids, packed.layout, [targets])[0]
    return next(_segment_scores([branch], scores))
