"""Games of the scripted player as episodes for ``main_sft``: a policy of one's own learns the
format and the things.

One JSONL line per game: ``{"task_id": str, "won": bool, "messages": [{"role": ..., "content": ...},
...]}``. The messages are those of a rollout with ``append`` history and no levels, which are also
those of ``TwentyQuestionsEnv``.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_system.environments.env_package.twenty_questions import game
from agent_system.environments.env_package.twenty_questions.gamemaster import EmbeddedGamemaster
from agent_system.environments.env_package.twenty_questions.knowledge import knowledge
from agent_system.environments.env_package.twenty_questions.package import TwentyQuestionsPrompts
from agent_system.environments.env_package.twenty_questions.player import Player
from verl.utils.seeds import derive_seed


def write_demonstrations(
    path: str | Path,
    episodes: int,
    words: Sequence[str] | None = None,
    max_steps: int = game.MAX_STEPS,
    careless: float = 0.5,
    hasty: float = 0.1,
    seed: int = 0,
) -> Path:
    """Write ``episodes`` games about ``words`` (default: all of the table), won and lost ones, and
    return ``path``.

    ``careless`` and ``hasty`` make the player worse (see ``Player``): what it leaves to be gained
    is for reinforcement learning. Every word is the secret one equally often.
    """
    words = sorted(words or knowledge().things)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number in range(episodes):
            rng = random.Random(derive_seed("twenty questions demonstration", seed, number))
            player = Player(words, rng, careless, hasty)
            file.write(
                json.dumps(play_episode(words[number % len(words)], player, max_steps)) + "\n"
            )
    return path


def play_episode(word: str, player: Player, max_steps: int) -> dict[str, Any]:
    """One game about ``word`` as an episode."""
    gamemaster, state, done = EmbeddedGamemaster(), game.new_game(word, max_steps), False
    messages = [{"role": "system", "content": TwentyQuestionsPrompts().system(False)}]
    while not done:
        messages.append({"role": "user", "content": state["reply"]})
        move = player.move()
        messages.append({"role": "assistant", "content": f"<action>{move}</action>"})
        state, _, done, info = game.play(state, move, gamemaster)
        player.hear(state["reply"])
    return {"task_id": f"twenty_questions/{word}", "won": info["won"], "messages": messages}
