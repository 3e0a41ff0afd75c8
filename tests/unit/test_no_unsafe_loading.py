"""No source runs code from files or texts, uses a shell, or listens on an address other than
loopback."""

import ast
from pathlib import Path

import pytest

from scripts.dev.licences import PINNED_PACKAGE, format_licences_page, get_licence
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import collect_section_keys

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    file
    for package in ("verl", "agent_system", "rlvcr", "scripts", "experiments")
    for file in (ROOT / package).rglob("*.py")
)
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "torch.load", "yaml.load", "os.system", "np.load", "numpy.load"}
# The format of torch.distributed.checkpoint has a pickled index.
CALLS |= {"FileSystemReader", "FileSystemWriter"}
# Allowed findings by file, with the reason.
ALLOWED = {
    # Measures the size of what Ray sends. Nothing is unpickled.
    "scripts/dev/bench/driver.py": {"import pickle"},
    # Only tensors are read (weights_only).
    "verl/models/weights.py": {"call torch.load"},
    # Expressions of game files. Only names, attributes, texts, + and or are compiled.
    "agent_system/environments/env_package/alfworld/grammar.py": {"call eval"},
}


def find_unsafe_code(source: str) -> set[str]:
    """Return what ``source`` has that could run what it reads, or be reached from outside."""
    findings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            findings |= {f"import {name.name}" for name in node.names if name.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            findings.add(f"import {node.module}")
        elif isinstance(node, ast.Call):
            findings |= find_unsafe_call(node)
        elif isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            findings.add(f"address {node.value}")
        elif isinstance(node, ast.AnnAssign) and is_name(node.target, "trust_remote_code"):
            findings |= {"trust_remote_code"} if not is_false(node.value) else set()
    return findings


def find_unsafe_call(node: ast.Call) -> set[str]:
    name = ast.unparse(node.func)
    findings = {f"call {name}"} if name in CALLS else set()
    for keyword in node.keywords:
        true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and true:
            findings.add(f"{keyword.arg}=True")
    return findings


def is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def is_false(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is False)


def test_no_source_has_unlisted_unsafe_code():
    assert len(SOURCES) > 250
    findings = {str(file.relative_to(ROOT)): find_unsafe_code(file.read_text()) for file in SOURCES}
    assert {name: unsafe for name, unsafe in findings.items() if unsafe} == ALLOWED


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("import pickle", "import pickle"),
        ("from cloudpickle import loads", "import cloudpickle"),
        ("torch.load(path, weights_only=False)", "call torch.load"),
        ("eval(text)", "call eval"),
        ("FileSystemReader(path)", "call FileSystemReader"),
        ("subprocess.run(text, shell=True)", "shell=True"),
        ("load(path, trust_remote_code=True)", "trust_remote_code=True"),
        ("class A:\n    trust_remote_code: bool = True", "trust_remote_code"),
        ("serve('0.0.0.0')", "address 0.0.0.0"),
        ("numpy.load(path, allow_pickle=True)", "allow_pickle=True"),
    ],
)
def test_each_kind_of_unsafe_code_is_detected(source, finding):
    assert finding in find_unsafe_code(source)
    assert (
        find_unsafe_code("model.eval()\ntrust_remote_code: bool = False\nserve('127.0.0.1')")
        == set()
    )


def test_model_code_is_not_trusted_by_default():
    for schema in (PPOConfig, SFTConfig):
        keys = {
            path: key
            for path, key in collect_section_keys(schema).items()
            if "trust_remote_code" in path
        }
        assert keys and not any(key.default_value for key in keys.values())


def test_licences_page_lists_the_pinned_packages():
    pins = (ROOT / "requirements" / "cpu.txt").read_text()
    page = (ROOT / "docs" / "reference" / "licences.md").read_text()
    rows = [
        line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if "==" not in line
    ]
    assert [name for name, _ in PINNED_PACKAGE.findall(pins)] == rows[
        -len(PINNED_PACKAGE.findall(pins)) :
    ]
    assert (
        "| numpy | " in format_licences_page("numpy==1.0") and get_licence("no-such-package") == ""
    )
