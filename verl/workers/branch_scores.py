"""Compute log-probs and entropies of rows, branches and spans in the same forward passes.

A branch is an alternative continuation of a row. A span is a token range of a row::

    row     prompt, sampled tokens, ...     log-prob and entropy of each sampled token, [B, R], at
                                            the rollout temperature
    span    tokens [start, end) of the row  their means (``ScoreResult``), at temperature 1
    branch  row[0:start) + token_ids        means over token_ids[target_start:], at temperature 1

Equal branches of a batch are computed once.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.models.flops import ForwardSize
from verl.models.packed_layout import expand_ranges
from verl.models.prefix_tree import PackedRows
from verl.models.token_scores import TargetLogProbs, Targets
from verl.protocol import DataProto, object_array
from verl.records import BranchRequest, ScoreResult, SpanRequest
from verl.workers.engine import TrainEngine
from verl.workers.mini_batches import call_on_micro_batches
from verl.workers.rows import MicroBatchLimits, Rows


@dataclass
class LogProbsAndScores:
    """Log-probs and entropies of the rows of a batch, and scores of their branches and spans.

    ``log_probs`` and ``entropy`` are [B, R] on the CPU, zero where no token was sampled. A branch
    is an alternative continuation of a row, a span is a token range of a row. ``branch_scores`` and
    ``span_scores`` [B] hold a list per row, with one ``ScoreResult`` per branch or span. They are
    None for a batch without branches and spans. ``forward_size`` counts the tokens of this rank's
    forward passes, from which FLOPs are computed.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    branch_scores: np.ndarray | None = None
    span_scores: np.ndarray | None = None
    forward_size: ForwardSize = field(default_factory=ForwardSize)


def compute_log_probs_and_scores(
    engine: TrainEngine,
    data: DataProto,
    temperature: float = 1.0,
    max_rows: int | None = None,
    max_tokens: int | None = None,
) -> LogProbsAndScores:
    """Compute log-probs and entropies of all rows, and scores of their branches and spans.

    The columns ``branches`` (alternative continuations of a row) and ``spans`` (token ranges of a
    row) of ``non_tensor_batch`` are optional. A micro-batch has at most ``max_rows`` rows or
    ``max_tokens`` tokens, including those of branches. Raises ``ValueError`` for a span outside its
    row. Every rank of the engine must call this function.
    """
    scorer = _BatchScorer(engine, data, temperature)
    limits = MicroBatchLimits(max_rows=max_rows, max_tokens=max_tokens)
    call_on_micro_batches(engine, scorer.rows, scorer.row_sizes(), limits, scorer.score_micro_batch)
    return scorer.collect_scores()


def _get_list_column(data: DataProto, key: str) -> list[list[Any]]:
    if key not in data.non_tensor_batch:
        return [[] for _ in range(len(data))]
    return [list(row) for row in data.non_tensor_batch[key]]


class _BatchScorer:
    """Rows of one batch with their branches and spans, and the scores computed so far."""

    def __init__(self, engine: TrainEngine, data: DataProto, temperature: float) -> None:
        self.rows = Rows(data, engine.device, engine.prefix_tree)
        self._requested_branches: list[list[BranchRequest]] = _get_list_column(data, "branches")
        self.branches, self._distinct_positions = merge_equal_branches(
            self._requested_branches, self.rows.tokens
        )
        self.spans: list[list[SpanRequest]] = _get_list_column(data, "spans")
        self._engine = engine
        self._temperature = temperature
        self._has_segments = bool({"branches", "spans"} & set(data.non_tensor_batch))
        self._log_probs = torch.zeros(self.rows.mask.shape)
        self._entropy = torch.zeros(self.rows.mask.shape)
        self._branch_scores = object_array([[] for _ in range(len(self.rows))])
        self._span_scores = object_array([[] for _ in range(len(self.rows))])

    def row_sizes(self) -> list[int]:
        """Return the number of tokens to compute for each row and its branches."""
        return list(
            map(self._engine.module.forward_kind.count_tokens, self.rows.lengths, self.branches)
        )

    def score_micro_batch(self, row_indices: list[int]) -> None:
        """Compute and store the scores of the rows ``row_indices`` in one forward."""
        branches = [self.branches[row] for row in row_indices]
        spans = [self.spans[row] for row in row_indices]
        packed = self.rows.pack_rows(row_indices, branches)
        span_token_indices = None
        if self._temperature == 1.0:
            span_token_indices = _find_span_tokens(self.rows, row_indices, spans)
        separately_scored_spans = spans if span_token_indices is None else [[] for _ in spans]
        targets = [
            self.rows.sampled_targets(packed, row_indices, self._temperature),
            _collect_branch_targets(packed, branches, self.rows.device),
            _collect_span_targets(self.rows, packed, row_indices, separately_scored_spans),
        ]
        row_token_scores, branch_token_scores, span_token_scores = self._engine.module(
            packed.input_ids, packed.position_ids, packed.layout, targets
        )
        if span_token_indices is not None:
            span_token_scores = TargetLogProbs(
                row_token_scores.log_probs[span_token_indices],
                row_token_scores.required_entropy[span_token_indices],
            )
        row_index_tensor = torch.as_tensor(row_indices)
        for stored_scores, token_scores in (
            (self._log_probs, row_token_scores.log_probs),
            (self._entropy, row_token_scores.required_entropy),
        ):
            stored_scores[row_index_tensor] = self.rows.scatter_to_responses(
                token_scores, row_indices
            ).cpu()
        if not self._has_segments:
            return
        branch_scores = _average_segment_scores(
            [b for row in branches for b in row], branch_token_scores
        )
        span_scores = _average_segment_scores([s for row in spans for s in row], span_token_scores)
        for row in row_indices:
            self._branch_scores[row] = [next(branch_scores) for _ in self.branches[row]]
            self._span_scores[row] = [next(span_scores) for _ in self.spans[row]]

    def collect_scores(self) -> LogProbsAndScores:
        """Return the scores that ``score_micro_batch`` has stored, for all rows of the batch."""
        scores = LogProbsAndScores(
            self._log_probs, self._entropy, forward_size=self.rows.packed_size
        )
        if self._has_segments:
            requests_and_positions = zip(
                self._requested_branches, self._distinct_positions, strict=True
            )
            scores.span_scores = self._span_scores
            scores.branch_scores = object_array(
                [
                    [
                        self._branch_scores[row][index]._replace(
                            step=request.step, label=request.label
                        )
                        for request, (row, index) in zip(branches, positions, strict=True)
                    ]
                    for branches, positions in requests_and_positions
                ]
            )
        return scores


def merge_equal_branches(
    branches: Sequence[Sequence[BranchRequest]], row_tokens: Sequence[torch.Tensor]
) -> tuple[list[list[BranchRequest]], list[list[tuple[int, int]]]]:
    """Return the distinct branches of each row, and the position of each given branch among them.

    Branches with the same tokens after the same prefix have equal scores, also in different rows. A
    position is a row and an index in the distinct branches of that row. Example: if two rows have
    the same branch, it is kept in row 0, and both positions are (0, 0).
    """
    first_positions: dict[tuple[bytes, tuple[int, ...], int], tuple[int, int]] = {}
    distinct_branches: list[list[BranchRequest]] = [[] for _ in branches]
    positions: list[list[tuple[int, int]]] = [[] for _ in branches]
    for row, (row_branches, tokens) in enumerate(zip(branches, row_tokens, strict=True)):
        token_array = tokens.numpy()
        prefix_hashes = {
            start: hashlib.sha256(token_array[:start].tobytes()).digest()
            for start in {branch.start for branch in row_branches}
        }
        for branch in row_branches:
            key = (prefix_hashes[branch.start], tuple(branch.token_ids), branch.target_start)
            position = first_positions.setdefault(key, (row, len(distinct_branches[row])))
            if position == (row, len(distinct_branches[row])):
                distinct_branches[row].append(branch)
            positions[row].append(position)
    return distinct_branches, positions


def _collect_branch_targets(
    packed: PackedRows, branches: Sequence[Sequence[BranchRequest]], device: str
) -> Targets:
    """Return the tokens to score in the branches of a micro-batch, ordered by branch."""
    predicting_positions: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    branches_and_positions = zip(branches, packed.branch_positions, strict=True)
    for branch, branch_positions in (
        pair for row in branches_and_positions for pair in zip(*row, strict=True)
    ):
        token_ids = torch.as_tensor(branch.token_ids, dtype=torch.long)
        if not 0 <= branch.target_start < len(token_ids):
            raise ValueError(
                f"branch target_start {branch.target_start} is outside its {len(token_ids)} tokens"
            )
        # The logits at a token predict the next token: begin one token before the first target.
        predicting_positions.append(branch_positions[branch.start + branch.target_start - 1 : -1])
        tokens.append(token_ids[branch.target_start :])
    return _concat_targets(predicting_positions, tokens, device)


def _find_span_tokens(
    rows: Rows, row_indices: Sequence[int], spans: Sequence[Sequence[SpanRequest]]
) -> torch.Tensor | None:
    """Return the index of each span token among the sampled tokens of the rows ``row_indices``.

    A span is a token range of a row. At temperature 1 the log-probs of its tokens equal those of
    the sampled tokens, so they can be copied from these indices. Sampled tokens are counted row by
    row. The result is None if a span has a token that was not sampled.
    """
    width = rows.response_length
    selected_rows = torch.as_tensor(row_indices)
    # The response begins at this index of the row without padding.
    response_starts = rows.response_index[selected_rows, 0].tolist()
    span_ranges = [
        (row * width + span.start - response_start, row * width + span.end - response_start)
        for row, (response_start, row_spans) in enumerate(zip(response_starts, spans, strict=True))
        for span in row_spans
        if response_start <= span.start < span.end <= response_start + width
    ]
    if len(span_ranges) < sum(map(len, spans)):
        return None
    positions = torch.from_numpy(expand_ranges(span_ranges))
    is_sampled = rows.mask[selected_rows].reshape(-1)
    if not is_sampled[positions].all():
        return None
    return (is_sampled.cumsum(0) - 1)[positions].to(rows.device)


def _collect_span_targets(
    rows: Rows,
    packed: PackedRows,
    row_indices: Sequence[int],
    spans: Sequence[Sequence[SpanRequest]],
) -> Targets:
    """Return the tokens to score in the spans of a micro-batch, ordered by span."""
    predicting_positions: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    for row, row_spans, row_offset in zip(row_indices, spans, packed.offsets, strict=True):
        length = rows.lengths[row]
        for span in row_spans:
            if not 0 < span.start < span.end <= length:
                raise ValueError(
                    f"span [{span.start}, {span.end}) is outside 1..{length}, "
                    f"the tokens of row {row}"
                )
            first_position, end_position = row_offset + span.start - 1, row_offset + span.end - 1
            predicting_positions.append(packed.row_positions[first_position:end_position])
            tokens.append(rows.tokens[row][span.start : span.end])
    return _concat_targets(predicting_positions, tokens, rows.device)


def _concat_targets(
    predicting_positions: list[torch.Tensor], tokens: list[torch.Tensor], device: str
) -> Targets:
    empty = torch.zeros(0, dtype=torch.long)
    return Targets(
        torch.cat([empty, *predicting_positions]).to(device), torch.cat([empty, *tokens]).to(device)
    )


def _average_segment_scores(
    segments: Sequence[BranchRequest | SpanRequest], token_scores: TargetLogProbs
) -> Iterator[ScoreResult]:
    """Yield mean log-prob, entropy and probability of the tokens of each branch or span."""
    num_tokens = torch.tensor([segment.num_targets for segment in segments], dtype=torch.long)
    segment_of_token = torch.repeat_interleave(torch.arange(len(segments)), num_tokens)
    token_values = torch.stack(
        [token_scores.log_probs, token_scores.required_entropy, token_scores.log_probs.exp()], dim=1
    )
    # The sum is float64, because a float32 sum over a long segment depends on the order of tokens.
    mean_scores = torch.zeros(len(segments), 3, dtype=torch.float64)
    mean_scores.index_add_(0, segment_of_token, token_values.double().cpu())
    mean_scores = mean_scores / num_tokens[:, None].clamp(min=1)
    score_columns = [*mean_scores.unbind(1), mean_scores[:, 0].exp()]
    scores_of_segments = zip(*(column.tolist() for column in score_columns), strict=True)
    for segment, segment_scores in zip(segments, scores_of_segments, strict=True):
        logprob, entropy, mean_prob, geometric_prob = segment_scores
        yield ScoreResult(
            step=segment.step,
            label=segment.label,
            logprob=logprob,
            entropy=entropy,
            mean_prob=mean_prob,
            geometric_prob=geometric_prob,
            num_tokens=segment.num_targets,
        )
