"""Fingerprints of weights: one number per tensor, to compare the tensors of two processes."""

import numpy as np
import torch

from verl.utils.tensor_arrays import as_tensor

# Maximum number of values read per tensor. With this many values, an optimizer step changes at
# least one of them even in bfloat16. Reading them costs little compared with sending the weights.
MAX_VALUES_READ = 1 << 18
# Each value is multiplied by a factor 1, 2, ..., NUM_POSITION_FACTORS, 1, 2, ... The number is
# prime, so that the factors do not repeat with the period of a matrix row.
NUM_POSITION_FACTORS = 1021
# Bytes per value -> integer dtype that shows the bits of a value
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compute_fingerprint(
    values: "np.ndarray | torch.Tensor", dtype: torch.dtype | None = None
) -> int:
    """Return a weighted sum of evenly spaced values of a tensor, whose bits are read as integers.

    The weight of a value depends on its position, so that exchanged values change the sum. Values
    are cast to ``dtype`` first. The arithmetic uses integers, so the result does not depend on the
    device or the number of threads.
    """
    flat_values = values.reshape(-1)
    # The distance is odd: with a power of 2, the same columns of every row would be read.
    distance = max(1, len(flat_values) // MAX_VALUES_READ) | 1
    read_values = flat_values[::distance]
    sampled_values = as_tensor(read_values).detach()
    sampled_values = sampled_values.to(dtype or sampled_values.dtype).contiguous()
    bits = sampled_values.view(_INTEGER_DTYPES[sampled_values.element_size()]).to(torch.int64)
    position_factors = torch.arange(len(bits), device=bits.device) % NUM_POSITION_FACTORS + 1
    return int((bits * position_factors).sum())
