"""Rules of the game, without tokens or prompts, used by ``package`` and ``multistep_env``.

The policy asks yes/no questions or guesses with ``[word]``. A guess or the last turn ends the game.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from agent_system.environments.env_package.dataset.answers import remove_thoughts
from agent_system.environments.env_package.twenty_questions.gamemaster import (
    Gamemaster,
    gamemaster_prompt,
    read_answer,
)
from agent_system.environments.env_package.twenty_questions.knowledge import Answer, load_knowledge
from verl.utils.seeds import derive_seed

MAX_STEPS = 20
HELD_OUT_DIVISOR = 4  # one word, or one set of clues, in four is held out for validation
# An unclosed tag still counts: turns are cut at their limit of tokens.
_TAGGED = re.compile(r"<action>(.*?)(?:</action>|$)", re.DOTALL)
_GUESS = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"^(a|an|the)\s+")

OPENING = "I am thinking of a word. {clues}{left} left."
CLUE = "{question} {answer}. "
MALFORMED = "Ask a yes/no question, or guess with [word]."
RIGHT = "Right!"
WRONG = "Wrong guess."

# Keys: solution, left (turns), turns ([(action, reply), ...]), reply, done and ``won``.
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Move:
    """Move of the policy: a guess, or a question if ``guess`` is None.

    The text is not empty if ``is_valid`` is True.
    """

    guess: str | None
    question: str
    is_valid: bool


def read_move(text: str) -> Move:
    """Parse the move in the last action tag of ``text``, or in all of it without a tag.

    The last ``[word]`` is a guess. Without one the text is a question.
    """
    # A move in a thought does not count, even if the thought has no closing tag.
    text = remove_thoughts(text)
    tagged = _TAGGED.findall(text)
    content = (tagged[-1] if tagged else text).strip()
    guesses = _GUESS.findall(content)
    if guesses:
        word = _ARTICLE.sub("", " ".join(guesses[-1].lower().split()))
        return Move(word, "", bool(word))
    question = " ".join(content.split())
    return Move(None, question, any(letter.isalpha() for letter in question))


def new_game(solution: str, max_steps: int = MAX_STEPS, clues: Sequence[str] = ()) -> State:
    """Return the state of a new game about ``solution`` with at most ``max_steps`` turns.

    ``clues`` are questions with the answer yes. They count as asked and use no turn.
    """
    clue_text = "".join(CLUE.format(question=clue, answer=Answer.YES) for clue in clues)
    return {
        "solution": solution,
        "left": max_steps,
        "turns": [(clue, f"{Answer.YES}.") for clue in clues],
        "reply": OPENING.format(clues=clue_text, left=max_steps),
        "done": False,
        "won": False,
    }


def apply_move(
    state: State, text: str, gamemaster: Gamemaster
) -> tuple[State, float, bool, dict[str, Any]]:
    """Return the state after the move in ``text``, reward (1 for the right guess, else 0), done and
    info.

    ``info`` holds ``won`` and ``is_action_valid``. Raises the exceptions of ``gamemaster``.
    """
    move = read_move(text)
    won = move.is_valid and move.guess == state["solution"].lower()
    turns_left = state["left"] - 1
    is_guess = move.is_valid and move.guess is not None
    done = is_guess or turns_left == 0
    reply = _make_reply(state, move, gamemaster) + ("" if done else f" {turns_left} left.")
    turns = [*state["turns"], (f"[{move.guess}]" if is_guess else move.question, reply)]
    # Make a new dictionary: the caller may still hold the old state.
    new_state = dict(state, left=turns_left, turns=turns, reply=reply, done=done, won=won)
    return new_state, float(won), done, {"won": won, "is_action_valid": move.is_valid}


def _make_reply(state: State, move: Move, gamemaster: Gamemaster) -> str:
    if not move.is_valid:
        return MALFORMED
    if move.guess is not None:
        return RIGHT if move.guess == state["solution"].lower() else WRONG
    return f"{read_answer(gamemaster(gamemaster_prompt(state['solution'], move.question)))}."


def list_words(words: Sequence[str] | None = None) -> list[str]:
    """Return the distinct ``words`` (default: the shipped table), sorted."""
    return sorted(set(words)) if words else sorted(load_knowledge().things)


def split_words(split: str, words: Sequence[str] | None = None) -> list[str]:
    """Return the ``"train"`` or ``"val"`` part of ``words`` (default: the shipped table), sorted.

    The parts are disjoint. A hash of the word decides its part, independently of the other words.
    If a part would be empty, the word with the lowest or highest hash moves to it. Raises
    ``ValueError`` for fewer than two words.
    """
    words = list_words(words)
    if len(words) < 2:
        raise ValueError(
            f"words={words} are too few; allowed: at least two words, one to train on and one to "
            "hold out; fix: add words to env.twenty_questions.words"
        )
    hashes = {word: derive_seed("twenty questions", word) for word in words}
    order = sorted(words, key=hashes.__getitem__)
    held_out = {word for word in words if hashes[word] % HELD_OUT_DIVISOR == 0} or {order[0]}
    if len(held_out) == len(words):
        held_out.remove(order[-1])
    return [word for word in words if (word in held_out) == (split == "val")]


def split_clues(
    split: str, count: int, words: Sequence[str] | None = None
) -> list[tuple[str, tuple[str, ...]]]:
    """Return the ``"train"`` or ``"val"`` starts as (word, ``count`` attributes of it), sorted.

    Only the set of attributes decides the split, so a word can be in both splits. If the word
    decided too, training could teach that these attributes never belong to the held-out word.
    """
    things = load_knowledge().things
    return [
        (word, clues)
        for word in list_words(words)
        for clues in permutations(sorted(things[word].holds), count)
        if (derive_seed("clues", *sorted(clues)) % HELD_OUT_DIVISOR == 0) == (split == "val")
    ]
