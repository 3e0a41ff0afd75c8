"""The ``env.tools`` section."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from annotated_types import Gt

from agent_system.environments.env_package.dataset.settings import DatasetSettings
from verl.config.settings import ConfigError, PositiveInt, RunsCode, Section, Seed

if TYPE_CHECKING:
    from verl.config.schema.env import EnvConfig

LOOKUP = ".tools.example:lookup"


class McpServer(Section):
    """A server that speaks MCP on its standard input and output; it runs beside the environment."""

    command: str
    """program that is started, such as python or npx"""
    args: list[str] = []
    """its arguments"""
    env: dict[str, str] = {}
    """environment variables beside PATH, HOME and the like"""
    tools: list[str] = []
    """which of its tools are offered; none: all of them"""


class ToolsSettings(DatasetSettings):
    """Which functions may be called, and what is asked."""

    one_step: ClassVar[bool] = False
    fits_prompts: ClassVar[bool] = False  # what is shown first depends on the tools

    functions: Annotated[list[str], RunsCode()] = []
    """functions by place, FILE.py:NAME or MODULE:NAME; none, and no server: the calculator and the
    lookup of the example"""
    schemas: dict[str, dict[str, Any]] = {}
    """JSON schemas of arguments by function, shown in place of those that signatures give"""
    mcp_servers: Annotated[list[McpServer], RunsCode()] = []
    """servers whose tools are offered too"""
    call_timeout_s: Annotated[float, Gt(0)] = 5.0
    """seconds that the calls of one turn may take together"""
    max_calls: PositiveInt = 8
    """calls in one turn; further ones are refused"""
    max_chars: PositiveInt = 2000
    """characters of a result; the rest is cut"""
    train_tasks: PositiveInt = 1000
    """questions of the example to train on, where train_files is empty"""
    val_tasks: PositiveInt = 128
    """questions of the example held out, where val_files is empty"""
    task_seed: Seed = 0
    """seed of the questions of the example, of both splits"""

    def known_tasks(self, split: str) -> int | None:
        """How many questions of the example ``split`` has; None for files."""
        if self.val_files if split == "val" else self.train_files:
            return None
        return self.val_tasks if split == "val" else self.train_tasks

    def completed(self, env: "EnvConfig") -> Self:
        """These settings. Raises ``ConfigError`` where functions of the user's own replace those
        that the questions of the example need.
        """
        key = "functions" if self.functions else "mcp_servers"
        if (
            getattr(self, key)
            and not self.train_files
            and not self.val_files
            and not any(place.endswith(LOOKUP) for place in self.functions)
        ):
            raise ConfigError(
                f"env.tools.{key} without data.train_files: the questions of the example are about "
                "prices that its own lookup knows, so none could be answered; allowed: files of "
                "questions for functions of your own; fix: data.train_files=[FILE] "
                "data.val_files=[FILE], which are keys of env.tools too"
            )
        return super().completed(env)
