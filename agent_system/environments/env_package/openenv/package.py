"""Text version of OpenEnv environments, in this process or on a server.

A task is a seed, which is passed to the environment's ``reset``. The environment defines what the
seed affects. A server exchanges JSON messages over a WebSocket at ``/ws``::

    {"type": "reset", "data": {"seed": 3}}           {"type": "step", "data": {"message": "look"}}
    {"type": "observation", "data": {"observation": {...}, "reward": 1.0, "done": false}}
    {"type": "error", "data": {"message": "...", "code": "VALIDATION_ERROR"}}
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agent_system.environments.chat_prompts import ACTION_TAG_PATTERN, ChatPrompts, project_action
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.openenv.settings import OpenEnvSettings
from agent_system.environments.event_loop import await_if_needed
from agent_system.environments.package import EnvPackage
from agent_system.environments.tasks import SEED_MASK, get_task_number_range
from agent_system.reward_manager.custom import load_import_path
from verl.utils.seeds import derive_seed

NAME = "openenv"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # maximum size of a message from a server
# Fields of OpenEnv's observations that do not belong to the content.
_NON_CONTENT_FIELDS = ("done", "reward", "metadata")


class InvalidActionError(ValueError):
    """Error for an action with missing or invalid fields."""


class ServerFailedError(RuntimeError):
    """Error: the server did not answer, or answered with an error or an unreadable message."""


@dataclass(frozen=True, slots=True)
class SessionResult:
    """Result of a reset or a step of an OpenEnv environment."""

    observation: dict[str, Any]
    reward: float
    done: bool


class LocalSession:
    """Session with an instance of the environment's class in this process."""

    def __init__(self, settings: OpenEnvSettings) -> None:
        if settings.action is None:
            raise ValueError(
                f"env.{NAME}.action=null with env.{NAME}.environment={settings.environment!r}; "
                f"allowed: the class of its actions; fix: env.{NAME}.action=MODULE:CLASS"
            )
        self._action_class = load_import_path(settings.action, f"env.{NAME}.action")
        environment_class = load_import_path(settings.environment or "", f"env.{NAME}.environment")
        self._env = environment_class(**settings.options)

    def reset(self, options: Mapping[str, Any]) -> SessionResult:
        return _make_session_result(await_if_needed(self._env.reset(**options)))

    def step(self, action: Mapping[str, Any]) -> SessionResult:
        """Apply the fields of one action. Raises ``InvalidActionError``."""
        try:
            parsed_action = self._action_class.model_validate(dict(action))
        except ValidationError as error:
            raise InvalidActionError(str(error)) from error
        return _make_session_result(await_if_needed(self._env.step(parsed_action)))

    def close(self) -> None:
        close_env = getattr(self._env, "close", None)
        if close_env is not None:
            close_env()


def _make_session_result(observation: Any) -> SessionResult:
    fields = observation.model_dump(mode="json", exclude=set(_NON_CONTENT_FIELDS))
    return SessionResult(fields, float(observation.reward or 0.0), bool(observation.done))


class ServerSession:
    """Session with a server. It connects at the first reset, and reconnects after a failure."""

    def __init__(self, settings: OpenEnvSettings) -> None:
        self._url = _make_socket_url(settings.url or "")
        self._timeout_s = settings.timeout_s
        self._socket: Any = None

    def reset(self, options: Mapping[str, Any]) -> SessionResult:
        """Start an episode. Raises ``ServerFailedError``, and ``OSError`` if no server listens."""
        if self._socket is None:
            from websockets.sync.client import connect

            # By default ``websockets`` would use the proxy of the environment variables. Connect to
            # the server directly.
            self._socket = connect(
                self._url, open_timeout=self._timeout_s, max_size=MAX_MESSAGE_BYTES, proxy=None
            )
        return self._send_request({"type": "reset", "data": dict(options)})

    def step(self, action: Mapping[str, Any]) -> SessionResult:
        """Apply one action. Raises ``InvalidActionError`` and ``ServerFailedError``."""
        return self._send_request({"type": "step", "data": dict(action)})

    def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    def _send_request(self, message: dict[str, Any]) -> SessionResult:
        if self._socket is None:
            raise ServerFailedError("step was called without a connection: call reset first")
        try:
            self._socket.send(json.dumps(message))
            answer = json.loads(self._socket.recv(timeout=self._timeout_s))
            answer_type, answer_data = answer["type"], answer["data"]
            if answer_type == "observation":
                reward = float(answer_data.get("reward") or 0.0)
                return SessionResult(
                    answer_data["observation"], reward, bool(answer_data.get("done"))
                )
        except Exception as error:  # environment boundary: any error of the server ends the episode
            self.close()
            raise ServerFailedError(f"{self._url}: {error!r}") from error
        if answer_type == "error" and answer_data.get("code") == "VALIDATION_ERROR":
            raise InvalidActionError(str(answer_data.get("message")))
        self.close()
        raise ServerFailedError(f"{self._url}: {str(answer)[:300]}")


def _make_socket_url(url: str) -> str:
    """Return the WebSocket URL of a server: ``http://host:1`` becomes ``ws://host:1/ws``."""
    scheme, _, host_and_path = url.rstrip("/").partition("://")
    socket_schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if scheme not in socket_schemes or not host_and_path:
        allowed_urls = ", ".join(f"{name}://..." for name in socket_schemes)
        raise ValueError(
            f"env.{NAME}.url={url!r}; allowed: {allowed_urls}; fix: env.{NAME}.url=http://127.0.0.1:8000"
        )
    return f"{socket_schemes[scheme]}://{host_and_path}/ws"


class OpenEnvEnv:
    """Environment of OpenEnv. An episode is a success if its last reward is above 0."""

    placement = "process"  # third-party code or a remote server

    def __init__(self, settings: OpenEnvSettings) -> None:
        self.settings = settings
        if (settings.url is None) == (settings.environment is None):
            raise ValueError(
                f"env.{NAME}.url={settings.url!r} and env.{NAME}.environment="
                f"{settings.environment!r}; allowed: one of them; fix: env.{NAME}.url="
                "http://127.0.0.1:8000"
            )
        session_class = LocalSession if settings.url is None else ServerSession
        self._session = session_class(settings)
        self._last_observation_text = ""

    def reset(self, task: Task, seed: int) -> Observation:
        session_result = self._session.reset({**self.settings.reset_options, "seed": task["seed"]})
        self._last_observation_text = self._read_observation_text(session_result.observation)
        return Observation(self._last_observation_text)

    def step(self, action: str) -> Step:
        try:
            session_result = self._session.step(self._parse_action_fields(action))
        except InvalidActionError as error:
            text = f"That is no action: {error}\n{self._last_observation_text}"
            observation = Observation(text, anchor=self._last_observation_text)
            return observation, 0.0, False, {"won": False, "is_action_valid": False}
        self._last_observation_text = self._read_observation_text(session_result.observation)
        won = session_result.done and session_result.reward > 0
        reward = float(won) if self.settings.reward == "won" else session_result.reward
        info = {"won": won, "is_action_valid": True}
        return Observation(self._last_observation_text), reward, session_result.done, info

    def close(self) -> None:
        self._session.close()

    def _parse_action_fields(self, action: str) -> Mapping[str, Any]:
        if self.settings.action_field:
            return {self.settings.action_field: action}
        try:
            fields = json.loads(action)
        # Deeply nested JSON raises RecursionError.
        except (ValueError, RecursionError) as error:
            raise InvalidActionError(f"not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise InvalidActionError("not a JSON object")
        return fields

    def _read_observation_text(self, fields: Mapping[str, Any]) -> str:
        text_field = self.settings.text_field
        if text_field is None:
            return json.dumps(fields, sort_keys=True)
        if text_field not in fields:
            raise KeyError(
                f"env.{NAME}.text_field={text_field!r}: the observation does not have this field; "
                f"allowed: {', '.join(sorted(fields))}; fix: set one of them, or null"
            )
        return str(fields[text_field])


def parse_action(text: str) -> tuple[str, bool]:
    """Return the text of the first closed ``<action>`` tag, and True if it is the only one.

    Unlike ``project_action``, keep white space within the text and its length: it may be code.
    Without a closed tag, return the action of ``project_action``, and False.
    """
    closed_actions = ACTION_TAG_PATTERN.findall(text)
    if not closed_actions:
        return project_action(text)[0], False
    action = closed_actions[0].strip()
    return action, bool(action) and len(closed_actions) == 1


def list_tasks(settings: OpenEnvSettings, split: str) -> list[Task]:
    """Return one task per seed. Validation uses the first seed numbers, training the next ones."""
    return [
        {
            "task_id": f"{NAME}/{settings.source}/{task_number}",
            "data_source": settings.source,
            "seed": derive_seed(NAME, settings.task_seed, task_number) & SEED_MASK,
        }
        for task_number in get_task_number_range(split, settings.train_tasks, settings.val_tasks)
    ]


PACKAGE = EnvPackage(
    name=NAME,
    settings=OpenEnvSettings,
    make=OpenEnvEnv,
    tasks=list_tasks,
    prompts=lambda settings: ChatPrompts(settings.rules, settings.example, keep_first=True),
    project=parse_action,
    remarks=lambda: {
        "": "it needs env.openenv.url or env.openenv.environment, the server or class"
    },
)
