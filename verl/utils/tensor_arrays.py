"""Conversion of tensors to arrays, which Ray sends through shared memory without a copy.

Ray would pickle tensors. numpy has no bfloat16, so the bits of bfloat16 values are sent as uint16.
No weight has the dtype uint16, so the receiver knows that such an array is bfloat16.
"""

from typing import TYPE_CHECKING

import numpy as np

# Functions import torch when they are called: an engine first sets environment variables, which
# torch reads at import.
if TYPE_CHECKING:
    import torch


def as_array(tensor: "torch.Tensor", dtype: "torch.dtype") -> np.ndarray:
    """Convert a CPU tensor to an array of ``dtype`` float32, float16 or bfloat16 (as uint16)."""
    import torch

    cast_tensor = tensor.detach().to(dtype)
    return (cast_tensor.view(torch.uint16) if dtype is torch.bfloat16 else cast_tensor).numpy()


def as_tensor(array: "np.ndarray | torch.Tensor") -> "torch.Tensor":
    """Convert an array from ``as_array`` back to a tensor. Read-only memory is copied.

    A tensor is returned unchanged.
    """
    import torch

    if isinstance(array, torch.Tensor):
        return array
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
