"""Device ``fakegpu`` that computes on the CPU and refuses operations on tensors of two devices.

A test on a machine without GPU uses it to find tensors that are left on the CPU. As with CUDA, a
CPU tensor without dimensions may be combined with tensors of the device, and CPU tensors may index
them.
"""

import contextlib
from collections.abc import Iterator
from functools import cache

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

DEVICE = "fakegpu"
aten = torch.ops.aten
# Operations that read tensors of both devices on CUDA too.
COPIES = {aten._to_copy.default, aten.copy_.default, aten._local_scalar_dense.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class FakeGpuTensor(torch.Tensor):
    """Tensor on ``fakegpu`` whose values are in the CPU tensor ``cpu_values``."""

    cpu_values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "FakeGpuTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(DEVICE, 0),
            requires_grad=False,
        )
        tensor.cpu_values = values
        return tensor

    @property
    def is_cuda(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return True, so that code for CUDA runs too."""
        return True

    def __repr__(self, **_):
        return f"FakeGpuTensor({self.cpu_values!r})"

    def __format__(self, spec):
        return format(self.cpu_values, spec)

    def tolist(self):
        return self.cpu_values.tolist()

    def numpy(self, **_):
        raise TypeError("a tensor on a GPU cannot be converted to numpy; use cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """Run ``func`` on the CPU. Raise ``RuntimeError`` if its tensors are on two devices."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    device = kwargs.get("device")
    if func is aten.copy_.default:
        to_gpu = isinstance(args[0], FakeGpuTensor)
    elif device is not None:
        to_gpu = torch.device(device).type == DEVICE
    else:
        to_gpu = any(isinstance(x, FakeGpuTensor) for x in tensors)
    if func not in COPIES:
        compared = [args[0], *args[2:3]] if func in INDEXING else tensors
        on_gpu = {isinstance(x, FakeGpuTensor) for x in compared if x.dim() > 0}
        if len(on_gpu) > 1 or (to_gpu and on_gpu == {False}):
            shapes = [(tuple(x.shape), x.device.type) for x in tensors]
            raise RuntimeError(f"{func}: tensors on two devices: {shapes}")
    cpu_args, cpu_kwargs = tree_map(_get_values, (args, kwargs))
    if device is not None:
        cpu_kwargs["device"] = "cpu"
    if func is aten.mm.dtype:  # which the CPU lacks
        *factors, dtype = cpu_args
        result = aten.mm.default(*(factor.to(dtype) for factor in factors))
    else:
        result = func(*cpu_args, **cpu_kwargs)
    if not to_gpu or func is aten._local_scalar_dense.default:
        return result
    if func._schema.is_mutable and isinstance(result, torch.Tensor):
        return args[0]  # an operation in place
    return tree_map(lambda x: FakeGpuTensor(x) if isinstance(x, torch.Tensor) else x, result)


def _get_values(value):
    return value.cpu_values if isinstance(value, FakeGpuTensor) else value


class _CreateOnFakeGpu(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == DEVICE:
            return run(func, args, kwargs)
        return func(*args, **kwargs)


class _CreateFromData(TorchFunctionMode):
    """Create tensors from Python data, which torch does without a dispatched operation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func not in (torch.tensor, torch.as_tensor) or device is None:
            return func(*args, **kwargs)
        return func(*args, **kwargs | {"device": "cpu"}).to(device)


class _BackendModule(_DummyBackendModule):
    def synchronize(self, *_):
        """Do nothing; tensordict calls it after copies."""


@cache
def _register_device() -> None:
    _setup_privateuseone_for_python_backend(DEVICE, _BackendModule())


@contextlib.contextmanager
def fake_gpu() -> Iterator[str]:
    """Provide the device and yield its name."""
    _register_device()
    with _CreateOnFakeGpu(), _CreateFromData():
        yield DEVICE
