"""The report of a run that is under way, over HTTP: it is read anew as the run goes on.

    GET /KEY/            the page, without plays
    GET /KEY/stamp       a text that changes with the run's files
    GET /KEY/plays/NAME  the plays of one file of the page's index, packed

Nothing is written, and no path of a request becomes a path of a file: names are looked up. The key
is drawn at the start, for other users of the machine reach its loopback, too.
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
from verl.record.report.plays import affordable, pack, play_files
from verl.record.report.run_data import load_run
from verl.utils.proxies import is_loopback

logger = logging.getLogger(__name__)
PORT = 8400
WAIT_S = 30.0  # for a request that does not end
MOST_THREADS = 64  # requests that are answered at once; further ones wait


class LiveRun:
    """What a run directory holds at the moment."""

    def __init__(self, run_dir: str | Path) -> None:
        self._directory = load_run(run_dir).directory  # raises where there is no run
        self._lock = threading.Lock()
        self._rendered = ("", b"")  # stamp and page

    def stamp(self) -> str:
        """The state of the metrics and of the plays: another text when they are others."""
        files = [self._directory.metrics_path, *(one.path for one in play_files(self._directory))]
        found = [file.stat() for file in files if file.exists()]
        newest = max((status.st_mtime_ns for status in found), default=0)
        return f"{len(found)}-{sum(status.st_size for status in found)}-{newest}"

    def page(self) -> bytes:
        """The page as HTML, rendered once for each state of the run."""
        with self._lock:
            # Before the files are read: what comes meanwhile is a later state.
            stamp = self.stamp()
            if self._rendered[0] != stamp:
                html = render_live(load_run(self._directory.path), stamp)
                self._rendered = (stamp, html.encode())
            return self._rendered[1]

    def plays(self, name: str) -> bytes | None:
        """The plays of a file that the page's index names; None for another name."""
        with self._lock:
            for file in affordable(play_files(self._directory)):
                if file.name == name:
                    return pack(file).packed
        return None


class LiveServer(ThreadingHTTPServer):
    """Answers for one run on ``address``, by default to this machine alone."""

    daemon_threads = True
    request_queue_size = 1024  # connections that wait to be accepted

    def __init__(self, run_dir: str | Path, host: str = "127.0.0.1", port: int = PORT) -> None:
        self.live = LiveRun(run_dir)
        self._free_threads = threading.BoundedSemaphore(MOST_THREADS)
        super().__init__((host, port), Handler)
        self.local = is_loopback(host)
        self.key = secrets.token_urlsafe(16)

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/{self.key}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, as soon as one of ``MOST_THREADS`` is free."""
        self._free_threads.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then let the next request have the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_threads.release()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = WAIT_S
    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Answer with a page, a stamp or plays; 403 for a foreign host, 404 for another path."""
        # A page of another site could else have its own name point here and read along.
        if self.server.local and not is_loopback(self.asked_host()):
            self.answer(HTTPStatus.FORBIDDEN, "text/plain", b"ask for localhost\n")
            return
        key, slash, path = unquote(urlsplit(self.path).path).removeprefix("/").partition("/")
        known = secrets.compare_digest(key.encode(), self.server.key.encode())
        found = self.found(path) if known and slash else None
        kind, body = found or ("text/plain", b"no such page\n")
        self.answer(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND, kind, body)

    do_HEAD = do_GET  # answer() leaves the body out

    def found(self, path: str) -> tuple[str, bytes] | None:
        """Kind and content of what is at ``path`` behind the key."""
        live = self.server.live
        if path == "":
            return "text/html", live.page()
        if path == "stamp":
            return "text/plain", live.stamp().encode()
        folder, _, name = path.partition("/")
        plays = live.plays(name) if folder == "plays" else None
        return None if plays is None else ("application/gzip", plays)

    def asked_host(self) -> str:
        """The host that the browser believes to speak to; empty where it names none."""
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:  # an unclosed bracket
            return ""

    def answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        """Send ``body``; no other site may use it, and no cache keeps it."""
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
        """To the log, where a request every two seconds is of interest."""
        logger.debug(format, *args)
