"""The documentation is correct: blocks marked ``python test`` run, commands parse, named files,
keys and modules exist, links have targets, and the site builds without warnings."""

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlvcr.core_rlvcr  # noqa: F401  registers its estimators before any page is read
from verl.algos import ADV_ESTIMATORS, POLICY_LOSSES
from verl.config.compose import list_config_names
from verl.config.plugins import collect_all_keys
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.schema.tools import ExportConfig, GenerationConfig
from verl.config.settings.hints import find_containing_key
from verl.config.validate import find_problems
from verl.trainer import cli
from verl.trainer.launch import extensions

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# Pages outside docs/ that the site also shows.
OUTSIDE = [
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "experiments/README.md",
    "experiments/audits.md",
    "scripts/dev/closed_faults.md",
    "scripts/dev/mutants/results.md",
]
# Excluded: mistakes.md names things that do not exist, CHANGELOG.md names things that moved.
TEXTS = [page for page in PAGES if page.name != "mistakes.md"]
TEXTS += [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
LINKED = [*PAGES, ROOT / "README.md", *(ROOT / name for name in OUTSIDE)]
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
CONFIG = re.compile(r"--config-name[ =]([\w.]*\w)")
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:\S+=\S+ )*python -m verl\.trainer\.main_(ppo|sft|eval)\b(.*)")
MODULE = re.compile(r"(?<![\w/])python -m ((?:agent_system|verl|scripts)[\w.]*)")


@pytest.mark.parametrize(
    ("page", "number", "code"), BLOCKS, ids=[f"{p.stem}-{n}" for p, n, _ in BLOCKS]
)
def test_python_block_runs(page, number, code, tmp_path, monkeypatch):
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
        # Remove what the page registered, so that later tests do not see it.
        ADV_ESTIMATORS.clear()
        ADV_ESTIMATORS.update(estimators)
        POLICY_LOSSES.clear()
        POLICY_LOSSES.update(losses)


def test_pages_have_python_blocks_to_run():
    assert {page.stem for page, _, _ in BLOCKS} >= {"prompts", "algorithms"}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_files_configs_and_keys_exist(page):
    text = page.read_text()
    assert [name for name in FILE.findall(text) if not (ROOT / name).is_file()] == []
    assert [
        name for name in CONFIG.findall(text) if name not in list_config_names() and name != "NAME"
    ] == []
    schemas = (PPOConfig, SFTConfig, GenerationConfig, ExportConfig)
    keys = [collect_all_keys(schema) for schema in schemas]
    named = {key for key in KEY.findall(text) if not key.endswith((".py", ".md", ".json"))}
    sections = {key.rpartition(".")[0] for schema in keys for key in schema}
    unknown = {key for key in named if not any(find_containing_key(key, schema) for schema in keys)}
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


def test_make_targets_named_on_pages_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / page).read_text(), re.MULTILINE))
        targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
        assert named and named <= targets, named - targets


def anchors(text: str) -> set[str]:
    """Return the anchors of headings that GitHub and mkdocs name in the same way."""
    titles = [title.lower().replace("`", "") for title in HEADING.findall(FENCE.sub("", text))]
    plain = [re.sub(r"[^\w\s-]", "", title).strip() for title in titles]
    # mkdocs joins several spaces and hyphens into one hyphen; GitHub keeps one for each.
    return {title.replace(" ", "-") for title in plain} & {
        re.sub(r"[-\s]+", "-", title) for title in plain
    }


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links of ``text``, the content of ``page``, without a target in the repository."""
    broken = []
    for link in LINK.findall(FENCE.sub("", text)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if path.startswith(("http://", "https://", "mailto:")):
            continue
        inside = target.is_relative_to(ROOT) and target.is_file()
        if not inside or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_links_have_targets(page):
    assert broken_links(page, page.read_text()) == []


def test_broken_links_are_reported():
    page = ROOT / "docs" / "architecture.md"
    links = ["models.md", "no.md", "#packages", "#package", "models.md#nothing", "../../x.md"]
    text = "".join(f"[a]({link})\n" for link in links) + "## Packages\n```\n[b](code.md)\n```\n"
    assert broken_links(page, text) == ["no.md", "#package", "models.md#nothing", "../../x.md"]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_blocks_are_closed_and_python_parses(page):
    text = page.read_text()
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text))
    for mark, code in FENCE.findall(text):
        if mark.startswith("python"):
            ast.parse(code)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_modules_in_commands_exist(page):
    named = {name.rstrip(".") for name in MODULE.findall(page.read_text())}
    assert [name for name in sorted(named) if importlib.util.find_spec(name) is None] == []


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return the training commands in the blocks of ``text``: entry point and arguments."""
    lines = [
        line.strip()
        for _, block in FENCE.findall(text)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    matches = [match for line in lines if (match := COMMAND.fullmatch(line))]
    return [(match[1], shlex.split(match[2], comments=True)) for match in matches]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_training_commands_are_valid(page):
    for entry, arguments in commands(page.read_text()):
        arguments = [argument for argument in arguments if argument != "YOUR_OVERRIDES"]
        supervised = entry == "sft"
        default = extensions.choose_sft_config_name if supervised else extensions.choose_config_name
        # Raises ConfigError for unknown keys and wrong values.
        parsed = cli.parse(arguments, default, SFTConfig if supervised else PPOConfig)
        for cfg in parsed.configs:
            assert find_problems(cfg, check_files=False) == [], arguments


def nav_files(entry: Any) -> list[str]:
    """Return the files of a part of ``nav`` of ``mkdocs.yml``, in order."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [file for part in parts for file in nav_files(part)]


def test_every_page_is_in_the_navigation_once():
    files = nav_files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    docs = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]
    assert sorted(files) == sorted([*docs, *OUTSIDE])


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_site_builds_without_warnings(tmp_path):
    arguments = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    for page in ("index.html", "reference/keys/index.html", "repository/contributing/index.html"):
        assert (tmp_path / page).is_file()
    assert "```" not in (tmp_path / "write_environment" / "index.html").read_text()


def test_readme_and_pages_stay_short():
    """Pages are counted without generated ones (``docs/reference``) and without code blocks."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    pages = [page.read_text() for page in PAGES if page.parent == ROOT / "docs"]
    assert sum(len(FENCE.sub("", page).split()) for page in pages) <= 35_000
