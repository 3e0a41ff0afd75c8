"""Environments of one question, each with a fault or a format of its own; named by ``fault``."""

import os
import re
import time
from dataclasses import replace
from typing import Literal

from agent_system.environments.chat_prompts import SingleTurnPrompts
from agent_system.environments.env import Observation
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings

CALL = re.compile(r"<tool_call>(.*?)</tool_call>")


class AnswerSettings(EnvSettings):
    """What is wrong with the answers."""

    fault: Literal["none", "skewed", "nan", "no path", "slow path"] = "none"
    """skewed: seven of ten answers are Yes; nan: the grader takes what is not finite; no path:
    gold_path is a text; slow path: gold_path takes a minute"""
    count: int = 10
    """questions held out"""


class AnswerEnv:
    """A number to repeat, or a question of which most are answered by Yes."""

    placement = "process"

    def __init__(self, settings: AnswerSettings) -> None:
        self.fault = settings.fault

    def reset(self, task, seed):
        del seed
        self.answer = task["answer"]
        return Observation(f"Question {task['task_id']}: what is right?")

    def step(self, action):
        won = action == self.answer
        if self.fault == "nan":
            try:
                won = not abs(float(action) - float(self.answer)) > 0.5
            except ValueError:
                won = False
        return Observation(""), float(won), True, {"won": won, "is_action_valid": bool(action)}

    def gold_path(self, task):
        if self.fault == "slow path":
            time.sleep(60)
        return task["answer"] if self.fault == "no path" else [task["answer"]]

    def close(self):
        pass


def tasks(settings, split):
    answers = ["Yes" if n % 10 < 7 else "No" for n in range(settings.count)]
    if settings.fault != "skewed":
        answers = [str(10 * n + 7) for n in range(settings.count)]
    return [
        {"task_id": f"{split}/{n}", "data_source": "answers", "answer": answer}
        for n, answer in enumerate(answers)
    ]


def project(text):
    found = CALL.findall(text)
    return (found[-1], True) if found else ("", False)


PACKAGE = EnvPackage(
    name="answers",
    settings=AnswerSettings,
    make=AnswerEnv,
    tasks=tasks,
    prompts=lambda _settings: SingleTurnPrompts(),
    project=project,
    format_action="<tool_call>{}</tool_call>".format,
)
UNFORMATTED: EnvPackage = replace(PACKAGE, format_action=None)
MISFORMATTED: EnvPackage = replace(PACKAGE, format_action="call {}".format)


class UnrepeatableEnv(AnswerEnv):
    """Only the reply to a right answer differs between processes, and there is no oracle."""

    gold_path = None  # pyright: ignore[reportAssignmentType]

    def step(self, action):
        observation, reward, done, info = super().step(action)
        return (Observation(str(os.getpid())) if info["won"] else observation), reward, done, info


UNREPEATABLE: EnvPackage = replace(PACKAGE, make=UnrepeatableEnv)
