"""Environment worker process: contains several environments and answers one JSON line per call.

The pool starts it as ``python -m agent_system.environments.pool.worker FD PARENT_PID``. It imports
the environment's package, but no trainer. When the parent dies, the kernel kills it (Linux). It
also exits when its socket is closed.

    pool -> worker   {"target", "section", "sys_path"}                       once
    worker -> pool   {"hello", "asynchronous"} | {"failed", "missing"}       once
    pool -> worker   {"id", "slot", "op": "reset", "task", "seed"}
    pool -> worker   {"id", "slot", "op": "step", "action"}
    worker -> pool   {"id", "ok"} | {"id", "error": kind, "detail"}
    pool -> worker   {"op": "exit"}
"""

import asyncio
import contextlib
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from agent_system.environments.env import Env, get_failure_kind
from agent_system.environments.env_registry import get_package
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool import wire as wire
from verl.config.settings.errors import names_fix
from verl.config.settings.secret_values import mask_text, register_secrets
from verl.utils.limits import USER_CODE_ERRORS, describe_error, limit_memory
from verl.utils.processes import adopt_orphans, die_with_parent
from verl.utils.stacks import install_stack_dump_handler


class EnvironmentHost:
    """Environments of this worker process, by slot number.

    An environment that raised an error is dropped. The next reset of its slot makes a new one.
    """

    def __init__(self, package: EnvPackage, section: dict[str, Any]) -> None:
        self.package = package
        self.settings = package.read_settings(section)
        memory_limit_gb = self.settings.memory_limit_gb()
        if memory_limit_gb is not None:
            limit_memory(memory_limit_gb)
        self.envs: dict[int, Env] = {}

    def get_env(self, slot: int) -> Env:
        if slot not in self.envs:
            self.envs[slot] = self.package.make(self.settings)
        return self.envs[slot]

    @property
    def is_async(self) -> bool:
        """True if ``reset`` or ``step`` of the environment is a coroutine function."""
        env = self.get_env(0)
        return inspect.iscoroutinefunction(env.reset) or inspect.iscoroutinefunction(env.step)

    def start_call(self, call: dict[str, Any]) -> Any:
        """Call ``reset`` or ``step`` and return the result, which may be a coroutine."""
        if call["op"] == "reset":
            return self.get_env(call["slot"]).reset(call["task"], call["seed"])
        # A failed environment was removed, and its episode is lost. A new environment could not
        # continue the episode.
        if call["slot"] not in self.envs:
            raise RuntimeError("step before reset")
        return self.envs[call["slot"]].step(call["action"])

    def encode_result(self, call: dict[str, Any], result: object) -> bytes:
        """Return the reply line for ``result``: an error reply if it violates the protocol."""
        try:
            if call["op"] == "reset":
                result_fields = wire.pack_observation(wire.check_reset(result))
            else:
                observation, reward, done, info = wire.check_step(result)
                result_fields = [wire.pack_observation(observation), reward, done, info]
            return wire.encode({"id": call["id"], "ok": result_fields})
        except USER_CODE_ERRORS as error:  # boundary to the environment
            return self.encode_failure(call, "garbage", error)

    def encode_failure(self, call: dict[str, Any], kind: str, error: BaseException) -> bytes:
        """Drop the environment that failed and return the error reply."""
        self.drop_env(call["slot"])
        last_frames = "".join(traceback.format_tb(error.__traceback__)[-2:])
        detail = mask_text(f"{call['op']}: {describe_error(error)}\n{last_frames}")
        return wire.encode({"id": call["id"], "error": kind, "detail": detail})

    def drop_env(self, slot: int) -> None:
        env = self.envs.pop(slot, None)
        if env is not None:
            with contextlib.suppress(*USER_CODE_ERRORS):
                env.close()

    def close(self) -> None:
        for slot in list(self.envs):
            self.drop_env(slot)


def serve_blocking(channel: socket.socket, lines: Iterable[bytes], host: EnvironmentHost) -> None:
    for line in lines:
        call = wire.decode(line)
        if call["op"] == "exit":
            return
        try:
            result = host.start_call(call)
        except USER_CODE_ERRORS as error:  # boundary to the environment
            channel.sendall(host.encode_failure(call, get_failure_kind(error), error))
        else:
            channel.sendall(host.encode_result(call, result))


async def serve_async(channel: socket.socket, host: EnvironmentHost) -> None:
    """Answer calls concurrently, but the calls of one environment (slot) in order."""
    channel.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=channel, limit=wire.MAX_LINE_BYTES)
    slot_locks: dict[int, asyncio.Lock] = {}
    running_tasks: set[asyncio.Task[None]] = set()  # the loop has only weak references

    async def answer_call(call: dict[str, Any]) -> None:
        async with slot_locks.setdefault(call["slot"], asyncio.Lock()):
            try:
                result = host.start_call(call)
                result = await result if inspect.isawaitable(result) else result
            except USER_CODE_ERRORS as error:  # boundary to the environment
                writer.write(host.encode_failure(call, get_failure_kind(error), error))
            else:
                writer.write(host.encode_result(call, result))

    while line := await reader.readline():
        call = wire.decode(line)
        if call["op"] == "exit":
            return
        task = asyncio.get_running_loop().create_task(answer_call(call))
        running_tasks.add(task)
        task.add_done_callback(running_tasks.discard)


def start_host(start_message: dict[str, Any]) -> tuple[EnvironmentHost | None, bytes]:
    """Import the package and make the host of its environments, as ``start_message`` requests.

    Also return the line for the pool. On failure the host is None and the line has the error.
    """
    # Append, so that the paths of this process have precedence.
    sys.path.extend(entry for entry in start_message["sys_path"] if entry not in sys.path)
    register_secrets(start_message["section"])
    try:
        host = EnvironmentHost(get_package(start_message["target"]), start_message["section"])
        return host, wire.encode({"hello": os.getpid(), "asynchronous": host.is_async})
    except ModuleNotFoundError as error:
        return None, wire.encode({"failed": repr(error), "missing": error.name})
    except USER_CODE_ERRORS as error:  # boundary to the environment
        message = describe_error(error, str)
        if names_fix(message):  # the message names key, value and fix: omit the traceback
            return None, wire.encode({"failed": mask_text(message), "missing": None})
        detail = "".join(traceback.format_exception(error)[-4:])
        missing_module = (
            error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        )
        failure = mask_text(f"{describe_error(error)}\n{detail}")
        return None, wire.encode({"failed": failure, "missing": missing_module})


def main(fd: int, parent_pid: int) -> None:
    """Serve the pool through socket ``fd`` until the exit message or the end of the socket."""
    die_with_parent()
    adopt_orphans()
    # The parent may have died before the call of ``die_with_parent``. Then no signal comes.
    if os.getppid() != parent_pid:
        return
    install_stack_dump_handler("environment worker")
    # Child processes of an environment must not keep the socket open.
    os.set_inheritable(fd, False)
    # Redirect standard output to standard error, the file that error messages quote from.
    os.dup2(2, 1)
    channel = socket.socket(fileno=fd)
    lines = channel.makefile("rb")
    first_line = lines.readline()
    host, reply_line = start_host(wire.decode(first_line)) if first_line else (None, b"")
    channel.sendall(reply_line)
    if host is None:
        return
    with contextlib.suppress(ConnectionError):  # the pool closed the socket
        if host.is_async:
            asyncio.run(serve_async(channel, host))
        else:
            serve_blocking(channel, lines, host)
    host.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
