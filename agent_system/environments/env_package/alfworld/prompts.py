"""Prompts of ALFWorld, and the projection of model text to a command.

There are ``compact`` prompts for small policies trained on demonstrations, and ``full`` ones for
chat models.

``compact`` contains only the task and the observation, in few tokens and with all names. The policy
learns the answer format from demonstrations, so the plain and the four-level variant are equal.
``full`` explains the household, the answer format and, if requested, the four levels. It lists the
admissible actions in every turn.
"""

import re
from collections.abc import Mapping, Sequence

from agent_system.environments import chat_prompts
from agent_system.environments.env import Observation
from rlvcr.levels import merge_level_prompts

MAX_COMMAND_LENGTH = 120  # characters; the longest command the engine knows has about 60
_ROOM = re.compile(
    r"You are in the middle of a room\. Looking quickly around you, you see (.*?)\.\s*", re.DOTALL
)
_TASK = re.compile(r"Your task is to: (.*?)\.?\s*$", re.DOTALL)
_ARRIVE = re.compile(r"You arrive at [^.]*\. ")
_OPENED = re.compile(r"You open the [^.]*\. The ([^.]*) is open\. In it, you see ")
_ON = re.compile(r"(?:On the ([^,]*)|The ([^.]*) is open\. In it), you see ")
_CLOSED = re.compile(r"The ([^.]*) is closed\.")
_ARTICLE = re.compile(r"(?<=[ ,])(?:and )?an? (?=[a-z])")


def extract_task(text: str) -> str:
    """Return the task sentence in the first text of a game, without its full stop."""
    match = _TASK.search(text)
    return match.group(1) if match else ""


def shorten_first_text(text: str) -> str:
    """Return the task and the receptacles of the room: ``put a mug in desk. cabinet 1, desk 1``."""
    room = _ROOM.search(text)
    if not room:
        return text
    return f"{extract_task(text)}.{_ARTICLE.sub('', ' ' + room.group(1))}"


def shorten_text(text: str) -> str:
    """Shorten an engine text, as to ``desk 1: mug 2, pen 1`` or ``drawer 1 closed``."""
    text = _ARRIVE.sub("", text, count=1)
    text = _OPENED.sub(lambda match: f"{match.group(1)}: ", text)
    text = _ON.sub(lambda match: f"{match.group(1) or match.group(2)}: ", text)
    text = _CLOSED.sub(lambda match: f"{match.group(1)} closed", text)
    return text.rstrip(".") if "facing" in text else _ARTICLE.sub("", text).rstrip(".")


class CompactAlfworldPrompts(chat_prompts.CompactPrompts):
    """Prompts with few tokens for small policies: task and room, then the answers to actions."""

    def __init__(self) -> None:
        super().__init__(shorten=shorten_text, shorten_first=shorten_first_text)

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """Return task and room, the last observations with their actions, and the present one."""
        del levels  # both variants are equal
        lines = [shorten_first_text(first.text)]
        for text, action in history:
            # The text of the first observation is already at the top: add only the action after it.
            lines += [f"{shorten_text(text)} > {action}" if text != first.text else f"> {action}"]
        if observation.text != first.text:
            lines.append(shorten_text(observation.text))
        return "\n".join(lines)


class ObservationLogPrompts(CompactAlfworldPrompts):
    """Prompts whose window lists the observations so far in their order, without the actions."""

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """Return task and room, ``read:`` earlier observations, and ``now:`` the present one."""
        del levels  # both variants are equal
        earlier_texts = [shorten_text(text) for text, _ in history if text != first.text]
        lines = [shorten_first_text(first.text)]
        if earlier_texts:
            lines.append(f"read: {'; '.join(earlier_texts)}")
        if observation.text != first.text:
            lines.append(f"now: {shorten_text(observation.text)}")
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


class FullAlfworldPrompts(chat_prompts.ChatPrompts):
    """Prompts for chat models: instructions, answer format and admissible actions.

    ``texts`` replaces the descriptions of levels, by level.
    """

    shows_level_prompts = True

    def __init__(self, texts: Mapping[int, str] | None = None) -> None:
        super().__init__(FULL_SYSTEM, example="")
        lines = [
            f"{level}: {text}" for level, text in merge_level_prompts(texts, LEVEL_TEXTS).items()
        ]
        self._levels = FULL_LEVELS.format("\n".join(lines))

    def system(self, levels: bool) -> str | None:
        """Return the instructions and the answer format."""
        return f"{FULL_SYSTEM}\n\n{self._levels if levels else FULL_FORMAT}"

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """Return the first text, recent turns, the present observation and the possible actions."""
        del levels  # both variants are equal
        paragraphs = [first.text]
        if history:
            paragraphs.append("Your most recent turns:")
        for text, action in history:
            if text != first.text:
                paragraphs.append(f"You saw: {text}")
            paragraphs.append(f"You did: {action}")
        if observation.text != first.text:
            paragraphs.append(f"Now you see: {observation.text}")
        return self._with_actions("\n".join(paragraphs), observation)

    def _with_actions(self, text: str, observation: Observation) -> str:
        # ``help`` changes nothing and would only cost tokens.
        actions = [
            action for action in observation.info.get("admissible_actions", ()) if action != "help"
        ]
        return f"{text}\nPossible actions: {', '.join(actions)}" if actions else f"{text}\n"


def project_command(text: str) -> tuple[str, bool]:
    """Return the command inside ``<action>..</action>``, and True if the text is well formed.

    Like ``chat_prompts.project_action``, but in lower case and without a final full stop. Text that
    is not well formed still gives a command, which the engine may reject.

    >>> project_command("<action>Go to desk 1.</action>")
    ('go to desk 1', True)
    """
    action, well_formed = chat_prompts.project_action(text)
    command = action.lower().rstrip(".")
    is_command = 0 < len(command) <= MAX_COMMAND_LENGTH and "<" not in command
    return command[:MAX_COMMAND_LENGTH], well_formed and is_command
