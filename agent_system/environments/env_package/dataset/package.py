"""Single-turn data as an environment: ``env.env_name=dataset``.

An episode has one turn. A row of a file is the prompt, the whole reply is the action, and a grader
returns the reward. If the grader raises an error, the trajectory is aborted. It does not count as a
wrong answer: ``env.on_abort`` decides how it is used.
"""

from agent_system.environments.chat_prompts import SingleTurnPrompts
from agent_system.environments.env import Env, Observation, Step, Task
from agent_system.environments.env_package.dataset.grading import Grader, grade_answer
from agent_system.environments.env_package.dataset.rows import NAME, list_tasks
from agent_system.environments.env_package.dataset.settings import DatasetSettings
from agent_system.environments.package import EnvPackage, TaskText


class DatasetEnv(Env):
    """Environment of one turn. A row of a file is the prompt, and a grade is the reward."""

    placement = "process"  # graders are user-provided code, or compute formulas of the answer

    def __init__(self, settings: DatasetSettings) -> None:
        self.settings = settings
        self.grader = Grader(settings.reward)
        self.task: Task = {}

    def reset(self, task: Task, seed: int) -> Observation:
        self.task = task
        return build_first_observation(task)

    def step(self, action: str) -> Step:
        return grade_answer(self.grader, self.task, action, self.settings.grade_s)

    def gold_path(self, task: Task) -> list[str]:
        """Return one reply that solves ``task``: its ground truth in ``\\boxed{}``.

        If several answers are accepted, the reply contains the first one.
        """
        truth = task["ground_truth"]
        return [f"\\boxed{{{truth[0] if isinstance(truth, list) else truth}}}"]


def build_first_observation(task: Task) -> Observation:
    """Return the last message of ``task`` as the first observation.

    Earlier messages, such as a system message, become its ``opening``.
    """
    *opening, last_message = task["messages"]
    return Observation(last_message["content"], opening=opening)


def replace_prompt_text(task: Task, text: str) -> Task:
    """Return ``task`` with ``text`` as the content of its last message."""
    *opening, last_message = task["messages"]
    return {**task, "messages": [*opening, {**last_message, "content": text}]}


def parse_answer(text: str) -> tuple[str, bool]:
    """Return the whole reply, and True if it is not empty. The grader extracts the answer."""
    answer = text.strip()
    return answer, bool(answer)


PACKAGE = EnvPackage(
    name=NAME,
    settings=DatasetSettings,
    make=DatasetEnv,
    tasks=list_tasks,
    prompts=lambda _: SingleTurnPrompts(),
    project=parse_answer,
    stop=(),
    executes_cut_turns=True,
    task_text=TaskText(build_first_observation, replace_prompt_text),
    format_action=str,
    remarks=lambda: {"": "it needs data.train_files and data.val_files, the files of your rows"},
)
