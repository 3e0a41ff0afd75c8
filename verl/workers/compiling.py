"""Compile decoder layers by ``torch.compile``, each one separately, because FSDP gathers and frees
parameters between layers.

    norm, projections, rotation ──▶ attention, not compiled ──▶ projection, norm, feed-forward
          one graph                                                one graph

Layers of one class share their graphs. The number of tokens is a dynamic dimension, because it
differs between micro-batches.
"""

import torch

from verl.models.policy import PackedModel


def compile_blocks(module: PackedModel, device: str) -> None:
    """Let every decoder layer of ``module`` be compiled in its first forward.

    Raises ``RuntimeError`` if nothing can be compiled for ``device``.
    """
    _try_compiler(device)
    for block in module.sharded_layers:
        # Only ``forward`` is compiled: the hooks of FSDP and checkpointing stay outside.
        block.forward = torch.compile(block.forward, dynamic=True)


def _try_compiler(device: str) -> None:
    """Compile a tiny function, so that a missing compiler raises before the first update."""
    # Imported here, because importing a compiler takes seconds, and few runs use it.
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        torch.compile(_tiny_function)(torch.ones(8, device=device))
    except (TorchDynamoException, InvalidCxxCompiler) as error:
        compiler = "Triton" if device == "cuda" else "a C++ compiler"
        raise RuntimeError(
            f"use_torch_compile=true: torch.compile fails for {device} on this machine "
            f"({str(error).splitlines()[0]}); fix: install {compiler}, or set it to false"
        ) from error


def _tiny_function(numbers: torch.Tensor) -> torch.Tensor:
    return (2.0 * numbers + 1.0).sin()
