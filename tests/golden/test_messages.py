"""The wording of messages is that of the golden file."""

from tests.golden.messages import GOLDEN, config_section


def test_messages_of_the_configuration_are_those_of_the_golden_file():
    assert GOLDEN.read_text().startswith(config_section()), "python -m tests.golden.messages"
