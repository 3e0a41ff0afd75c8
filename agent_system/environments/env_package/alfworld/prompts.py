"""How ALFWorld speaks to a policy: ``compact`` for small policies trained on demonstrations,
``full`` for chat models.

``compact`` says only the task and the observation, in few tokens and without loss of a name. How to
answer is learnt from demonstrations, so its plain and its four-level variant read the same.
``full`` explains the household, the answer format, the four levels where they are asked for, and
lists the admissible actions at every step.
"""

import re
from collections.abc import Mapping, Sequence

from agent_system.environments import chat_prompts
from agent_system.environments.env import Observation
from rlvcr.levels import level_prompts

_ROOM = re.compile(
    r"You are in the middle of a room\. Looking quickly around you, you see (.*?)\.\s*", re.DOTALL
)
_TASK = re.compile(r"Your task is to: (.*?)\.?\s*$", re.DOTALL)
_ARRIVE = re.compile(r"You arrive at [^.]*\. ")
_OPENED = re.compile(r"You open the [^.]*\. The ([^.]*) is open\. In it, you see ")
_ON = re.compile(r"(?:On the ([^,]*)|The ([^.]*) is open\. In it), you see ")
_CLOSED = re.compile(r"The ([^.]*) is closed\.")
_ARTICLE = re.compile(r"(?<=[ ,])(?:and )?an? (?=[a-z])")


def task_of(text: str) -> str:
    """The task sentence of an engine's first text, without its full stop."""
    found = _TASK.search(text)
    return found.group(1) if found else ""


def compact_first(text: str) -> str:
    """``put a mug in desk. cabinet 1, desk 1``: the task, then what stands in the room."""
    room = _ROOM.search(text)
    if not room:
        return text
    return f"{task_of(text)}.{_ARTICLE.sub('', ' ' + room.group(1))}"


def compact(text: str) -> str:
    """An engine text in few words: ``desk 1: mug 2, pen 1`` for what lies there, other sentences
    unchanged.
    """
    text = _ARRIVE.sub("", text, count=1)
    text = _OPENED.sub(lambda found: f"{found.group(1)}: ", text)
    text = _ON.sub(lambda found: f"{found.group(1) or found.group(2)}: ", text)
    text = _CLOSED.sub(lambda found: f"{found.group(1)} closed", text)
    return text.rstrip(".") if "facing" in text else _ARTICLE.sub("", text).rstrip(".")


class CompactAlfworldPrompts(chat_prompts.CompactPrompts):
    """The fewest tokens a small policy needs: task and room, then what each action changed."""

    def __init__(self) -> None:
        super().__init__(shorten=compact, begin=compact_first)

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """Task and room, the last actions with what was seen before each, and what is seen now."""
        del levels  # both variants read the same
        lines = [compact_first(first.text)]
        for seen, action in history:
            # The first text stands at the top already; of the first turn only the action is new.
            lines += [f"{compact(seen)} > {action}" if seen != first.text else f"> {action}"]
        if observation.text != first.text:
            lines.append(compact(observation.text))
        return "\n".join(lines)


class LogPrompts(CompactAlfworldPrompts):
    """In a window, what was read so far in the order of reading, in place of turns and actions."""

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """Task and room; ``read:`` what was seen before; ``now:`` what is seen at present."""
        del levels  # both variants read the same
        read = [compact(seen) for seen, _ in history if seen != first.text]
        lines = [compact_first(first.text)]
        if read:
            lines.append(f"read: {'; '.join(read)}")
        if observation.text != first.text:
            lines.append(f"now: {compact(observation.text)}")
        return "\n".join(lines)


FULL_SYSTEM = """\
You act in a household described in text. Each turn you see what happened and which actions \
are possible, and you choose one of them to get the task done in as few turns as you can."""
FULL_FORMAT = """\
First think about what to do, between <think> and </think>. Then write the one action \
you choose, copied exactly from the list, between <action> and </action>."""
FULL_LEVELS = """\
Decide how much thought this turn deserves and answer in this form:
<level>L</level><think>your thought</think><action>one action, copied exactly from the list</action>
The level L is one of
{}
Think as little as the turn allows, and no less than it needs."""
LEVEL_TEXTS = {
    1: "the action is obvious; leave the thought empty.",
    2: "say briefly what the situation is.",
    3: "say what the situation is and what was already tried, and with what result.",
    4: "as 3, and also weigh the options and plan the next actions.",
}


class FullPrompts:
    """Instructions, admissible actions and answer format in words, for models that follow
    instructions.

    ``texts`` replace the descriptions of levels.
    """

    asks_for_levels = shows_level_prompts = True

    def __init__(self, texts: Mapping[int, str] | None = None) -> None:
        lines = [f"{level}: {text}" for level, text in level_prompts(texts, LEVEL_TEXTS).items()]
        self._levels = FULL_LEVELS.format("\n".join(lines))

    def system(self, levels: bool) -> str | None:
        """Who the policy is and how it answers."""
        return f"{FULL_SYSTEM}\n\n{self._levels if levels else FULL_FORMAT}"

    def first(self, observation: Observation, levels: bool) -> str:
        """The engine's first text and the possible actions."""
        del levels  # both variants read the same
        return f"{observation.text}\n{self._actions(observation)}"

    def turn(self, observation: Observation) -> str:
        """The engine's answer and the possible actions."""
        return f"{observation.text}\n{self._actions(observation)}"

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """First text, recent turns, the present and the possible actions."""
        del levels  # both variants read the same
        parts = [first.text]
        if history:
            turns = [
                f"You saw: {seen}\nYou did: {action}"
                for seen, action in history
                if seen != first.text
            ]
            opening = [f"You did: {action}" for seen, action in history if seen == first.text]
            parts += ["Your most recent turns:", *opening, *turns]
        if observation.text != first.text:
            parts.append(f"Now you see: {observation.text}")
        return "\n".join([*parts, self._actions(observation)])

    def _actions(self, observation: Observation) -> str:
        # ``help`` lists commands and changes nothing: in the list it would only cost tokens.
        actions = [
            action for action in observation.info.get("admissible_actions", ()) if action != "help"
        ]
        return "Possible actions: " + ", ".join(actions) if actions else ""
