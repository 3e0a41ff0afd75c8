"""Configurations of the small commands: ``main_generation`` and ``main_export``."""

from typing import Annotated, Any, Literal

from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.trainer import Seconds
from verl.config.settings import PositiveInt, RunsCode, Section


class GenerationDataConfig(Section):
    """The prompts, and where the answers go."""

    path: str = ""
    """jsonl or parquet file of prompts; required"""
    prompt_key: str = "prompt"
    """column of the prompts: a text, or a list of messages"""
    n_samples: PositiveInt = 1
    """answers per prompt"""
    output_path: str | None = None
    """file that is written, jsonl or parquet; null: beside data.path, as NAME.generated"""
    overwrite: bool = False
    """replace output_path where it exists"""
    response_key: str = "responses"
    """column that is added: the list of answers"""
    max_prompt_length: PositiveInt = 1024
    """longest prompt, in tokens; a longer one is refused"""
    max_response_length: PositiveInt = 512
    """longest answer, in tokens"""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """arguments of the chat template, as {enable_thinking: false}"""


class GenerationModelConfig(Section):
    """The policy."""

    path: str = ""
    """directory (or hub name) of the policy in Hugging Face format; required"""
    trust_remote_code: Annotated[bool, RunsCode()] = False
    """run Python code that ships with the model"""


class GenerationTrainerConfig(Section):
    """What becomes of a generation that stands still."""

    waiting_log_s: Seconds = 60.0
    """seconds without movement after which the log says so, then after twice as many"""
    stall_timeout_s: Seconds | None = 7200.0
    """seconds without movement after which the stacks of all processes are written and the command
    ends; null: never"""


class GenerationConfig(Section):
    """Everything ``main_generation`` reads."""

    data: GenerationDataConfig = GenerationDataConfig()
    """the prompts, and where the answers go"""
    model: GenerationModelConfig = GenerationModelConfig()
    """the policy"""
    rollout: RolloutConfig = RolloutConfig()
    """the engine that samples, as actor_rollout_ref.rollout of main_ppo"""
    trainer: GenerationTrainerConfig = GenerationTrainerConfig()
    """what becomes of a generation that stands still"""


class ExportConfig(Section):
    """Everything ``main_export`` reads."""

    checkpoint: str = ""
    """checkpoint of a run: runs/.../checkpoints/global_step_N; required"""
    target: str = ""
    """directory that is written; required"""
    trust_run_code: bool = False
    """execute the code that the configuration of the run names: trust_remote_code, external_lib"""
    overwrite: bool = False
    """delete what target holds, also what no such command wrote"""
    lora: Literal["merged", "adapters"] = "merged"
    """with LoRA: one model with the adapters in its weights, or the adapters alone (peft)"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the weights that are written; null: as in the checkpoint"""
    model_path: str | None = None
    """model that the run started from; null: as the configuration of the run says"""
