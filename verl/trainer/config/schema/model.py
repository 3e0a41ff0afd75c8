"""``actor_rollout_ref.model``, and the optimiser, sharding and checkpoint sections that actor and
critic share.
"""

from dataclasses import dataclass
from typing import Any

from verl.trainer.config.schema.field import opt, section

DTYPES = ("float32", "bfloat16", "float16")  # of an engine
TRAIN_DTYPES = ("float32", "bfloat16")


@dataclass
class ModelConfig:
    """Which policy is trained and how it is loaded."""

    path: str | None = opt(
        None, "directory (or hub name) of the policy in Hugging Face format; required"
    )
    use_remove_padding: bool = opt(
        False, "compute on real tokens only", unused="rows are always packed"
    )
    enable_gradient_checkpointing: bool = opt(
        False, "recompute activations in backward: less memory, more time"
    )
    lora_rank: int = opt(0, "rank of LoRA adapters; 0 trains all weights", low=0)
    lora_alpha: float = opt(16.0, "LoRA scale numerator")
    target_modules: Any = opt("all-linear", "LoRA modules: all-linear, one name or a list of names")
    trust_remote_code: bool = opt(False, "run Python code that ships with the model")
    override_config: dict[str, Any] = opt({}, "values that replace those of the model's own config")
    external_lib: str | None = opt(
        None, "module imported before anything is looked up in a registry"
    )
    use_liger: bool = opt(False, "Liger kernels", unused="no Liger kernels are used")


@dataclass
class FSDPConfig:
    """How FSDP2 places parameters and optimiser state."""

    param_offload: bool = opt(False, "keep parameters in host memory between passes", gpu_only=True)
    optimizer_offload: bool = opt(
        False, "keep optimiser state in host memory between updates", gpu_only=True
    )
    offload_policy: bool = opt(
        False, "let FSDP2 offload parameters, gradients and optimiser state", gpu_only=True
    )
    reshard_after_forward: bool = opt(True, "free gathered parameters between forward and backward")
    fsdp_size: int = opt(-1, "ranks that share one copy of the parameters; -1: all of them")


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = opt(1e-6, "peak learning rate", low=0)
    betas: list[float] = opt([0.9, 0.999], "decay rates of the two moments")
    eps: float = opt(1e-8, "added to the denominator", low=0)
    weight_decay: float = opt(0.01, "decoupled weight decay", low=0)
    lr_warmup_steps: int = opt(-1, "optimizer steps of linear warm-up; -1: use the ratio")
    lr_warmup_steps_ratio: float = opt(
        0.0, "warm-up as a share of all optimizer steps", low=0, high=1
    )
    warmup_style: str = opt("constant", "schedule after warm-up", choices=("constant", "cosine"))
    min_lr_ratio: float = opt(
        0.0, "last learning rate of the cosine as a share of lr", low=0, high=1
    )
    total_training_steps: int = opt(
        -1, "optimizer steps of the schedule; -1: filled in from the plan"
    )


@dataclass
class CheckpointConfig:
    """What a checkpoint holds."""

    contents: list[str] = opt(
        ["model", "optimizer", "extra"],
        "parts that are saved: model, optimizer, extra (random states), hf_model",
        choices=("model", "optimizer", "extra", "hf_model"),
    )


@dataclass
class CriticModelConfig:
    """The value model: the policy's architecture with a scalar head."""

    path: str | None = opt(None, "where its weights start from; null: actor_rollout_ref.model.path")
    tokenizer_path: str | None = opt(
        None, "its tokenizer", unused="the critic reads the policy's tokens"
    )
    use_remove_padding: bool = opt(
        False, "compute on real tokens only", unused="rows are always packed"
    )
    enable_gradient_checkpointing: bool = opt(False, "recompute activations in backward")
    trust_remote_code: bool = opt(False, "run Python code that ships with the model")
    override_config: dict[str, Any] = opt({}, "values that replace those of the model's own config")
    external_lib: str | None = opt(None, "module imported before the model is built")
    fsdp_config: FSDPConfig = section(FSDPConfig, "placement of parameters and optimiser state")
