"""Relay: an episode is a sequence of puzzles ("doors"), such as ``d+3 a>b f>c ...``.

The right answer to this door is the place that is 3 arrows after ``d``. By default, doors ask for 0
to 7 arrows. A policy with few layers follows about one arrow per written token. Therefore the
number of arrows determines the required thinking level of a turn.
"""

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.relay import doors
from agent_system.environments.env_package.relay.expert import EXPERT
from agent_system.environments.env_package.relay.settings import RelaySettings
from agent_system.environments.package import EnvPackage
from agent_system.environments.question_series import QuestionSeries

RULES = """\
You pass {doors} doors. At each one arrows lead from place to place: a>b leads from a to b.
Start where you are, follow as many arrows as the door asks for, one after another, and answer with
the place where you arrive. Right opens the door. Wrong, and you are lost.
A thought that helps follows the arrows step by step: 1=c 2=f"""


class RelayEnv(QuestionSeries[doors.DoorPuzzle]):
    """Series of doors (puzzles). The answer to a door is the place at the end of its arrows.

    An answer that is no place of the door is invalid, and the door is shown again.
    ``info["situation"]`` groups doors in metrics: ``+3`` for those that ask for 3 arrows.
    """

    invalid_text = "There is no such place. "
    wrong_text = "{answer} is wrong: you are lost."
    wrong_state = "lost"
    passed_text = "All doors are passed."
    passed_state = "won"

    def __init__(self, settings: RelaySettings) -> None:
        super().__init__()
        self.settings = settings

    def load_questions(self, task: Task) -> list[doors.DoorPuzzle]:
        return [doors.DoorPuzzle.parse(text) for text in task["doors"]]

    def is_valid(self, question: doors.DoorPuzzle, answer: str) -> bool:
        return answer in question.all_places

    def is_right(self, question: doors.DoorPuzzle, answer: str) -> bool:
        return answer == question.answer_place

    def make_question_observation(
        self, question: doors.DoorPuzzle, number: int, count: int
    ) -> Observation:
        info = {
            "admissible_actions": question.all_places,
            "situation": f"+{question.hops}",
            "needed_level": doors.compute_needed_level(question.hops, self.settings.hops),
        }
        text = doors.describe_door(question, number, count)
        return Observation(text, anchor=question.state, info=info)


def make_prompts(settings: RelaySettings) -> ChatPrompts | CompactPrompts:
    if settings.prompt == "compact":
        return CompactPrompts(doors.shorten_observation)
    return ChatPrompts(RULES.format(doors=settings.doors), example="c")


PACKAGE = EnvPackage(
    name=doors.NAME,
    settings=RelaySettings,
    make=RelayEnv,
    tasks=doors.list_tasks,
    prompts=make_prompts,
    expert=EXPERT,
)
