"""No source opens a door by itself: no code out of files or texts, no shell, no address but the
loopback's.
"""

import ast
from pathlib import Path

import pytest

from scripts.dev.licences import PINNED, licence_of, licences_page
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import keys_of

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    file
    for room in ("verl", "agent_system", "rlvcr", "scripts", "experiments")
    for file in (ROOT / room).rglob("*.py")
)
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "torch.load", "yaml.load", "os.system", "np.load", "numpy.load"}
# Of torch.distributed.checkpoint, whose own format has a pickled index.
CALLS |= {"FileSystemReader", "FileSystemWriter"}
# By file: what is found there, and why it may stay.
ALLOWED = {
    "scripts/dev/bench/driver.py": {"import pickle"},  # a stand-in for Ray's store, of its own rows
    # Tensors alone are read (weights_only), and pickle is imported for the error that this raises.
    "verl/models/weights.py": {"import pickle", "call torch.load"},
    # Expressions of game files, of which only names, attributes, texts, + and or are compiled.
    "agent_system/environments/env_package/alfworld/grammar.py": {"call eval"},
}


def doors(source: str) -> set[str]:
    """What ``source`` has that could run what it reads, or be reached from outside."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {f"import {name.name}" for name in node.names if name.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.add(f"import {node.module}")
        elif isinstance(node, ast.Call):
            found |= _of_call(node)
        elif isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            found.add(f"address {node.value}")
        elif isinstance(node, ast.AnnAssign) and _is(node.target, "trust_remote_code"):
            found |= {"trust_remote_code"} if not _is_false(node.value) else set()
    return found


def _of_call(node: ast.Call) -> set[str]:
    name = ast.unparse(node.func)
    found = {f"call {name}"} if name in CALLS else set()
    for keyword in node.keywords:
        true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and true:
            found.add(f"{keyword.arg}=True")
    return found


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_false(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is False)


def test_no_source_has_a_door_that_is_not_listed():
    assert len(SOURCES) > 250
    found = {str(file.relative_to(ROOT)): doors(file.read_text()) for file in SOURCES}
    assert {name: some for name, some in found.items() if some} == ALLOWED


@pytest.mark.parametrize(
    ("source", "door"),
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
def test_the_search_finds_each_kind(source, door):
    assert door in doors(source)
    assert doors("model.eval()\ntrust_remote_code: bool = False\nserve('127.0.0.1')") == set()


def test_code_of_models_is_not_trusted_by_default():
    for schema in (PPOConfig, SFTConfig):
        keys = {path: key for path, key in keys_of(schema).items() if "trust_remote_code" in path}
        assert keys and not any(key.default_value for key in keys.values())


def test_the_page_of_licences_is_that_of_the_pinned_packages():
    pins = (ROOT / "requirements" / "cpu.txt").read_text()
    written = (ROOT / "docs" / "reference" / "licences.md").read_text()
    rows = [
        line.split(" | ")[0].removeprefix("| ") for line in written.splitlines() if "==" not in line
    ]
    assert [name for name, _ in PINNED.findall(pins)] == rows[-len(PINNED.findall(pins)) :]
    assert "| numpy | " in licences_page("numpy==1.0") and licence_of("no-such-package") == ""
