"""The configuration of ``main_sft``: which episodes are imitated, by which policy, for how long."""

from dataclasses import dataclass
from typing import Any

from verl.trainer.config.schema.env import EnvConfig
from verl.trainer.config.schema.field import opt, section
from verl.trainer.config.schema.model import TRAIN_DTYPES, FSDPConfig, OptimConfig
from verl.trainer.config.schema.trainer import DEVICES, RESUME_MODES


@dataclass
class NewPolicyConfig:
    """The size of a policy built from nothing (Qwen3 architecture)."""

    hidden_size: int = opt(128, "width", low=8)
    num_hidden_layers: int = opt(2, "layers", low=1)
    num_attention_heads: int = opt(4, "attention heads", low=1)
    num_key_value_heads: int = opt(2, "key/value heads", low=1)
    head_dim: int | None = opt(
        None, "width of a head; null: hidden_size / num_attention_heads", low=1
    )
    intermediate_size: int = opt(384, "width of the feed-forward layer", low=8)
    max_position_embeddings: int = opt(4096, "longest context", low=1)
    tie_word_embeddings: bool = opt(True, "output layer shares the input embedding")


@dataclass
class SFTModelConfig:
    """Where the policy comes from and goes to."""

    path: str | None = opt(None, "policy to start from; null: a new one of the size below")
    save_path: str = opt(
        "data/models/policy",
        "directory the trained policy and tokenizer are written to (HF format)",
    )
    new: NewPolicyConfig = section(NewPolicyConfig, "size of a policy built from nothing")
    tokenizer_path: str | None = opt(None, "tokenizer; null: that of path, or a new one")
    vocab_size: int = opt(800, "tokens of a new BPE tokenizer, special tokens included", low=300)
    dtype: str = opt("float32", "compute dtype; master weights stay float32", choices=TRAIN_DTYPES)
    enable_gradient_checkpointing: bool = opt(False, "recompute activations in backward")
    trust_remote_code: bool = opt(False, "run Python code that ships with the model")
    override_config: dict[str, Any] = opt({}, "values that replace those of the model's own config")
    fsdp_config: FSDPConfig = section(FSDPConfig, "placement of parameters and optimiser state")


@dataclass
class SFTDataConfig:
    """Expert episodes, or message files of the user's own."""

    train_files: list[str] = opt(
        [], "jsonl or parquet files with a column of messages; empty: expert episodes"
    )
    val_files: list[str] = opt([], "the same for the held-out loss")
    messages_key: str = opt("messages", "column that holds them")
    apply_chat_template_kwargs: dict[str, Any] = opt(
        {}, "passed to the chat template, as {enable_thinking: false}"
    )
    data_dir: str = opt("data/sft", "where expert episodes are stored by content hash")
    episodes: int = opt(3400, "expert episodes to train on", low=1)
    val_episodes: int = opt(64, "expert episodes for the held-out loss", low=0)
    noise: float = opt(0.35, "share of useless but valid actions in expert episodes", low=0, high=1)
    levels: list[int] = opt(
        [1, 2, 3, 4], "thinking levels, drawn uniformly; empty: files of plain actions"
    )
    num_workers: int = opt(2, "processes that play the expert", low=1)
    max_length: int = opt(
        2048, "longest row, in tokens; longer episodes are cut after a whole turn", low=1
    )
    tokens_per_batch: int = opt(2048, "tokens per optimizer step", low=1)
    max_token_len_per_gpu: int = opt(16384, "tokens per forward/backward and device", low=1)
    env_loss_weight: float = opt(
        0.5, "loss weight of environment tokens; agent tokens weigh 1", low=0
    )
    shuffle: bool = opt(True, "a seeded permutation per epoch")


@dataclass
class SFTTrainerConfig:
    """Schedule, devices and the run directory."""

    project_name: str = opt("rlvcr", "first folder below runs/, project of the trackers")
    experiment_name: str = opt("sft", "second folder below runs/, name of the run")
    seed: int = opt(0, "seed of weights and data order", low=0)
    total_epochs: int = opt(1, "passes over the episodes", low=1)
    total_training_steps: int | None = opt(
        None, "optimizer steps; null: total_epochs decides", low=1
    )
    grad_clip: float = opt(1.0, "largest gradient norm", low=0)
    test_freq: int = opt(
        -1, "held-out loss every so many optimizer steps and after the last one", low=-1
    )
    save_freq: int = opt(-1, "checkpoint every so many optimizer steps", low=-1)
    resume_mode: str = opt(
        "auto", "continue from the newest checkpoint, or not", choices=RESUME_MODES
    )
    resume_from_path: str | None = opt(
        None, "checkpoint to continue from with resume_mode=resume_path"
    )
    n_gpus_per_node: int = opt(1, "devices per node; on CPU the number of FSDP ranks", low=1)
    nnodes: int = opt(1, "nodes", low=1)
    device: str = opt("auto", "what the workers compute on", choices=DEVICES)
    num_threads: int | None = opt(None, "CPU threads per rank; null: all cores", low=1)
    default_local_dir: str = opt(
        "runs/${trainer.project_name}/${trainer.experiment_name}", "the run directory"
    )
    logger: list[str] = opt(["console"], "trackers: console, tensorboard, wandb, ...")


@dataclass
class SFTConfig:
    """Everything ``main_sft`` reads."""

    model: SFTModelConfig = section(SFTModelConfig, "where the policy comes from and goes to")
    data: SFTDataConfig = section(SFTDataConfig, "what is imitated")
    optim: OptimConfig = section(
        lambda: OptimConfig(lr=1e-3, warmup_style="cosine", lr_warmup_steps_ratio=0.05),
        "AdamW and its schedule",
    )
    env: EnvConfig = section(EnvConfig, "the environment whose expert is imitated")
    trainer: SFTTrainerConfig = section(SFTTrainerConfig, "schedule, devices and the run directory")
