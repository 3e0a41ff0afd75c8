"""HTTP server for the report of a running job. It reads the run directory again as it changes.

    GET /KEY/            the page, without trajectories
    GET /KEY/stamp       a text that changes with the run's files
    GET /KEY/plays/NAME  the compressed trajectories of one file of the page's index

The server writes no files. It looks up requested names in a list and never uses them as file paths.
KEY is random. It protects the data, because other users of the machine can reach this port too.
"""

import logging
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from verl.record.report.page import render_live
from verl.record.report.run_data import load_run
from verl.record.report.trajectory_chunks import pack_file, rollout_files, select_within_budget
from verl.utils.proxies import is_loopback

logger = logging.getLogger(__name__)
PORT = 8400
WAIT_S = 30.0  # seconds after which a connection without data is closed
MOST_THREADS = 64  # requests that are answered at the same time; others wait


class LiveRun:
    """Report page and trajectories of a run directory whose files still change."""

    def __init__(self, run_dir: str | Path) -> None:
        self._directory = load_run(run_dir).directory  # raises FileNotFoundError
        self._lock = threading.Lock()
        self._rendered = ("", b"")  # stamp and page

    def state_stamp(self) -> str:
        """Return a text that changes when metrics or trajectories change."""
        paths = [file.path for file in rollout_files(self._directory)]
        existing = [path for path in [self._directory.metrics_path, *paths] if path.exists()]
        states = [path.stat() for path in existing]
        newest = max((state.st_mtime_ns for state in states), default=0)
        return f"{len(states)}-{sum(state.st_size for state in states)}-{newest}"

    def render_page(self) -> bytes:
        """Return the page as HTML. It is rendered once for each state of the run."""
        with self._lock:
            # Take the stamp before reading: later writes then count as a new state.
            stamp = self.state_stamp()
            if self._rendered[0] != stamp:
                html = render_live(load_run(self._directory.path), stamp)
                self._rendered = (stamp, html.encode())
            return self._rendered[1]

    def packed_trajectories(self, name: str) -> bytes | None:
        """Return the compressed trajectories of file ``name`` of the index; None if unknown."""
        with self._lock:
            for file in select_within_budget(rollout_files(self._directory)):
                if file.name == name:
                    return pack_file(file).packed
        return None


class LiveServer(ThreadingHTTPServer):
    """HTTP server for one run. By default only this machine can reach it."""

    daemon_threads = True
    request_queue_size = 1024  # connections that wait to be accepted

    def __init__(self, run_dir: str | Path, host: str = "127.0.0.1", port: int = PORT) -> None:
        self.live = LiveRun(run_dir)
        self._free_threads = threading.BoundedSemaphore(MOST_THREADS)
        super().__init__((host, port), RequestHandler)
        self.local = is_loopback(host)
        self.key = secrets.token_urlsafe(16)

    @property
    def page_url(self) -> str:
        """Return the URL of the page, with the key."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/{self.key}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread as soon as one of ``MOST_THREADS`` is free."""
        self._free_threads.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the request and release the thread for the next one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_threads.release()


class RequestHandler(BaseHTTPRequestHandler):
    """Handler of one HTTP request to a ``LiveServer``."""

    timeout = WAIT_S
    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Send the page, the stamp or trajectories; 403 for a foreign host, 404 for other paths."""
        # DNS rebinding: a page of another site could point its own name to this machine.
        if self.server.local and not is_loopback(self.requested_host()):
            self.send_answer(HTTPStatus.FORBIDDEN, "text/plain", b"ask for localhost\n")
            return
        key, slash, path = unquote(urlsplit(self.path).path).removeprefix("/").partition("/")
        is_key_valid = secrets.compare_digest(key.encode(), self.server.key.encode())
        content = self.find_content(path) if is_key_valid and slash else None
        content_type, body = content or ("text/plain", b"no such page\n")
        self.send_answer(HTTPStatus.OK if content else HTTPStatus.NOT_FOUND, content_type, body)

    do_HEAD = do_GET  # send_answer() omits the body

    def find_content(self, path: str) -> tuple[str, bytes] | None:
        """Return media type and content of ``path`` below the key; None if there is none."""
        live = self.server.live
        if path == "":
            return "text/html", live.render_page()
        if path == "stamp":
            return "text/plain", live.state_stamp().encode()
        folder, _, name = path.partition("/")
        packed = live.packed_trajectories(name) if folder == "plays" else None
        return None if packed is None else ("application/gzip", packed)

    def requested_host(self) -> str:
        """Return the host name of the request's Host header; empty without one."""
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:  # an unclosed bracket
            return ""

    def send_answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        """Send ``body`` with headers that forbid caching and use by other sites."""
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log requests for debugging only: the page sends one every two seconds."""
        logger.debug(format, *args)
