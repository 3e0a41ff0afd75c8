"""Tests that every mistaken command of ``scripts/dev/mistakes.py`` is refused before a start."""

import pytest

from scripts.dev.mistakes import MISTAKES, SCRATCH, run_mistake, write_scratch_files
from tests.golden.messages import GOLDEN, command_section
from tests.helpers.jobs import ROOT
from tests.helpers.refusals import fix


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mistakes")
    write_scratch_files(directory)
    return directory


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.description)
def test_mistake_is_refused_with_key_value_and_fix(mistake, scratch, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, text = run_mistake(mistake, scratch)
    assert status == 2, "it would have started"
    _, *problems = text.strip().splitlines()
    assert "Traceback" not in text
    start = f"  - {mistake.expected_start}"
    (problem_line,) = [problem for problem in problems if problem.startswith(start)]
    assert mistake.fix in fix(problem_line) and "; allowed" in problem_line, problem_line
    section = command_section(mistake, text)
    assert section in GOLDEN.read_text(), "python -m tests.golden.messages"


def test_mistakes_are_distinct():
    assert len({mistake.words for mistake in MISTAKES}) == len(MISTAKES) >= 25
    assert all(str(SCRATCH) not in mistake.description for mistake in MISTAKES)


@pytest.mark.parametrize(
    ("number", "mistake"), enumerate(MISTAKES, start=1), ids=lambda value: str(value)[:3]
)
def test_docs_page_shows_the_mistake(number, mistake):
    page = (ROOT / "docs" / "reference" / "mistakes.md").read_text()
    heading = f"## {number}. {mistake.description}: exit status 2\n"
    assert heading in page
    shown = page.partition(heading)[2].partition("\n## ")[0]
    assert f"main_ppo {' '.join(mistake.words)}\n" in shown
    assert f"  - {mistake.expected_start}" in shown and mistake.fix in shown
