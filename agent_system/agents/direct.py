"""The agent that says what a language model samples, as it is.

The model is anything with vLLM's ``LLM.generate``: a list of prompts and sampling parameters go in,
objects with ``.outputs[0].token_ids`` come out, in order. Log-probs, a finish reason and a text are
taken where they are there.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from agent_system.agents.base import Action, Conversation, Message
from agent_system.tokens.tokenizer import is_chat_tokenizer
from verl.utils.sampling import StopReason

_REASONS = {"length": StopReason.LENGTH, "abort": StopReason.ABORT}


class SampledOutput(Protocol):
    """One continuation of a prompt; of more than its tokens nothing is taken for granted."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The sampled tokens."""
        ...


class GeneratedResult(Protocol):
    """What a model returns for one prompt."""

    @property
    def outputs(self) -> Sequence[SampledOutput]:
        """The continuations; the first one counts."""
        ...


class LanguageModel(Protocol):
    """A model to sample from, such as ``vllm.LLM``.

    ``sampling_params`` are the caller's own, and ``use_tqdm=False`` is passed where it is taken.
    """

    @property
    def generate(self) -> Callable[..., Iterable[GeneratedResult]]:
        """``generate(prompts, sampling_params=...)``: one result per prompt, in order."""
        ...


class DirectOutputAgent:
    """One sampled turn per action.

    ``sampling_params`` is handed to ``llm.generate`` unchanged; its ``max_tokens``, if it has one,
    bounds a turn. ``tokenizer`` decodes what was sampled and renders prompts where messages are all
    there is; by default it is the model's own (``llm.get_tokenizer()``), if it has one. Without any
    tokenizer, prompts are plain transcripts, and a model that tells token ids but no text is quoted
    as its ids in decimal.
    """

    def __init__(
        self, llm: LanguageModel, sampling_params: object = None, tokenizer: object = None
    ) -> None:
        self.llm = llm
        self.sampling_params = sampling_params
        self._tokenizer = tokenizer if tokenizer is not None else _own_tokenizer(llm)
        # vLLM draws a progress bar for every turn by default; others need not know the option.
        self._options = {"use_tqdm": False} if _accepts(llm.generate, "use_tqdm") else {}

    @property
    def max_turn_tokens(self) -> int | None:
        """The longest turn in tokens, where the sampling parameters say."""
        return getattr(self.sampling_params, "max_tokens", None)

    def get_action(self, messages: list[Message], agent_state: Any = None) -> tuple[str, Any]:
        """The text of the next turn; ``agent_state`` is passed through."""
        return self.act_batch([Conversation(messages)])[0].text, agent_state

    def act_batch(self, conversations: Sequence[Conversation]) -> list[Action]:
        """Sample one turn for every conversation in a single call of the model.

        Raises:
            ValueError: The model returned another number of results than it was given prompts.
        """
        prompts = [self._prompt(conversation) for conversation in conversations]
        results = list(
            self.llm.generate(prompts, sampling_params=self.sampling_params, **self._options)
        )
        if len(results) != len(prompts):
            raise ValueError(
                f"the model returned {len(results)} results for {len(prompts)} prompts"
            )
        return [self._action(result.outputs[0]) for result in results]

    def _prompt(self, conversation: Conversation) -> dict[str, list[int]] | str:
        # Ids before messages: a conversation that is rendered and encoded again has other tokens
        # than the policy has seen.
        if conversation.prompt_ids is not None:
            return {"prompt_token_ids": list(conversation.prompt_ids)}
        messages = list(conversation.messages)
        if is_chat_tokenizer(self._tokenizer):
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            # A model that encodes the text itself may begin it with a second BOS.
            doubled = list(self._tokenizer(text, add_special_tokens=True)["input_ids"]) != ids
            return {"prompt_token_ids": ids} if doubled else text
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + "assistant: "

    def _action(self, output: SampledOutput) -> Action:
        ids = [int(token) for token in output.token_ids]
        # A model that tells no reason is taken to have finished its turn.
        reason = _REASONS.get(getattr(output, "finish_reason", ""), StopReason.STOP)
        version = getattr(output, "policy_version", 0)
        return Action(
            text=self._text(output, ids),
            token_ids=ids,
            logprobs=_logprobs(output, ids),
            stop_reason=reason,
            policy_version=version if isinstance(version, int) else 0,
        )

    def _text(self, output: SampledOutput, ids: list[int]) -> str:
        text = getattr(output, "text", None)
        if isinstance(text, str):
            return text
        decode = getattr(self._tokenizer, "decode", None)
        text = None if decode is None else decode(ids, skip_special_tokens=True)
        return text if isinstance(text, str) else " ".join(map(str, ids))


def _own_tokenizer(llm: object) -> object:
    get = getattr(llm, "get_tokenizer", None)
    return get() if callable(get) else getattr(llm, "tokenizer", None)


def _accepts(function: Callable[..., object], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _logprobs(output: SampledOutput, ids: list[int]) -> list[float]:
    """One log-prob per id: from vLLM's dictionaries by token, or from plain numbers; NaN where
    there is none.
    """
    told = getattr(output, "logprobs", None)
    if not isinstance(told, Sequence) or not told:
        return [math.nan] * len(ids)
    values: list[float] = []
    for entry, token in zip(told, ids, strict=True):
        # vLLM may list likelier tokens beside the sampled one, which is always among them.
        found = entry[token] if isinstance(entry, Mapping) else entry
        number = getattr(found, "logprob", found)
        values.append(math.nan if number is None else float(number))
    return values
