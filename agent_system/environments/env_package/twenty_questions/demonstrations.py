"""Demonstrations by the scripted questioner for ``scripts/train_twenty_questions.py``.

The file has one JSON line per game: ``{"task_id": str, "won": bool, "messages": [{"role": ...,
"content": ...}, ...]}``. The games are made as in
``agent_system.environments.experts.demonstrations``, without thinking levels. Games without success
are kept, and every word is the secret word equally often. The messages are those of a rollout with
``append`` history, as in ``TwentyQuestionsEnv``.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from agent_system.environments.env_package.twenty_questions import game
from agent_system.environments.env_package.twenty_questions.expert import TwentyQuestionsExpert
from agent_system.environments.env_package.twenty_questions.knowledge import load_knowledge
from agent_system.environments.env_package.twenty_questions.package import PACKAGE
from agent_system.environments.env_package.twenty_questions.questioner import Questioner
from agent_system.environments.env_package.twenty_questions.settings import TwentyQuestionsSettings
from agent_system.environments.experts.episode import ExpertEpisode, LevelSampler
from verl.utils.files import atomic_write
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
    """Write ``episodes`` games about ``words`` (default: all of the table) and return ``path``.

    Games without success are included. ``careless`` and ``hasty`` make the questioner worse (see
    ``Questioner``), so that reinforcement learning can improve on it.
    """
    words = sorted(words or load_knowledge().things)
    settings = TwentyQuestionsSettings(max_steps=max_steps)
    env = PACKAGE.make(settings)
    prompts = PACKAGE.prompts(settings)
    with atomic_write(path) as file:
        for episode_number in range(episodes):
            word = words[episode_number % len(words)]
            task = {"task_id": f"twenty_questions/{word}", "solution": word}
            rng = random.Random(derive_seed("twenty questions demonstration", seed, episode_number))
            expert = TwentyQuestionsExpert(Questioner(words, rng, careless, hasty))
            episode = ExpertEpisode(env, prompts, task, env.reset(task, 0), asks_levels=False)
            won = episode.run(expert, LevelSampler((), rng), max_steps)
            row = {"task_id": task["task_id"], "won": won, "messages": episode.messages}
            file.write(json.dumps(row) + "\n")
    return Path(path)
