"""``actor_rollout_ref.model``, and the optimiser, sharding and checkpoint sections that actor and
critic share.
"""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from verl.config.schema.accepted import AcceptedCriticModel, AcceptedModel
from verl.config.settings import (
    GpuOnly,
    NonNegative,
    NonNegativeInt,
    RunsCode,
    Section,
    Share,
)
from verl.names import PackedAttention


class ModelConfig(AcceptedModel):
    """Which policy is trained and how it is loaded."""

    path: str | None = None
    """directory (or hub name, or name@revision) of the policy in Hugging Face format; required"""
    enable_gradient_checkpointing: bool = False
    """recompute activations in backward: less memory, more time"""
    attn_implementation: PackedAttention = "sdpa"
    """kernels of packed attention: sdpa (calls for rows and for blocks of branches) or flex
    (FlexAttention, one compiled call; GPUs alone)"""
    lora_rank: NonNegativeInt = 0
    """rank of LoRA adapters; 0 trains all weights"""
    lora_alpha: Annotated[float, Gt(0)] = 16.0
    """numerator of the scale of LoRA adapters"""
    target_modules: Any = "all-linear"
    """LoRA modules: all-linear, one name or a list of names"""
    trust_remote_code: Annotated[bool, RunsCode()] = False
    """run Python code that ships with the model"""
    override_config: dict[str, Any] = {}
    """values that replace those of the model's own config"""
    external_lib: Annotated[str | None, RunsCode()] = None
    """module imported before anything is looked up in a registry"""


class FSDPConfig(Section):
    """How FSDP2 places parameters and optimiser state."""

    param_offload: Annotated[bool, GpuOnly()] = False
    """keep parameters in host memory between passes"""
    optimizer_offload: Annotated[bool, GpuOnly()] = False
    """keep optimiser state in host memory between updates"""
    offload_policy: Annotated[bool, GpuOnly()] = False
    """let FSDP2 offload parameters, gradients and optimiser state"""
    reshard_after_forward: bool = True
    """free gathered parameters between forward and backward"""
    reduce_every_micro_batch: bool = True
    """reduce gradients after every micro-batch, so that a device holds its share of them only;
    false: once per optimizer step, which sends less and holds a whole gradient on every device"""
    fsdp_size: int = -1
    """ranks that share one copy of the parameters; -1: all of them"""


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    # Far above any use: beyond it, sums of the step are no float32 numbers.
    lr: Annotated[float, Ge(0), Le(1e6)] = 1e-06
    """peak learning rate"""
    # Not a tuple, which YAML lacks; that there are two is checked in validate.
    betas: list[float] = [0.9, 0.999]
    """decay rates of the two moments"""
    eps: NonNegative = 1e-08
    """added to the denominator"""
    weight_decay: NonNegative = 0.01
    """decoupled weight decay"""
    lr_warmup_steps: int = -1
    """optimizer steps of linear warm-up; -1: use the ratio"""
    lr_warmup_steps_ratio: Share = 0.0
    """warm-up as a share of all optimizer steps"""
    warmup_style: Literal["constant", "cosine"] = "constant"
    """schedule after warm-up"""
    min_lr_ratio: Share = 0.0
    """last learning rate of the cosine as a share of lr"""
    # Warm-up ratio and cosine need the whole length, which only the environment's tasks tell.
    total_training_steps: int = -1
    """optimizer steps of the schedule; -1: filled in from the plan"""


class CheckpointConfig(Section):
    """What a checkpoint holds."""

    contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = [
        "model",
        "optimizer",
        "extra",
    ]
    """parts that are saved: model, optimizer, extra (random states), hf_model"""


class CriticModelConfig(AcceptedCriticModel):
    """The value model: the policy's architecture with a scalar head."""

    path: str | None = None
    """where the value model's weights start from; null: actor_rollout_ref.model.path"""
    enable_gradient_checkpointing: bool = False
    """recompute activations in backward"""
    attn_implementation: PackedAttention = "sdpa"
    """kernels of packed attention: sdpa or, on GPUs, flex"""
    trust_remote_code: Annotated[bool, RunsCode()] = False
    """run Python code that ships with the model"""
    override_config: dict[str, Any] = {}
    """values that replace those of the model's own config"""
    external_lib: Annotated[str | None, RunsCode()] = None
    """module imported before the model is built"""
    fsdp_config: FSDPConfig = FSDPConfig()
    """placement of parameters and optimiser state"""
