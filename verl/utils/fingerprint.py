"""Fingerprints of weights: a number per tensor that two processes compare instead of the tensor."""

import numpy as np
import torch

from verl.utils.shipped import as_tensor

# Numbers read of a tensor: enough for some of them to cross a rounding step of bfloat16 whenever an
# optimizer moves them all, and few enough to cost nothing beside sending the weights.
READ = 1 << 18
# Place of a number in the sum: a prime number of places, so that no row length repeats them.
PLACES = 1021
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(values: "np.ndarray | torch.Tensor", dtype: torch.dtype | None = None) -> int:
    """A number that depends on the bits of evenly spaced ``values`` (after a cast to ``dtype``) and
    their places.

    Integer arithmetic: the same on every device, by any number of threads.
    """
    flat = values.reshape(-1)
    # Odd, so that not the same columns of every row are read.
    step = max(1, len(flat) // READ) | 1
    part = flat[::step]
    read = as_tensor(part).detach()
    read = read.to(dtype or read.dtype).contiguous()
    bits = read.view(_BITS[read.element_size()]).to(torch.int64)
    places = torch.arange(len(bits), device=bits.device) % PLACES + 1
    return int((bits * places).sum())
