"""Tiny policy trained on number-line episodes with all four thinking levels, for tests of whole
jobs.
"""

import json
import random
import sys
from pathlib import Path

from agent_system.environments.env_package.number_line.package import (
    MOVES,
    NumberLineEnv,
    NumberLinePrompts,
    list_tasks,
)
from agent_system.environments.env_package.number_line.settings import LineSettings
from tests.helpers.jobs import Job
from tests.helpers.tiny_model import make_tiny_policy

SETTINGS = LineSettings(size=4, max_steps=4)  # so small that a random policy gets rewards
THOUGHTS = {
    1: "",
    2: "I am at {position}.",
    3: "I am at {position} and I moved {steps} times.",
    4: "The target is {target}, so I plan to go {way}.",
}
EPISODES = 300
STEPS = 60
TIMEOUT_S = 240


def write_line_policy(directory: Path) -> Path:
    """Train the policy with ``main_sft`` below ``directory`` and return the directory of the
    policy.
    """
    episodes = directory / "episodes.jsonl"
    draw = random.Random(0)
    train = list_tasks(SETTINGS, "train")
    lines = [
        {"task_id": str(i), "messages": _episode(draw.choice(train), draw)} for i in range(EPISODES)
    ]
    episodes.write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = [
        f"model.path={make_tiny_policy(directory / 'random')}",
        f"model.save_path={directory / 'policy'}",
        f"data.train_files=[{episodes}]",
        "data.val_episodes=0",
        f"trainer.default_local_dir={directory / 'sft'}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.num_threads=1",
        "env.env_name=number_line",
        "optim.lr=1e-2",
    ]
    job = Job([sys.executable, "-m", "verl.trainer.main_sft", *overrides], directory / "sft.log")
    job.finish(TIMEOUT_S)
    return directory / "policy"


def _episode(task: dict, draw: random.Random) -> list[dict[str, str]]:
    env = NumberLineEnv(SETTINGS)
    prompts = NumberLinePrompts(SETTINGS)
    observation = env.reset(task, 0)
    done = False
    messages = [
        {"role": "system", "content": prompts.system(True)},
        {"role": "user", "content": observation.text},
    ]
    while not done:
        level = draw.randint(1, 4)
        way = "right" if env.target > env.position else "left"
        far = abs(env.target - env.position) >= 3
        action = f"jump {way}" if far else way
        action = draw.choice(list(MOVES)) if draw.random() < 0.3 else action
        thought = THOUGHTS[level].format(
            position=env.position, steps=env.steps, target=env.target, way=way
        )
        text = f"<level>{level}</level><think>{thought}</think><action>{action}</action>"
        messages.append({"role": "assistant", "content": text})
        observation, _, done, _ = env.step(action)
        messages.append({"role": "user", "content": prompts.turn(observation)})
    return messages[:-1]
