"""AdamW with warm-up and a constant or cosine schedule; state as tensors and JSON."""

import math
from collections.abc import Iterable, Sequence

import torch

from verl.config.schema.model import OptimConfig


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], optim: OptimConfig
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; matrices decay, vectors (norms, biases) do not.

    A parameter whose gradient is always zero is
    moved by weight decay alone; ``TrainEngine.step`` therefore skips the step when the whole
    gradient is zero.
    """
    trained = [p for p in parameters if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    groups = []
    if matrices:
        groups.append({"params": matrices, "weight_decay": float(optim.weight_decay)})
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    first, second = optim.betas
    fused = fuses(trained)
    return torch.optim.AdamW(
        groups,
        lr=float(optim.lr),
        betas=(first, second),
        eps=float(optim.eps),
        foreach=not fused,
        fused=fused,
    )


def fuses(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether one kernel takes the step, which reads and writes each number once: on CUDA."""
    return bool(parameters) and all(p.device.type == "cuda" for p in parameters)


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Optimizer steps of linear warm-up: ``lr_warmup_steps``, else the ratio of ``total_steps``."""
    if optim.lr_warmup_steps >= 0:
        return optim.lr_warmup_steps
    return int(optim.lr_warmup_steps_ratio * max(total_steps, 0))


def check_schedule(optim: OptimConfig) -> None:
    """Raise ``ValueError`` for a schedule that cannot be computed: it depends on a total number of
    steps not given.
    """
    if optim.total_training_steps > 0:
        return
    steps_given = optim.lr_warmup_steps >= 0
    if optim.warmup_style == "cosine":
        what = "warmup_style=cosine"
    elif optim.lr_warmup_steps_ratio > 0 and not steps_given:
        what = "lr_warmup_steps_ratio"
    else:
        return
    raise ValueError(
        f"{what} needs optim.total_training_steps, the number of optimizer steps of the whole run"
    )


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0).

    Linear from ``lr / w`` over the ``w`` warm-up steps, then constant, or a cosine from ``lr`` to
    ``lr * min_lr_ratio`` at the last of ``total_steps`` (which must be positive for the cosine).
    """
    warm = warmup_steps(optim, total_steps)
    peak = float(optim.lr)
    if step < warm:
        # from lr / w, not from 0: a first step with rate 0 would be a step for nothing
        return peak * (step + 1) / warm
    if optim.warmup_style == "constant":
        return peak
    progress = min(1.0, (step - warm) / max(1, total_steps - 1 - warm))
    low = float(optim.min_lr_ratio)
    return peak * (low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress)))
