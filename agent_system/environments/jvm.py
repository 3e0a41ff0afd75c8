"""Java virtual machines (JVMs): one per process and jar, shared by the environments of the process.

A JVM is started for the first environment and stopped with the last one. It also exits when this
process dies, because its standard input is a pipe from this process. Its heap is bounded. A JVM
that runs out of memory exits, and the next environment starts a new one. An environment whose
library has global state uses a separate JVM (``shared=False``).
"""

import contextlib
import operator
import os
import shutil
import subprocess
import tempfile
import threading
from typing import Any

# Calls come one at a time. The serial garbage collector and the first compiler stage then need the
# least memory and start-up time.
JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError")
LOOPBACK_HOST = "127.0.0.1"
# Seconds that a JVM may take to exit after its standard input is closed.
EXIT_TIMEOUT_S = 5.0


class JavaMissingError(ImportError):
    """Error: no Java runtime was found, or the runtime does not start."""


def find_java(env_name: str) -> str:
    """Return ``java`` in ``$JAVA_HOME/bin`` or on ``$PATH``. Raises ``JavaMissingError``."""
    java_home = os.environ.get("JAVA_HOME")
    java_path = shutil.which("java", path=os.path.join(java_home, "bin") if java_home else None)
    if java_path is None:
        searched_location = f"$JAVA_HOME/bin ({java_home}/bin)" if java_home else "the path"
        raise JavaMissingError(
            f"environment {env_name!r} needs Java 8 or newer, and there is no java on "
            f"{searched_location}; fix: install it, for example with `apt-get install "
            "default-jre-headless`, or set JAVA_HOME"
        )
    return java_path


class Jvm:
    """Running JVM with ``jar_path`` on its class path, which ``num_users`` environments use."""

    def __init__(
        self, env_name: str, jar_path: str, heap_mb: int, options: tuple[str, ...]
    ) -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        self.num_users = 0
        self.jar_path = jar_path
        # A file instead of a pipe: a full pipe without a reader would block the JVM.
        self._output_file = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the JVM
        jvm_flags = [f"-Xmx{heap_mb}m", *JVM_OPTIONS, *options]
        try:
            gateway_result: Any = launch_gateway(
                classpath=jar_path,
                javaopts=jvm_flags,
                java_path=find_java(env_name),
                # The JVM exits when its standard input, a pipe from this process, is closed.
                die_on_exit=True,
                enable_auth=True,  # other users of this machine can reach the port
                cwd=os.path.dirname(jar_path),
                redirect_stderr=self._output_file,
                return_proc=True,
            )
        except ValueError as error:  # the output was not a port number
            self._output_file.seek(0)
            output = self._output_file.read().decode(errors="replace")[-2000:].strip()
            raise JavaMissingError(
                f"java did not start with {' '.join(jvm_flags)}:\n{output}"
            ) from error
        # With these arguments the result has three values, which the type stub does not say.
        port, token, process = gateway_result
        self.process: subprocess.Popen[str] = process
        self._finalizer_prefix = f"{LOOPBACK_HOST}{port}"
        gateway_parameters = GatewayParameters(
            LOOPBACK_HOST, port, auth_token=token, auto_field=True
        )
        self.gateway = JavaGateway(gateway_parameters=gateway_parameters, java_process=self.process)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def create_object(self, class_name: str) -> Any:
        """Return a new object of the Java class. ``release_object`` frees it."""
        return operator.attrgetter(class_name)(self.gateway.jvm)()

    def release_object(self, java_object: object) -> None:
        if self.is_running:
            self.gateway.detach(java_object)

    def kill(self) -> None:
        """Kill the process. The pending call and all later calls raise an error."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Make the process exit and wait for it. Kill it after ``EXIT_TIMEOUT_S``."""
        from py4j.finalizer import ThreadSafeFinalizer

        # Remove py4j's finalizers of this JVM's objects: they would call the stopped JVM.
        for key in list(ThreadSafeFinalizer.finalizers):
            if key.startswith(self._finalizer_prefix):
                ThreadSafeFinalizer.remove_finalizer(key)
        self.gateway.close()
        if self.process.stdin is not None:  # closing it makes the JVM exit
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._output_file.close()


_SHARED_JVMS: dict[str, Jvm] = {}  # shared JVMs by jar
_JVM_LOCK = threading.Lock()


def acquire_jvm(
    env_name: str,
    jar_path: str,
    heap_mb: int,
    options: tuple[str, ...] = (),
    *,
    shared: bool = True,
) -> Jvm:
    """Return the JVM of this process for ``jar_path``. Start one if none is running.

    Every call needs a later ``release_jvm``. ``heap_mb`` (megabytes) and ``options`` (flags after
    the standard ones) have an effect only when a JVM is started. With ``shared=False`` a new JVM is
    started. Raises ``JavaMissingError``.
    """
    with _JVM_LOCK:
        jvm = _SHARED_JVMS.get(jar_path) if shared else None
        if jvm is None or not jvm.is_running:
            jvm = Jvm(env_name, jar_path, heap_mb, options)
            if shared:
                _SHARED_JVMS[jar_path] = jvm
        jvm.num_users += 1
        return jvm


def release_jvm(jvm: Jvm) -> None:
    """Decrement the users of ``jvm``. Stop it when the last user releases it."""
    with _JVM_LOCK:
        jvm.num_users -= 1
        if jvm.num_users > 0:
            return
        # Compare by identity: after a crash another JVM may be registered for the same jar.
        if _SHARED_JVMS.get(jvm.jar_path) is jvm:
            del _SHARED_JVMS[jvm.jar_path]
    # Stop the JVM outside the lock: this may take ``EXIT_TIMEOUT_S``, and other jars need not wait.
    jvm.stop()
