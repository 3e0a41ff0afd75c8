"""From padded rows to packed micro-batches and back.

The batch is ``[B, P + R]`` with padding on both sides; the model reads ``[1, T]`` without any.
``Rows`` holds the unpadded tokens of every row and where each response position went.
"""

from collections.abc import Sequence
from typing import TypedDict

import torch

from verl.models.branch_attention import PackedBranches, pack
from verl.models.flops import Work
from verl.models.token_scores import Targets
from verl.protocol import DataProto
from verl.records import Branch
from verl.single_controller.base.decorator import PADDING_ROWS


class Rows:
    """The rows of a batch without padding.

    ``tokens[b]`` [length] real tokens of row b; ``place`` [B, R] unpadded index of every response
    position; ``mask`` [B, R] bool, the sampled positions; ``responses`` [B, R]. Raises
    ``ValueError`` for an empty row and for a row whose first token is a sampled one (nothing
    predicts it).
    """

    def __init__(self, data: DataProto, device: str = "cpu") -> None:
        batch = data.batch
        attention = batch["attention_mask"].bool()
        self.responses = batch["responses"]
        self.width = self.responses.shape[1]
        self.mask = batch["response_mask"].bool()
        self.lengths: list[int] = attention.sum(-1).tolist()
        if 0 in self.lengths:
            raise ValueError(f"row {self.lengths.index(0)} has no token")
        self.tokens = batch["input_ids"][attention].split(self.lengths)
        # The response stands on the right: the last R columns, counted without padding.
        self.place = (attention.long().cumsum(-1) - 1)[:, -self.width :]
        unpredicted = (self.mask & (self.place < 1)).any(-1)
        if unpredicted.any():
            row = int(unpredicted.nonzero()[0])
            raise ValueError(f"row {row} starts with a sampled token; a row needs a prompt")
        self.device = device

    def __len__(self) -> int:
        return len(self.lengths)

    def pack(
        self, rows: Sequence[int], branches: Sequence[Sequence[Branch]] | None = None
    ) -> PackedBranches:
        """The given rows, with the branches of each, as one packed sequence on the device."""
        return pack([self.tokens[row] for row in rows], branches, self.device)

    @staticmethod
    def pack_alone(tokens: torch.Tensor, device: str = "cpu") -> PackedBranches:
        """One sequence [length] of tokens as a packed sequence of its own."""
        return pack([tokens], None, device)

    def targets(
        self,
        packed: PackedBranches,
        rows: Sequence[int],
        temperature: float = 1.0,
        with_entropy: bool = True,
    ) -> Targets:
        """All sampled tokens of the given rows, row by row."""
        index = torch.as_tensor(rows)
        mask = self.mask[index]
        # the logits at a position predict the token after it, hence the -1
        before = torch.as_tensor(packed.offsets)[:, None] + self.place[index] - 1
        tokens = self.responses[index][mask]
        places = before[mask].to(self.device)
        return Targets(places, tokens.to(self.device), temperature, with_entropy)

    def work(self, rows: Sequence[int]) -> Work:
        """What a pass over the given rows is asked for, at their sampled tokens."""
        lengths = [self.lengths[row] for row in rows]
        return Work(
            tokens=sum(lengths),
            positions=int(self.mask[torch.as_tensor(rows, dtype=torch.long)].sum()),
            pairs=sum(length * (length + 1) // 2 for length in lengths),
        )

    def unpack(self, values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Values [N] of ``targets`` at their response positions, zero elsewhere: [len(rows), R];
        differentiable.
        """
        mask = self.mask[torch.as_tensor(rows)].to(values.device)
        empty = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
        return empty.masked_scatter(mask, values)


def drop_padding(data: DataProto) -> DataProto:
    """The batch without the copied rows that only even out the ranks."""
    extra = int(data.meta_info.get(PADDING_ROWS, 0))
    # Copies stand at the end of a rank's rows (see the dispatch modes).
    return data[: len(data) - extra] if extra else data


class MicroBatchLimits(TypedDict, total=False):
    """How much a micro-batch holds: ``max_tokens`` tokens where given, else ``max_rows`` rows."""

    max_rows: int | None
    max_tokens: int | None


def limits_of(
    by_tokens: bool | None, max_rows: int | None, max_tokens: int | None
) -> MicroBatchLimits:
    """The limit that counts: of tokens with ``by_tokens`` (``use_dynamic_bsz``), else of rows."""
    return (
        MicroBatchLimits(max_tokens=max_tokens)
        if by_tokens
        else MicroBatchLimits(max_rows=max_rows)
    )


def micro_batches(
    lengths: Sequence[int], max_rows: int | None = None, max_tokens: int | None = None
) -> list[list[int]]:
    """Row indices of micro-batches: rows sorted by length and cut at ``max_tokens`` tokens, or at
    ``max_rows`` rows.

    Sorted, because neighbours of similar length share an attention call. A row longer than
    ``max_tokens`` gets a micro-batch of its own.
    """
    parts: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if max_tokens:
            # Real tokens, not width times rows: packed rows have no padding.
            full = tokens + lengths[row] > max_tokens
        else:
            full = bool(parts) and len(parts[-1]) >= (max_rows or len(lengths))
        if full or not parts:
            parts.append([])
            tokens = 0
        parts[-1].append(row)
        tokens += lengths[row]
    return parts
