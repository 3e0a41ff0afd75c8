"""Weights as arrays, which Ray sends through shared memory without a copy, and their fingerprints.

Ray would pickle tensors. numpy has no bfloat16, so the bits of bfloat16 values are sent as uint16.
No weight has the dtype uint16, so the receiver knows that such an array is bfloat16.
A fingerprint is one number per tensor, to compare the tensors of two processes.
"""

from typing import TYPE_CHECKING

import numpy as np

# Functions import torch when they are called: an engine first sets environment variables, which
# torch reads at import.
if TYPE_CHECKING:
    import torch

# Maximum number of values read per tensor. With this many values, an optimizer step changes at
# least one of them even in bfloat16. Reading them costs little compared with sending the weights.
MAX_VALUES_READ = 1 << 18
# Each value is multiplied by a factor 1, 2, ..., NUM_POSITION_FACTORS, 1, 2, ... The number is
# prime, so that the factors do not repeat with the period of a matrix row.
NUM_POSITION_FACTORS = 1021


def as_array(tensor: "torch.Tensor", dtype: "torch.dtype") -> np.ndarray:
    """Convert a CPU tensor to an array of ``dtype`` float32, float16 or bfloat16 (as uint16).

    Integers keep their dtype: a cast would change large values.
    """
    import torch

    cast_tensor = tensor.detach()
    if tensor.is_floating_point():
        cast_tensor = cast_tensor.to(dtype)
    is_bfloat16 = cast_tensor.dtype is torch.bfloat16
    return (cast_tensor.view(torch.uint16) if is_bfloat16 else cast_tensor).numpy()


def as_tensor(array: "np.ndarray | torch.Tensor") -> "torch.Tensor":
    """Convert an array from ``as_array`` back to a tensor. Read-only memory is copied.

    A tensor is returned unchanged.
    """
    import torch

    if isinstance(array, torch.Tensor):
        return array
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def compute_fingerprint(
    values: "np.ndarray | torch.Tensor", dtype: "torch.dtype | None" = None
) -> int:
    """Return a weighted sum of evenly spaced values of a tensor, whose bits are read as integers.

    The weight of a value depends on its position, so that exchanged values change the sum. Values
    are cast to ``dtype`` first. The arithmetic uses integers, so the result does not depend on the
    device or the number of threads.
    """
    import torch

    flat_values = values.reshape(-1)
    # The stride is odd: with a power of 2, the same columns of every row would be read.
    stride = max(1, len(flat_values) // MAX_VALUES_READ) | 1
    strided_values = flat_values[::stride]
    sampled_values = as_tensor(strided_values).detach()
    sampled_values = sampled_values.to(dtype or sampled_values.dtype).contiguous()
    integer_dtype = getattr(torch, f"int{8 * sampled_values.element_size()}")
    value_bits = sampled_values.view(integer_dtype).to(torch.int64)
    position_factors = (
        torch.arange(len(value_bits), device=value_bits.device) % NUM_POSITION_FACTORS + 1
    )
    return int((value_bits * position_factors).sum())
