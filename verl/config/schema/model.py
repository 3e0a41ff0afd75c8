"""Section ``actor_rollout_ref.model``; sharding, optimiser and checkpoint of actor and critic."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from verl.config.settings import (
    NULL,
    VERL,
    Derived,
    GpuOnly,
    NamesCode,
    NonNegative,
    NonNegativeInt,
    Section,
    Share,
    Unused,
)
from verl.names import PackedAttention, PrefixTree

DecayRate = Annotated[float, Ge(0), Lt(1)]
UNUSED_PADDING_REMOVAL = Unused("rows are always packed", VERL)
DEFAULT_LORA_ALPHA = 16.0
DEFAULT_TARGET_MODULES = "all-linear"


class TrainedModelConfig(Section):
    """Path and loading of a trained model, and LoRA."""

    use_remove_padding: Annotated[bool, UNUSED_PADDING_REMOVAL] = False
    """compute without padding tokens"""
    path: str | None = None
    """directory (or hub name, or name@revision) of the policy in Hugging Face format; required"""
    enable_gradient_checkpointing: bool = False
    """recompute activations in backward: less memory, more time"""
    attn_implementation: PackedAttention = "sdpa"
    """kernels of packed attention: sdpa (one call per row, and per block of
    tokens after a prefix that rows share) or flex
    (FlexAttention, one compiled call; GPU only)"""
    prefix_tree: PrefixTree = "auto"
    """compute a prefix that rows of a micro-batch share only once; auto: if that saves 10% of the
    tokens"""
    lora_rank: NonNegativeInt = 0
    """rank of LoRA adapters; 0 trains all weights"""
    lora_alpha: Annotated[float, Gt(0)] = DEFAULT_LORA_ALPHA
    """numerator of the scale of LoRA adapters"""
    target_modules: Any = DEFAULT_TARGET_MODULES
    """LoRA modules: all-linear, one name or a list of names"""
    trust_remote_code: Annotated[bool, NamesCode()] = False
    """run Python code that ships with the model"""
    override_config: dict[str, Any] = {}
    """values that replace those of the model's own config"""
    external_lib: Annotated[str | None, NamesCode()] = None
    """module that is imported before the registries are read"""


class ModelConfig(TrainedModelConfig):
    """Path and loading of the policy, and LoRA."""

    use_liger: Annotated[bool, Unused("no Liger kernels are used", VERL)] = False
    """Liger kernels"""
    lora_rank: NonNegativeInt = 0
    """rank of LoRA adapters; 0: that of lora_adapter_path, without one all weights are trained"""
    lora_alpha: Derived[Annotated[float, Gt(0)]] = NULL
    """numerator of the scale of LoRA adapters; null: that of lora_adapter_path, else 16"""
    target_modules: Derived[Any] = NULL
    """LoRA modules: all-linear, one name or a list of names; null: those of lora_adapter_path, else
    all-linear"""
    lora_adapter_path: str | None = None
    """directory of peft with the LoRA adapter to start from; null: a new adapter. A checkpoint from
    which the run continues replaces it"""
    adapters: dict[str, str] = {}
    """further LoRA adapters, which are not trained: name -> directory of peft; requests to the
    engines and agents at the endpoint can name them"""


class FSDPConfig(Section):
    """Placement of parameters and optimiser state by FSDP2."""

    param_offload: Annotated[bool, GpuOnly()] = False
    """keep parameters in host memory between passes"""
    optimizer_offload: Annotated[bool, GpuOnly()] = False
    """keep optimiser state in host memory between updates"""
    offload_policy: Annotated[bool, GpuOnly()] = False
    """let FSDP2 offload parameters, gradients and optimiser state"""
    reshard_after_forward: bool = True
    """free gathered parameters between forward and backward"""
    reduce_every_micro_batch: bool = True
    """reduce gradients after every micro-batch, so that a device stores only its shard of them;
    false: once per optimizer step, with less communication and a whole gradient on every device"""
    fsdp_size: int = -1
    """ranks that share one copy of the parameters; -1: all of them"""


class OptimConfig(Section):
    """Parameters of AdamW and of its learning-rate schedule."""

    # The bound is far above useful values. Larger values overflow float32 in the update.
    lr: Annotated[float, Ge(0), Le(1e6)] = 1e-06
    """peak learning rate"""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """decay rates of the two moments of AdamW"""
    # With 0, weights without gradient, such as the embedding of an unused token, would become NaN.
    eps: Annotated[float, Gt(0)] = 1e-08
    """number that is added to the denominator of the update"""
    weight_decay: NonNegative = 0.01
    """decoupled weight decay"""
    lr_warmup_steps: Annotated[int, Ge(-1)] = -1
    """optimizer steps of linear warm-up; -1: use the ratio"""
    lr_warmup_steps_ratio: Share = 0.0
    """warm-up as a share of all optimizer steps"""
    warmup_style: Literal["constant", "cosine"] = "constant"
    """schedule after warm-up"""
    min_lr_ratio: Share = 0.0
    """final learning rate of the cosine as a share of lr"""
    # The default is taken from the plan, because the number of steps depends on the tasks.
    total_training_steps: Annotated[int, Ge(-1)] = -1
    """optimizer steps of the schedule; -1: taken from the plan"""


class CheckpointConfig(Section):
    """Contents of a checkpoint of one model."""

    contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = [
        "model",
        "optimizer",
        "extra",
    ]
    """parts that are saved: model, optimizer, extra (random states), hf_model"""


class CriticModelConfig(TrainedModelConfig):
    """The value model: the policy's architecture with a scalar head."""

    tokenizer_path: Annotated[
        str | None,
        Unused(
            "the critic reads the policy's tokens",
            VERL,
            instead="leave it out; critic.model.path names the critic",
        ),
    ] = None
    """tokenizer of the value model"""
    path: str | None = None
    """model whose weights initialise the value model; null: actor_rollout_ref.model.path"""
    external_lib: Annotated[str | None, NamesCode()] = None
    """module imported before the model is built"""
    fsdp_config: FSDPConfig = FSDPConfig()
    """placement of parameters and optimiser state"""
