"""Branches: continuations of a row's prefix, computed in the same forward as the row itself.

A branch of row ``b`` attends to the row's unpadded tokens ``[0, start)`` and causally to itself;
its position ids continue from ``start``. The trunk is the part of the packed sequence with the
rows themselves. One forward of ``trunk + branches`` tokens replaces a separate forward of
``start + branch`` tokens for each branch.

Example: a row of 6 tokens with two branches at 4 and one at 2 is packed as ::

    tokens     t0 t1 t2 t3 t4 t5 | a0 a1 a2 | b0 b1 | c0
    positions   0  1  2  3  4  5 |  2  3  4 |  4  5 |  4
    sees        causal           | t0..t1+a | t0..t3+b | t0..t3+c
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from verl.models.packed_attention import BranchBlock, PackedLayout, layout_of_rows
from verl.records import Branch

# Branches of a row share one attention call until it has this many queries. Larger values give
# fewer calls with larger masks.
BLOCK_QUERIES = 96


@dataclass(frozen=True)
class PackedBranches:
    """Rows and their branches packed into one sequence of T tokens.

    ``input_ids`` and ``position_ids`` are [T]. ``offsets[b]`` is the packed index of the first
    token of row b. ``branch_offsets[b][i]`` is the packed index of the first token of branch i of
    row b, in input order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: PackedLayout
    offsets: list[int]
    branch_offsets: list[list[int]]


def pack_with_branches(
    rows: Sequence[torch.Tensor],
    branches: Sequence[Sequence[Branch]] | None = None,
    device: torch.device | str = "cpu",
) -> PackedBranches:
    """Pack unpadded rows (each [length] int64) and the branches of each row.

    Raises ``ValueError`` for an empty row or branch and for a start outside ``0 < start <=
    length``.
    """
    lengths = [len(row) for row in rows]
    if min(lengths, default=1) < 1:
        raise ValueError("a packed row needs at least one token")
    layout = layout_of_rows(lengths, device)
    ids = list(rows)
    positions = [torch.arange(length) for length in lengths]
    offsets = [0, *accumulate(lengths)]
    cursor = offsets.pop()  # the end of the last row, where the first branch begins
    branch_offsets: list[list[int]] = []
    blocks: list[BranchBlock] = []
    longest_end = 0
    for row, offset, length in zip(branches or [], offsets, lengths, strict=bool(branches)):
        _check_branches(row, length)
        branch_starts = [0] * len(row)
        for block in _group_into_blocks(row):
            block_start = cursor
            for index in block:
                branch = row[index]
                size = len(branch.token_ids)
                branch_starts[index] = cursor
                ids.append(torch.as_tensor(branch.token_ids, dtype=torch.long))
                positions.append(torch.arange(branch.start, branch.start + size))
                cursor += size
                longest_end = max(longest_end, branch.start + size)
            sizes = tuple(len(row[index].token_ids) for index in block)
            block_starts = tuple(row[index].start for index in block)
            blocks.append(BranchBlock(block_start, offset, sizes, block_starts))
        branch_offsets.append(branch_starts)
    return PackedBranches(
        torch.cat(ids).to(device),
        torch.cat(positions).to(device),
        replace(layout, blocks=tuple(blocks), longest_branch=longest_end),
        offsets,
        branch_offsets or [[] for _ in rows],
    )


def _check_branches(row: Sequence[Branch], length: int) -> None:
    for branch in row:
        if not 0 < branch.start <= length:
            raise ValueError(
                f"branch start {branch.start} is outside 1..{length}, the tokens of its row"
            )
        if not len(branch.token_ids):
            raise ValueError("a branch needs at least one token")


def _group_into_blocks(row: Sequence[Branch]) -> list[list[int]]:
    """Sort branch indices by start and group them into blocks of about ``BLOCK_QUERIES`` tokens."""
    blocks: list[list[int]] = []
    # Start as if the current block were full, so that the first branch opens a block.
    queries = BLOCK_QUERIES
    # The keys of a block reach to its largest start. Sorting keeps the masked part small.
    for index in sorted(range(len(row)), key=lambda i: row[i].start):
        # keep branches with the same start in one block: they share their whole prefix
        has_same_start = bool(blocks) and row[blocks[-1][-1]].start == row[index].start
        if queries >= BLOCK_QUERIES and not has_same_start:
            blocks.append([])
            queries = 0
        blocks[-1].append(index)
        queries += len(row[index].token_ids)
    return blocks


def naive_sequences(
    rows: Sequence[torch.Tensor], branches: Sequence[Sequence[Branch]]
) -> list[list[torch.Tensor]]:
    """Return, for each row, the sequences ``row[:start] + token_ids`` of its branches.

    Tests compare a separate forward of each sequence with the forward of packed branches.
    """
    sequences: list[list[torch.Tensor]] = []
    for tokens, row in zip(rows, branches, strict=True):
        sequences.append([])
        for branch in row:
            branch_tokens = torch.as_tensor(branch.token_ids, dtype=torch.long)
            sequences[-1].append(torch.cat([tokens[: branch.start], branch_tokens]))
    return sequences
