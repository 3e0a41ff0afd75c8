"""Write the demonstrations of ``recall`` with summaries, from which ``recall_sft`` makes a policy.

    python -m experiments.recall_demonstrations

In ``recall`` the agent reads pages of arrows between places, such as ``a>f``. At the end it must
answer where the arrow from a given place leads.

A row holds one to three pages. It ends with a summary such as ``1=f``. The place ``f`` is drawn
uniformly from the ends of the arrows in the row and the place in the previous summary. So the
policy learns to write a place, but not which one it will need. The last row of an episode ends
with the answer. Its question is changed to one that the row itself answers.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verl.trainer.launch.extensions  # noqa: F401  (adds the settings of environments)
from agent_system.environments.env_package.recall.package import (
    PACKAGE,
    PLACES,
    QUESTION_END,
    TURN_PAGE_ACTION,
    list_tasks,
)
from verl.config.load import load_config
from verl.config.schema.env import EnvCompaction
from verl.utils.files import atomic_write
from verl.utils.seeds import derive_seed

SETTINGS = PACKAGE.read_settings({"prompt": "compact"})
OUTPUT_FOLDER = Path("data/demonstrations")
NUM_EPISODES = {"train": 6000, "val": 64}
MAX_PAGES_PER_ROW = 3


def make_question_answerable(
    messages: list[Any], start: str, clues: list[str], rng: random.Random
) -> list[Any]:
    """Return the last row of an episode, changed so that the row itself answers its question.

    ``clues`` are the arrows (``a>f``) and the summary (``1=f``) that the row shows. One of them is
    drawn as the answer. The place in the question, ``start``, is replaced accordingly.
    """
    clue = rng.choice(clues)
    arrow_starts = {arrow_or_summary[0] for arrow_or_summary in clues if ">" in arrow_or_summary}
    place = clue[0] if ">" in clue else rng.choice(sorted(set(PLACES) - arrow_starts))
    row = [dict(message) for message in messages]
    row[-1]["content"] = f"<action>{clue[-1]}</action>"
    for message in row[:-1]:
        message["content"] = message["content"].replace(f"{start}+1", f"{place}+1")
    return row


def make_demonstration_rows(
    task: dict[str, Any], compaction: EnvCompaction, rng: random.Random
) -> Iterator[list[Any]]:
    """Yield the messages of each row of one demonstration."""
    env = PACKAGE.make(SETTINGS)
    prompts = PACKAGE.prompts(SETTINGS)
    first_prompt = prompts.first(env.reset(task, 0), False)
    messages = [{"role": "user", "content": first_prompt}]
    clues: list[str] = []
    pages_left = rng.randint(1, MAX_PAGES_PER_ROW)
    while True:
        messages.append({"role": "assistant", "content": f"<action>{TURN_PAGE_ACTION}</action>"})
        if messages[-2]["content"].endswith(QUESTION_END):
            yield make_question_answerable(messages, task["place"], clues, rng)
            return
        page_text = prompts.turn(env.step(TURN_PAGE_ACTION)[0])
        if pages_left == 0:
            summary = f"1={rng.choice(sorted(set(clues)))[-1]}"
            messages.append({"role": "user", "content": compaction.instruction})
            messages.append({"role": "assistant", "content": summary})
            yield messages
            content = f"{first_prompt}\n\n{compaction.introduction}\n{summary}\n\n{page_text}"
            messages = [{"role": "user", "content": content}]
            clues = [summary]
            pages_left = rng.randint(1, MAX_PAGES_PER_ROW)
        else:
            messages.append({"role": "user", "content": page_text})
        pages_left -= 1
        clues += page_text.split()[1:] if ">" in page_text else []


def main() -> None:
    """Write the demonstrations for training and validation. RL uses other tasks."""
    compaction = load_config("recall").env.compact
    for split, num_episodes in NUM_EPISODES.items():
        rng = random.Random(derive_seed("recall demonstrations", split))
        tasks = list_tasks(SETTINGS, f"demonstrations {split}", num_episodes)
        rows = [
            messages
            for task in tasks
            for messages in make_demonstration_rows(task, compaction, rng)
        ]
        with atomic_write(OUTPUT_FOLDER / f"recall_{split}.jsonl") as file:
            file.writelines(json.dumps({"messages": messages}) + "\n" for messages in rows)


if __name__ == "__main__":
    main()
