"""Rules of the game, without tokens or prompts, used by ``package`` and ``multistep_env``.

The policy asks yes/no questions, or guesses with ``[word]``. A guess or the last turn ends a game.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from agent_system.environments.env_package.dataset.answers import remove_thoughts
from agent_system.environments.env_package.twenty_questions.gamemaster import (
    Gamemaster,
    build_gamemaster_prompt,
    read_answer,
)
from agent_system.environments.env_package.twenty_questions.knowledge import Answer, load_knowledge
from verl.config.settings.errors import UserError
from verl.utils.seeds import derive_seed

MAX_STEPS = 20  # default number of turns
VAL_DIVISOR = 4  # one word in four, or one set of clues in four, belongs to validation
# The closing tag may be missing, because a turn can be cut at its token limit.
_ACTION_PATTERN = re.compile(r"<action>(.*?)(?:</action>|$)", re.DOTALL)
_GUESS_PATTERN = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE_PATTERN = re.compile(r"^(a|an|the)\s+")

OPENING_REPLY = "I am thinking of a word. {clues}{left} left."
CLUE_TEXT = "{question} {answer}. "
MALFORMED_REPLY = "Ask a yes/no question, or guess with [word]."
RIGHT_REPLY = "Right!"
WRONG_REPLY = "Wrong guess."

# State of a game. Keys: ``solution``, ``left`` (number of turns left), ``turns`` (list of (action,
# reply)), ``reply`` (the latest one), ``done`` and ``won``.
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Move:
    """Move of the policy: a guess, or a question if ``guess`` is None. If empty, it is invalid."""

    guess: str | None
    question: str
    is_valid: bool


def read_move(text: str) -> Move:
    """Parse the move in the last action tag of ``text``, or in the whole text if it has no tag.

    The last ``[word]`` is the guess. Without brackets, the text is a question.
    """
    # Ignore moves in thoughts, even in a thought without closing tag.
    text = remove_thoughts(text)
    tagged_actions = _ACTION_PATTERN.findall(text)
    move_text = (tagged_actions[-1] if tagged_actions else text).strip()
    guesses = _GUESS_PATTERN.findall(move_text)
    if guesses:
        word = _normalize_word(guesses[-1])
        return Move(word, "", bool(word))
    question = " ".join(move_text.split())
    return Move(None, question, any(character.isalpha() for character in question))


def _normalize_word(word: str) -> str:
    return _ARTICLE_PATTERN.sub("", " ".join(word.lower().split()))


def create_game_state(
    solution: str, max_steps: int = MAX_STEPS, clues: Sequence[str] = ()
) -> State:
    """Return the state of a new game about ``solution`` with at most ``max_steps`` turns.

    ``clues`` are questions whose answer is yes. The first reply states them. They use no turn.
    """
    clue_text = "".join(CLUE_TEXT.format(question=clue, answer=Answer.YES) for clue in clues)
    return {
        "solution": solution,
        "left": max_steps,
        "turns": [(clue, f"{Answer.YES}.") for clue in clues],
        "reply": OPENING_REPLY.format(clues=clue_text, left=max_steps),
        "done": False,
        "won": False,
    }


def apply_move(
    state: State, text: str, gamemaster: Gamemaster
) -> tuple[State, float, bool, dict[str, Any]]:
    """Return (state, reward, done, info) after the move in ``text``, with a new state.

    The reward is 1.0 for the right guess, else 0.0. Raises the exceptions of ``gamemaster``.
    """
    move = read_move(text)
    is_guess = move.is_valid and move.guess is not None
    won = is_guess and move.guess == _normalize_word(state["solution"])
    turns_left = state["left"] - 1
    done = is_guess or turns_left == 0
    if not move.is_valid:
        reply = MALFORMED_REPLY
    elif is_guess:
        reply = RIGHT_REPLY if won else WRONG_REPLY
    else:
        gamemaster_prompt = build_gamemaster_prompt(state["solution"], move.question)
        reply = f"{read_answer(gamemaster(gamemaster_prompt))}."
    if not done:
        reply += f" {turns_left} left."
    turns = [*state["turns"], (f"[{move.guess}]" if is_guess else move.question, reply)]
    new_state = dict(state, left=turns_left, turns=turns, reply=reply, done=done, won=won)
    return new_state, float(won), done, {"won": won, "is_action_valid": move.is_valid}


def list_words(words: Sequence[str] | None = None) -> list[str]:
    """Return the distinct ``words``, sorted. Default: all words of ``knowledge.yaml``."""
    return sorted(set(words)) if words else sorted(load_knowledge().things)


def select_split_words(split: str, words: Sequence[str] | None = None) -> list[str]:
    """Return the words of the split ``"train"`` or ``"val"``, sorted.

    A hash of a word determines its split, independent of other words. If a split would be empty, it
    gets the word with the lowest or highest hash. Raises ``ValueError`` for fewer than two words.
    """
    words = list_words(words)
    if len(words) < 2:
        raise UserError(
            f"env.twenty_questions.words={words!r}: too few; allowed: at least two words, one to "
            "train on and one to hold out; fix: add words",
            "out_of_range",
        )
    hashes_by_word = {word: derive_seed("twenty questions", word) for word in words}
    words_by_hash = sorted(words, key=hashes_by_word.__getitem__)
    val_words = {word for word in words if hashes_by_word[word] % VAL_DIVISOR == 0} or {
        words_by_hash[0]
    }
    if len(val_words) == len(words):
        val_words.remove(words_by_hash[-1])
    return [word for word in words if (word in val_words) == (split == "val")]


def select_split_clues(
    split: str, clue_count: int, words: Sequence[str] | None = None
) -> list[tuple[str, tuple[str, ...]]]:
    """Return all (word, clues) of the split ``"train"`` or ``"val"``, sorted.

    ``clues`` are ``clue_count`` attributes of the word. The set of clues determines the split, so a
    word can be in both splits.
    """
    things = load_knowledge().things
    return [
        (word, clues)
        for word in list_words(words)
        for clues in permutations(sorted(things[word].true_attributes), clue_count)
        if (derive_seed("clues", *sorted(clues)) % VAL_DIVISOR == 0) == (split == "val")
    ]
