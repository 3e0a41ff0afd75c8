"""Default prompts and action parser: rules in the system message, actions in ``<action>`` tags."""

import re
from collections.abc import Callable

from agent_system.environments.env import Observation, PastTurns
from rlvcr.levels import render_level_instructions

PLAIN_ANSWER_FORMAT = (
    "First think about what to do, between <think> and </think>. "
    "Then write one action between <action> and </action>."
)
IMAGE_PLACEHOLDER = "<image>"  # placeholder in an observation's text for its image
MAX_ACTION_CHARS = 400  # maximum characters of an action; a longer one is cut and not well formed
ACTION_TAG_PATTERN = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_OPEN_ACTION_PATTERN = re.compile(r"<action>(.*)", re.DOTALL)
_TAG_PATTERN = re.compile(r"</?(?:action|think|level)>")


class ChatPrompts:
    """Prompts with rules and answer format in the system message, and unchanged observations.

    Args:
        rules: Rules of the environment.
        example: A valid action, shown as an example of the format.
        list_actions: Add the admissible actions to every observation.
        keep_first: Repeat the first observation in the prompt of every turn, for environments that
            state the task only once. It has an effect with ``env.history=window``.
    """

    asks_for_levels = True
    shows_level_prompts = False  # these prompts do not show a user's own descriptions of levels

    def __init__(
        self, rules: str, example: str, list_actions: bool = False, keep_first: bool = False
    ) -> None:
        self.rules = rules
        self.example = example
        self.list_actions = list_actions
        self.keep_first = keep_first

    def system(self, levels: bool) -> str | None:
        """Return the system message: the rules and the answer format."""
        answer_format = render_level_instructions() if levels else PLAIN_ANSWER_FORMAT
        example = f"An action looks like this: <action>{self.example}</action>"
        return f"{self.rules}\n\n{answer_format}\n{example}"

    def first(self, observation: Observation, levels: bool) -> str:
        return self._append_admissible_actions(observation.text, observation)

    def turn(self, observation: Observation) -> str:
        return self._append_admissible_actions(observation.text, observation)

    def window(
        self, first: Observation, history: PastTurns, observation: Observation, levels: bool
    ) -> str:
        """Return the user message with the past turns (without images) and ``observation``.

        With ``keep_first`` the text of the first observation comes before them.
        """
        observation_texts = [observation.text, *(past_text for past_text, _ in history)]
        # Omit the first observation while ``history`` contains it: it would appear twice.
        paragraphs = [first.text] if self.keep_first and first.text not in observation_texts else []
        for past_text, action in history:
            # Only the current observation keeps its image in the prompt.
            past_text_without_image = past_text.replace(IMAGE_PLACEHOLDER, "")
            paragraphs.append(f"{past_text_without_image}\nYou did: {action}".strip())
        paragraphs.append(observation.text)
        return self._append_admissible_actions("\n\n".join(paragraphs), observation)

    def _append_admissible_actions(self, text: str, observation: Observation) -> str:
        admissible_actions = (
            observation.info.get("admissible_actions") if self.list_actions else None
        )
        if not admissible_actions:
            return text
        return f"{text}\nPossible actions: {', '.join(admissible_actions)}"


class CompactPrompts:
    """Prompts of observations only, for small policies that learn the rules from demonstrations.

    The prompts with and without thinking levels are equal. ``shorten`` maps the text of an
    observation to a shorter text. ``shorten_first`` is used instead for the first observation
    (default: ``shorten``). With ``keep_first`` every prompt repeats the first observation.
    """

    asks_for_levels = True
    shows_level_prompts = False

    def __init__(
        self,
        shorten: Callable[[str], str] = str,
        shorten_first: Callable[[str], str] | None = None,
        keep_first: bool = False,
    ) -> None:
        self.shorten = shorten
        self.shorten_first = shorten if shorten_first is None else shorten_first
        self.keep_first = keep_first

    def system(self, levels: bool) -> str | None:
        return None

    def first(self, observation: Observation, levels: bool) -> str:
        return self.shorten_first(observation.text)

    def turn(self, observation: Observation) -> str:
        return self.shorten(observation.text)

    def window(
        self, first: Observation, history: PastTurns, observation: Observation, levels: bool
    ) -> str:
        """Return the user message with the past turns and the ``observation``, shortened."""
        observation_texts = [text for text, _ in history] + [observation.text]
        # Compare texts: a turn of the history does not record that it was the first.
        shortened_texts = [
            self.shorten_first(text) if text == first.text else self.shorten(text)
            for text in observation_texts
        ]
        lines = [
            f"{text}\n> {action}"
            for text, (_, action) in zip(shortened_texts, history, strict=False)
        ]
        if self.keep_first and first.text not in observation_texts:
            lines.insert(0, self.shorten_first(first.text))
        return "\n".join([*lines, shortened_texts[-1]])


class SingleTurnPrompts(CompactPrompts):
    """Prompts for single-turn environments: the unchanged text of the only observation."""

    asks_for_levels = False


def project_action(text: str) -> tuple[str, bool]:
    """Return the action in ``text`` with normalised white space, and True if it is well formed.

    The action is the text between the first ``<action>`` and ``</action>``. Without a closing tag
    it is the text after the opening tag, without any tag the last line. Well formed means exactly
    one closed action that is not empty, contains no tag and has at most ``MAX_ACTION_CHARS``
    characters::

        "<action> go  west </action>"  ->  ("go west", True)
        "I go <action>west"            ->  ("west", False)
        "look"                         ->  ("look", False)
    """
    closed_actions = ACTION_TAG_PATTERN.findall(text)
    if closed_actions:
        action = " ".join(closed_actions[0].split())
        # Check the length before truncating: a truncated action also counts as not well formed.
        is_well_formed = (
            len(closed_actions) == 1
            and 0 < len(action) <= MAX_ACTION_CHARS
            and _TAG_PATTERN.search(action) is None
        )
        return action[:MAX_ACTION_CHARS], is_well_formed
    # Text after an unclosed tag is taken as the action, but does not count as valid.
    open_action_match = _OPEN_ACTION_PATTERN.search(text)
    if open_action_match is not None:
        unclosed_text = open_action_match.group(1)
    else:
        lines = text.strip().splitlines()
        # The environment needs some text as action, so take the last line.
        unclosed_text = lines[-1] if lines else ""
    return " ".join(unclosed_text.split())[:MAX_ACTION_CHARS], False
