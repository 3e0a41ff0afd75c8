"""The first prompts of a run are compared with the chat template's tokens before it starts."""

import pytest

from agent_system.environments.env import Observation
from agent_system.multi_turn_rollout.first_prompts import check_template_tokens
from agent_system.tokens.template_support import TemplateVerdict, check_template_support
from tests.helpers.chat_tokenizers import TOKENIZERS, chat_tokenizer
from tests.helpers.number_line_world import make_config
from tests.helpers.tiny_model import CHAT_TEMPLATE, make_tiny_tokenizer
from verl.utils.chat_template import UnsupportedTemplateError

# The text between two turns depends on the words of the first message, which the probe cannot see.
DEPENDS_ON_THE_PROMPT = CHAT_TEMPLATE.replace(
    "{{ '<|im_start|>' +",
    "{{ ('!' if loop.index > 2 and 'line' in messages[0]['content'] else '') + '<|im_start|>' +",
)
OBSERVATIONS = [Observation("You are at 1."), Observation("You are at 2.")]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_first_prompts_have_the_tokens_of_the_template(kind):
    if check_template_support(chat_tokenizer(kind, "chatml")).verdict is TemplateVerdict.APPEND:
        check_template_tokens(make_config(), chat_tokenizer(kind, "chatml"), OBSERVATIONS)


def test_template_that_depends_on_the_prompt_is_refused():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = DEPENDS_ON_THE_PROMPT
    assert check_template_support(tokenizer).verdict is TemplateVerdict.APPEND
    with pytest.raises(UnsupportedTemplateError):
        check_template_tokens(make_config(), tokenizer, OBSERVATIONS)
    check_template_tokens(make_config(history="window"), tokenizer, OBSERVATIONS)
