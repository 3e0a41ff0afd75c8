"""Convert padded rows to packed micro-batches and back.

A batch is ``[B, P + R]`` with padding on both sides. The model input is ``[1, T]`` without padding.
``Rows`` holds the unpadded tokens of every row and the unpadded index of each response position.

Example: P = 3, R = 3, ``-`` is padding, the packed input of both rows is ``[1, 7]``::

    row 0   - a b | c d -      tokens a b c d
    row 1   - - e | f g -      tokens e f g
"""

from collections.abc import Sequence
from typing import TypedDict

import torch

from verl.models.flops import ForwardSize
from verl.models.prefix_tree import PackedRows, SortedSequences, pack_rows
from verl.models.token_scores import Targets
from verl.names import PrefixTree
from verl.protocol import DataProto
from verl.records import BranchRequest
from verl.single_controller.base.decorator import PADDING_ROWS


class Rows:
    """Rows of a batch without padding.

    ``tokens[b]`` [length] are the unpadded tokens of row b. ``response_index`` [B, R] is the
    unpadded index of every response position. ``mask`` [B, R] bool marks the sampled positions.
    ``prefix_tree`` (True, False or ``auto``) determines if a prefix that rows share is computed
    once. It is the value of the config key until ``split_into_micro_batches`` sets another one.
    ``packed_size`` counts the tokens of all passes so far. Raises ``ValueError`` for an empty row,
    and for a row whose first token is sampled, because no token predicts it.
    """

    def __init__(
        self, data: DataProto, device: str = "cpu", prefix_tree: PrefixTree = False
    ) -> None:
        batch = data.batch
        is_token = batch["attention_mask"].bool()
        self.responses = batch["responses"]
        self.response_length = self.responses.shape[1]
        self.mask = batch["response_mask"].bool()
        self.lengths: list[int] = is_token.sum(-1).tolist()
        if 0 in self.lengths:
            raise ValueError(f"row {self.lengths.index(0)} has no tokens")
        self.tokens = batch["input_ids"][is_token].split(self.lengths)
        # The response is in the last R columns. The cumulative sum counts tokens without padding.
        self.response_index = (is_token.long().cumsum(-1) - 1)[:, -self.response_length :]
        starts_with_sampled_token = (self.mask & (self.response_index < 1)).any(-1)
        if starts_with_sampled_token.any():
            row = int(starts_with_sampled_token.nonzero()[0])
            raise ValueError(f"row {row} starts with a sampled token; a row needs a prompt")
        self.device = device
        self.prefix_tree: PrefixTree = prefix_tree
        self.packed_size = ForwardSize()

    def __len__(self) -> int:
        return len(self.lengths)

    def pack_rows(
        self, rows: Sequence[int], branches: Sequence[Sequence[BranchRequest]] | None = None
    ) -> PackedRows:
        """Pack rows and their branches (alternative continuations) into one sequence on the device.

        If ``rows`` is empty, row 0 is packed and not counted in ``packed_size``. So a rank without
        rows can take part in a collective pass.
        """
        tokens = [self.tokens[row] for row in rows or [0]]
        packed = pack_rows(tokens, branches, self.device, self.prefix_tree)
        if rows:
            self.packed_size += self.measure_forward_size(packed, rows)
        return packed

    def sampled_targets(
        self,
        packed: PackedRows,
        rows: Sequence[int],
        temperature: float = 1.0,
        with_entropy: bool = True,
    ) -> Targets:
        """Return the sampled tokens of ``rows`` in order, with the positions that predict them."""
        row_indices = torch.as_tensor(rows)
        mask = self.mask[row_indices]
        # Subtract 1, because the logits at a position predict the next token.
        predicting_index = (
            torch.as_tensor(packed.offsets)[:, None] + self.response_index[row_indices] - 1
        )
        tokens = self.responses[row_indices][mask]
        packed_index = packed.row_positions[predicting_index[mask]].to(self.device)
        return Targets(packed_index, tokens.to(self.device), temperature, with_entropy)

    def measure_forward_size(self, packed: PackedRows, rows: Sequence[int]) -> ForwardSize:
        """Return the size of a forward pass of the given rows, from which FLOPs are computed."""
        num_branch_tokens = sum(len(branch) for row in packed.branch_positions for branch in row)
        return ForwardSize(
            tokens=len(packed.input_ids),
            head_positions=int(self.mask[torch.as_tensor(rows, dtype=torch.long)].sum()),
            attention_pairs=packed.layout.attention_pairs,
            sequence_tokens=len(packed.row_positions) + num_branch_tokens,
        )

    def scatter_to_responses(self, values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return [len(rows), R] with ``values`` [N] at the sampled positions and zero elsewhere.

        ``values`` are in the order of ``sampled_targets``. Values [N, K] give [len(rows), R, K].
        The operation is differentiable.
        """
        mask = self.mask[torch.as_tensor(rows)].to(values.device)
        return values.new_zeros((*mask.shape, *values.shape[1:])).index_put((mask,), values)


def drop_padding_rows(data: DataProto) -> DataProto:
    """Return the batch without padding rows.

    Padding rows are copies that make the number of rows equal on all ranks.
    """
    num_padding_rows = int(data.meta_info.get(PADDING_ROWS, 0))
    # Padding rows are the last rows of a rank (see the dispatch modes).
    return data[: len(data) - num_padding_rows] if num_padding_rows else data


class MicroBatchLimits(TypedDict, total=False):
    """Size limit of micro-batches: ``max_tokens`` tokens if given, else ``max_rows`` rows."""

    max_rows: int | None
    max_tokens: int | None


def choose_micro_batch_limits(
    by_tokens: bool | None, max_rows: int | None, max_tokens: int | None
) -> MicroBatchLimits:
    """Return the limit ``max_tokens`` if ``by_tokens`` (``use_dynamic_bsz``), else ``max_rows``."""
    return (
        MicroBatchLimits(max_tokens=max_tokens)
        if by_tokens
        else MicroBatchLimits(max_rows=max_rows)
    )


def make_micro_batches(
    lengths: Sequence[int], max_rows: int | None = None, max_tokens: int | None = None
) -> list[list[int]]:
    """Return the row indices of each micro-batch.

    A micro-batch has at most ``max_tokens`` tokens, or ``max_rows`` rows without ``max_tokens``.
    Rows of similar length are together, because they share an attention call. A row longer than
    ``max_tokens`` gets a separate micro-batch. Example: lengths [3, 9, 4] with ``max_tokens=8``
    give [[0, 2], [1]].
    """
    micro_batches: list[list[int]] = []
    num_tokens = 0
    for row in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if max_tokens:
            # The size of a micro-batch is the sum of lengths, because packed rows have no padding.
            is_full = num_tokens + lengths[row] > max_tokens
        else:
            is_full = bool(micro_batches) and len(micro_batches[-1]) >= (max_rows or len(lengths))
        if is_full or not micro_batches:
            micro_batches.append([])
            num_tokens = 0
        micro_batches[-1].append(row)
        num_tokens += lengths[row]
    return micro_batches


def make_prefix_tree_micro_batches(
    row_sizes: Sequence[int],
    sorted_rows: SortedSequences,
    max_rows: int | None = None,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Return the row indices of each micro-batch of rows that share prefixes.

    ``sorted_rows`` are sorted by their tokens, so that neighbours share long prefixes. A
    micro-batch holds consecutive rows. A row counts its ``row_sizes`` tokens minus those that it
    shares with the row before it. A micro-batch has at most ``max_tokens`` tokens. Without
    ``max_tokens``, the limit is the total size of the ``max_rows`` largest rows.
    """
    if not max_tokens:
        max_tokens = sum(sorted(row_sizes, reverse=True)[:max_rows])
    micro_batches: list[list[int]] = []
    num_tokens = 0
    for row, num_shared_tokens in zip(*sorted_rows, strict=True):
        num_tokens += row_sizes[row] - num_shared_tokens
        if num_tokens > max_tokens or not micro_batches:
            micro_batches.append([])
            num_tokens = row_sizes[row]
        micro_batches[-1].append(row)
    return micro_batches
