"""The rules of the game, without tokens or prompts; ``package`` and ``multistep_env`` play by them.

The player asks yes/no questions or guesses with ``[word]``. A wrong guess ends the game, as does
the last turn.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from agent_system.environments.env_package.dataset.answers import without_thoughts
from agent_system.environments.env_package.twenty_questions.gamemaster import (
    Gamemaster,
    gamemaster_prompt,
    read_answer,
)
from agent_system.environments.env_package.twenty_questions.knowledge import Answer, knowledge
from verl.utils.seeds import derive_seed

MAX_STEPS = 20
HELD_OUT_SHARE = 4  # one word, or one opening, of so many is for validation
# A tag that was never closed still counts: turns are cut at their limit of tokens.
_TAGGED = re.compile(r"<action>(.*?)(?:</action>|$)", re.DOTALL)
_GUESS = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"^(a|an|the)\s+")

OPENING = "I am thinking of a word. {clues}{left} left."
CLUE = "{question} {answer}. "
MALFORMED = "Ask a yes/no question, or guess with [word]."
RIGHT = "Right!"
WRONG = "Wrong guess."

State = dict[str, Any]  # solution, left (turns), turns ([(action, reply), ...]), reply, done, won


@dataclass(frozen=True, slots=True)
class Move:
    """What the player did: a guess, or else a question; neither is empty when ``valid``."""

    guess: str | None
    question: str
    valid: bool


def read_move(text: str) -> Move:
    """The move in the last action tag of ``text``, or in all of it without one; the last ``[word]``
    is a guess.
    """
    # What stands in a thought is no move, also in one that was cut.
    text = without_thoughts(text)
    tagged = _TAGGED.findall(text)
    said = (tagged[-1] if tagged else text).strip()
    guesses = _GUESS.findall(said)
    if guesses:
        word = _ARTICLE.sub("", " ".join(guesses[-1].lower().split()))
        return Move(word, "", bool(word))
    question = " ".join(said.split())
    return Move(None, question, any(letter.isalpha() for letter in question))


def new_game(solution: str, max_steps: int = MAX_STEPS, clues: Sequence[str] = ()) -> State:
    """A game about ``solution`` that lasts ``max_steps`` turns at most.

    ``clues`` are questions whose answer is yes: the game opens as if they had been asked already.
    """
    told = "".join(CLUE.format(question=clue, answer=Answer.YES) for clue in clues)
    return {
        "solution": solution,
        "left": max_steps,
        "turns": [(clue, f"{Answer.YES}.") for clue in clues],
        "reply": OPENING.format(clues=told, left=max_steps),
        "done": False,
        "won": False,
    }


def play(
    state: State, text: str, gamemaster: Gamemaster
) -> tuple[State, float, bool, dict[str, Any]]:
    """The state after the move in ``text``, reward (1 for the right guess, else 0), done, info.

    ``info`` holds ``won`` and ``is_action_valid``. Raises what ``gamemaster`` raises.
    """
    move = read_move(text)
    won = move.valid and move.guess == state["solution"].lower()
    left = state["left"] - 1
    guessed = move.valid and move.guess is not None
    done = guessed or left == 0
    reply = _reply(state, move, gamemaster) + ("" if done else f" {left} left.")
    turns = [*state["turns"], (f"[{move.guess}]" if guessed else move.question, reply)]
    # A new dictionary, for the caller may hold the old state: nothing of it is changed.
    after = {**state, "left": left, "turns": turns, "reply": reply, "done": done, "won": won}
    return after, float(won), done, {"won": won, "is_action_valid": move.valid}


def _reply(state: State, move: Move, gamemaster: Gamemaster) -> str:
    if not move.valid:
        return MALFORMED
    if move.guess is not None:
        return RIGHT if move.guess == state["solution"].lower() else WRONG
    return f"{read_answer(gamemaster(gamemaster_prompt(state['solution'], move.question)))}."


def words_of(split: str, words: Sequence[str] | None = None) -> list[str]:
    """The ``"train"`` or ``"val"`` words (default: of the whole shipped table), sorted; the two
    share none.

    A hash of its spelling says on which side a word is, whatever the other words are. Only where
    that leaves a side empty, the word with the lowest or highest hash changes it. Raises
    ``ValueError`` for fewer than two words.
    """
    words = sorted(set(words)) if words else sorted(knowledge().things)
    if len(words) < 2:
        raise ValueError(
            "twenty questions needs at least two words, one to train on and one to hold out; "
            f"got {words}"
        )
    order = sorted(words, key=lambda word: derive_seed("twenty questions", word))
    held_out = {
        word for word in words if derive_seed("twenty questions", word) % HELD_OUT_SHARE == 0
    }
    held_out = held_out or {order[0]}
    if len(held_out) == len(words):
        held_out.remove(order[-1])
    return [word for word in words if (word in held_out) == (split == "val")]


def clues_of(
    split: str, count: int, words: Sequence[str] | None = None
) -> list[tuple[str, tuple[str, ...]]]:
    """The ``"train"`` or ``"val"`` openings as (word, ``count`` attributes that it has), sorted.

    All words are in both splits. The attributes alone, in any order, say on which side an opening
    is: were one word's opening held out and another's with the same attributes not, training would
    teach that they never mean the word that is held out.
    """
    table = knowledge()
    openings = [
        (word, clues)
        for word in (sorted(set(words)) if words else sorted(table.things))
        for clues in permutations(sorted(table.things[word].holds), count)
    ]
    return [
        (word, clues)
        for word, clues in openings
        if (derive_seed("clues", *sorted(clues)) % HELD_OUT_SHARE == 0) == (split == "val")
    ]
