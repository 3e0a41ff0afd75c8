"""Agent that returns the unchanged output of a language model.

The model is any object with the interface of vLLM's ``LLM.generate``. It takes a list of prompts
and sampling parameters, and returns objects with ``.outputs[0].token_ids``, in order. Log-probs,
finish reason, text and ``policy_version`` are optional.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from agent_system.agents.base import Action, Conversation, Message
from agent_system.tokens.bridge import is_chat_tokenizer
from verl.utils.sampling import StopReason

_STOP_REASONS = {"length": StopReason.LENGTH, "abort": StopReason.ABORT}


class LanguageModel(Protocol):
    """Model to sample from, such as ``vllm.LLM``."""

    @property
    def generate(self) -> Callable[..., Iterable[Any]]:
        """Function ``generate(prompts, sampling_params=...)`` with one result per prompt."""
        ...


class DirectOutputAgent:
    """Agent that samples one turn per action with ``llm.generate``.

    ``sampling_params`` is passed to ``llm.generate`` unchanged. Its ``max_tokens``, if present, is
    the maximum length of a turn. ``tokenizer`` decodes sampled tokens and renders prompts of
    conversations without token ids. It defaults to the tokenizer of the model
    (``llm.get_tokenizer()`` or ``llm.tokenizer``).

    Without a tokenizer, prompts are plain transcripts ``role: content``. If the model returns no
    text either, the text of a turn is its token ids as decimal numbers, separated by spaces.
    """

    def __init__(
        self, llm: LanguageModel, sampling_params: object = None, tokenizer: object = None
    ) -> None:
        self.llm = llm
        self.sampling_params = sampling_params
        if tokenizer is None:
            get_tokenizer = getattr(llm, "get_tokenizer", None)
            has_get_tokenizer = callable(get_tokenizer)
            tokenizer = get_tokenizer() if has_get_tokenizer else getattr(llm, "tokenizer", None)
        self._tokenizer = tokenizer
        # Switch off the progress bar that vLLM shows for every turn. Other models may not accept
        # the argument ``use_tqdm``.
        parameters = inspect.signature(llm.generate).parameters
        accepts_use_tqdm = "use_tqdm" in parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        self._generate_kwargs = {"use_tqdm": False} if accepts_use_tqdm else {}

    @property
    def max_turn_tokens(self) -> int | None:
        """Maximum length of a turn: ``max_tokens`` of the sampling parameters, or None."""
        return getattr(self.sampling_params, "max_tokens", None)

    def get_action(self, messages: list[Message], agent_state: object = None) -> tuple[str, Any]:
        """Return the text of the next turn and the unchanged ``agent_state``."""
        return self.act_batch([Conversation(messages)])[0].text, agent_state

    def act_batch(self, conversations: Sequence[Conversation]) -> list[Action]:
        """Sample one turn for every conversation in a single call of the model."""
        prompts = [self._build_prompt(conversation) for conversation in conversations]
        options = {"sampling_params": self.sampling_params, **self._generate_kwargs}
        results = list(self.llm.generate(prompts, **options))
        if len(results) != len(prompts):
            raise ValueError(
                f"the model returned {len(results)} results for {len(prompts)} prompts; "
                "allowed: one result per prompt, in order"
            )
        return [self._build_action(result.outputs[0]) for result in results]

    def _build_prompt(self, conversation: Conversation) -> dict[str, list[int]] | str:
        # Prefer the token ids of the conversation: rendering and encoding its messages again can
        # give other tokens than the policy has seen.
        if conversation.prompt_ids is not None:
            return {"prompt_token_ids": list(conversation.prompt_ids)}
        messages = list(conversation.messages)
        if is_chat_tokenizer(self._tokenizer):
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            token_ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            # Pass ids if encoding a text adds special tokens: the template has already added BOS.
            adds_special_tokens = (
                list(self._tokenizer(text, add_special_tokens=True)["input_ids"]) != token_ids
            )
            return {"prompt_token_ids": token_ids} if adds_special_tokens else text
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + "assistant: "

    def _build_action(self, output: Any) -> Action:
        token_ids = [int(token) for token in output.token_ids]
        stop_reason = _STOP_REASONS.get(getattr(output, "finish_reason", ""), StopReason.STOP)
        policy_version = getattr(output, "policy_version", 0)
        return Action(
            text=self._get_output_text(output, token_ids),
            token_ids=token_ids,
            logprobs=_extract_logprobs(output, token_ids),
            stop_reason=stop_reason,
            policy_version=policy_version if isinstance(policy_version, int) else 0,
        )

    def _get_output_text(self, output: object, token_ids: list[int]) -> str:
        text = getattr(output, "text", None)
        decode = getattr(self._tokenizer, "decode", None)
        if text is None and decode is not None:
            text = decode(token_ids, skip_special_tokens=True)
        return text if isinstance(text, str) else " ".join(map(str, token_ids))


def _extract_logprobs(output: object, token_ids: list[int]) -> list[float]:
    """Return one log-prob per id, NaN where the model returned none."""
    logprob_entries = getattr(output, "logprobs", None)
    if not isinstance(logprob_entries, Sequence) or not logprob_entries:
        return [math.nan] * len(token_ids)
    logprobs: list[float] = []
    for logprob_entry, token_id in zip(logprob_entries, token_ids, strict=True):
        if isinstance(logprob_entry, Mapping):  # vLLM may also list more likely tokens
            logprob_entry = logprob_entry[token_id]
        logprob = getattr(logprob_entry, "logprob", logprob_entry)
        logprobs.append(math.nan if logprob is None else float(logprob))
    return logprobs
