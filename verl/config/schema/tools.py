"""Configurations of the small commands: ``main_generation`` and ``main_export``."""

from typing import Annotated, Any, Literal

from verl.config.schema.actor_rollout_ref import RolloutConfig
from verl.config.schema.trainer import Seconds
from verl.config.settings import NamesCode, PositiveInt, Section


class GenerationDataConfig(Section):
    """Files of prompts and of generated answers, and their lengths."""

    path: str = ""
    """jsonl or parquet file of prompts; required"""
    prompt_key: str = "prompt"
    """column of the prompts: a text, or a list of messages"""
    n_samples: PositiveInt = 1
    """answers per prompt"""
    output_path: str | None = None
    """file to write, jsonl or parquet; null: NAME.generated in the directory of data.path"""
    overwrite: bool = False
    """replace output_path if it exists"""
    response_key: str = "responses"
    """column that is added: the list of answers"""
    max_prompt_length: PositiveInt = 1024
    """longest prompt, in tokens; a longer one is refused"""
    max_response_length: PositiveInt = 512
    """longest answer, in tokens"""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """arguments of the chat template, as {enable_thinking: false}"""


class GenerationModelConfig(Section):
    """The policy that generates the answers."""

    path: str = ""
    """directory (or hub name) of the policy in Hugging Face format; required"""
    trust_remote_code: Annotated[bool, NamesCode()] = False
    """run Python code that ships with the model"""


class GenerationTrainerConfig(Section):
    """Timeouts after which a stalled generation is reported and ended."""

    waiting_log_s: Seconds = 60.0
    """seconds without progress after which the log reports it; the next entry follows after twice
    that time"""
    stall_timeout_s: Seconds | None = 7200.0
    """seconds without progress after which the stacks of all processes are written and the command
    ends; null: never"""


class GenerationConfig(Section):
    """Configuration of ``main_generation``, which generates answers to prompts."""

    data: GenerationDataConfig = GenerationDataConfig()
    """file of prompts, and file of answers"""
    model: GenerationModelConfig = GenerationModelConfig()
    """the policy"""
    rollout: RolloutConfig = RolloutConfig()
    """the rollout engine, as actor_rollout_ref.rollout of main_ppo"""
    trainer: GenerationTrainerConfig = GenerationTrainerConfig()
    """timeouts of a stalled generation"""


class ExportConfig(Section):
    """Configuration of ``main_export``, which writes a checkpoint in Hugging Face format."""

    checkpoint: str = ""
    """checkpoint of a run: runs/.../checkpoints/global_step_N; required"""
    target: str = ""
    """directory to write; required"""
    trust_run_code: bool = False
    """execute the code that the configuration of the run names: trust_remote_code, external_lib"""
    overwrite: bool = False
    """delete the contents of target, including files that main_export did not write"""
    role: Literal["actor", "critic"] = "actor"
    """model to write; a critic needs lora=adapters: its adapter and value head are written"""
    lora: Literal["merged", "adapters"] = "merged"
    """with LoRA: a model with the adapters merged into its weights, or only the adapters (peft)"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the written weights; null: as in the checkpoint"""
    model_path: str | None = None
    """model that the run started from; null: as in the configuration of the run"""
