"""``GRPOEnvTrainer``: TRL's GRPO on trials of a ``MultistepEnv``.

    dataset rows ─▶ _generate_and_score_completions ─▶ env.run_trial(agent) ─▶ tokens, masks,
                                   │                          log-probs, session ids
                                   │                                     │
    TRL: rewards by session ids, advantages, loss on the agent's tokens ◀┘

A trial is one or more episodes of a task in one conversation. TRL receives it as one prompt (up to
the first sampled token) and one completion. ``env_mask`` is 1 on the tokens of the agent and 0 on
those of the environment. All tokens are attended to.
"""

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from agent_system.agents import Agent, DirectOutputAgent
from agent_system.environments.multistep import MultistepEnv
from agent_system.integrations.trl.checks import (
    check_settings,
    find_sampling_options,
    samples_full_distribution,
)
from agent_system.integrations.trl.full_sequence import (
    build_full_sequence_batch,
    compute_token_logps,
    masked_grpo_loss,
)
from agent_system.integrations.trl.policies import (
    TrainedModelSampler,
    TurnSampling,
    VllmServerSampler,
    make_cpu_weight_sync,
    prepare_vllm_on_cpu,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl.trainer.grpo_trainer import RewardFunc

logger = logging.getLogger(__name__)
MIN_TURN_TOKENS = 16  # lower bound of the default of ``max_turn_tokens``, in tokens
EMPTY_USER_MESSAGE = {"role": "user", "content": ""}
# Columns of whole sequences, in addition to TRL's columns of prompts and completions. Log-probs
# and advantages still cover completions only.
FULL_SEQUENCE_COLUMNS = ("prompt_completion_ids", "attention_mask", "completion_only_mask")


class GRPOEnvTrainer(GRPOTrainer):
    """Trainer that generates trials of ``env`` with ``model`` and trains it on them.

    A trial is one or more episodes of a task in one conversation.

    Args:
        model, args, callbacks, optimizers, peft_config: As in ``trl.GRPOTrainer``.
            ``args.max_completion_length`` limits all tokens after the first prompt of a trial.
            ``args.num_generations`` is the group size.
        env: Environment of the trials. It needs a tokenizer, which is the default
            ``processing_class``.
        reward_funcs: Default: ``env.get_rubric()``. They receive ``session_ids`` and the columns
            of the dataset.
        train_dataset, eval_dataset: Rows for ``env``. A column ``prompt`` is not required.
            Default: the data sets of the environment.
        agent: Agent that returns the turns. Its tokens must be sampled from the trained policy.
            Default: an agent that samples from this policy.
        sampling_params: Passed to the sampler unchanged. Default: built from ``args``,
            ``max_turn_tokens`` and ``env.stop``.
        max_turn_tokens: Maximum length of a turn. A trial ends when no further turn of that length
            fits. Default: ``args.max_completion_length`` / (2 * turns of a trial), at least
            ``MIN_TURN_TOKENS``.
        old_logps: ``sampling``: use the rollout log-probs as old log-probs. This also corrects the
            mismatch between vLLM and the trainer, so TRL's correction is switched off.
            ``recompute``, and truncated or penalised sampling (top_p, top_k, min_p,
            repetition_penalty): use TRL's old log-probs. TRL's default
            ``vllm_importance_sampling_mode`` then drops whole sequences.
        loss_path: ``trl``: the loss of TRL. ``full_sequence``: the same loss, computed from the
            logits of whole sequences.
        allow_retokenized: Train on tokens that were encoded from the text of an agent.

    Raises ``ValueError`` if the settings cannot work together, with their names and the fix.
    """

    _tag_names: ClassVar = ["trl", "grpo", "multistep-env"]
    # Attributes that TRL's trainer sets, with more precise types.
    args: GRPOConfig  # pyright: ignore[reportIncompatibleVariableOverride]  always a GRPOConfig
    model: Any
    max_completion_length: int  # pyright: ignore[reportIncompatibleVariableOverride]  not None here

    def __init__(
        self,
        model: "str | PreTrainedModel",
        env: MultistepEnv,
        reward_funcs: "RewardFunc | list[RewardFunc] | None" = None,
        args: GRPOConfig | None = None,
        train_dataset: "Dataset | None" = None,
        eval_dataset: "Dataset | None" = None,
        processing_class: "PreTrainedTokenizerBase | None" = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: "PeftConfig | None" = None,
        *,
        agent: Agent | None = None,
        sampling_params: object = None,
        max_turn_tokens: int | None = None,
        old_logps: str = "sampling",
        loss_path: str = "trl",
        allow_retokenized: bool = False,
    ) -> None:
        args = GRPOConfig("grpo-env") if args is None else args
        options = find_sampling_options(args, agent, sampling_params, max_turn_tokens)
        check_settings(env, args, processing_class, old_logps, loss_path, options)
        self._uses_rollout_logprobs = old_logps == "sampling" and samples_full_distribution(options)
        is_colocated = args.use_vllm and args.vllm_mode == "colocate"
        uses_vllm_on_cpu = is_colocated and not torch.cuda.is_available()
        if uses_vllm_on_cpu:
            # Do this before TRL imports vLLM, which reads the environment variables on import.
            prepare_vllm_on_cpu()
        if args.use_vllm and self._uses_rollout_logprobs:
            _disable_vllm_correction(args)
        if eval_dataset is None and args.eval_strategy != "no":
            eval_dataset = env.get_eval_dataset()
        reward_functions: Any = env.get_rubric() if reward_funcs is None else reward_funcs
        tokenizer: Any = env.tokenizer if processing_class is None else processing_class
        super().__init__(
            model=model,
            reward_funcs=reward_functions,
            args=args,
            train_dataset=env.get_train_dataset() if train_dataset is None else train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
        )
        self.env = env
        self._unify_end_tokens()
        self.loss_path = loss_path
        self.allow_retokenized = allow_retokenized
        self.max_turn_tokens = max_turn_tokens or _compute_default_turn_length(
            env, self.max_completion_length
        )
        if uses_vllm_on_cpu:
            self.vllm_generation.sync_weights = make_cpu_weight_sync(self.vllm_generation)
        self.agent: Agent = self._make_agent(sampling_params) if agent is None else agent
        self.rollout_func = self._run_rollout
        self._rows: list[dict[str, Any]] = []
        self._opening_messages: list[list[dict[str, str]]] = []
        self._trials: dict[str, list] = {}

    def _unify_end_tokens(self) -> None:
        # TRL does not know the end-of-turn token of a chat template. Use the same tokens for
        # sampling, token lists and decoded texts.
        if self.env.bridge is not None:
            self.env.bridge.end_ids = self.env.bridge.end_ids.union(self.eos_token_ids)
            self.eos_token_ids = sorted(self.env.bridge.end_ids)

    # ---- rollout ----

    def _make_agent(self, sampling_params: object) -> DirectOutputAgent:
        if self.use_vllm and self.vllm_mode == "colocate":
            sampling_params = sampling_params or self._build_vllm_sampling_params()
            return DirectOutputAgent(self.vllm_generation.llm, sampling_params)
        if self.use_vllm:
            client = getattr(self.vllm_generation, "vllm_client", None)  # on the main process only
            policy = VllmServerSampler(client, self._tokenizer, self.eos_token_ids)
        else:
            seed = self.args.seed + self.accelerator.process_index
            # Untyped: transformers resolves ``eos_token_id`` at run time.
            tokenizer: Any = self._tokenizer
            policy = TrainedModelSampler(
                self._unwrap_model_for_sampling, tokenizer, self.eos_token_ids, seed
            )
        turn_sampling = TurnSampling(
            self.max_turn_tokens, self.temperature, self.top_p, self.top_k, tuple(self.env.stop)
        )
        return DirectOutputAgent(policy, sampling_params or turn_sampling, self._tokenizer)

    def _build_vllm_sampling_params(self) -> Any:
        from vllm import SamplingParams

        options = {
            "max_tokens": self.max_turn_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "stop": list(self.env.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": list(self.eos_token_ids),
            "skip_special_tokens": False,
            "logprobs": 0,
        }
        user_options: Any = self.args.generation_kwargs or {}  # TRL has parsed the string
        return SamplingParams(**(options | user_options))

    @contextlib.contextmanager
    def _unwrap_model_for_sampling(self) -> Iterator[Any]:
        checkpointing_kwargs: Any = self.args.gradient_checkpointing_kwargs  # TRL has parsed it
        with unwrap_model_for_generation(
            self.model_wrapped,
            self.accelerator,
            gather_deepspeed3_params=self.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=checkpointing_kwargs,
        ) as model:
            was_training = model.training
            model.eval()
            try:
                with self.accelerator.autocast():
                    yield model
            finally:
                model.train(was_training)

    def _generate_trials(self, rows: list[dict[str, Any]]) -> dict[str, list]:
        """Generate one trial (episodes of a task in one conversation) per row of this process.

        With a vLLM server, the main process generates the trials of all processes.
        """
        if not (self.use_vllm and self.vllm_mode == "server"):
            return self._run_trials(rows)
        all_rows = gather_object(rows)
        # ``broadcast_object_list`` fills the list in place on the other processes.
        shared_trials: list[Any] = [None]
        if self.accelerator.is_main_process:
            shared_trials = [self._run_trials(all_rows)]
        broadcast_object_list(shared_trials, from_process=0)
        start = self.accelerator.process_index * len(rows)
        end = start + len(rows)
        trials_of_process = {name: values[start:end] for name, values in shared_trials[0].items()}
        self.env.store_records(
            dict(zip(trials_of_process["session_ids"], trials_of_process["records"], strict=True))
        )
        return trials_of_process

    def _run_trials(self, rows: list[dict[str, Any]]) -> dict[str, list]:
        max_length = self.max_completion_length
        trials = self.env.run_trial(rows, agent=self.agent, max_completion_length=max_length)
        records = [self.env.completed_episodes[session_id] for session_id in trials["session_ids"]]
        return trials | {"records": records}

    def _run_rollout(self, prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        """Return prompts and completions for TRL, which calls this as its rollout function.

        One trial is generated for each row that ``_generate_and_score_completions`` has stored.
        """
        del prompts, trainer
        self._trials = trials = self._generate_trials(self._rows)
        if any(trials["retokenized"]) and not self.allow_retokenized:
            raise ValueError(
                "the agent returns no sampled tokens: its text was tokenised again, and these "
                "tokens can differ from those that the policy sampled. Use an agent that returns "
                "agent_system.agents.Action, or set allow_retokenized=True"
            )
        for opening, record in zip(self._opening_messages, trials["records"], strict=True):
            # Change in place: TRL keeps these lists for reward functions and logs.
            messages = itertools.takewhile(
                lambda message: message["role"] != "assistant", record["messages"]
            )
            opening[:] = [dict(message) for message in messages] or [dict(EMPTY_USER_MESSAGE)]
        rows = [self._split_trial(trials, index) for index in range(len(self._rows))]
        column_names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        columns = dict(zip(column_names, map(list, zip(*rows, strict=True)), strict=True))
        return columns | {"session_ids": trials["session_ids"]}

    def _split_trial(
        self, trials: dict[str, list], index: int
    ) -> tuple[list[int], list[int], list[float], list[int]]:
        """Return prompt, completion, log-probs and loss mask of the completion of trial ``index``.

        An end token is appended if the completion is empty, or if the trial is complete and has no
        end token. The appended token is not trained on.
        """
        ids: list[int] = trials["full_token_ids"][index]
        prompt_length: int = trials["prompt_lengths"][index]
        end_id: Any = self._tokenizer.eos_token_id
        completion_ids = ids[prompt_length:]
        mask: list[int] = trials["completion_only_mask"][index][prompt_length:]
        logprobs: list[float] = trials["logprobs"][index][prompt_length:]
        has_not_failed = trials["aborted"][index] is None
        is_complete = has_not_failed and trials["truncated"][index] in (None, "steps")
        if not completion_ids or (is_complete and completion_ids[-1] not in self.eos_token_ids):
            completion_ids = [*completion_ids, end_id]
            mask = [*mask, 0]
            logprobs = [*logprobs, 0.0]
        # A trial that failed before its first prompt needs one token as a placeholder prompt.
        return ids[:prompt_length] or [end_id], completion_ids, logprobs, mask

    # ---- TRL's hooks ----

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._rows = [dict(row) for row in inputs]
        # ``_run_rollout`` replaces these empty opening messages after the start of the episodes.
        # Store the rows, because TRL passes only prompts to the rollout function.
        self._opening_messages = [[dict(EMPTY_USER_MESSAGE)] for _ in inputs]
        pairs = zip(inputs, self._opening_messages, strict=True)
        rows = [{**row, "prompt": opening} for row, opening in pairs]
        output = super()._generate_and_score_completions(rows)
        # Every token of the agent was sampled and has a finite log-prob.
        has_all_logprobs = not any(self._trials["retokenized"]) and all(
            math.isfinite(value) for row in self._trials["logprobs"] for value in row
        )
        if has_all_logprobs and self._uses_rollout_logprobs:
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        elif "sampling_per_token_logps" in output:
            # NaN is an unknown log-prob. It would make TRL's metrics NaN.
            output["sampling_per_token_logps"] = output["sampling_per_token_logps"].nan_to_num()
        full_batch = build_full_sequence_batch(output)
        return output | {name: full_batch[name] for name in FULL_SEQUENCE_COLUMNS}

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],  # noqa: ARG002  whole trials, decoded; see below
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        """Call the reward functions with the agent's last message only.

        ``completions`` would be the decoded text of the whole trial, with all its turns.
        """
        return super()._calculate_rewards(
            inputs, prompts, self._trials["final_completion_messages"], completion_ids_list
        )

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Return the loss of TRL, or ``masked_grpo_loss`` computed on whole sequences.

        ``masked_grpo_loss`` is used with ``loss_path="full_sequence"``. It is also used for
        ``inputs`` without ``completion_ids``, which already contain whole sequences.
        """
        has_trl_columns = "completion_ids" in inputs
        if self.loss_path == "trl" and has_trl_columns:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        batch = build_full_sequence_batch(inputs) if has_trl_columns else inputs
        ids = batch["prompt_completion_ids"]
        logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits
        logps = compute_token_logps(logits, ids, self.temperature)
        num_micro_batches = self.current_gradient_accumulation_steps if self.model.training else 1
        num_tokens = inputs.get("num_items_in_batch")
        if num_tokens is not None:  # counted over all processes and the whole generation batch
            steps_per_generation: Any = self.args.steps_per_generation  # set by TRL if None
            num_tokens = num_tokens.clamp(min=1.0) / self.accelerator.num_processes
            if self.model.training:
                num_tokens = num_tokens * (num_micro_batches / steps_per_generation)
        loss = masked_grpo_loss(
            logps,
            batch,
            loss_type=self.loss_type,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            beta=self.beta,
            delta=self.args.delta,
            importance_sampling_level=self.importance_sampling_level,
            bias_correction=self.args.use_bias_correction_kl,
            max_completion_length=self.max_completion_length,
            num_tokens=num_tokens,
        )
        # The ``dapo`` loss is already divided by the tokens of the optimizer step. Other losses are
        # means over a micro-batch, so divide them by the number of accumulated micro-batches.
        if self.loss_type == "dapo" and num_tokens is not None:
            return loss
        return loss / num_micro_batches


def _disable_vllm_correction(args: GRPOConfig) -> None:
    if args.vllm_importance_sampling_correction:
        logger.info(
            "Rollout log-probs are used as old log-probs: "
            "vllm_importance_sampling_correction is switched off."
        )
        args.vllm_importance_sampling_correction = False


def _compute_default_turn_length(env: MultistepEnv, max_completion_length: int) -> int:
    """Return the default maximum length of a turn: half of the tokens available per turn.

    The other half is for the text of the environment. Example: 1024 tokens and 4 turns give 128.
    """
    num_turns = env.max_steps_per_episode * env.episodes_per_trial
    return min(
        max_completion_length, max(MIN_TURN_TOKENS, max_completion_length // (2 * num_turns))
    )
