"""Prompts of ALFWorld, and the projection of model text to a command.

``compact`` prompts are for small policies trained on demonstrations: task and observations in few
tokens, without answer format. ``full`` prompts are for chat models. They explain the household, the
answer format and, if requested, the four thinking levels. They list the admissible actions in every
turn.
"""

import re
from collections.abc import Mapping

from agent_system.environments import chat_prompts
from agent_system.environments.env import Observation, PastTurns
from rlvcr.levels import merge_level_prompts

MAX_COMMAND_LENGTH = 120  # characters; the longest command the engine knows has about 60
_ROOM_PATTERN = re.compile(
    r"You are in the middle of a room\. Looking quickly around you, you see (.*?)\.\s*", re.DOTALL
)
_TASK_PATTERN = re.compile(r"Your task is to: (.*?)\.?\s*$", re.DOTALL)
_LOCATION_PATTERN = re.compile(r"You arrive at [^.]*\. ")
_OPENED_PATTERN = re.compile(r"You open the [^.]*\. The ([^.]*) is open\. In it, you see ")
_CONTENT_PATTERN = re.compile(r"(?:On the ([^,]*)|The ([^.]*) is open\. In it), you see ")
_CLOSED_PATTERN = re.compile(r"The ([^.]*) is closed\.")
_ARTICLE_PATTERN = re.compile(r"(?<=[ ,])(?:and )?an? (?=[a-z])")


def extract_task(text: str) -> str:
    """Return the task sentence in the first text of a game, without its full stop."""
    match = _TASK_PATTERN.search(text)
    return match.group(1) if match else ""


def shorten_first_observation(text: str) -> str:
    """Return the task and the receptacles of the room: ``put a mug in desk. cabinet 1, desk 1``."""
    room_match = _ROOM_PATTERN.search(text)
    if not room_match:
        return text
    return f"{extract_task(text)}.{_ARTICLE_PATTERN.sub('', ' ' + room_match.group(1))}"


def shorten_observation(text: str) -> str:
    """Shorten an engine text. Typical results: ``desk 1: mug 2, pen 1``, ``drawer 1 closed``."""
    text = _LOCATION_PATTERN.sub("", text, count=1)
    text = _OPENED_PATTERN.sub(lambda match: f"{match.group(1)}: ", text)
    text = _CONTENT_PATTERN.sub(lambda match: f"{match.group(1) or match.group(2)}: ", text)
    text = _CLOSED_PATTERN.sub(lambda match: f"{match.group(1)} closed", text)
    return text.rstrip(".") if "facing" in text else _ARTICLE_PATTERN.sub("", text).rstrip(".")


class CompactAlfworldPrompts(chat_prompts.CompactPrompts):
    """Prompts with few tokens for small policies: task, room, then actions and observations."""

    def __init__(self) -> None:
        super().__init__(shorten=shorten_observation, shorten_first=shorten_first_observation)

    def window(
        self, first: Observation, history: PastTurns, observation: Observation, levels: bool
    ) -> str:
        lines = [shorten_first_observation(first.text)]
        for text, action in history:
            # The first line already contains the first observation, so add only its action.
            prefix = "" if text == first.text else f"{shorten_observation(text)} "
            lines.append(f"{prefix}> {action}")
        if observation.text != first.text:
            lines.append(shorten_observation(observation.text))
        return "\n".join(lines)


class ObservationLogPrompts(CompactAlfworldPrompts):
    """Prompts that list earlier observations (``read:``) and the current one (``now:``)."""

    def window(
        self, first: Observation, history: PastTurns, observation: Observation, levels: bool
    ) -> str:
        earlier_texts = [shorten_observation(text) for text, _ in history if text != first.text]
        lines = [shorten_first_observation(first.text)]
        if earlier_texts:
            lines.append(f"read: {'; '.join(earlier_texts)}")
        if observation.text != first.text:
            lines.append(f"now: {shorten_observation(observation.text)}")
        return "\n".join(lines)


FULL_RULES = """\
You act in a household described in text. Each turn you see what happened and which actions \
are possible, and you choose one of them to get the task done in as few turns as you can."""
FULL_ANSWER_FORMAT = """\
First think about what to do, between <think> and </think>. Then write the one action \
you choose, copied exactly from the list, between <action> and </action>."""
FULL_LEVELS_TEMPLATE = """\
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

    ``level_texts`` maps thinking levels to descriptions that replace the default ones.
    """

    shows_level_prompts = True

    def __init__(self, level_texts: Mapping[int, str] | None = None) -> None:
        super().__init__(FULL_RULES, example="")
        level_lines = [
            f"{level}: {text}"
            for level, text in merge_level_prompts(level_texts, LEVEL_TEXTS).items()
        ]
        self._level_instructions = FULL_LEVELS_TEMPLATE.format("\n".join(level_lines))

    def system(self, levels: bool) -> str | None:
        return f"{FULL_RULES}\n\n{self._level_instructions if levels else FULL_ANSWER_FORMAT}"

    def window(
        self, first: Observation, history: PastTurns, observation: Observation, levels: bool
    ) -> str:
        paragraphs = [first.text]
        if history:
            paragraphs.append("Your most recent turns:")
        for text, action in history:
            if text != first.text:
                paragraphs.append(f"You saw: {text}")
            paragraphs.append(f"You did: {action}")
        if observation.text != first.text:
            paragraphs.append(f"Now you see: {observation.text}")
        return self._append_admissible_actions("\n".join(paragraphs), observation)

    def _append_admissible_actions(self, text: str, observation: Observation) -> str:
        # Do not list the command ``help``, which changes nothing.
        actions = [
            action for action in observation.info.get("admissible_actions", ()) if action != "help"
        ]
        return f"{text}\nPossible actions: {', '.join(actions)}" if actions else f"{text}\n"


def parse_game_command(text: str) -> tuple[str, bool]:
    """Return the command inside ``<action>..</action>``, and True if the text is well formed.

    The command is in lower case, without a final full stop. A text that is not well formed also
    gives a command, which the engine may reject.

    >>> parse_game_command("<action>Go to desk 1.</action>")
    ('go to desk 1', True)
    """
    action, is_well_formed = chat_prompts.project_action(text)
    command = action.lower().rstrip(".")
    is_command = 0 < len(command) <= MAX_COMMAND_LENGTH and "<" not in command
    return command[:MAX_COMMAND_LENGTH], is_well_formed and is_command
