"""Settings of ``GRPOEnvTrainer`` that cannot work, refused before a model is loaded."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from agent_system.environments.multistep import MultistepEnv
from agent_system.integrations.trl.full_sequence import LOSS_TYPES

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

OLD_LOGPS = ("sampling", "recompute")
LOSS_PATHS = ("trl", "full_sequence")


def check(
    env: MultistepEnv, args: "GRPOConfig", processing_class: object, old_logps: str, loss_path: str
) -> None:
    """Raise ``ValueError`` with everything that is wrong and how to mend it; ``args`` is a
    ``trl.GRPOConfig``.
    """
    # Everything that is wrong at once: each further attempt would cost another start.
    problems = [*_tokens(env, processing_class), *_choices(old_logps, loss_path), *_sampling(args)]
    if loss_path == "full_sequence":
        problems += _full_sequence(args, old_logps)
    if problems:
        raise ValueError("GRPOEnvTrainer: " + "; ".join(problems))


def _tokens(env: MultistepEnv, processing_class: object) -> Iterator[str]:
    if env.tokenizer is None:
        yield "it trains on tokens: give the environment a tokenizer"
    elif processing_class is not None and not _same_vocabulary(processing_class, env.tokenizer):
        yield "processing_class and the environment's tokenizer differ: use one for both"


def _same_vocabulary(one: Any, other: Any) -> bool:
    # By content: the same tokenizer is often loaded twice.
    return one.get_vocab() == other.get_vocab()


def _choices(old_logps: str, loss_path: str) -> Iterator[str]:
    for name, value, allowed in (
        ("old_logps", old_logps, OLD_LOGPS),
        ("loss_path", loss_path, LOSS_PATHS),
    ):
        if value not in allowed:
            yield f"{name}={value!r}: allowed are {', '.join(allowed)}"


def _sampling(args: "GRPOConfig") -> Iterator[str]:
    if args.remove_unused_columns:
        yield (
            "remove_unused_columns=True drops the columns that the environment needs: "
            "set it to False"
        )
    if args.chat_template_kwargs:
        yield (
            "chat_template_kwargs are not applied, the environment renders its trials: "
            "set tokenizer.chat_template"
        )
    colocated = args.use_vllm and args.vllm_mode == "colocate"
    # A live model and a server are told what ``TurnSampling`` holds, and nothing else.
    if not colocated and (args.min_p or args.repetition_penalty != 1.0 or args.generation_kwargs):
        yield (
            "min_p, repetition_penalty and generation_kwargs are applied with "
            "use_vllm=True vllm_mode='colocate' only"
        )
    if colocated and args.vllm_enable_sleep_mode:
        yield (
            "turns are sampled one by one, and TRL wakes a sleeping engine for one: "
            "vllm_enable_sleep_mode=False"
        )
    if not args.use_vllm and (args.fsdp or args.deepspeed) and args.world_size > 1:
        yield (
            "to sample from a sharded model, all processes must sample every token together, and "
            "trials differ in length: use_vllm=True"
        )
    if args.use_vllm and args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1:
        yield (
            "with vllm_tensor_parallel_size > 1, all processes must sample every turn together, "
            "and trials differ in length: vllm_mode='server'"
        )


def _full_sequence(args: "GRPOConfig", old_logps: str) -> Iterator[str]:
    if args.loss_type not in LOSS_TYPES:
        yield f"loss_path='full_sequence' knows loss_type {', '.join(LOSS_TYPES)}"
    extra = (
        args.entropy_coef,
        args.use_adaptive_entropy,
        args.off_policy_mask_threshold,
        args.top_entropy_quantile < 1,
    )
    if any(extra):
        yield (
            "loss_path='full_sequence' has neither entropy terms nor an off-policy mask: "
            "loss_path='trl'"
        )
    # That loss has no factor for the gap between vLLM's log-probs and the trainer's.
    if args.use_vllm and old_logps == "recompute":
        yield "loss_path='full_sequence' with vLLM takes old_logps='sampling'"
