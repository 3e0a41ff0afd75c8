"""Twenty questions as an environment package: ``env.env_name=twenty_questions``."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.twenty_questions import game
from agent_system.environments.env_package.twenty_questions.expert import EXPERT
from agent_system.environments.env_package.twenty_questions.gamemaster import (
    MAX_SERVER_REQUESTS,
    EmbeddedGamemaster,
    Gamemaster,
)
from agent_system.environments.env_package.twenty_questions.knowledge import load_knowledge
from agent_system.environments.env_package.twenty_questions.settings import TwentyQuestionsSettings
from agent_system.environments.package import EnvPackage

RULES = """We play twenty questions. Find out my word with yes/no questions. \
I answer Yes, No or I don't know.
Guess with the word in square brackets: [word]. A wrong guess ends the game."""
ANSWER_FORMAT = "Answer with one question or your guess between tags: <action>Is it alive?</action>"
LEVELS_ANSWER_FORMAT = """First choose how much to think, then think, then ask or guess:
<level>1</level><think></think><action>question or [word]</action> asks at once.
<level>2</level><think>what do I know?</think><action>question or [word]</action> \
reads the situation.
<level>3</level><think>what did I ask?</think><action>question or [word]</action> \
also reflects on what was asked.
<level>4</level><think>what is my plan?</think><action>question or [word]</action> \
also plans and weighs options."""

# The threads start on demand. The embedded gamemaster needs none.
_GAMEMASTER_THREADS = ThreadPoolExecutor(MAX_SERVER_REQUESTS, thread_name_prefix="gamemaster")


def make_gamemaster(settings: TwentyQuestionsSettings) -> Gamemaster:
    """Return the gamemaster that ``settings`` select.

    Raises ``ValueError`` if a server is selected without ``base_url`` or ``model``.
    """
    if settings.gamemaster == "embedded":
        return EmbeddedGamemaster()
    from agent_system.environments.env_package.twenty_questions.openai_gamemaster import (
        OpenAIGamemaster,
    )

    return OpenAIGamemaster(
        base_url=settings.base_url,
        model=settings.model,
        api_key_env=settings.api_key_env,
        timeout_s=settings.timeout_s,
        attempts=settings.attempts,
    )


class TwentyQuestionsGame:
    """Environment of twenty questions. The reward is 1 for the right guess, else 0.

    If the gamemaster is a server, ``step`` is a coroutine function that does not block the loop.
    """

    placement = "inline"

    def __init__(self, settings: TwentyQuestionsSettings) -> None:
        self.gamemaster = make_gamemaster(settings)
        self.max_steps = settings.max_steps or game.MAX_STEPS
        self.state: game.State = {}
        if getattr(self.gamemaster, "remote", False):
            self.step = self._step_async  # pyright: ignore[reportAttributeAccessIssue]  awaited

    def reset(self, task: Task, seed: int) -> Observation:
        clues = [load_knowledge().attributes[clue].question for clue in task.get("clues", ())]
        self.state = game.create_game_state(task["solution"], self.max_steps, clues)
        return self._make_observation()

    def step(self, action: str) -> Step:
        self.state, reward, done, info = game.apply_move(self.state, action, self.gamemaster)
        return self._make_observation(), reward, done, info

    async def _step_async(self, action: str) -> Step:
        loop = asyncio.get_running_loop()
        self.state, reward, done, info = await loop.run_in_executor(
            _GAMEMASTER_THREADS, game.apply_move, self.state, action, self.gamemaster
        )
        return self._make_observation(), reward, done, info

    def gold_path(self, task: Task) -> list[str]:
        return [f"[{task['solution']}]"]

    def _make_observation(self) -> Observation:
        # Sort the answers, because the order of the questions does not change what is known.
        answer_texts = sorted(
            f"{action} {reply.partition('.')[0]}" for action, reply in self.state["turns"]
        )
        state_key = " | ".join([str(self.state["left"]), *answer_texts])
        return Observation(self.state["reply"], anchor=state_key)

    def close(self) -> None:
        close_method = getattr(self.gamemaster, "close", None)
        if close_method is not None:
            close_method()


class TwentyQuestionsPrompts(ChatPrompts):
    """Prompts with the rules and an answer format for questions and guesses."""

    def __init__(self) -> None:
        super().__init__(RULES, example="Is it alive?")

    def system(self, levels: bool) -> str:
        return f"{RULES}\n{LEVELS_ANSWER_FORMAT if levels else ANSWER_FORMAT}"


def make_prompts(settings: TwentyQuestionsSettings) -> TwentyQuestionsPrompts | CompactPrompts:
    return CompactPrompts() if settings.prompt == "compact" else TwentyQuestionsPrompts()


def list_tasks(settings: TwentyQuestionsSettings, split: str) -> list[Task]:
    """Return one task per word, or per word and clues. About a quarter belongs to ``val``."""
    name = "twenty_questions"
    if not settings.clues:
        return [
            {"task_id": f"{name}/{word}", "data_source": name, "solution": word}
            for word in game.select_split_words(split, settings.words)
        ]
    return [
        {
            "task_id": f"{name}/{word}/{'+'.join(clues)}",
            "data_source": name,
            "solution": word,
            "clues": list(clues),
        }
        for word, clues in game.select_split_clues(split, settings.clues, settings.words)
    ]


def parse_move(text: str) -> tuple[str, bool]:
    """Return the question or ``[guess]``, and True if it is not empty and has an action tag."""
    move = game.read_move(text)
    action = move.question if move.guess is None else f"[{move.guess}]"
    return action, move.is_valid and "<action>" in text


PACKAGE = EnvPackage(
    name="twenty_questions",
    settings=TwentyQuestionsSettings,
    make=TwentyQuestionsGame,
    tasks=list_tasks,
    prompts=make_prompts,
    project=parse_move,
    expert=EXPERT,
)
