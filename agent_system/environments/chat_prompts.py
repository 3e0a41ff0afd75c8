"""Prompts and projection for environments that need nothing special: rules in the system message,
actions in tags.
"""

import re
from collections.abc import Callable, Sequence

from agent_system.environments.env import Observation
from rlvcr.levels import level_instructions

PLAIN = (
    "First think about what to do, between <think> and </think>. "
    "Then write one action between <action> and </action>."
)
IMAGE = "<image>"  # stands for the image of an observation in its text
MAX_LENGTH = 400  # characters of an action
_CLOSED = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_OPEN = re.compile(r"<action>(.*)", re.DOTALL)
_TAG = re.compile(r"</?(?:action|think|level)>")


class ChatPrompts:
    """``rules`` and how to answer in the system message, observations as they are in the user
    messages.

    ``example`` is an action that may be written. ``list_actions`` adds the admissible actions to
    every observation. ``keep_first`` repeats the first observation in every window prompt, for
    tasks that are told only once.
    """

    asks_for_levels = True
    shows_level_prompts = False  # the levels are described in one text for all environments

    def __init__(
        self, rules: str, example: str, list_actions: bool = False, keep_first: bool = False
    ) -> None:
        self.rules = rules
        self.example = example
        self.list_actions = list_actions
        self.keep_first = keep_first

    def system(self, levels: bool) -> str | None:
        """Rules and answer format; with ``levels`` the format that begins with a thinking level."""
        answer = level_instructions() if levels else PLAIN
        example = f"An action looks like this: <action>{self.example}</action>"
        return f"{self.rules}\n\n{answer}\n{example}"

    def first(self, observation: Observation, levels: bool) -> str:
        """The first observation."""
        del levels  # the system message asks for them
        return self._with_actions(observation.text, observation)

    def turn(self, observation: Observation) -> str:
        """What the last action brought about."""
        return self._with_actions(observation.text, observation)

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """The remembered turns, without their images, then the present; before them the first text
        where it is kept.
        """
        del levels  # the system message asks for them
        shown = [observation.text, *(seen for seen, _ in history)]
        # Not where the window still shows it: a prompt would tell the task twice.
        parts = [first.text] if self.keep_first and first.text not in shown else []
        for seen, action in history:
            # A prompt carries one image: the present observation's.
            text = seen.replace(IMAGE, "")
            parts.append(f"{text}\nYou did: {action}".strip())
        parts.append(observation.text)
        return self._with_actions("\n\n".join(parts), observation)

    def _with_actions(self, text: str, observation: Observation) -> str:
        actions = observation.info.get("admissible_actions") if self.list_actions else None
        if not actions:
            return text
        return f"{text}\nPossible actions: {', '.join(actions)}"


class SingleTurnPrompts:
    """The one observation of an episode as it is, for environments of one step: nothing follows an
    answer, and nothing lies behind a question.
    """

    asks_for_levels = False
    shows_level_prompts = False

    def system(self, levels: bool) -> str | None:
        """No system message."""
        del levels  # not asked for
        return None

    def first(self, observation: Observation, levels: bool) -> str:
        """The observation."""
        del levels  # where they are asked for, the system message does
        return observation.text

    def turn(self, observation: Observation) -> str:
        """The observation."""
        return observation.text

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """The observation."""
        del first, history, levels  # there is one step
        return observation.text


class CompactPrompts:
    """Observations alone, for small policies that learn rules and answer format from
    demonstrations.

    The plain and the four-level variant read the same. ``shorten`` makes an observation's text one
    that is easy to read with few parameters; ``begin`` is the same for the first observation of an
    episode (default: ``shorten``). ``keep_first`` as in ``ChatPrompts``.
    """

    asks_for_levels = True
    shows_level_prompts = False

    def __init__(
        self,
        shorten: Callable[[str], str] = str,
        begin: Callable[[str], str] | None = None,
        keep_first: bool = False,
    ) -> None:
        self.shorten = shorten
        self.begin = shorten if begin is None else begin
        self.keep_first = keep_first

    def system(self, levels: bool) -> str | None:
        """No system message."""
        del levels  # both variants read the same
        return None

    def first(self, observation: Observation, levels: bool) -> str:
        """The first observation."""
        del levels  # both variants read the same
        return self.begin(observation.text)

    def turn(self, observation: Observation) -> str:
        """What the last action brought about."""
        return self.shorten(observation.text)

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """The remembered turns, then the present; before them the first text where it is kept."""
        del levels  # both variants read the same
        shown = [seen for seen, _ in history] + [observation.text]
        lines = [self.begin(first.text)] if self.keep_first and first.text not in shown else []
        lines += [f"{self._said(first, seen)}\n> {action}" for seen, action in history]
        return "\n".join([*lines, self._said(first, observation.text)])

    def _said(self, first: Observation, text: str) -> str:
        # By its text: a remembered turn no longer says that it was the first.
        return self.begin(text) if text == first.text else self.shorten(text)


def project(text: str) -> tuple[str, bool]:
    """The action between the first ``<action>`` and ``</action>``, white space tidied, and whether
    it is well formed.

    Well formed means: one closed action that is not empty, has no tag in it and at most
    ``MAX_LENGTH`` characters. Without a closed one the action is what follows an open tag, or the
    last line.
    """
    closed = _CLOSED.findall(text)
    if closed:
        action = " ".join(closed[0].split())
        # Judged before it is cut to length: a long action is cut and also counts as not valid.
        well_formed = (
            len(closed) == 1 and 0 < len(action) <= MAX_LENGTH and _TAG.search(action) is None
        )
        return action[:MAX_LENGTH], well_formed
    # An open tag still names an action, though it does not count as valid.
    opened = _OPEN.search(text)
    if opened is not None:
        rest = opened.group(1)
    else:
        lines = text.strip().splitlines()
        # Some action must be played; that it is not valid is said beside it.
        rest = lines[-1] if lines else ""
    return " ".join(rest.split())[:MAX_LENGTH], False
