"""Tests of the report server of a running job: its content and its access rules."""

import gzip
import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.fake_run import fake_run
from tests.helpers.refusals import mentions
from tests.helpers.report_data import index_of, list_trajectories
from verl.record.report import serve, write_report
from verl.record.report.serve import LiveServer
from verl.utils import jsonl

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def run_dir(tmp_path):
    return fake_run(tmp_path / "run", steps=2, validate_every=2)


@pytest.fixture
def server(run_dir):
    with LiveServer(run_dir, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def get(server, path, host=None, method="GET", key=None):
    """Return status, headers and body of a response."""
    path_with_key = f"/{server.key if key is None else key}{path}"
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    # Send the path unchanged; an HTTP client would normalise it.
    connection.putrequest(method, path_with_key, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers, body


def test_page_has_an_index_and_sends_trajectories_on_request(server, run_dir):
    status, headers, body = get(server, "/")
    page = body.decode()
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert (
        '"application/gzip" data-trajectories' not in page and "connect-src &#39;self&#39;" in page
    )
    assert f'data-live="{get(server, "/stamp")[2].decode()}"' in page
    names = [file["name"] for file in index_of(page)["files"]]
    assert names == ["val-0", "train-1", "train-2", "val-2"]
    status, headers, body = get(server, "/trajectories/train-2")
    assert status == 200 and headers["Cross-Origin-Resource-Policy"] == "same-origin"
    static_page = write_report(run_dir).read_text()
    assert json.loads(gzip.decompress(body))["trajectories"] == list_trajectories(
        static_page, "train-2"
    )
    assert "data-live" not in static_page and "connect-src" not in static_page


def test_stamp_changes_with_metrics_and_trajectories(server, run_dir):
    stamps = [get(server, "/stamp")[2]]
    assert get(server, "/stamp")[2] == stamps[0]
    jsonl.append(run_dir / "metrics.jsonl", {"step": 3, "episode/reward": 0.5})
    stamps.append(get(server, "/stamp")[2])
    rows = list(jsonl.read(run_dir / "rollouts" / "2.jsonl"))
    jsonl.write(run_dir / "rollouts" / "3.jsonl", rows)
    stamps.append(get(server, "/stamp")[2])
    assert len(set(stamps)) == 3
    assert index_of(get(server, "/")[2].decode())["files"][-1]["name"] == "train-3"


@pytest.mark.parametrize(
    "path",
    [
        "/config.yaml",
        "/../config.yaml",
        "/trajectories/../../config.yaml",
        "/trajectories/..%2f..%2fconfig.yaml",
        "/trajectories//etc/passwd",
        "/trajectories/",
        "/metrics.jsonl",
        "/rollouts/1.jsonl",
    ],
)
def test_no_path_leads_to_a_file(server, path):
    status, _, body = get(server, path)
    assert (status, body) == (404, b"no such page\n")


def test_request_without_the_key_is_refused(server):
    for key in ("", "trajectories", server.key[:-1], server.key + "x"):
        for path in ("/", "/stamp", "/trajectories/train-1"):
            assert get(server, path, key=key)[0] == 404
    # Without the final slash the page could not load its trajectories.
    assert get(server, "")[0] == 404 and len(server.key) >= 20


def test_many_readers_share_one_rendering(server, monkeypatch):
    stamps = []
    original = serve.render_report

    def record_and_render(run, stamp):
        stamps.append(stamp)
        return original(run, stamp)

    monkeypatch.setattr(serve, "render_report", record_and_render)
    with ThreadPoolExecutor(200) as readers:
        responses = list(readers.map(lambda _: get(server, "/"), range(200)))
    assert {status for status, _, _ in responses} == {200}
    assert len({body for _, _, body in responses}) == 1 and len(stamps) == 1


def test_head_has_no_body(server):
    full_response = get(server, "/")
    status, headers, body = get(server, "/", method="HEAD")
    assert (status, body) == (200, b"")
    assert headers["Content-Length"] == str(len(full_response[2]))


@pytest.mark.parametrize(
    "path", ["//[", "/[", "http://[", "/%ff%fe", "/%", "?/[", "/" + "a" * 9000]
)
def test_strange_path_is_not_found(server, path, capsys):
    assert get(server, path, key="")[0] == 404
    assert "Traceback" not in capsys.readouterr().err


def test_removed_run_gives_status_503(server, run_dir):
    shutil.rmtree(run_dir)
    status, _, body = get(server, "/")
    assert status == 503 and b"run cannot be read" in body


def test_slow_clients_do_not_shut_out_readers(server, monkeypatch):
    monkeypatch.setattr(serve, "REQUEST_TIMEOUT_S", 0.5)
    slow_clients = [
        socket.create_connection(server.server_address[:2]) for _ in range(serve.MAX_THREADS + 1)
    ]
    for client in slow_clients:
        client.sendall(b"GET / HTTP/1.0\r\nX")
    assert get(server, "/stamp")[0] == 200  # within the 30 s of get(); an idle client may stay 30 s
    for client in slow_clients:
        client.close()


@pytest.mark.parametrize("host", ["[", "[::1", "]", "a]b:1"])
def test_malformed_host_is_refused(server, host):
    assert get(server, "/stamp", host)[0] == 403


def test_server_is_read_only(server, run_dir):
    before = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*"))
    for method in ("POST", "PUT", "DELETE"):
        assert get(server, "/", method=method)[0] == 501
    get(server, "/")
    get(server, "/trajectories/train-1")
    assert sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*")) == before


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8400", "192.168.0.7", "[fe80::1]"])
def test_foreign_host_names_are_refused(server, host):
    for path in ("/", "/stamp", "/trajectories/train-1"):
        assert get(server, path, host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8400"])
def test_local_host_names_are_accepted(server, host):
    assert get(server, "/stamp", host)[0] == 200


def test_server_listens_on_loopback_by_default(run_dir):
    with LiveServer(run_dir, port=0) as server:
        assert server.server_address[0] == "127.0.0.1" and server.is_local
        assert server.page_url == f"http://127.0.0.1:{server.server_address[1]}/{server.key}/"
    with LiveServer(run_dir, host="0.0.0.0", port=0) as server:
        assert not server.is_local


def test_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, check=mentions("metrics.jsonl")):
        LiveServer(tmp_path, port=0)


def test_command_line_prints_the_address(run_dir):
    command = [sys.executable, "-m", "verl.utils.report", "--serve", str(run_dir)]
    both = subprocess.run(
        [*command, str(run_dir)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert both.returncode == 2 and "--serve" in both.stderr
    with subprocess.Popen(
        [*command, "--port", "0"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:") and address.endswith("/")
        finally:
            process.terminate()
            process.wait(30)
