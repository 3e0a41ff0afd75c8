"""Write the demonstrations of ``recall`` with summaries, from which ``recall_sft`` makes a policy.

    python -m experiments.recall_demonstrations

A row holds one to three shelves. It ends with a summary of two things, which are drawn uniformly
from those that the row shows. So the policy learns to copy things, but not which one it will need.
The last row of an episode ends with the answer. It asks for one of the things that it shows.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verl.trainer.launch.extensions  # noqa: F401  (adds the settings of environments)
from agent_system.environments.env_package.recall.package import LOOK, PACKAGE, list_tasks
from verl.config.load import load_config
from verl.config.schema.env import EnvCompact
from verl.utils.files import atomic_write
from verl.utils.seeds import derive_seed

SETTINGS = PACKAGE.read_settings({"prompt": "compact"})
DIRECTORY = Path("data/demonstrations")
NUM_EPISODES = {"train": 6000, "val": 64}
THINGS_PER_SUMMARY = 2
MAX_SHELVES_PER_ROW = 3


def read_things(text: str) -> list[str]:
    """Return the things with their numbers in ``shelf mug 3 pen 7`` or ``hold mug 3 pen 7``."""
    words = text.split()[1:]
    return [f"{thing} {number}" for thing, number in zip(words[::2], words[1::2], strict=True)]


def ask_for_visible_thing(messages: list[Any], needed: str, visible: str) -> list[Any]:
    """Return a last row that asks for ``visible``, which it shows, instead of ``needed``."""
    thing = visible.split()[0]
    row = [dict(message) for message in messages]
    row[-1]["content"] = f"<action>take {visible}</action>"
    for message in row[:-1]:
        for verb in ("need", "take"):
            message["content"] = message["content"].replace(f"{verb} {needed}", f"{verb} {thing}")
    return row


def make_rows(task: dict[str, Any], compact: EnvCompact, rng: random.Random) -> Iterator[list[Any]]:
    """Yield the messages of each row of one episode."""
    env = PACKAGE.make(SETTINGS)
    prompts = PACKAGE.prompts(SETTINGS)
    first = prompts.first(env.reset(task, 0), False)
    messages = [{"role": "user", "content": first}]
    visible: list[str] = []
    shelves_left = rng.randint(1, MAX_SHELVES_PER_ROW)
    while True:
        messages.append({"role": "assistant", "content": f"<action>{LOOK}</action>"})
        if messages[-2]["content"].rpartition("\n")[2].startswith("take"):
            yield ask_for_visible_thing(messages, task["thing"], rng.choice(visible))
            return
        text = prompts.turn(env.step(LOOK)[0])
        if shelves_left == 0:
            things = rng.sample(sorted(set(visible)), THINGS_PER_SUMMARY)
            summary = " ".join(["hold", *things])
            messages.append({"role": "user", "content": compact.instruction})
            messages.append({"role": "assistant", "content": summary})
            yield messages
            content = f"{first}\n\n{compact.introduction}\n{summary}\n\n{text}"
            messages = [{"role": "user", "content": content}]
            visible = things
            shelves_left = rng.randint(1, MAX_SHELVES_PER_ROW)
        else:
            messages.append({"role": "user", "content": text})
        shelves_left -= 1
        visible += read_things(text) if text.startswith("shelf") else []


def main() -> None:
    """Write the files of both splits. Their tasks are neither training nor validation tasks."""
    compact = load_config("recall").env.compact
    for split, count in NUM_EPISODES.items():
        rng = random.Random(derive_seed("recall demonstrations", split))
        tasks = list_tasks(SETTINGS, f"demonstrations {split}", count)
        rows = [messages for task in tasks for messages in make_rows(task, compact, rng)]
        with atomic_write(DIRECTORY / f"recall_{split}.jsonl") as file:
            file.writelines(json.dumps({"messages": messages}) + "\n" for messages in rows)


if __name__ == "__main__":
    main()
