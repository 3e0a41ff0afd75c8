"""What the documentation shows works: blocks marked ``python test`` run, files and keys that pages
name exist.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest

from verl.algos import ADV_ESTIMATORS, POLICY_LOSSES
from verl.trainer.config import PPOConfig, SFTConfig
from verl.trainer.config.compose import config_names
from verl.trainer.config.plugged import schema_keys
from verl.trainer.config.schema.tools import ExportConfig, GenerationConfig
from verl.utils.settings.unknown import owner

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# A page of mistakes names what does not exist.
RIGHT = [page for page in PAGES if page.name != "mistakes.md"]
TEXTS = [*RIGHT, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
BLOCK = re.compile(r"^```python test\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [
    (page, number, code)
    for page in PAGES
    for number, code in enumerate(BLOCK.findall(page.read_text()))
]
SECTIONS = (
    "data|actor_rollout_ref|critic|algorithm|env|trainer|cold_start|ray_init|custom_reward_function"
)
KEY = re.compile(rf"(?<![\w./])((?:{SECTIONS})(?:\.[a-z_A-Z0-9]+)+)(?![\w/*<({{])")
FILE = re.compile(
    r"(?<![\w/.<-])((?:agent_system|verl|rlvcr|scripts|configs|docs)/[\w./]+\.(?:py|yaml|md|sh))"
)
CONFIG = re.compile(r"--config-name[ =](\w+)")


@pytest.mark.parametrize(
    ("page", "number", "code"), BLOCKS, ids=[f"{p.stem}-{n}" for p, n, _ in BLOCKS]
)
def test_the_block_runs(page, number, code, tmp_path, monkeypatch):
    name = f"docs_{page.stem}_{number}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    estimators = dict(ADV_ESTIMATORS)
    losses = dict(POLICY_LOSSES)
    try:
        module = importlib.import_module(name)
        if hasattr(module, "check"):
            module.check()
    finally:
        sys.modules.pop(name, None)
        # What a page registers is not there for the tests that follow.
        ADV_ESTIMATORS.clear()
        ADV_ESTIMATORS.update(estimators)
        POLICY_LOSSES.clear()
        POLICY_LOSSES.update(losses)


def test_there_are_blocks_to_run():
    assert {page.stem for page, _, _ in BLOCKS} >= {"environments", "algorithms"}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_files_configs_and_keys_exist(page):
    text = page.read_text()
    assert [name for name in FILE.findall(text) if not (ROOT / name).is_file()] == []
    assert [
        name for name in CONFIG.findall(text) if name not in config_names() and name != "NAME"
    ] == []
    if page.name == "mutants.md":
        return  # it quotes code, whose names are no keys
    schemas = (PPOConfig, SFTConfig, GenerationConfig, ExportConfig)
    keys = [schema_keys(schema) for schema in schemas]
    named = {key for key in KEY.findall(text) if not key.endswith((".py", ".md", ".json"))}
    sections = {key.rpartition(".")[0] for schema in keys for key in schema}
    unknown = {key for key in named if not any(owner(key, schema) for schema in keys)}
    assert sorted(unknown - sections) == []


def test_one_training_step_is_22_files_with_a_sentence_each():
    page = (ROOT / "docs" / "architecture.md").read_text()
    entries = re.findall(
        r"^(\d+)\. `([\w/]+\.py)`: (.+?)(?=^\d+\. |\Z)", page, re.DOTALL | re.MULTILINE
    )
    assert [int(number) for number, _, _ in entries] == list(range(1, 23))
    assert [file for _, file, _ in entries if not (ROOT / file).is_file()] == []
    assert len({file for _, file, _ in entries}) == 22
    for _, file, sentence in entries:
        assert sentence.strip().endswith("."), file


def test_the_commands_of_contributing_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / page).read_text(), re.MULTILINE))
        targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
        assert named and named <= targets, named - targets
