"""Tool use: a question, function calls over several turns, and a graded final answer.

A turn contains either calls or the answer. The next observation contains the results or errors of
the calls. The answer ends the episode. Questions come from files, as in the environment
``dataset``, or from the module ``example``.
"""

import contextlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts
from agent_system.environments.env import TOOL_RESULTS, Observation, Step, Task
from agent_system.environments.env_package.dataset.grading import Grader, grade_answer
from agent_system.environments.env_package.dataset.package import build_first_observation
from agent_system.environments.env_package.dataset.rows import list_tasks as list_file_tasks
from agent_system.environments.env_package.tools import calls, example, toolbox
from agent_system.environments.env_package.tools.mcp_tools import McpConnection
from agent_system.environments.env_package.tools.settings import ToolsSettings
from agent_system.environments.package import EnvPackage
from rlvcr.levels import render_level_instructions
from verl.config.settings.errors import UserError

NAME = "tools"
INSTRUCTIONS = """\
You answer a question with the help of functions. This is what there is, as JSON:
<tools>
{tools}
</tools>
Call a function by writing, for each call,
<tool_call>{{"name": "NAME", "arguments": {{...}}}}</tool_call>
Several calls in one turn are made at once, and their results come in the same order. Once you \
know the answer, write it without a call: <answer>42</answer>"""
# With env.history=chat the template of the model describes the functions and the format of calls.
SHORT_INSTRUCTIONS = """\
You answer a question with the help of functions. Several calls in one turn are made at once, and \
their results come in the same order. Once you know the answer, write it without a call: \
<answer>42</answer>"""


class Toolbox:
    """All tools that the settings select, and connections to the MCP servers.

    Raises ``ValueError`` if two tools have the same name, and the errors of loading them.
    """

    def __init__(self, settings: ToolsSettings) -> None:
        self.connections: list[McpConnection] = []
        self.tools: dict[str, toolbox.Tool] = {}
        python_tools = [
            toolbox.load_tool(import_path, settings) for import_path in settings.functions
        ]
        if not python_tools and not settings.mcp_servers:
            python_tools = [
                toolbox.PythonTool(function, settings.schemas.get(function.__name__))
                for function in example.FUNCTIONS
            ]
        try:
            self._add_tools(python_tools)
            for server in settings.mcp_servers:
                self.connections.append(McpConnection(server, settings.call_timeout_s))
                self._add_tools(self.connections[-1].tools)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.connections = []

    def _add_tools(self, tools: Sequence[toolbox.Tool]) -> None:
        for tool in tools:
            if tool.name in self.tools:
                raise UserError(
                    f"env.{NAME}: two tools have the name {tool.name!r}; allowed: distinct names; "
                    f"fix: list the tools of the server in env.{NAME}.mcp_servers, without this "
                    "one",
                    "conflicting_keys",
                )
            self.tools[tool.name] = tool


class ToolsEnv:
    """Environment of one question per episode. The reward is the grade of the final answer."""

    placement = "process"  # tools are user-provided code

    def __init__(self, settings: ToolsSettings) -> None:
        self.settings = settings
        self.toolbox = Toolbox(settings)
        self.grader = Grader(settings.reward)
        self.task: Task = {}
        self._history: list[str] = []  # the question and all results so far, for the anchor

    def reset(self, task: Task, seed: int) -> Observation:
        """Return the question as observation.

        Earlier messages of the task become its ``opening``, whose system message also describes the
        tools.
        """
        self.task = task
        observation = build_first_observation(task)
        self._history = [observation.text]
        if observation.opening:
            text = make_system_instructions(self.settings, levels=False)  # pyright: ignore[reportArgumentType]  settings are hashable
            observation.opening = _add_system_instructions(observation.opening, text)
        return observation

    def step(self, action: str) -> Step:
        """Run the calls in ``action``. Without a call, grade it as answer and end the episode.

        Raises ``ToolServerLostError`` and the exceptions of ``grade_answer``.
        """
        call_texts = calls.find_call_texts(action)
        if not call_texts:
            return grade_answer(self.grader, self.task, action, self.settings.grade_s)
        max_calls = self.settings.max_calls
        outcomes = toolbox.run_calls(
            self.toolbox.tools, call_texts[:max_calls], self.settings.call_timeout_s
        )
        refusal_text = f"more than {max_calls} calls in one turn"
        refusal = toolbox.CallOutcome(None, error=refusal_text, is_valid=False)
        outcomes += [refusal] * (len(call_texts) - max_calls)
        responses = [
            calls.format_response(
                outcome.name, outcome.value, outcome.error, self.settings.max_chars
            )
            for outcome in outcomes
        ]
        is_valid = all(outcome.is_valid for outcome in outcomes)
        self._history += responses
        results = [
            {"name": outcome.name or "", "content": text}
            for outcome, text in zip(
                outcomes, map(calls.parse_tool_response, responses), strict=True
            )
        ]
        observation = Observation(
            "\n".join(responses), anchor="\n".join(self._history), info={TOOL_RESULTS: results}
        )
        return observation, 0.0, False, {"won": False, "is_action_valid": is_valid}

    def close(self) -> None:
        self.toolbox.close()


def _add_system_instructions(
    opening_messages: list[dict[str, str]], instructions: str
) -> list[dict[str, str]]:
    first_message = opening_messages[0]
    if first_message["role"] != "system":
        return [{"role": "system", "content": instructions}, *opening_messages]
    return [
        {"role": "system", "content": f"{first_message['content']}\n\n{instructions}"},
        *opening_messages[1:],
    ]


class ToolPrompts(ChatPrompts):
    """Prompts whose system message describes the tools and the format of calls."""

    def __init__(self, settings: ToolsSettings) -> None:
        super().__init__(rules="", example="", keep_first=True)
        self._settings = settings

    def list_tools(self) -> list[dict[str, Any]]:
        return list_schemas(self._settings)  # pyright: ignore[reportArgumentType]  settings are hashable

    def build_system_without_tools(self) -> str:
        return SHORT_INSTRUCTIONS

    def format_call(self, name: str, arguments: dict[str, Any]) -> str:
        return calls.format_call(name, arguments)

    def system(self, levels: bool) -> str | None:
        """Return the system message: descriptions of the tools, and the answer format.

        With ``levels`` (thinking levels), calls and answers must be in ``<action>`` tags.
        """
        return make_system_instructions(self._settings, levels)  # pyright: ignore[reportArgumentType]  settings are hashable


@lru_cache(maxsize=8)
def list_schemas(settings: ToolsSettings) -> list[dict[str, Any]]:
    """Return the JSON schemas of all tools. Starts the MCP servers once to list their tools."""
    with contextlib.closing(Toolbox(settings)) as selected_tools:
        return [tool.openai_schema for tool in selected_tools.tools.values()]


@lru_cache(maxsize=8)
def make_system_instructions(settings: ToolsSettings, levels: bool) -> str:
    text = INSTRUCTIONS.format(
        tools="\n".join(json.dumps(schema) for schema in list_schemas(settings))  # pyright: ignore[reportArgumentType]  settings are hashable
    )
    if not levels:
        return text
    example_call = f"<action>{calls.format_call('NAME', {})}</action>"
    return (
        f"{text}\n\n{render_level_instructions()}\nCalls and the answer are actions: {example_call}"
    )


def list_tasks(settings: ToolsSettings, split: str) -> list[Task]:
    """Return the tasks of the data files. Without files, return generated example questions."""
    if settings.train_files or settings.val_files:
        file_tasks = list_file_tasks(settings, split, f"env.{NAME}")
        return [{**task, "task_id": f"{NAME}/{split}/{n}"} for n, task in enumerate(file_tasks)]
    return example.list_tasks(settings, split)


PACKAGE = EnvPackage(
    name=NAME,
    settings=ToolsSettings,
    make=ToolsEnv,
    tasks=list_tasks,
    prompts=ToolPrompts,
    project=calls.parse_action_with_calls,
    stop=("</action>", "<tool_response>"),
)
