"""The scan of all environments keeps the result of each check, also if one hangs or crashes."""

import json
import re
import sys
import time

import psutil

from scripts.dev.check_environments import (
    TIMED_OUT_STATUS,
    check_names,
    describe_outcome,
    main,
    run_environment_check,
)
from verl.utils import jsonl

# A check that counts its runs, and whose behaviour its name selects.
FAKE_CHECK = """
import os, pathlib, subprocess, sys, time
log, name = pathlib.Path(sys.argv[1]), sys.argv[2]
log.open("a").write(name + "\\n")
if name == "crashes":
    os.abort()
if name == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(f"{log}.pid").write_text(str(child.pid))
    time.sleep(600)
if name == "wrong":
    print("table\\nopen: no oracle\\nWRONG: empty solved 1\\nWRONG: random solved 2")
    sys.exit(1)
if name == "missing":
    sys.stderr.write("the package xyz is missing\\n")
    sys.exit(2)
print("nothing is wrong")
"""


def fake_command(tmp_path):
    script = tmp_path / "fake_check.py"
    script.write_text(FAKE_CHECK)
    return (sys.executable, str(script), str(tmp_path / "runs"))


def test_each_name_has_a_result_and_a_second_scan_runs_none(tmp_path):
    path, command = tmp_path / "results.jsonl", fake_command(tmp_path)
    names = ["right", "wrong", "missing", "crashes"]
    results = {}
    for _ in range(2):
        results = check_names(names, path, jobs=2, timeout_s=60.0, command=command)
        assert {name: results[name]["status"] for name in names} == {
            "right": 0,
            "wrong": 1,
            "missing": 2,
            "crashes": -6,
        }
    assert sorted((tmp_path / "runs").read_text().split()) == sorted(names)
    assert results["wrong"]["problems"] == ["empty solved 1", "random solved 2"]
    assert results["wrong"]["remarks"] == ["no oracle"]
    assert results["missing"]["problems"] == ["the package xyz is missing"]
    assert results["right"]["problems"] == []


def test_the_deadline_ends_a_check_and_the_processes_that_it_started(tmp_path):
    result = run_environment_check("hangs", 5.0, fake_command(tmp_path))
    (problem,) = result["problems"]
    assert result["status"] == TIMED_OUT_STATUS and "5 s" in problem
    pid = int((tmp_path / "runs.pid").read_text())
    until = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_line_that_an_interruption_cut_off_is_checked_again(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"name": "first", "status": 0}\n{"name": "right", "sta')
    results = check_names(["first", "right"], path, 1, 30.0, fake_command(tmp_path))
    assert [results[name]["status"] for name in ("first", "right")] == [0, 0]
    assert [result["name"] for result in jsonl.read(path)] == ["first", "right"]
    assert (tmp_path / "runs").read_text().split() == ["right"]


def test_problems_need_attention_unless_the_list_names_them():
    outcomes = [describe_outcome({"status": 1}, has_remark) for has_remark in (False, True)]
    assert outcomes == ["problems", "named"]
    assert describe_outcome({"status": -11}, False) == "problems"
    assert describe_outcome({"status": TIMED_OUT_STATUS}, True) == "not finished"


def test_a_real_check(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    assert main([str(path), "number_line", "agent"]) == 0
    statuses = [json.loads(line)["status"] for line in path.read_text().splitlines()]
    assert statuses == [0, 2]
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.findall(r"\d+", last) == ["2", "1", "1"]
