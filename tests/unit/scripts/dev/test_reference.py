"""Tests that the generated pages of ``docs/reference`` equal the declarations of the program."""

from agent_system.environments.env_registry import REGISTRY
from scripts.dev.reference import PAGES, REFERENCE_DIR


def test_keys_page_is_up_to_date():
    # To update the page: python -m scripts.dev.reference
    assert (REFERENCE_DIR / "keys.md").read_text(encoding="utf-8") == PAGES["keys.md"]()


def test_section_descriptions_keep_their_spelling_and_end_with_one_full_stop():
    text = PAGES["keys.md"]()
    assert "\nAdvantage estimation and KL in the reward.\n" in text
    assert (
        "\nSettings of the exam: number and generators of the questions, and number of tasks.\n"
        in text
    )
    assert ".." not in [line[-2:] for line in text.splitlines()]


def test_every_registered_environment_is_listed():
    page = (REFERENCE_DIR / "environments.md").read_text(encoding="utf-8")
    assert [name for name in REGISTRY if f"\n| `{name}` |" not in page] == []
