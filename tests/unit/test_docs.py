"""What the documentation shows works: blocks marked ``python test`` run, files, keys and modules
that pages name exist, links lead somewhere, and the site is built without a warning.
"""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlvcr.core_rlvcr  # noqa: F401  registers its estimators before any page is read
from verl.algos import ADV_ESTIMATORS, POLICY_LOSSES
from verl.config.compose import config_names
from verl.config.plugins import schema_keys
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.schema.tools import ExportConfig, GenerationConfig
from verl.config.settings.unknown import owner

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# A page of mistakes names what does not exist.
RIGHT = [page for page in PAGES if page.name != "mistakes.md"]
BESIDE = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
TEXTS = [*RIGHT, ROOT / "README.md", *BESIDE]
LINKED = [*PAGES, ROOT / "README.md", *BESIDE, ROOT / "SECURITY.md"]
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
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULE = re.compile(r"(?<![\w/])python -m ((?:agent_system|verl|scripts)[\w.]*)")


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


def anchors(text: str) -> set[str]:
    """What may stand behind the ``#`` of a link to a page: names that GitHub and mkdocs both give a
    heading.
    """
    titles = [title.lower().replace("`", "") for title in HEADING.findall(FENCE.sub("", text))]
    plain = [re.sub(r"[^\w\s-]", "", title).strip() for title in titles]
    # mkdocs makes one hyphen of many spaces and hyphens, GitHub one of each.
    return {title.replace(" ", "-") for title in plain} & {
        re.sub(r"[-\s]+", "-", title) for title in plain
    }


def broken_links(page: Path, text: str) -> list[str]:
    """The links of ``text``, the content of ``page``, that lead nowhere inside the repository."""
    found = []
    for link in LINK.findall(FENCE.sub("", text)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if path.startswith(("http://", "https://", "mailto:")):
            continue
        inside = target.is_relative_to(ROOT) and target.is_file()
        if not inside or (anchor and anchor not in anchors(target.read_text())):
            found.append(link)
    return found


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    assert broken_links(page, page.read_text()) == []


def test_a_link_that_leads_nowhere_is_found():
    page = ROOT / "docs" / "architecture.md"
    links = ["models.md", "no.md", "#rooms", "#room", "models.md#nothing", "../../x.md"]
    text = "".join(f"[a]({link})\n" for link in links) + "## Rooms\n```\n[b](code.md)\n```\n"
    assert broken_links(page, text) == ["no.md", "#room", "models.md#nothing", "../../x.md"]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_blocks_are_closed_and_python_can_be_read(page):
    text = page.read_text()
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text))
    for mark, code in FENCE.findall(text):
        if mark.startswith("python"):
            ast.parse(code)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_modules_that_are_run_exist(page):
    named = {name.rstrip(".") for name in MODULE.findall(page.read_text())}
    assert [name for name in sorted(named) if importlib.util.find_spec(name) is None] == []


def nav_files(entry: Any) -> list[str]:
    """The files of a part of ``nav`` of ``mkdocs.yml``, in order."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [file for part in parts for file in nav_files(part)]


def test_every_page_is_in_the_navigation_once():
    files = nav_files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    own = [file for file in files if not file.startswith("../")]
    assert sorted(own) == [page.name for page in PAGES]
    assert [file for file in files if not (ROOT / "docs" / file).is_file()] == []


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_is_built_without_a_warning(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "five_minutes/index.html", "contributing/index.html"):
        assert (tmp_path / page).is_file()
    assert "```" not in (tmp_path / "environments" / "index.html").read_text()
