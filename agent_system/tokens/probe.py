"""Does a chat template keep a conversation's earlier text when the conversation goes on?

``append`` history sends the policy its own earlier tokens followed by the bridge. That is what the
template would have written only if every prompt is a prefix of the next one. A template that
rewrites history needs ``window`` history, where each step renders a new prompt.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.template import (
    RENDER_ERRORS,
    ChatTemplate,
    Message,
    TemplateUnsupported,
    anchor,
)
from agent_system.tokens.tokenizer import ChatTokenizer
from verl.utils.limits import TimeLimit, time_limit

PROBE_S = 20.0  # a template comes with a model, and may loop for ever
# Three turns have two bridges, the least that shows whether they depend on their place.
TURNS = 3
THINK = "<think>"
# What may stand before an assistant's words although no prompt shows it.
UNSEEN = re.compile(r"\s+|</?think>")
MARK = re.compile(r"[<\[].*[>\]]", re.DOTALL)
# What is said in turns whose tokens are compared.
SAMPLES = ("You see a desk.", " A mug.\n1. a book\n")
ANSWERS = ("look", "<action>go to desk 1</action>", "It is 4.")

Words = Callable[[int], Message]  # what the assistant says in turn i: its message without the role


class Verdict(StrEnum):
    """What a template can be used for."""

    APPEND = "append works"
    WINDOW = "window needed"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """``reason`` says why not ``append``. ``opens_thought``: the generation prompt opens
    ``<think>``.

    ``keeps_thoughts``: thoughts in ``<think>`` of earlier turns stay when the template renders
    them. Where they do not, ``append`` still works (the policy sees its own tokens), but a model
    trained on that template has seen earlier turns without their thoughts.
    ``takes_system``: it renders a system message of its own (see ``ChatTemplate``).
    """

    verdict: Verdict
    reason: str = ""
    opens_thought: bool = False
    keeps_thoughts: bool = True
    takes_system: bool = True

    def require(self, history: str) -> None:
        """Refuse ``history`` ("append" | "window") where the template cannot do it.

        Raises:
            TemplateUnsupported: With the reason, and the setting that works where there is one.
        """
        if self.verdict is Verdict.UNSUPPORTED:
            raise TemplateUnsupported(f"the chat template cannot be used: {self.reason}")
        if history == "append" and self.verdict is Verdict.WINDOW:
            raise TemplateUnsupported(
                f"env.history=append does not work with this chat template: {self.reason}. "
                "Set env.history=window, or use a template that keeps earlier turns as they were"
            )


def probe_template(
    tokenizer: ChatTokenizer, template_kwargs: dict[str, Any] | None = None
) -> TemplateProbe:
    """Render conversations of one to three turns and say what the tokenizer's template can be used
    for: nothing, where that takes longer than ``PROBE_S``.
    """
    try:
        with time_limit(PROBE_S, "rendering the chat template"):
            return _probe(tokenizer, template_kwargs)
    except TimeLimit as error:
        return TemplateProbe(Verdict.UNSUPPORTED, str(error))


def _probe(tokenizer: ChatTokenizer, template_kwargs: dict[str, Any] | None) -> TemplateProbe:
    try:
        bridge = ChatBridge(tokenizer, template_kwargs)
        template = bridge.template
        opened = template.generation_prompt()
        _check_generation_prompt(template)
        check_first_prompt(bridge, [{"role": "user", "content": text} for text in SAMPLES[:1]])
    except TemplateUnsupported as error:
        return TemplateProbe(Verdict.UNSUPPORTED, str(error))
    opens_thought = opened.rstrip().endswith(THINK)
    openings: list[list[Message]] = [[]]
    if template.takes_system:
        openings.append([{"role": "system", "content": anchor(99)}])
    try:
        template.between()
        plain = _first_reason(template, openings, lambda i: {"content": anchor(i)})
        thoughts = [_first_reason(template, openings, words) for words in _thinking_turns(opened)]
        check_next_turn(bridge)
    except TemplateUnsupported as error:
        reason = str(error)
        return TemplateProbe(Verdict.WINDOW, reason, opens_thought, False, template.takes_system)
    # An empty reason is success, and one way of handing thoughts over is enough.
    keeps_thoughts = "" in thoughts
    # Where the template opens the thought, a turn without one is not what the policy writes.
    reason = plain
    if opens_thought:
        reason = "" if keeps_thoughts else thoughts[0]
    verdict = Verdict.WINDOW if reason else Verdict.APPEND
    return TemplateProbe(verdict, reason, opens_thought, keeps_thoughts, template.takes_system)


def check_first_prompt(bridge: ChatBridge, messages: Sequence[Message]) -> None:
    """Raise ``TemplateUnsupported`` where the first prompt of ``messages`` has other tokens than
    ``apply_chat_template``. A text that spells a control token has others on purpose.
    """
    if not bridge.is_plain(messages):
        return
    ours, theirs = bridge.first_prompt(messages), bridge.template.tokens(bridge.shown(messages))
    if ours == theirs:
        return
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((i for i, (own, other) in pairs if own != other), min(len(ours), len(theirs)))
    raise TemplateUnsupported(
        f"the tokens of a prompt are not those of apply_chat_template from token {place} on: "
        f"{ours[place : place + 8]} instead of {theirs[place : place + 8]}"
    )


def check_next_turn(bridge: ChatBridge, opening: Sequence[Message] = ()) -> None:
    """Raise ``TemplateUnsupported`` where the tokens around a turn that follows ``opening`` (by
    default a text of the user) are not those of ``apply_chat_template``.
    """
    first = list(opening) or [{"role": "user", "content": SAMPLES[0]}]
    if not bridge.is_plain(first):
        return
    end = bridge.end_of_turn_id
    sampled = [] if end is None else [end]
    for answer, text in product(ANSWERS, SAMPLES):
        turns = [("assistant", answer), ("user", text)]
        messages = [*first, *({"role": role, "content": said} for role, said in turns)]
        shown = bridge.shown(messages)
        said, found, tail = bridge.template.render(shown).rpartition(answer)
        closing = bridge.closing if tail.startswith(bridge.closing) else ""
        link = bridge.between(sampled, text)
        head = bridge.encode(said + found + closing)
        ours = [*head, *link.before, *link.observation, *link.after]
        if closing and head[-1] != end:
            raise TemplateUnsupported(
                f"the tokenizer does not read its own end of turn {closing.strip()!r} after "
                f"{answer!r}: no policy could learn to end a turn with it"
            )
        if ours != bridge.template.tokens(shown):
            raise TemplateUnsupported(
                "the tokens between two turns depend on the text of the turn before them, so that "
                f"they cannot follow sampled tokens (after {answer!r})"
            )


def _check_generation_prompt(template: ChatTemplate) -> None:
    """Raise ``TemplateUnsupported`` where a prompt does not end as an assistant turn begins."""
    turns: list[Message] = [
        {"role": "user", "content": anchor(0)},
        {"role": "assistant", "content": anchor(1)},
    ]
    try:
        shown = template.render(turns, add_generation_prompt=False)
    except RENDER_ERRORS:
        return  # single turns do not need it
    _, asked, tail = shown.rpartition(anchor(0))
    between, answered, _ = tail.partition(anchor(1))
    if not asked or not answered:
        return
    opened, begun = (UNSEEN.sub("", text) for text in (template.generation_prompt(), between))
    if opened.startswith(begun):  # a prompt may also begin the turn itself, as with <think>
        return
    rest = begun[len(opened) :]
    closed = template.render(turns[:1], add_generation_prompt=False)
    # Some policies write the marks of their channel themselves, after a prompt that asks for it.
    own = MARK.search(rest) is not None and closed != template.render(turns[:1])
    if not begun.startswith(opened) or (rest and not own):
        raise TemplateUnsupported(
            f"its generation prompt is {template.generation_prompt()!r}, and between a user's and "
            f"an assistant's words it writes {between!r}: a policy would not be asked for a turn"
        )


def _first_reason(
    template: ChatTemplate, openings: Sequence[Sequence[Message]], words: Words
) -> str:
    """The first reason of ``_why_not_prefix``, empty where there is none."""
    reasons = [_why_not_prefix(template, words, opening) for opening in openings]
    return next(filter(None, reasons), "")


def _thinking_turns(opened: str) -> Iterator[Words]:
    """The ways in which a thinking turn can be handed to a template: inside the content, or as a
    field of its own.
    """
    start = opened[opened.rindex(THINK) :] if opened.rstrip().endswith(THINK) else f"{THINK}\n"
    yield lambda i: {"content": f"{start}thought{i}\n</think>\n\n{anchor(i)}"}
    yield lambda i: {"content": f"{THINK}thought{i}</think>{anchor(i)}"}
    yield lambda i: {"content": anchor(i), "reasoning_content": f"thought{i}"}


def _why_not_prefix(template: ChatTemplate, words: Words, opening: Sequence[Message]) -> str:
    """Empty where each prompt after ``opening``, with the words that answer it, is a prefix of the
    next one; else the reason.
    """
    messages = list(opening)
    prompt = ""
    tails: set[str] = set()
    for turn in range(TURNS):
        # 100 and up, apart from the anchors of the assistant, which count from 0.
        messages.append({"role": "user", "content": anchor(100 + turn)})
        try:
            text = template.render(messages)
        except RENDER_ERRORS as error:
            return f"it refuses a conversation of {turn + 1} turns ({error})"
        if turn:
            answer = words(turn - 1)
            if not text.startswith(prompt):
                return (
                    "the prompt of a turn is not a prefix of the next turn's prompt: "
                    "it rewrites earlier turns"
                )
            shown = text[len(prompt) :]
            if not _shows(shown, answer):
                return "it drops or changes part of an earlier assistant turn"
            tail = shown.rpartition(anchor(turn - 1))[2]
            tails.add(tail.replace(anchor(100 + turn), ""))
        prompt = text
        messages.append({"role": "assistant", **words(turn)})
    # The bridge is encoded once and put between all turns, so it may not vary.
    if len(tails) > 1:
        return "the text it puts between two turns depends on how many came before"
    return ""


def _shows(shown: str, answer: Message) -> bool:
    content = answer["content"]
    thought = answer.get("reasoning_content", "")
    visible = content
    # The tag itself may stand in the prompt, which opens the thought.
    if content.startswith(THINK):
        visible = content.partition(THINK)[2].lstrip("\n")
    return visible in shown and thought in shown
