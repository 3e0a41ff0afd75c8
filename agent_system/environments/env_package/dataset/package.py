"""Single-turn data as an environment: an episode is one step, the prompt is a row of a file, the
whole answer is the action, and a grader says what it earns.

A play whose grader fails is broken, not lost: it is left out of its group like any other
(``env.on_abort``).
"""

from agent_system.environments.chat_prompts import SingleTurnPrompts
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.dataset.grading import Grader, graded_step
from agent_system.environments.env_package.dataset.rows import NAME, tasks
from agent_system.environments.env_package.dataset.settings import DatasetSettings
from agent_system.environments.package import EnvPackage, TaskText


class DatasetEnv:
    """One row at a time."""

    placement = "process"  # graders are the user's own code, or compute with what was answered

    def __init__(self, settings: DatasetSettings) -> None:
        self.settings = settings
        self.grader = Grader(settings.reward)
        self.task: Task = {}

    def reset(self, task: Task, seed: int) -> Observation:
        """The messages of ``task``; the seed changes nothing."""
        del seed  # the task says it all
        self.task = task
        return shows(task)

    def step(self, action: str) -> Step:
        """Grade the answer; always done. Raises what the grader raises, ``NoGrade`` and
        ``TimeLimit``.
        """
        return graded_step(self.grader, self.task, action, self.settings.grade_s)

    def gold_path(self, task: Task) -> list[str]:
        """The truth of ``task``, marked as its answer."""
        truth = task["ground_truth"]
        return [f"\\boxed{{{truth[0] if isinstance(truth, list) else truth}}}"]

    def close(self) -> None:
        """Nothing to free."""


def shows(task: Task) -> Observation:
    """The last message of a row, and those in front of it."""
    *opening, last = task["messages"]
    return Observation(last["content"], opening=opening)


def retold(task: Task, text: str) -> Task:
    """``task`` with ``text`` as its last message."""
    *opening, last = task["messages"]
    return {**task, "messages": [*opening, {**last, "content": text}]}


def prompts(settings: DatasetSettings) -> SingleTurnPrompts:
    """A row's own messages, whatever the settings: what is answered, and how, is theirs to say."""
    del settings  # they change nothing here
    return SingleTurnPrompts()


def project(text: str) -> tuple[str, bool]:
    """The whole answer: where in it the result stands, graders know."""
    answer = text.strip()
    return answer, bool(answer)


PACKAGE = EnvPackage(
    name=NAME,
    settings=DatasetSettings,
    make=DatasetEnv,
    tasks=tasks,
    prompts=prompts,
    project=project,
    stop=(),
    plays_cut_turns=True,
    task_text=TaskText(shows, retold),
    format_action=str,
)
