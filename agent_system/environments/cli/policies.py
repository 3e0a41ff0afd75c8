"""Scripted policies of the command ``check``. They return texts with tags, as a model would.

Every episode has a new policy object, which is called once per turn with the last observation.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from agent_system.environments.env import Env, Observation, Task
from agent_system.environments.event_loop import await_if_needed
from agent_system.environments.expert_protocol import EpisodeStart, Expert
from agent_system.environments.package import EnvPackage
from agent_system.environments.random_moves import find_bracketed_moves, vary_move
from agent_system.environments.settings import EnvSettings
from verl.utils.files import read_yaml_table
from verl.utils.limits import USER_CODE_ERRORS, describe_raised_error

Policy = Callable[[Observation], str]
PLACEHOLDER_PATTERN = re.compile(r"<[^<>]+>")  # as in the admissible action search[<words>]
WORD_PATTERN = re.compile(r"[\w'-]+")
MAX_CONSTANTS_PER_SOURCE = 8  # constant actions from one candidate list, the most frequent first
_INJECTION_TEXTS = read_yaml_table(__file__, "injections.yaml")
# Texts that try to deceive an environment or a grader.
INJECTIONS = tuple(
    text if isinstance(text, str) else text[0] * text[1]
    for text in [
        *_INJECTION_TEXTS["orders"],
        *_INJECTION_TEXTS["code"],
        *_INJECTION_TEXTS["malformed"],
    ]
)


PolicyFactory = Callable[[EpisodeStart[Any]], Policy]


class TextWithAction(str):
    """Text of a scripted policy that also carries its ``action``.

    The answer format of a package may be unknown. Then the check passes ``action`` to the
    environment directly, without the parser ``project``.
    """

    action: str


def make_text_with_action(action: str) -> TextWithAction:
    """Return the model text for ``action`` in the default format, ``<action>`` tags."""
    text = TextWithAction(f"<action>{action}</action>")
    text.action = action
    return text


class OraclePolicy:
    """Policy that follows the environment's scripted expert, without random useless actions."""

    def __init__(self, expert: Expert[Any], episode_start: EpisodeStart[Any]) -> None:
        self._expert = expert.start(episode_start)
        self._last_action: str | None = None

    def __call__(self, observation: Observation) -> str:
        if self._last_action is not None:
            self._expert.observe(self._last_action, observation)
        self._last_action = self._expert.act().action
        return make_text_with_action(self._last_action)


class FixedActionsPolicy:
    """Policy that follows a given list of actions.

    If an observation lists all admissible actions, the policy skips actions that are not listed.
    """

    def __init__(self, actions: Sequence[str]) -> None:
        self._remaining_actions = list(actions)

    def __call__(self, observation: Observation) -> str:
        admissible_actions = _get_admissible_actions(observation)
        lists_all_actions = _has_complete_action_list(observation)
        while self._remaining_actions:
            action = self._remaining_actions.pop(0)
            if not lists_all_actions or action in admissible_actions:
                return make_text_with_action(action)
        return ""


def make_random_policy(episode_start: EpisodeStart[Any]) -> Policy:
    """Return a policy of random actions.

    It takes an admissible action if the observation lists them. Otherwise it varies a move that was
    shown in brackets. Without such a move, it writes random words of the observation.
    """
    shown_moves: dict[str, None] = {}  # a dict, because the order of a set varies

    def make_random_action_text(observation: Observation) -> str:
        words = WORD_PATTERN.findall(observation.text) or ["wait"]
        admissible_actions = _get_admissible_actions(observation)
        shown_moves.update(dict.fromkeys(find_bracketed_moves(observation.text)))
        if admissible_actions:
            action = episode_start.rng.choice(admissible_actions)
            action = PLACEHOLDER_PATTERN.sub(lambda _: episode_start.rng.choice(words), action)
        elif shown_moves:
            action = vary_move(episode_start.rng.choice(list(shown_moves)), episode_start.rng)
        else:
            action = " ".join(episode_start.rng.choices(words, k=episode_start.rng.randint(1, 3)))
        return make_text_with_action(action)

    return make_random_action_text


def make_repeating_policy(episode_start: EpisodeStart[Any]) -> Policy:
    """Return a policy that repeats the first admissible action, or else the first line of text."""
    lines = episode_start.first.text.strip().splitlines()
    text = make_text_with_action((_get_admissible_actions(episode_start.first) or lines or [""])[0])
    return lambda _observation: text


# Policies that need no oracle.
POLICIES_WITHOUT_ORACLE: dict[str, PolicyFactory] = {
    "random": make_random_policy,
    "empty": lambda _start: lambda _observation: "",
    "repeating": make_repeating_policy,
}


class InjectionPolicy:
    """Policy that sends all ``INJECTIONS`` (texts that try to deceive a grader), one per turn.

    Each text is sent unchanged and also in the answer format of the package. Each episode continues
    the list where the previous episode ended. ``num_unused`` is the number of unused texts.
    """

    def __init__(self, package: EnvPackage[Any]) -> None:
        injection_texts = [
            sent_text
            for text in INJECTIONS
            for sent_text in (text, _format_text_with_hostile_action(package, text))
        ]
        random.Random(0).shuffle(injection_texts)
        self.num_unused = len(injection_texts)
        self._text_cycle = itertools.cycle(injection_texts)

    def __call__(self, _start: EpisodeStart[Any]) -> Policy:
        return self._next_injection

    def _next_injection(self, _observation: Observation) -> str:
        self.num_unused -= 1
        return next(self._text_cycle)


def _format_text_with_hostile_action(package: EnvPackage[Any], action: str) -> str:
    """Return a model text from which the parser of ``package`` reads the hostile ``action``.

    If the format of the package is unknown, return a ``TextWithAction``, which skips the parser.
    """
    if package.format_action is not None:
        return package.format_action(action)
    text = make_text_with_action(action)
    has_default_format = package.project(make_text_with_action("x")) == ("x", True)
    return str(text) if has_default_format else text


def list_constant_action_candidates(
    actions: Sequence[str], observations: Sequence[Observation]
) -> list[str]:
    """Return actions with which a policy that repeats one action could succeed.

    They are the most frequent of ``actions`` and of the admissible actions. If some observation
    does not list all its actions, texts in brackets and frequent answers to questions are added.
    """
    admissible_counts, bracketed_counts = Counter[str](), Counter[str]()
    for observation in observations:
        admissible_counts.update(_get_admissible_actions(observation))
        bracketed_counts.update(find_bracketed_moves(observation.text))
    counts_of_sources = [Counter(actions), admissible_counts]
    frequent_answers: list[str] = []
    if not observations or not all(map(_has_complete_action_list, observations)):
        counts_of_sources.append(bracketed_counts)
        frequent_answers = _INJECTION_TEXTS["frequent_answers"]
    frequent_texts = [
        text
        for source_counts in counts_of_sources
        for text, _ in source_counts.most_common(MAX_CONSTANTS_PER_SOURCE)
        if not PLACEHOLDER_PATTERN.search(text)
    ]
    return list(dict.fromkeys([*frequent_texts, *frequent_answers]))


def _has_complete_action_list(observation: Observation) -> bool:
    actions = _get_admissible_actions(observation)
    return bool(actions) and not any(map(PLACEHOLDER_PATTERN.search, actions))


class InvalidGoldPathError(ValueError):
    """Error for a method ``gold_path`` that raised, or that did not return a list of actions."""


def find_oracle(
    expert: Expert[Any] | None, env: Env, tasks: Sequence[Task], settings: EnvSettings
) -> PolicyFactory | None:
    """Return a function that makes a policy that solves the task of its episode, or None.

    The policy follows ``env.gold_path(task)`` if that exists, or ``expert`` if it solves every
    task.
    """
    gold_path = getattr(env, "gold_path", None)
    if gold_path is not None:
        # Compute all paths first: computing one may end the current episode of ``env``.
        gold_paths = {task["task_id"]: _read_gold_path(gold_path, task) for task in tasks}
        return lambda start: FixedActionsPolicy(gold_paths[start.task["task_id"]])
    # An expert that has to guess does not solve every task, so it cannot be the oracle.
    if expert is None or not expert.knows_solution(settings):
        return None
    return lambda start: OraclePolicy(expert, start)


def _read_gold_path(gold_path: Callable[[Task], Any], task: Task) -> list[str]:
    try:
        path = await_if_needed(gold_path(task))
    except USER_CODE_ERRORS as error:  # boundary to user code
        error_text = describe_raised_error(error)
        raise InvalidGoldPathError(f"gold_path of {task['task_id']} raised {error_text}") from error
    # Refuse a string, which is also a sequence of strings.
    if isinstance(path, str) or not all(isinstance(action, str) for action in path):
        raise InvalidGoldPathError(
            f"gold_path of {task['task_id']} is {path!r}; allowed: a list of strings; "
            "fix: return the actions that solve the task, in order"
        )
    return list(path)


def _get_admissible_actions(observation: Observation) -> Sequence[str]:
    return observation.info.get("admissible_actions") or ()
