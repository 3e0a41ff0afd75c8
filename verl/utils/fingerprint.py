"""Fingerprints of weights: one number per tensor, to compare the tensors of two processes."""

import numpy as np
import torch

from verl.utils.tensor_arrays import as_tensor

# Largest number of values read per tensor. Among so many, at least one changes in bfloat16 in every
# optimizer step. Reading them costs little compared with sending the weights.
MAX_VALUES_READ = 1 << 18
# A value is multiplied by a factor that depends on its position. The factors repeat after this
# number of values. It is prime, so that they do not repeat with the rows of a matrix.
POSITION_FACTORS = 1021
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compute_fingerprint(
    values: "np.ndarray | torch.Tensor", dtype: torch.dtype | None = None
) -> int:
    """Return a number computed from the bits and positions of evenly spaced ``values``.

    Values are cast to ``dtype`` first. Integer arithmetic is equal on all devices and thread
    counts.
    """
    flat = values.reshape(-1)
    # An odd step, so that it reads different columns of the rows.
    step = max(1, len(flat) // MAX_VALUES_READ) | 1
    sample = flat[::step]
    sampled_values = as_tensor(sample).detach()
    sampled_values = sampled_values.to(dtype or sampled_values.dtype).contiguous()
    bits = sampled_values.view(_BITS[sampled_values.element_size()]).to(torch.int64)
    position_factors = torch.arange(len(bits), device=bits.device) % POSITION_FACTORS + 1
    return int((bits * position_factors).sum())
