"""The sample for blind readings holds what it says, and a seed draws it again."""

from scripts.dev.sample_language import collect_items, format_sample

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
    assert sorted(text for _, text in items["identifiers"]) == [
        "LIMIT",
        "count_rows",
        "rows",
        "total",
    ]
    assert items["sentences"] == [("README.md", "This sentence has exactly six words.")]


def test_a_seed_draws_the_same_sample_again(tmp_path):
    root = make_checkout(tmp_path)
    first, again = (list(format_sample(root, 7)) for _ in range(2))
    assert first == again and first[0] == "Seed 7"
    assert {"\n## 2 docstrings", "\n## 1 comments", "\n## 1 sentences"} <= set(first)
