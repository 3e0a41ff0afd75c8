"""Tests that the generated pages of ``docs/reference`` equal the declarations of the program."""

import pytest

from agent_system.environments.env_registry import REGISTRY
from scripts.dev.reference import PAGES, REFERENCE


@pytest.mark.parametrize("name", ["keys.md", "metrics.md"])
def test_reference_page_is_up_to_date(name):
    # To update the pages: python -m scripts.dev.reference
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name]()


def test_every_registered_environment_is_listed():
    page = (REFERENCE / "environments.md").read_text(encoding="utf-8")
    assert [name for name in REGISTRY if f"\n| `{name}` |" not in page] == []
