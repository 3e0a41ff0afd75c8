"""Twenty questions as a ``MultistepEnv``, an environment that runs whole trials of an agent.

``GRPOEnvTrainer`` and scripts with an agent use it.
"""

import json
from collections.abc import Sequence
from typing import Any

from agent_system.environments.env_package.twenty_questions import game
from agent_system.environments.env_package.twenty_questions.gamemaster import (
    MAX_SERVER_REQUESTS,
    EmbeddedGamemaster,
    Gamemaster,
)
from agent_system.environments.env_package.twenty_questions.knowledge import find_unknown_words
from agent_system.environments.env_package.twenty_questions.package import TwentyQuestionsPrompts
from agent_system.environments.multistep import MultistepEnv
from agent_system.environments.tasks import compute_epoch_order
from agent_system.tokens.bridge import TextTokenizer
from verl.utils.seeds import derive_seed


class TwentyQuestionsEnv(MultistepEnv):
    """Multistep environment of twenty questions.

    The column ``solution`` of a dataset row is the secret word. Without it, the word is a training
    word that ``seed`` and the content of the row determine, so that the rows of a group are equal.

    Args:
        tokenizer, env_id, system_prompt, max_steps_per_episode, episodes_per_trial, free_shots,
            options: As in ``MultistepEnv``. The default system prompt is that of
            ``env.env_name=twenty_questions``.
        gamemaster: Callable that gets a prompt with the secret word and a question and returns text
            with an answer. Default: ``EmbeddedGamemaster``, which needs no network.
        words: The secret words of both splits. Default: all words of the embedded gamemaster. About
            a quarter is held out for validation.
        seed: Seed of the order of rows in the datasets, and of the words of rows without
            ``solution``.

    Raises ``ValueError`` for words that the embedded gamemaster does not know.
    """

    stop = ("</action>",)

    def __init__(
        self,
        tokenizer: TextTokenizer | None = None,
        env_id: str = "twenty_questions",
        system_prompt: str | None = None,
        max_steps_per_episode: int = game.MAX_STEPS,
        episodes_per_trial: int = 1,
        free_shots: int = 0,
        gamemaster: Gamemaster | None = None,
        words: Sequence[str] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.gamemaster = EmbeddedGamemaster() if gamemaster is None else gamemaster
        self.words = words
        self.seed = seed
        is_embedded = isinstance(self.gamemaster, EmbeddedGamemaster)
        unknown_words = find_unknown_words(words or ()) if is_embedded else []
        if unknown_words:
            raise ValueError(
                f"words: the embedded gamemaster does not know {', '.join(unknown_words)}; "
                "allowed: words of knowledge.yaml; fix: use such words, or a gamemaster that knows "
                "them"
            )
        if getattr(self.gamemaster, "remote", False):
            options.setdefault("step_workers", MAX_SERVER_REQUESTS)
        prompt = TwentyQuestionsPrompts().system(False) if system_prompt is None else system_prompt
        super().__init__(
            tokenizer,
            env_id,
            prompt,
            max_steps_per_episode,
            episodes_per_trial,
            free_shots,
            **options,
        )

    def _initialize_episode(self, session_id: str, task_info: dict[str, Any]) -> game.State:
        solution = task_info.get("solution") or self._choose_word(task_info)
        return game.create_game_state(solution, self.max_steps_per_episode)

    def _format_prompt(self, state: game.State, step: int) -> str:
        return state["reply"]

    def _step_episode(
        self, session_id: str, action: str
    ) -> tuple[game.State, float, bool, dict[str, Any]]:
        return game.apply_move(self.active_states[session_id], action, self.gamemaster)

    def _format_outcome(self, state: game.State) -> str:
        return state["reply"]

    def _choose_word(self, task_info: dict[str, Any]) -> str:
        words = game.select_split_words("train", self.words)
        row_json = json.dumps(task_info, sort_keys=True, default=str)
        return words[derive_seed(self.seed, row_json) % len(words)]

    def get_train_dataset(self) -> Any:
        """Return a dataset of the training words in random order, with the column ``solution``."""
        return self._make_dataset("train")

    def get_eval_dataset(self) -> Any:
        """Return a dataset of the held-out words in random order, with the column ``solution``."""
        return self._make_dataset("val")

    def _make_dataset(self, split: str) -> Any:
        from datasets import Dataset, Features, Value

        words = game.select_split_words(split, self.words)
        shuffled_words = [
            words[index]
            for index in compute_epoch_order(len(words), self.seed, "twenty questions", split)
        ]
        return Dataset.from_dict(
            {"solution": shuffled_words}, features=Features({"solution": Value("string")})
        )
