"""Branches: continuations of a row's prefix, computed in the same forward as the row itself.

A branch of row ``b`` attends to the row's unpadded tokens ``[0, start)`` and causally to itself;
its position ids continue from ``start``. The trunk is the part of the packed sequence that holds
the rows. One forward of ``trunk + branches`` tokens replaces a separate forward of ``start +
branch`` tokens for each branch.

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

# Branches (alternative continuations) of a row are added to one attention call until the call has
# this many queries. Larger values give fewer calls with larger masks.
MIN_BLOCK_QUERIES = 96


@dataclass(frozen=True)
class PackedBranches:
    """Rows and their branches (alternative continuations), packed into one sequence of T tokens.

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
    """Pack unpadded rows (each [length] int64) and their branches (alternative continuations).

    Raises ``ValueError`` for an empty row or branch and for a start outside ``0 < start <=
    length``.
    """
    lengths = [len(row) for row in rows]
    if min(lengths, default=1) < 1:
        raise ValueError("a packed row needs at least one token")
    layout = layout_of_rows(lengths, device)
    token_ids = list(rows)
    positions = [torch.arange(length) for length in lengths]
    offsets = [0, *accumulate(lengths)]
    next_offset = offsets.pop()  # the end of the last row, where the first branch begins
    branch_offsets: list[list[int]] = []
    blocks: list[BranchBlock] = []
    longest_branch = 0
    for row_branches, offset, length in zip(
        branches or [], offsets, lengths, strict=bool(branches)
    ):
        _check_branches(row_branches, length)
        row_branch_offsets = [0] * len(row_branches)
        for block in _group_into_blocks(row_branches):
            block_start = next_offset
            for index in block:
                branch = row_branches[index]
                num_tokens = len(branch.token_ids)
                row_branch_offsets[index] = next_offset
                token_ids.append(torch.as_tensor(branch.token_ids, dtype=torch.long))
                positions.append(torch.arange(branch.start, branch.start + num_tokens))
                next_offset += num_tokens
                longest_branch = max(longest_branch, branch.start + num_tokens)
            branch_lengths = tuple(len(row_branches[index].token_ids) for index in block)
            prefix_lengths = tuple(row_branches[index].start for index in block)
            blocks.append(BranchBlock(block_start, offset, branch_lengths, prefix_lengths))
        branch_offsets.append(row_branch_offsets)
    return PackedBranches(
        torch.cat(token_ids).to(device),
        torch.cat(positions).to(device),
        replace(layout, blocks=tuple(blocks), longest_branch=longest_branch),
        offsets,
        branch_offsets or [[] for _ in rows],
    )


def _check_branches(row_branches: Sequence[Branch], length: int) -> None:
    for branch in row_branches:
        if not 0 < branch.start <= length:
            raise ValueError(
                f"branch start {branch.start} is outside 1..{length}, the tokens of its row"
            )
        if not len(branch.token_ids):
            raise ValueError("a branch needs at least one token")


def _group_into_blocks(row_branches: Sequence[Branch]) -> list[list[int]]:
    """Group the indices of a row's branches (alternative continuations) into blocks.

    A block is one attention call of about ``MIN_BLOCK_QUERIES`` tokens. Branches are sorted by the
    position in the row where they start.
    """
    blocks: list[list[int]] = []
    # Start as if the current block were full, so that the first branch begins a new block.
    num_queries = MIN_BLOCK_QUERIES
    # The keys of a block include the row up to the largest start of its branches. Sorting keeps the
    # masked part small.
    for index in sorted(range(len(row_branches)), key=lambda i: row_branches[i].start):
        # Branches with the same start are in one block, because they share their whole prefix.
        has_same_start = (
            bool(blocks) and row_branches[blocks[-1][-1]].start == row_branches[index].start
        )
        if num_queries >= MIN_BLOCK_QUERIES and not has_same_start:
            blocks.append([])
            num_queries = 0
        blocks[-1].append(index)
        num_queries += len(row_branches[index].token_ids)
    return blocks


def naive_sequences(
    rows: Sequence[torch.Tensor], branches: Sequence[Sequence[Branch]]
) -> list[list[torch.Tensor]]:
    """Return each row's alternative continuations as full sequences ``row[:start] + token_ids``.

    Tests compare a separate forward of each sequence with the forward of packed branches.
    """
    sequences: list[list[torch.Tensor]] = []
    for tokens, row_branches in zip(rows, branches, strict=True):
        sequences.append([])
        for branch in row_branches:
            branch_tokens = torch.as_tensor(branch.token_ids, dtype=torch.long)
            sequences[-1].append(torch.cat([tokens[: branch.start], branch_tokens]))
    return sequences
