"""HTTP server for the report of a running job. It renders the page when the run's files change.

    GET /KEY/            the page, without trajectories
    GET /KEY/stamp       a text that changes when the run's files change
    GET /KEY/trajectories/NAME  the compressed trajectories of the rollout file NAME

The server writes no files. It looks up NAME in the list of rollout files and never uses it as a
path. KEY is a random text. It protects the data from other users of the machine, who can also
connect to the port.
"""

import contextlib
import logging
import secrets
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from verl.record.report.page import render_report
from verl.record.report.run_data import load_run
from verl.record.report.trajectory_chunks import (
    compress_rollout_file,
    list_rollout_files,
    select_files_within_budget,
)
from verl.utils.commands import UsageError
from verl.utils.proxies import is_loopback

logger = logging.getLogger(__name__)
PORT = 8400
IDLE_TIMEOUT_S = 30.0  # seconds after which a connection without data is closed
REQUEST_TIMEOUT_S = 10.0  # seconds to receive the whole request
MAX_THREADS = 64  # maximum number of requests that are answered at the same time; others wait


class LiveServer(ThreadingHTTPServer):
    """HTTP server for one run, whose files still change. By default only this machine uses it."""

    daemon_threads = True
    request_queue_size = 1024  # connections that wait to be accepted

    def __init__(self, run_dir: str | Path, host: str = "127.0.0.1", port: int = PORT) -> None:
        self._directory = load_run(run_dir).directory  # raises if run_dir is not a run directory
        self._lock = threading.Lock()
        self._last_render = ("", b"")  # stamp of the last rendered page, and this page
        self._free_threads = threading.BoundedSemaphore(MAX_THREADS)
        super().__init__((host, port), RequestHandler)
        self.is_local = is_loopback(host)
        self.key = secrets.token_urlsafe(16)

    def compute_change_stamp(self) -> str:
        """Return a text that changes when a metrics file or rollout file changes."""
        paths = [file.path for file in list_rollout_files(self._directory)]
        existing_paths = [path for path in [self._directory.metrics_path, *paths] if path.exists()]
        file_states = [path.stat() for path in existing_paths]
        newest_time_ns = max((file_state.st_mtime_ns for file_state in file_states), default=0)
        total_bytes = sum(file_state.st_size for file_state in file_states)
        return f"{len(file_states)}-{total_bytes}-{newest_time_ns}"

    def render_page(self) -> bytes:
        """Return the page as HTML. Render it only if the run's files have changed."""
        with self._lock:
            # Compute the stamp before reading the files: a write in between then changes the stamp.
            stamp = self.compute_change_stamp()
            if self._last_render[0] != stamp:
                html = render_report(load_run(self._directory.path), stamp)
                self._last_render = (stamp, html.encode())
            return self._last_render[1]

    def pack_trajectories(self, name: str) -> bytes | None:
        """Return the compressed trajectories of the rollout file ``name``; None if unknown."""
        with self._lock:
            for file in select_files_within_budget(list_rollout_files(self._directory)):
                if file.name == name:
                    return compress_rollout_file(file).packed
        return None

    @property
    def page_url(self) -> str:
        """Return the URL of the page, which contains the access key."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/{self.key}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer the request in a new thread. Wait while ``MAX_THREADS`` threads are running."""
        self._free_threads.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the request, then allow another request to start a thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_threads.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, unless the client has closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _stop_reading(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client has closed the connection
        connection.shutdown(socket.SHUT_RD)


class RequestHandler(BaseHTTPRequestHandler):
    """Handler of one HTTP request to a ``LiveServer``."""

    timeout = IDLE_TIMEOUT_S
    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self) -> None:
        """Answer one request. Stop reading from a client that sends it too slowly."""
        deadline_timer = threading.Timer(REQUEST_TIMEOUT_S, _stop_reading, (self.connection,))
        deadline_timer.daemon = True
        deadline_timer.start()
        try:
            super().handle()
        finally:
            deadline_timer.cancel()

    def do_GET(self) -> None:
        """Send the report's page, its stamp (it changes with the run's files), or trajectories.

        Sends status 404 for another path or a wrong access key, and 503 if the run's files cannot
        be read. A local server sends 403 for a request whose Host header does not name this
        machine.
        """
        # The Host check prevents DNS rebinding, where another site's name points to this machine.
        if self.server.is_local and not is_loopback(self.get_requested_host()):
            self.send_answer(HTTPStatus.FORBIDDEN, "text/plain", b"ask for localhost\n")
            return
        url_path = self.path.partition("?")[0]
        requested_key, separator, path = unquote(url_path).removeprefix("/").partition("/")
        is_key_valid = secrets.compare_digest(requested_key.encode(), self.server.key.encode())
        try:
            content = self.find_content(path) if is_key_valid and separator else None
        except (OSError, UsageError) as error:
            text = f"the run cannot be read: {error}\n"
            self.send_answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", text.encode())
            return
        content_type, body = content or ("text/plain", b"no such page\n")
        self.send_answer(HTTPStatus.OK if content else HTTPStatus.NOT_FOUND, content_type, body)

    do_HEAD = do_GET  # send_answer() omits the body

    def find_content(self, path: str) -> tuple[str, bytes] | None:
        """Return media type and content for a URL path, from which the access key was removed.

        None if the path is unknown.
        """
        if path == "":
            return "text/html", self.server.render_page()
        if path == "stamp":
            return "text/plain", self.server.compute_change_stamp().encode()
        folder, _, name = path.partition("/")
        gzip_data = self.server.pack_trajectories(name) if folder == "trajectories" else None
        return None if gzip_data is None else ("application/gzip", gzip_data)

    def get_requested_host(self) -> str:
        """Return the host name in the request's Host header; "" if there is none."""
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:  # an IPv6 address with an unclosed bracket
            return ""

    def send_answer(self, status: HTTPStatus, media_type: str, body: bytes) -> None:
        """Send ``body`` with headers that forbid caching and use by other sites."""
        self.send_response(status)
        self.send_header("Content-Type", f"{media_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log a request for debugging only, because the page sends one every two seconds."""
        logger.debug(format, *args)
