"""The doctor reports missing requirements with a fix, and runs smoke tests."""

import collections
import io
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from verl import doctor
from verl.trainer.launch.doctor import facts, smoke
from verl.trainer.launch.doctor.facts import FindingState, MachineFinding, collect_findings

Usage = collections.namedtuple("Usage", "total used free")


def findings_by_name(directory=Path()):
    return {finding.name: finding for finding in collect_findings(directory)}


def test_every_requirement_has_a_value_and_this_machine_can_train():
    findings = findings_by_name()
    required = {
        "Python",
        "torch",
        "ray",
        "vLLM",
        "CPU",
        "cores",
        "threads",
        "memory",
        "gloo",
        "NCCL",
    }
    required |= {"shared memory", "open files", "Java", "disk", "environments", "instructions"}
    assert required <= set(findings) and all(finding.value for finding in findings.values())
    assert FindingState.MISSING not in {finding.state for finding in findings.values()}
    assert all(finding.fix for finding in findings.values() if finding.state is not FindingState.OK)


def test_missing_library_is_missing_and_missing_vllm_a_note(monkeypatch):
    not_installed = ("tensordict", *facts.VLLM_PACKAGES)
    monkeypatch.setattr(facts, "get_version", lambda name: None if name in not_installed else "1.0")
    findings = findings_by_name()
    assert (
        findings["tensordict"].state is FindingState.MISSING
        and "pip install" in findings["tensordict"].fix
    )
    assert findings["vLLM"].state is FindingState.NOTE and "rollout.name=hf" in findings["vLLM"].fix
    assert findings["torch"] == MachineFinding("torch", "1.0")


@pytest.mark.parametrize(
    ("oldest", "newest", "state"),
    [
        (sys.version_info[:2], sys.version_info[:2], FindingState.OK),
        ((3, 99), (3, 99), FindingState.MISSING),
        ((3, 0), (3, 1), FindingState.MISSING),
    ],
)
def test_python_without_pinned_packages_is_missing(oldest, newest, state, monkeypatch):
    monkeypatch.setattr(facts, "OLDEST_PYTHON", oldest)
    monkeypatch.setattr(facts, "NEWEST_PYTHON", newest)
    assert findings_by_name()["Python"].state is state


def test_little_memory_disk_and_few_open_files_are_notes(monkeypatch):
    usage = Usage(64 * 2**20, 0, 64 * 2**20)
    monkeypatch.setattr(facts.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(facts.resource, "getrlimit", lambda which: (256, 4096))
    findings = findings_by_name()
    for name, fix in {
        "shared memory": "--shm-size",
        "disk": "1 to 3 GB",
        "open files": "ulimit -n 4096",
    }.items():
        assert findings[name].state is FindingState.NOTE and fix in findings[name].fix
    assert "0.1 GB" in findings["shared memory"].value


def test_unwritable_directory_is_missing(tmp_path):
    finding = findings_by_name(tmp_path / "not there")["disk"]
    assert finding.state is FindingState.MISSING and "No such file" in finding.value


def test_missing_java_names_the_environments_that_need_it(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    finding = findings_by_name()["Java"]
    assert finding.state is FindingState.NOTE and "scienceworld" in finding.fix


def test_unlimited_open_files_are_ok(monkeypatch):
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(facts.resource, "getrlimit", lambda which: unlimited)
    assert findings_by_name()["open files"] == MachineFinding("open files", "unlimited")


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("note", 0), ("MISSING", 1)])
def test_only_missing_requirements_change_the_status(state, status):
    out = io.StringIO()
    findings = [MachineFinding("[thing]", "x" * 200, FindingState(state), "install it")]
    assert doctor.print_report(findings, Console(file=out)) == status
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100 and "install it" in out.getvalue() and "[thing]" in lines[0]
    assert ("[thing]" in lines[-1]) == bool(status)


def test_hanging_or_failing_smoke_test_is_a_finding():
    (hung,) = smoke.run_smoke_tests(["environment"], deadline_s=0.01)
    assert hung.state is FindingState.MISSING and "0.01 s" in hung.value
    (failed,) = smoke.run_smoke_tests(["no such part"])
    assert failed.state is FindingState.MISSING and "no such part" in failed.value
    assert failed.fix.endswith("python -m verl.trainer.launch.doctor.smoke no such part")


def test_smoke_test_runs_an_engine_and_the_trainer():
    (finding,) = smoke.run_smoke_tests(["engine and trainer"])
    assert finding.state is FindingState.OK and "1 step" in finding.value, finding


def test_command_without_smoke_tests_needs_no_torch():
    code = "import sys, verl.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    result = subprocess.run(
        [sys.executable, "-m", "verl.doctor", "--no-smoke"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0 and "smoke" not in result.stdout, result.stderr
    assert "MISSING" not in result.stdout
