"""Tensors as arrays, which Ray ships through shared memory without a copy; tensors it pickles.

numpy has no bfloat16. Its bits travel as unsigned 16-bit integers, which no weight is made of.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # imported late: an engine first sets what torch reads at its import
    import torch


def as_array(tensor: "torch.Tensor", dtype: "torch.dtype") -> np.ndarray:
    """``tensor`` (on the CPU) in ``dtype``: float32, float16 or bfloat16."""
    import torch

    cast = tensor.detach().to(dtype)
    return (cast.view(torch.uint16) if dtype is torch.bfloat16 else cast).numpy()


def as_tensor(array: "np.ndarray | torch.Tensor") -> "torch.Tensor":
    """What ``as_array`` was given; memory that arrived read-only (from Ray's object store) is
    copied.
    """
    import torch

    if isinstance(array, torch.Tensor):
        return array
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
