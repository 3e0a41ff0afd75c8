"""Decoder layers through ``torch.compile``, one by one: FSDP gathers and frees between them.

    norm, projections, rotation ──▶ attention, as it is ──▶ projection, norm, feed-forward
          one graph                                                one graph

Layers of one kind share their graphs. The number of tokens is a variable of them: the next
micro-batch has another one.
"""

import torch

from verl.models.policy import PackedModel


def compile_blocks(module: PackedModel, device: str) -> None:
    """Have every decoder layer of ``module`` compiled at its first pass.

    Raises ``RuntimeError`` where nothing can be compiled for ``device``.
    """
    _try_compiler(device)
    for block in module.blocks:
        # Not the module: what FSDP and checkpointing hang on its call stays outside.
        block.forward = torch.compile(block.forward, dynamic=True)


def _try_compiler(device: str) -> None:
    """Compile something small: of a layer it would fail in the middle of the first update."""
    # Here, because importing a compiler takes seconds, and few runs use it.
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        torch.compile(_small)(torch.ones(8, device=device))
    except (TorchDynamoException, InvalidCxxCompiler) as error:
        needed = "Triton" if device == "cuda" else "a C++ compiler"
        raise RuntimeError(
            f"use_torch_compile=true: nothing can be compiled for {device} here "
            f"({str(error).splitlines()[0]}); fix: install {needed}, or set it to false"
        ) from error


def _small(numbers: torch.Tensor) -> torch.Tensor:
    return (2.0 * numbers + 1.0).sin()
