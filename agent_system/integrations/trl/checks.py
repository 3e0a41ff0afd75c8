"""Check of the settings of ``GRPOEnvTrainer``, before a model is loaded."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agent_system.environments.multistep import MultistepEnv
from agent_system.integrations.trl.full_sequence import LOSS_TYPES

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

OLD_LOGP_SOURCES = ("sampling", "recompute")
LOSS_PATHS = ("trl", "full_sequence")


def check_settings(
    env: MultistepEnv,
    args: "GRPOConfig",
    processing_class: Any,
    old_logps: str,
    loss_path: str,
    sampling_options: Mapping[str, Any],
) -> None:
    """Raise ``ValueError`` if ``GRPOEnvTrainer`` cannot train with these settings.

    ``sampling_options`` is the result of ``find_sampling_options``. The message names all invalid
    settings and their fixes.
    """
    problems: list[str] = []
    tokenizer: Any = env.tokenizer
    if tokenizer is None:
        problems.append(
            "env.tokenizer=None: training needs tokens; give the environment a tokenizer"
        )
    # Compare the contents: the same tokenizer is often loaded twice.
    elif processing_class is not None and processing_class.get_vocab() != tokenizer.get_vocab():
        problems.append(
            "processing_class and the tokenizer of the environment have different vocabularies: "
            "use the same tokenizer for both"
        )
    settings_with_choices = (
        ("old_logps", old_logps, OLD_LOGP_SOURCES),
        ("loss_path", loss_path, LOSS_PATHS),
    )
    problems += [
        f"{name}={value!r}: allowed are {', '.join(allowed)}; set one of them"
        for name, value, allowed in settings_with_choices
        if value not in allowed
    ]
    problems += _find_sampling_problems(args)
    problems += _find_option_problems(args, sampling_options)
    if loss_path == "full_sequence":
        problems += _find_full_sequence_problems(args, old_logps)
    if problems:
        raise ValueError("GRPOEnvTrainer: " + "; ".join(problems))


def find_sampling_options(
    args: "GRPOConfig", agent: object, sampling_params: object, max_turn_tokens: int | None
) -> dict[str, Any]:
    """Return the options with which turns are sampled, by the names of vLLM.

    ``sampling_params`` (of the trainer, or of ``agent``) have precedence over
    ``args.generation_kwargs``, and these over ``args``. Options without a value are omitted.
    """
    sampling_params = sampling_params or getattr(agent, "sampling_params", None)
    option_names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    options = {name: getattr(args, name) for name in option_names}
    if sampling_params is not None:
        option_names = (*option_names, "max_tokens", "presence_penalty", "frequency_penalty")
        options |= {name: getattr(sampling_params, name, None) for name in option_names}
    else:
        user_options: Any = args.generation_kwargs or {}  # TRL has parsed the string
        options |= user_options
        if max_turn_tokens is not None:
            options["max_tokens"] = max_turn_tokens
    return {name: value for name, value in options.items() if value is not None}


def samples_full_distribution(options: Mapping[str, Any]) -> bool:
    """Return True if sampling with ``options`` has neither truncation nor penalties."""
    neutral_values = {
        "top_p": (1.0,),
        "top_k": (0, -1),
        "min_p": (0.0,),
        "repetition_penalty": (1.0,),
        "presence_penalty": (0.0,),
        "frequency_penalty": (0.0,),
    }
    return all(options.get(name, values[0]) in values for name, values in neutral_values.items())


def _find_option_problems(args: "GRPOConfig", options: Mapping[str, Any]) -> Iterator[str]:
    if options.get("temperature", args.temperature) != args.temperature:
        yield (
            f"turns are sampled with temperature={options['temperature']}, but the loss divides "
            f"logits by args.temperature={args.temperature}: set both to the same value"
        )
    max_completion_tokens = args.max_completion_length
    if max_completion_tokens is not None and options.get("max_tokens", 0) > max_completion_tokens:
        yield (
            f"a turn may have max_tokens={options['max_tokens']}, but args.max_completion_length="
            f"{max_completion_tokens} leaves no space for such a turn: increase "
            "max_completion_length, or reduce max_turn_tokens (max_tokens of the sampling "
            "parameters)"
        )


def _find_sampling_problems(args: "GRPOConfig") -> Iterator[str]:
    if args.remove_unused_columns:
        yield (
            "remove_unused_columns=True removes the columns that the environment needs: "
            "set it to False"
        )
    if args.chat_template_kwargs:
        yield (
            "chat_template_kwargs have no effect, because the environment renders its trials: "
            "set tokenizer.chat_template instead"
        )
    is_colocated = args.use_vllm and args.vllm_mode == "colocate"
    # Other samplers receive only the fields of ``TurnSampling``.
    has_further_options = args.min_p or args.repetition_penalty != 1.0 or args.generation_kwargs
    if has_further_options and not is_colocated:
        yield (
            "min_p, repetition_penalty and generation_kwargs only have an effect in colocated "
            "vLLM: remove them, or set use_vllm=True vllm_mode='colocate'"
        )
    if is_colocated and args.vllm_enable_sleep_mode:
        yield (
            "vllm_enable_sleep_mode=True: each turn is a separate call, but TRL wakes the engine "
            "for one call only. Set vllm_enable_sleep_mode=False"
        )
    if not args.use_vllm and (args.fsdp or args.deepspeed) and args.world_size > 1:
        yield (
            "all processes of a sharded model must sample every token together, but trials differ "
            "in length: set use_vllm=True"
        )
    if is_colocated and args.vllm_tensor_parallel_size > 1:
        yield (
            "with vllm_tensor_parallel_size > 1, all processes must sample every turn together, "
            "but trials differ in length: set vllm_mode='server'"
        )


def _find_full_sequence_problems(args: "GRPOConfig", old_logps: str) -> Iterator[str]:
    if args.loss_type not in LOSS_TYPES:
        yield (
            f"loss_type={args.loss_type!r}: loss_path='full_sequence' allows "
            f"{', '.join(LOSS_TYPES)}; set one of them, or loss_path='trl'"
        )
    unsupported_loss_terms = (
        args.entropy_coef,
        args.use_adaptive_entropy,
        args.off_policy_mask_threshold,
        args.top_entropy_quantile < 1,
    )
    if any(unsupported_loss_terms):
        yield (
            "loss_path='full_sequence' supports neither entropy terms nor an off-policy mask: "
            "set loss_path='trl'"
        )
    # This loss has no correction for the mismatch between the log-probs of vLLM and the trainer.
    if args.use_vllm and old_logps == "recompute":
        yield (
            "old_logps='recompute' is not allowed with loss_path='full_sequence' and vLLM: "
            "set old_logps='sampling'"
        )
