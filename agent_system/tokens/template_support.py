"""Test of chat templates: do earlier turns stay unchanged when a conversation continues?

``append`` history sends the policy its earlier tokens, followed by the template tokens and the
observation of the next turn (the bridge). This equals the output of the template only if every
prompt is a prefix of the next one. A template that rewrites earlier turns needs ``window`` history,
which renders a new prompt in each turn.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product, takewhile
from typing import Any

from agent_system.tokens.bridge import (
    ChatBridge,
    ChatTokenizer,
    PlainBridge,
    TextTokenizer,
    is_chat_tokenizer,
)
from verl.names import History
from verl.utils.chat_template import (
    RENDER_ERRORS,
    ChatTemplate,
    Message,
    UnsupportedTemplateError,
    make_content_placeholder,
    make_placeholder_messages,
)
from verl.utils.limits import TimeLimitError, time_limit

PROBE_TIMEOUT_S = 20.0  # time limit in seconds: the template of a model may contain an endless loop
# Three turns have two gaps between turns, the minimum to see if their template text differs.
NUM_PROBED_TURNS = 3
THINK_TAG = "<think>"
# White space and think tags are ignored when a generation prompt is compared with the text that the
# template writes before an assistant's content.
INVISIBLE_TEXT_PATTERN = re.compile(r"\s+|</?think>")
CHANNEL_TAG_PATTERN = re.compile(r"[<\[].*[>\]]", re.DOTALL)
# Observations and answers of the turns whose tokens are compared.
SAMPLE_OBSERVATIONS = ("You see a desk.", " A mug.\n1. a book\n")
SAMPLE_ANSWERS = ("look", "<action>go to desk 1</action>", "It is 4.")

# Function from turn number i to the message of the assistant, without the key ``role``.
MessageBuilder = Callable[[int], Message]


class TemplateVerdict(StrEnum):
    """Verdict on a chat template: ``append`` history works, only ``window`` works, or neither."""

    APPEND = "append works"
    WINDOW = "window needed"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class TemplateSupport:
    """Result of the test whether a chat template keeps earlier turns unchanged.

    ``reason`` states why ``append`` does not work. ``renders_system_message``: the template renders
    a system message separately. ``multi_turn_error``: error for a conversation of several turns, or
    empty.

    ``keeps_thoughts``: the template renders the ``<think>`` thoughts of earlier turns. If it does
    not, ``append`` still works, unless the generation prompt ends with ``<think>``. The policy then
    sees its earlier thoughts, which were removed when the model was trained with this template.
    """

    verdict: TemplateVerdict
    reason: str = ""
    keeps_thoughts: bool = True
    renders_system_message: bool = True
    multi_turn_error: str = ""

    def check_history_support(self, history: History) -> None:
        """Check that the template supports ``history``.

        Raises ``UnsupportedTemplateError`` with the reason and, if one exists, the setting that
        works.
        """
        if self.verdict is TemplateVerdict.UNSUPPORTED:
            raise UnsupportedTemplateError(f"the chat template cannot be used: {self.reason}")
        if history == "append" and self.verdict is TemplateVerdict.WINDOW:
            raise UnsupportedTemplateError(
                f"env.history=append does not work with this chat template: {self.reason}. "
                "Set env.history=chat or env.history=window, or use a template that keeps earlier "
                "turns unchanged"
            )
        if history == "chat" and self.multi_turn_error:
            raise UnsupportedTemplateError(
                "env.history=chat does not work with this chat template: it refuses a "
                f"conversation of {NUM_PROBED_TURNS} turns ({self.multi_turn_error}). "
                "Set env.history=window"
            )

    def describe_history_support(self, history: History) -> str:
        """Return a note, printed before a run, on what the template does with earlier turns.

        The note also states which other kind of history the template excludes.
        """
        if history == "window":
            note = (
                "the template renders no earlier turns: the user message has the last ones as text"
            )
            if self.multi_turn_error:
                note += "; chat is refused, because the template refuses several turns"
            return f"{note}; append is refused, because {self.reason}" if self.reason else note
        if self.reason:
            return f"append is refused, because with this template {self.reason}"
        if not self.keeps_thoughts:
            history_effect = (
                "append keeps them" if history == "append" else "new row after each thought"
            )
            return f"the template removes earlier thoughts ({history_effect})"
        return "the template keeps earlier turns"


def check_template_support(
    tokenizer: ChatTokenizer, template_kwargs: dict[str, Any] | None = None
) -> TemplateSupport:
    """Render conversations of one to three turns and report which kinds of history work.

    The verdict is ``UNSUPPORTED`` if this takes longer than ``PROBE_TIMEOUT_S`` seconds.
    """
    try:
        with time_limit(PROBE_TIMEOUT_S, "rendering the chat template"):
            return _probe_template_support(tokenizer, template_kwargs)
    except TimeLimitError as error:
        return TemplateSupport(TemplateVerdict.UNSUPPORTED, str(error))


def _probe_template_support(
    tokenizer: ChatTokenizer, template_kwargs: dict[str, Any] | None
) -> TemplateSupport:
    try:
        bridge = ChatBridge(tokenizer, template_kwargs)
        template = bridge.template
        generation_prompt = template.render_generation_prompt()
        _check_generation_prompt(template)
        check_first_prompt_tokens(
            bridge, [{"role": "user", "content": text} for text in SAMPLE_OBSERVATIONS[:1]]
        )
    except UnsupportedTemplateError as error:
        return TemplateSupport(TemplateVerdict.UNSUPPORTED, str(error))
    opens_thought = generation_prompt.rstrip().endswith(THINK_TAG)
    make_support_result = functools.partial(
        TemplateSupport,
        renders_system_message=template.renders_system_message,
        multi_turn_error=_find_multi_turn_error(template),
    )
    openings: list[list[Message]] = [[]]
    if template.renders_system_message:
        openings.append([{"role": "system", "content": make_content_placeholder(99)}])
    try:
        template.render_between_turns()
        problem_without_thoughts = _find_first_problem(
            template, openings, lambda i: {"content": make_content_placeholder(i)}
        )
        problems_with_thoughts = [
            _find_first_problem(template, openings, build_message)
            for build_message in _list_thought_message_builders(generation_prompt)
        ]
        check_inter_turn_tokens(bridge)
    except UnsupportedTemplateError as error:
        return make_support_result(TemplateVerdict.WINDOW, str(error), keeps_thoughts=False)
    # One form of thoughts without a problem ("") is enough: <think> tags or reasoning_content.
    keeps_thoughts = "" in problems_with_thoughts
    # If the generation prompt opens a thought, every turn has one, so only the results for turns
    # with thoughts count.
    reason = problem_without_thoughts
    if opens_thought:
        reason = "" if keeps_thoughts else problems_with_thoughts[0]
    verdict = TemplateVerdict.WINDOW if reason else TemplateVerdict.APPEND
    return make_support_result(verdict, reason, keeps_thoughts=keeps_thoughts)


def _find_multi_turn_error(template: ChatTemplate) -> str:
    """Return the error that ``template`` raises for a conversation of several turns, or ""."""
    messages: list[Message] = []
    for turn in range(NUM_PROBED_TURNS):
        messages += [{"role": "user", "content": make_content_placeholder(turn)}]
        try:
            template.render(messages)
        except RENDER_ERRORS as error:
            return str(error) or type(error).__name__
        messages += [{"role": "assistant", "content": make_content_placeholder(100 + turn)}]
    return ""


def check_first_prompt_tokens(bridge: ChatBridge, messages: Sequence[Message]) -> None:
    """Raise ``UnsupportedTemplateError`` if a first prompt differs from ``apply_chat_template``.

    Messages that contain a control token as text are not checked: their tokens differ on purpose.
    """
    if not bridge.has_plain_text_only(messages):
        return
    bridge_ids = bridge.encode_first_prompt(messages)
    template_ids = bridge.template.render_token_ids(bridge.adapt_messages_to_template(messages))
    if bridge_ids == template_ids:
        return
    id_pairs = zip(bridge_ids, template_ids, strict=False)
    num_equal_tokens = len(list(takewhile(lambda id_pair: id_pair[0] == id_pair[1], id_pairs)))
    raise UnsupportedTemplateError(
        "the tokens of a prompt differ from those of apply_chat_template from token "
        f"{num_equal_tokens}: {bridge_ids[num_equal_tokens : num_equal_tokens + 8]} "
        f"instead of {template_ids[num_equal_tokens : num_equal_tokens + 8]}"
    )


def check_inter_turn_tokens(bridge: ChatBridge, opening: Sequence[Message] = ()) -> None:
    """Raise ``UnsupportedTemplateError`` if the tokens around a turn differ from the template's.

    The turn follows ``opening``, by default one user message.
    """
    first_messages = list(opening) or [{"role": "user", "content": SAMPLE_OBSERVATIONS[0]}]
    if not bridge.has_plain_text_only(first_messages):
        return
    end_id = bridge.history_end_id
    sampled_ids = [] if end_id is None else [end_id]
    for answer, text in product(SAMPLE_ANSWERS, SAMPLE_OBSERVATIONS):
        turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
        prepared_messages = bridge.adapt_messages_to_template([*first_messages, *turns])
        head_text, answer_text, tail = bridge.template.render(prepared_messages).rpartition(answer)
        closing_text = bridge.turn_closing_text if tail.startswith(bridge.turn_closing_text) else ""
        bridge_tokens = bridge.make_inter_turn_tokens(sampled_ids, text)
        ids_before_bridge = bridge.encode(head_text + answer_text + closing_text)
        appended_ids = [*ids_before_bridge, *bridge_tokens.all_ids]
        if closing_text and ids_before_bridge[-1] != end_id:
            raise UnsupportedTemplateError(
                f"the tokenizer does not encode its end of turn {closing_text.strip()!r} as one "
                f"token after {answer!r}, so a policy cannot be trained to end a turn with it"
            )
        if appended_ids != bridge.template.render_token_ids(prepared_messages):
            raise UnsupportedTemplateError(
                "the tokens between two turns depend on the text of the turn before them, so "
                f"they cannot be appended to sampled tokens (after {answer!r})"
            )


def _check_generation_prompt(template: ChatTemplate) -> None:
    """Raise ``UnsupportedTemplateError`` if assistant turns do not begin with the generation
    prompt.
    """
    turns = make_placeholder_messages("user", "assistant")
    try:
        conversation_text = template.render(turns, add_generation_prompt=False)
    except RENDER_ERRORS:
        return  # the template refuses assistant turns, which a single turn does not need
    _, user_text, tail = conversation_text.rpartition(make_content_placeholder(0))
    inter_turn_text, assistant_text, _ = tail.partition(make_content_placeholder(1))
    if not user_text or not assistant_text:
        return
    rendered_prompt = template.render_generation_prompt()
    generation_prompt = INVISIBLE_TEXT_PATTERN.sub("", rendered_prompt)
    turn_beginning = INVISIBLE_TEXT_PATTERN.sub("", inter_turn_text)
    # The generation prompt may be longer than the common beginning of turns, for example by
    # <think>.
    if generation_prompt.startswith(turn_beginning):
        return
    extra_text = turn_beginning[len(generation_prompt) :]
    user_turn = template.render(turns[:1], add_generation_prompt=False)
    # Some policies sample the tags between generation prompt and content themselves, such as
    # <|channel|>final<|message|>.
    is_channel_tag = CHANNEL_TAG_PATTERN.search(extra_text) is not None
    writes_tags_itself = is_channel_tag and user_turn != template.render(turns[:1])
    if not turn_beginning.startswith(generation_prompt) or (extra_text and not writes_tags_itself):
        raise UnsupportedTemplateError(
            f"its generation prompt is {rendered_prompt!r}, but it writes "
            f"{inter_turn_text!r} between the content of a user turn and of an assistant turn: "
            "both must agree"
        )


def _find_first_problem(
    template: ChatTemplate, openings: Sequence[Sequence[Message]], build_message: MessageBuilder
) -> str:
    problems = [_find_prefix_problem(template, build_message, opening) for opening in openings]
    return next(filter(None, problems), "")


def _list_thought_message_builders(generation_prompt: str) -> Iterator[MessageBuilder]:
    """Yield functions that build an assistant message with a thought.

    The thought is in the content between ``<think>`` tags, or in the key ``reasoning_content``.
    """
    think_tag = (
        generation_prompt[generation_prompt.rindex(THINK_TAG) :]
        if generation_prompt.rstrip().endswith(THINK_TAG)
        else f"{THINK_TAG}\n"
    )
    yield lambda i: {"content": f"{think_tag}thought{i}\n</think>\n\n{make_content_placeholder(i)}"}
    yield lambda i: {"content": f"{THINK_TAG}thought{i}</think>{make_content_placeholder(i)}"}
    yield lambda i: {"content": make_content_placeholder(i), "reasoning_content": f"thought{i}"}


def _find_prefix_problem(
    template: ChatTemplate, build_message: MessageBuilder, opening: Sequence[Message]
) -> str:
    """Return the reason why a prompt is not a prefix of the next prompt; "" if it is."""
    messages = list(opening)
    previous_prompt = ""
    inter_turn_texts: set[str] = set()
    for turn in range(NUM_PROBED_TURNS):
        # Anchors (unique marker texts) of the user start at 100, those of the assistant at 0.
        messages.append({"role": "user", "content": make_content_placeholder(100 + turn)})
        try:
            text = template.render(messages)
        except RENDER_ERRORS as error:
            return f"it refuses a conversation of {turn + 1} turns ({error})"
        if turn:
            answer = build_message(turn - 1)
            if not text.startswith(previous_prompt):
                return (
                    "the prompt of a turn is not a prefix of the next turn's prompt: "
                    "it rewrites earlier turns"
                )
            new_text = text[len(previous_prompt) :]
            if not _shows_answer(new_text, answer):
                return "it drops or changes part of an earlier assistant turn"
            inter_turn_text = new_text.rpartition(make_content_placeholder(turn - 1))[2]
            inter_turn_texts.add(inter_turn_text.replace(make_content_placeholder(100 + turn), ""))
        previous_prompt = text
        messages.append({"role": "assistant", **build_message(turn)})
    # ``append`` history uses the same bridge text after every turn, so it must not vary.
    if len(inter_turn_texts) > 1:
        return "the text that it puts between two turns depends on the number of earlier turns"
    return ""


def _shows_answer(rendered_text: str, answer: Message) -> bool:
    content = answer["content"]
    thought = answer.get("reasoning_content", "")
    expected_content = content
    # Search for the content without <think>: the template may write this tag in the prompt.
    if content.startswith(THINK_TAG):
        expected_content = content.partition(THINK_TAG)[2].lstrip("\n")
    return expected_content in rendered_text and thought in rendered_text


def make_bridge_for_append(tokenizer: TextTokenizer) -> ChatBridge | PlainBridge:
    """Return the encoder for append-only conversations.

    It is a ``ChatBridge``, or a ``PlainBridge`` if the tokenizer has no chat template. Raises
    ``UnsupportedTemplateError`` if the template changes earlier turns.
    """
    if not is_chat_tokenizer(tokenizer):
        return PlainBridge(tokenizer)
    template_support = check_template_support(tokenizer)
    if template_support.verdict is not TemplateVerdict.APPEND:
        raise UnsupportedTemplateError(
            "a trial is one growing token sequence, and this chat template cannot continue one: "
            f"{template_support.reason}. Set a template that keeps earlier turns unchanged "
            "(trl contains such variants: trl/chat_templates/*_training.jinja)"
        )
    return ChatBridge(tokenizer)
