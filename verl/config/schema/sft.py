"""The configuration of ``main_sft``: model, expert episodes, optimiser and schedule."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from verl.config.schema.env import EnvConfig
from verl.config.schema.model import (
    DEFAULT_LORA_ALPHA,
    DEFAULT_TARGET_MODULES,
    FSDPConfig,
    OptimConfig,
)
from verl.config.schema.trainer import RunConfig, Seconds
from verl.config.settings import (
    NULL,
    Derived,
    NamesCode,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Section,
)
from verl.names import History, TrainDtype


class NewPolicyConfig(Section):
    """Architecture and size of a new policy with random weights."""

    architecture: Literal["qwen3", "qwen3_5"] = "qwen3"
    """qwen3_5: every second layer, from the first, has linear attention"""
    hidden_size: Annotated[int, Ge(8)] = 128
    """width of the hidden states"""
    num_hidden_layers: PositiveInt = 2
    """layers"""
    num_attention_heads: PositiveInt = 4
    """attention heads"""
    num_key_value_heads: PositiveInt = 2
    """key/value heads"""
    head_dim: PositiveInt | None = None
    """width of a head; null: hidden_size / num_attention_heads"""
    intermediate_size: Annotated[int, Ge(8)] = 384
    """width of the feed-forward layer"""
    max_position_embeddings: PositiveInt = 4096
    """longest context, in tokens"""
    tie_word_embeddings: bool = True
    """output layer shares the input embedding"""

    @property
    def head_width(self) -> int:
        """Return ``head_dim``; if it is null, the hidden size divided by the number of heads."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class SFTModelConfig(Section):
    """Initial policy, tokenizer and directory of the trained policy."""

    path: str | None = None
    """policy to start from; null: a new one of the size in model.new"""
    save_path: str = "data/models/policy"
    """directory the trained policy and tokenizer are written to (HF format)"""
    overwrite: bool = False
    """delete the contents of save_path, including files that no supervised run wrote"""
    new: NewPolicyConfig = NewPolicyConfig()
    """size of a new policy with random weights"""
    tokenizer_path: str | None = None
    """tokenizer; null: that of model.path, or a new one"""
    vocab_size: Annotated[int, Ge(300)] = 800
    """tokens of a new BPE tokenizer, special tokens included"""
    dtype: TrainDtype = "float32"
    """compute dtype; master weights stay float32"""
    enable_gradient_checkpointing: bool = False
    """recompute activations in backward"""
    lora_rank: NonNegativeInt = 0
    """rank of LoRA adapters; 0 trains all weights. save_path gets the merged policy, and the
    adapter in the folder lora_adapter"""
    lora_alpha: Annotated[float, Gt(0)] = DEFAULT_LORA_ALPHA
    """numerator of the scale of LoRA adapters"""
    target_modules: Any = DEFAULT_TARGET_MODULES
    """LoRA modules: all-linear, one name or a list of names"""
    trust_remote_code: Annotated[bool, NamesCode()] = False
    """run Python code that ships with the model"""
    override_config: dict[str, Any] = {}
    """values that replace those of the model's own config"""
    fsdp_config: FSDPConfig = FSDPConfig()
    """placement of parameters and optimiser state"""


class SFTDataConfig(Section):
    """Episodes of the environment's expert program, or user-provided files of messages."""

    train_files: list[str] = []
    """jsonl or parquet files with a column of messages; empty: expert episodes"""
    val_files: list[str] = []
    """jsonl or parquet files with a column of messages for the held-out loss"""
    messages_key: str = "messages"
    """column of the files that holds the messages"""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """arguments of the chat template, as {enable_thinking: false}"""
    data_dir: str = "data/sft"
    """directory in which expert episodes are stored by content hash"""
    episodes: PositiveInt = 3400
    """expert episodes to train on"""
    val_episodes: NonNegativeInt = 64
    """expert episodes for the held-out loss; with data.history=window, turns"""
    history: Derived[History] = NULL
    """append: an episode is one row; window: each turn of an expert episode is a row, whose prompt
    shows env.history_length past turns; chat: prompts and rows as with env.history=chat; null: chat
    with env.history=chat, else append"""
    noise: Annotated[float, Ge(0), Lt(0.95)] = 0.35
    """share of useless but valid actions in expert episodes, in addition to 5% invalid actions"""
    num_workers: PositiveInt = 2
    """processes that generate expert episodes"""
    max_length: PositiveInt = 2048
    """longest row, in tokens; longer episodes are cut after a whole turn"""
    tokens_per_batch: PositiveInt = 2048
    """tokens per optimizer step"""
    max_token_len_per_gpu: PositiveInt = 16384
    """tokens per forward/backward and device"""
    env_loss_weight: Derived[NonNegative] = NULL
    """loss weight of environment tokens; agent tokens have weight 1; null: 0 with data.train_files
    or data.history=chat, else 0.5"""
    shuffle: bool = True
    """use a seeded permutation of the rows in every epoch"""


class SFTTrainerConfig(RunConfig):
    """Schedule, devices and the run directory."""

    experiment_name: str = "sft"
    """second folder below runs/, name of the run"""
    total_epochs: PositiveInt = 1
    """number of times that every episode is trained on"""
    total_training_steps: PositiveInt | None = None
    """optimizer steps; null: as total_epochs gives"""
    grad_clip: Annotated[float, Gt(0)] = 1.0
    """largest gradient norm"""
    test_freq: Annotated[int, Ge(-1)] = -1
    """optimizer steps between two computations of the held-out loss; -1: only before the first and
    after the last step"""
    save_freq: Annotated[int, Ge(-1)] = -1
    """optimizer steps between two checkpoints, in addition to the policy in model.save_path; -1 or
    0: no checkpoints"""
    nnodes: Annotated[int, Ge(1), Le(1)] = 1
    """nodes; a supervised run trains on the devices of one machine"""
    stall_timeout_s: Seconds | None = 7200.0
    """seconds without progress after which the stacks of all processes are written and the run
    ends; null: never. For a cold start, the keys of the run that needs the policy apply"""


class SFTConfig(Section):
    """Configuration of supervised training of a policy: ``main_sft``."""

    model: SFTModelConfig = SFTModelConfig()
    """initial policy and directory of the trained one"""
    data: SFTDataConfig = SFTDataConfig()
    """expert episodes or files to imitate"""
    optim: OptimConfig = OptimConfig(lr=0.001, warmup_style="cosine", lr_warmup_steps_ratio=0.05)
    """AdamW and its schedule"""
    env: EnvConfig = EnvConfig()
    """the environment whose expert is imitated"""
    trainer: SFTTrainerConfig = SFTTrainerConfig()
    """schedule, devices and the run directory"""
