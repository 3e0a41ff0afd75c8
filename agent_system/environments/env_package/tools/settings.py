"""Settings of ``env.tools``: tools, MCP servers and questions."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from annotated_types import Gt

from agent_system.environments.env_package.dataset.settings import DatasetSettings
from verl.config.settings import ConfigError, NamesCode, PositiveInt, Section, Seed

if TYPE_CHECKING:
    from verl.config.schema.env import EnvConfig

LOOKUP_IMPORT_SUFFIX = ".tools.example:lookup"


class McpServer(Section):
    """MCP server on standard input and output, run as a subprocess of the environment."""

    command: str
    """program to start, such as python or npx"""
    args: list[str] = []
    """arguments of the program"""
    env: dict[str, str] = {}
    """environment variables in addition to PATH, HOME and similar ones"""
    tools: list[str] = []
    """names of the tools to offer; empty: all of them"""


class ToolsSettings(DatasetSettings):
    """Tools, their limits, and the questions."""

    is_single_turn: ClassVar[bool] = False
    can_drop_or_truncate_prompts: ClassVar[bool] = False  # prompts also contain tool descriptions

    functions: Annotated[list[str], NamesCode()] = []
    """import paths of functions, FILE.py:NAME or MODULE:NAME; empty, and without servers: the
    calculator and the lookup of the example"""
    schemas: dict[str, dict[str, Any]] = {}
    """JSON schemas of arguments by function name, which replace those made from signatures"""
    mcp_servers: Annotated[list[McpServer], NamesCode()] = []
    """MCP servers whose tools are offered in addition"""
    call_timeout_s: Annotated[float, Gt(0)] = 5.0
    """timeout of all calls of one turn together, in seconds"""
    max_calls: PositiveInt = 8
    """most calls in one turn; further ones are refused"""
    max_chars: PositiveInt = 2000
    """most characters of a result; the rest is cut"""
    train_tasks: PositiveInt = 1000
    """questions of the example to train on, if train_files is empty"""
    val_tasks: PositiveInt = 128
    """questions of the example held out, if val_files is empty"""
    task_seed: Seed = 0
    """seed of the questions of the example, for both splits"""

    def count_configured_tasks(self, split: str) -> int | None:
        if self.val_files if split == "val" else self.train_files:
            return None
        return self.val_tasks if split == "val" else self.train_tasks

    def list_max_step_waits(self) -> Mapping[str, float]:
        return {"grade_s": self.grade_s, "call_timeout_s": self.call_timeout_s}

    def with_derived_values(self, env: "EnvConfig") -> Self:
        """Raise ``ConfigError`` if user-provided tools cannot answer the example questions."""
        key = "functions" if self.functions else "mcp_servers"
        if (
            getattr(self, key)
            and not self.train_files
            and not self.val_files
            and not any(
                import_path.endswith(LOOKUP_IMPORT_SUFFIX) for import_path in self.functions
            )
        ):
            raise ConfigError(
                f"env.tools.{key} without data.train_files: only the lookup of the example can "
                "answer the example's questions; allowed: user-provided tools together with files "
                "of questions; fix: set data.train_files=[FILE] data.val_files=[FILE], which are "
                "also keys of env.tools",
                "missing_key",
            )
        return super().with_derived_values(env)
