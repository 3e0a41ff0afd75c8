"""Tests of the language measures, on texts small enough to count by hand, and of the sample."""

import textwrap
from pathlib import Path

import pytest

from scripts.dev.check_language import (
    Finding,
    collect_items,
    count_findings,
    find_banned_in_name,
    find_banned_in_text,
    format_sample,
    list_exceeded_limits,
    main,
    measure_language,
    split_name,
    split_sentences,
)

CODE = '''
"""Who reads this."""

class Same:
    """Two more words and then three."""


def fit():
    """Return the step."""


def dealt(rows):
    """Return the rows in the order of ranks."""
    for row in rows:
        if row:
            pass
        elif rows:
            with row:
                for token in row:
                    yield token


def draw_rows():
    # nobody calls this
    raise ValueError("plays are missing")
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return two packages with a class of the same name, and one page."""
    (tmp_path / "verl").mkdir()
    (tmp_path / "rlvcr").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "verl" / "a.py").write_text(CODE)
    (tmp_path / "rlvcr" / "b.py").write_text('class Same:\n    """Another class of this name."""\n')
    (tmp_path / "docs" / "a.md").write_text("One.\n\nTwo `plays`,\n```\nplays\n```\nthree plays.\n")
    return tmp_path


def list_places(findings: list[Finding], kind: str) -> list[tuple[str, int]]:
    return [(finding.file, finding.line) for finding in findings if finding.kind == kind]


def test_every_finding_has_its_place(checkout: Path):
    findings, totals = measure_language(checkout)
    assert (totals.docstrings, totals.functions) == (5, 3)
    assert list_places(findings, "opening") == [("verl/a.py", 2)]
    assert list_places(findings, "one_word") == [("verl/a.py", 8), ("verl/a.py", 12)]
    assert list_places(findings, "unaccepted_word") == [("verl/a.py", 12)]
    assert list_places(findings, "same_class") == [("verl/a.py", 4), ("rlvcr/b.py", 1)]
    assert list_places(findings, "short_docstring") == [
        ("verl/a.py", 2),
        ("verl/a.py", 9),
        ("rlvcr/b.py", 2),
    ]
    assert sorted(list_places(findings, "banned")) == [
        ("docs/a.md", 7),
        ("verl/a.py", 12),
        ("verl/a.py", 24),
        ("verl/a.py", 25),
    ]
    numbers = count_findings(findings, totals)
    assert (numbers["opening"], numbers["one_word"]) == (1 / 5, 2 / 3)
    assert list_exceeded_limits(numbers) == [
        "opening",
        "one_word",
        "banned",
        "same_class",
        "deep_nesting",
    ]


def test_sizes_count_from_one_above_the_limit(tmp_path: Path):
    (tmp_path / "verl").mkdir()
    body = "    pass\n" * 59
    code = f"def in_limit():\n{body}\n\ndef above_limit():\n{body}    pass\n"
    (tmp_path / "verl" / "a.py").write_text(code + "\n" * 600)
    findings, _ = measure_language(tmp_path)
    assert list_places(findings, "long_function") == [("verl/a.py", 63)]
    assert list_places(findings, "long_file") == [("verl/a.py", 1)]


@pytest.mark.parametrize("name", ["play_rows", "_playedRows", "RowsToPlay", "jobs_of", "found"])
def test_banned_word_is_detected_in_any_part_of_a_name(name: str):
    assert len(list(find_banned_in_name(name, "verl/a.py", 1))) == 1


@pytest.mark.parametrize("name", ["won", "_won", "VectorisedPlay", "display", "replay", "rows"])
def test_public_names_and_other_words_are_accepted(name: str):
    assert len(list(find_banned_in_name(name, "verl/a.py", 1))) == 0


def test_code_in_prose_is_ignored():
    text = "Set env.rollout.carry_over=1 or ``plays``, see left_out_rows and data/plays.jsonl."
    assert list(find_banned_in_text(text, "verl/a.py", 1)) == []


def test_text_worlds_may_have_rooms_and_prompts_are_content(tmp_path: Path):
    package = tmp_path / "agent_system" / "environments" / "env_package"
    package.mkdir(parents=True)
    (package / "a.py").write_text(
        '"""Rooms and doors."""\nPROMPT = "You have won."\nraise ValueError("a play is missing")\n'
    )
    findings, _ = measure_language(tmp_path)
    assert list_places(findings, "banned") == [("agent_system/environments/env_package/a.py", 3)]


def test_sentences_end_at_full_stops_and_paragraphs():
    text = textwrap.dedent("""\
        One two. Three
        four

            code, which is no sentence
        """)
    assert list(split_sentences(text)) == ["One two.", "Three four"]


def test_names_are_split_into_words():
    assert split_name("_leftOut_Rows2") == "left out rows2"


def test_command_lists_one_kind_and_fails_above_a_limit(
    checkout: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["--root", str(checkout), "--list", "opening"]) == 1
    assert capsys.readouterr().out == "verl/a.py:2: Who reads this.\n"
    (checkout / "verl" / "a.py").write_text("")
    (checkout / "docs" / "a.md").write_text("")
    assert main(["--root", str(checkout)]) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("verl/a.js", 'const plays = "https://plays";\n  run(); // Plays\n'),
        ("scripts/a.sh", "echo ${#plays}\n# plays\n"),
        ("settings.toml", 'plays = "plays"\nlimit = 2 # plays\n'),
        ("configs/a.yaml", "plays: 1 # doors\nlimit: 2 # plays\n"),
    ],
)
def test_only_comments_of_other_files_are_read(tmp_path: Path, name: str, text: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    findings, _ = measure_language(tmp_path)
    assert list_places(findings, "banned") == [(name, 2)]


SOURCE = '''"""Module text."""

LIMIT = 3  # rows at most


def count_rows(rows, cls=None):
    """Return the number of rows."""
    total = len(rows)  # noqa: E501
    return total
'''


def make_checkout(root):
    (root / "verl").mkdir()
    (root / "docs").mkdir()
    (root / "verl" / "a.py").write_text(SOURCE)
    (root / "README.md").write_text(
        "# Title\n\nOne short line. This sentence has exactly six words.\n"
    )
    (root / "docs" / "b.md").write_text(
        "| a | table row with many words |\n\n```\ncode has no sentences at all.\n```\n"
    )
    return root


def test_each_kind_is_collected(tmp_path):
    items = collect_items(make_checkout(tmp_path))
    assert [text for _, text in items["docstrings"]] == [
        "module\nModule text.",
        "def count_rows(rows, cls=None)\nReturn the number of rows.",
    ]
    assert [text.splitlines()[1] for _, text in items["comments"]] == ["LIMIT = 3  # rows at most"]
    contexts = dict(text.split("\n", 1) for _, text in items["identifiers"])
    assert sorted(contexts) == ["LIMIT", "count_rows", "rows", "total"]
    assert "LIMIT = 3  # rows at most" in contexts["LIMIT"].splitlines()
    sentence = "(before it: One short line.)\nThis sentence has exactly six words."
    assert items["sentences"] == [("README.md", sentence)]


def test_seed_determines_the_sample(tmp_path):
    root = make_checkout(tmp_path)
    first, second = (list(format_sample(root, 7)) for _ in range(2))
    assert first == second and first[0] == "Seed 7"
    assert {"\n## 2 docstrings", "\n## 1 comments", "\n## 1 sentences"} <= set(first)
