"""Does a chat template keep a conversation's earlier text when the conversation goes on?

``append`` history sends the policy its own earlier tokens followed by the bridge. That is what the
template would have written only if every prompt is a prefix of the next one. A template that
rewrites history needs ``window`` history, where each step renders a new prompt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agent_system.tokens.template import (
    RENDER_ERRORS,
    ChatTemplate,
    Message,
    TemplateUnsupported,
    anchor,
)
from agent_system.tokens.tokenizer import ChatTokenizer

# Three turns have two bridges, the least that shows whether they depend on their place.
TURNS = 3
THINK = "<think>"

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
    """

    verdict: Verdict
    reason: str = ""
    opens_thought: bool = False
    keeps_thoughts: bool = True

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
    for.
    """
    try:
        template = ChatTemplate(tokenizer, template_kwargs)
        opened = template.generation_prompt()
    except TemplateUnsupported as error:
        return TemplateProbe(Verdict.UNSUPPORTED, str(error))
    opens_thought = opened.rstrip().endswith(THINK)
    try:
        template.between()
        plain = _why_not_prefix(template, lambda i: {"content": anchor(i)})
        thoughts = [_why_not_prefix(template, words) for words in _thinking_turns(opened)]
    except TemplateUnsupported as error:
        return TemplateProbe(Verdict.WINDOW, str(error), opens_thought, False)
    # An empty reason is success, and one way of handing thoughts over is enough.
    keeps_thoughts = "" in thoughts
    # Where the template opens the thought, a turn without one is not what the policy writes.
    reason = plain
    if opens_thought:
        reason = "" if keeps_thoughts else thoughts[0]
    verdict = Verdict.WINDOW if reason else Verdict.APPEND
    return TemplateProbe(verdict, reason, opens_thought, keeps_thoughts)


def _thinking_turns(opened: str) -> Iterator[Words]:
    """The ways in which a thinking turn can be handed to a template: inside the content, or as a
    field of its own.
    """
    start = opened[opened.rindex(THINK) :] if opened.rstrip().endswith(THINK) else f"{THINK}\n"
    yield lambda i: {"content": f"{start}thought{i}\n</think>\n\n{anchor(i)}"}
    yield lambda i: {"content": f"{THINK}thought{i}</think>{anchor(i)}"}
    yield lambda i: {"content": anchor(i), "reasoning_content": f"thought{i}"}


def _why_not_prefix(template: ChatTemplate, words: Words) -> str:
    """Empty where each prompt, with the words that answer it, is a prefix of the next one; else the
    reason.
    """
    messages: list[Message] = []
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
