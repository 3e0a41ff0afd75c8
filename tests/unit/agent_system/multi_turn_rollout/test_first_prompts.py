"""The first prompts of a run are compared with the chat template's tokens before it starts."""

import pytest

from agent_system.environments.env import Observation
from agent_system.multi_turn_rollout.first_prompts import check_first_tokens
from agent_system.tokens.probe import Verdict, probe_template
from tests.helpers.chat_kinds import TOKENIZERS, chat_tokenizer
from tests.helpers.play import make_config
from tests.helpers.tiny_model import CHAT_TEMPLATE, make_tiny_tokenizer
from verl.utils.chat_template import TemplateUnsupported

# Which text stands between two turns depends on the first message's own words: no anchor shows it.
DEPENDS = CHAT_TEMPLATE.replace(
    "{{ '<|im_start|>' +",
    "{{ ('!' if loop.index > 2 and 'line' in messages[0]['content'] else '') + '<|im_start|>' +",
)
SEEN = [Observation("You are at 1."), Observation("You are at 2.")]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_prompts_of_an_environment_have_the_tokens_of_the_template(kind):
    if probe_template(chat_tokenizer(kind, "chatml")).verdict is Verdict.APPEND:
        check_first_tokens(make_config(), chat_tokenizer(kind, "chatml"), SEEN)


def test_a_template_that_reads_the_prompt_is_found_with_the_first_rows():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = DEPENDS
    assert probe_template(tokenizer).verdict is Verdict.APPEND
    with pytest.raises(TemplateUnsupported):
        check_first_tokens(make_config(), tokenizer, SEEN)
    check_first_tokens(make_config(history="window"), tokenizer, SEEN)
