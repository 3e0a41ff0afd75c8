"""Conversion of tensors to arrays, which Ray sends through shared memory without a copy.

Ray would pickle tensors. numpy has no bfloat16, so bfloat16 bits are sent as uint16. No weight has
the dtype uint16, so the receiver can tell them apart.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # imported late: an engine first sets variables that torch reads at import
    import torch


def as_array(tensor: "torch.Tensor", dtype: "torch.dtype") -> np.ndarray:
    """Convert a CPU tensor to an array of ``dtype`` float32, float16 or bfloat16 (as uint16)."""
    import torch

    cast = tensor.detach().to(dtype)
    return (cast.view(torch.uint16) if dtype is torch.bfloat16 else cast).numpy()


def as_tensor(array: "np.ndarray | torch.Tensor") -> "torch.Tensor":
    """Convert an array from ``as_array`` back to a tensor; read-only memory is copied."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
