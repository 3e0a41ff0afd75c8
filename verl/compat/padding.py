"""Padding of tensors, for code of users that builds the rows of a batch itself."""

import torch
from torch import Tensor


def pad_sequence_to_length(
    tensor: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Pad ``[..., L]`` to ``[..., max_seq_len]``; a tensor of at least that length is unchanged."""
    pad_length = max_seq_len - tensor.shape[-1]
    if pad_length <= 0:
        return tensor
    return torch.nn.functional.pad(
        tensor, (pad_length, 0) if left_pad else (0, pad_length), value=pad_token_id
    )
