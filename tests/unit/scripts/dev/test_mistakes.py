"""Every mistaken command of ``scripts/dev/mistakes.py`` prints the message of the docs page."""

import re

import pytest

from scripts.dev.mistakes import MISTAKES, PAGE_HEAD, format_mistake, write_scratch_files
from tests.golden.messages import shorten_lists
from tests.helpers.jobs import ROOT

PAGE = (ROOT / "docs" / "reference" / "mistakes.md").read_text()
SECTIONS = re.split(r"(?=^\n## )", PAGE, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mistakes")
    write_scratch_files(directory)
    return directory


@pytest.mark.parametrize(("number", "description"), enumerate(MISTAKES, start=1))
def test_mistake_is_refused_with_key_value_and_fix(number, description, scratch, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    section = format_mistake(number, description, scratch)
    assert f"{description}: exit status 2\n" in section, "it would have started"
    problems = re.findall(r"^  - .*$", section, re.MULTILINE)
    assert problems and all(re.match(r".+; allowed.+; fix: ", problem) for problem in problems)
    # Another machine may have further problems, for example too little memory.
    printed_lines = shorten_lists(section).splitlines()
    missing = set(shorten_lists(SECTIONS[number]).splitlines()) - set(printed_lines)
    assert not missing, "python scripts/dev/mistakes.py > docs/reference/mistakes.md"


def test_page_has_all_mistakes():
    assert SECTIONS[0] == PAGE_HEAD and len(SECTIONS) == 1 + len(MISTAKES)
