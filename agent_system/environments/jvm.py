"""One Java virtual machine per process and jar, shared by all environments of the process that need
it.

It is started for the first environment and ended with the last one. It ends by itself when this
process does, however that dies: its standard input is a pipe that only this process holds. Its heap
is bounded, and a JVM that runs out of memory exits, so that the next environment gets a fresh one.
An environment whose library keeps state that neighbours would change asks for a JVM of its own.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from typing import Any

# One environment is called at a time: the serial collector and the quick compiler cost the least
# memory and start-up.
OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError")
HOST = "127.0.0.1"
# Seconds that a JVM may take to end when asked.
EXIT_S = 5.0


class JavaMissing(RuntimeError):
    """No Java runtime is installed, or it does not start."""


def find_java(env_name: str) -> str:
    """The path of ``java``: below ``$JAVA_HOME`` where that is set, else on the path.

    Raises ``JavaMissing``.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=os.path.join(home, "bin")) if home else shutil.which("java")
    if found is None:
        where = f"$JAVA_HOME/bin ({home}/bin)" if home else "the path"
        raise JavaMissing(
            f"environment {env_name!r} needs Java 8 or newer, and there is no java on {where}: "
            "install one, for example with `apt-get install default-jre-headless`, or set JAVA_HOME"
        )
    return found


class Jvm:
    """A running JVM with ``jar`` on its class path.

    Made by ``attach``; ``users`` counts the environments on it.
    """

    def __init__(self, env_name: str, jar: str, heap_mb: int, options: tuple[str, ...]) -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        self.users = 0
        # A file and no pipe: nobody reads along, and a full pipe would stop the JVM.
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the JVM
        flags = [f"-Xmx{heap_mb}m", *OPTIONS, *options]
        try:
            launched: Any = launch_gateway(
                classpath=jar,
                javaopts=flags,
                java_path=find_java(env_name),
                # Its standard input is a pipe of ours, and it ends when that closes.
                die_on_exit=True,
                enable_auth=True,  # others on this machine can reach the port
                cwd=os.path.dirname(jar),
                redirect_stderr=self._words,
                return_proc=True,
            )
        except ValueError as error:  # it said something else than the number of its port
            raise JavaMissing(
                f"java did not start with {' '.join(flags)}:\n{self._said()}"
            ) from error
        # Its stub leaves open which of the arguments make it return what.
        port, token, process = launched
        self.process: subprocess.Popen[str] = process
        self._finalizer_prefix = f"{HOST}{port}"
        parameters = GatewayParameters(HOST, port, auth_token=token, auto_field=True)
        self.gateway = JavaGateway(gateway_parameters=parameters, java_process=self.process)

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self.process.poll() is None

    def new(self, class_name: str) -> Any:
        """An object of the Java class; ``free`` gives it back."""
        found: Any = self.gateway.jvm
        for part in class_name.split("."):
            found = getattr(found, part)
        return found()

    def free(self, java_object: object) -> None:
        """Let the JVM collect ``java_object``."""
        if self.alive:
            self.gateway.detach(java_object)

    def kill(self) -> None:
        """End the process at once; a call that hangs in it returns with an error, and so do all
        later ones.
        """
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End the process and wait for it."""
        self._forget_objects()
        self.gateway.close()
        if self.process.stdin is not None:  # the pipe whose end it waits for
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._words.close()

    def _forget_objects(self) -> None:
        """Else Python's garbage collector calls a JVM that is gone for every object that is still
        referred to.
        """
        from py4j.finalizer import ThreadSafeFinalizer

        keys = list(ThreadSafeFinalizer.finalizers)
        for key in keys:
            if key.startswith(self._finalizer_prefix):
                ThreadSafeFinalizer.remove_finalizer(key)

    def _said(self) -> str:
        self._words.seek(0)
        return self._words.read().decode(errors="replace")[-2000:].strip()


_RUNNING: dict[str, Jvm] = {}  # by jar: those that are shared
_LOCK = threading.Lock()


def attach(
    env_name: str, jar: str, heap_mb: int, options: tuple[str, ...] = (), *, shared: bool = True
) -> Jvm:
    """The JVM of this process for ``jar``, started where there is none or it has died; ``release``
    must follow.

    ``heap_mb`` (megabytes) and ``options`` (flags, after the standard ones) are those of the first
    call. One that is not ``shared`` is always new. Raises ``JavaMissing``.
    """
    with _LOCK:
        jvm = _RUNNING.get(jar) if shared else None
        if jvm is None or not jvm.alive:
            jvm = Jvm(env_name, jar, heap_mb, options)
            if shared:
                _RUNNING[jar] = jvm
        jvm.users += 1
        return jvm


def release(jvm: Jvm) -> None:
    """Give back what ``attach`` returned; the last one to do so ends the JVM."""
    with _LOCK:
        jvm.users -= 1
        if jvm.users > 0:
            return
        # By identity: a JVM that died has been replaced under the same jar, and that one stays.
        for jar in [jar for jar, running in _RUNNING.items() if running is jvm]:
            del _RUNNING[jar]
    # Outside the lock: it may take ``EXIT_S``, and another jar's environments need not wait.
    jvm.stop()
