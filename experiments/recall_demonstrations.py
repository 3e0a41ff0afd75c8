"""Write the demonstrations of ``recall`` with summaries, from which ``recall_sft`` makes a policy.

    python -m experiments.recall_demonstrations

A row holds one to three pages. It ends with a summary of two codes, which are drawn uniformly from
those that the row shows. So the policy learns to copy codes, but not which one it will need. The
last row of an episode ends with the answer. It asks for one of the codes that it shows.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verl.trainer.launch.extensions  # noqa: F401  (adds the settings of environments)
from agent_system.environments.env_package.recall.package import PACKAGE, find_digit, list_tasks
from verl.config.load import load_config
from verl.config.schema.env import EnvCompact
from verl.utils.files import atomic_write
from verl.utils.seeds import derive_seed

SETTINGS = PACKAGE.read_settings({"prompt": "compact"})
DIRECTORY = Path("data/demonstrations")
NUM_EPISODES = {"train": 8000, "val": 128}
CODES_PER_SUMMARY = 2
MAX_PAGES_PER_ROW = 3


def write_summary(codes: list[str], rng: random.Random) -> str:
    """Return a summary of two of ``codes``, drawn uniformly."""
    return " ".join(["keep", *rng.sample(sorted(set(codes)), CODES_PER_SUMMARY)])


def ask_for_visible_code(messages: list[Any], key: str, code: str) -> list[Any]:
    """Return a last row that asks for ``code``, which it shows, instead of the code of ``key``."""
    letter, digit = code
    row = [dict(message) for message in messages]
    row[-1]["content"] = f"<action>{digit}</action>"
    for message in row[:-1]:
        for verb in ("find", "tell"):
            message["content"] = message["content"].replace(f"{verb} {key}", f"{verb} {letter}")
    return row


def make_rows(task: dict[str, Any], compact: EnvCompact, rng: random.Random) -> Iterator[list[Any]]:
    """Yield the messages of each row of one episode."""
    env = PACKAGE.make(SETTINGS)
    prompts = PACKAGE.prompts(SETTINGS)
    first = prompts.first(env.reset(task, 0), False)
    messages = [{"role": "user", "content": first}]
    codes: list[str] = []
    pages_left = rng.randint(1, MAX_PAGES_PER_ROW)
    while True:
        is_question = messages[-1]["content"].rpartition("\n")[2].startswith("tell")
        action = find_digit(task) if is_question else "next"
        messages.append({"role": "assistant", "content": f"<action>{action}</action>"})
        observation, _, done, _ = env.step(action)
        if done:
            yield ask_for_visible_code(messages, task["key"], rng.choice(codes))
            return
        text = prompts.turn(observation)
        if pages_left == 0:
            summary = write_summary(codes, rng)
            messages.append({"role": "user", "content": compact.instruction})
            messages.append({"role": "assistant", "content": summary})
            yield messages
            content = f"{first}\n\n{compact.introduction}\n{summary}\n\n{text}"
            messages = [{"role": "user", "content": content}]
            codes = summary.split()[1:]
            pages_left = rng.randint(1, MAX_PAGES_PER_ROW)
        else:
            messages.append({"role": "user", "content": text})
        pages_left -= 1
        codes += text.split()[1:] if text.startswith("page") else []


def main() -> None:
    """Write the files of both splits. Their tasks are neither training nor validation tasks."""
    compact = load_config("recall").env.compact
    for split, count in NUM_EPISODES.items():
        rng = random.Random(derive_seed("recall demonstrations", split))
        tasks = list_tasks(SETTINGS, f"demonstrations {split}", count)
        with atomic_write(DIRECTORY / f"recall_{split}.jsonl") as file:
            for task in tasks:
                for messages in make_rows(task, compact, rng):
                    file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
