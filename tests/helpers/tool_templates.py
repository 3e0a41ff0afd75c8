"""Small chat templates that write tool calls in formats of model families without a template in
``trl``, each with a tokenizer that has their control tokens.
"""

import re
from functools import cache
from typing import Any

from tests.helpers.tiny_model import make_tiny_tokenizer

SKELETON = (
    "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set calls = m.tool_calls or [] %}@TURN@"
    "{% elif m.role == 'tool' %}@RESULT@"
    "{% else %}@USER@{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}@PROMPT@{% endif %}"
)
# Thoughts are a part of the content.
MISTRAL = {
    "USER": "[INST]{{ m.content }}[/INST]",
    "TURN": "{{ m.content }}{% for c in calls %}@CALL@{% endfor %}</s>",
    "RESULT": "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
    "PROMPT": "",
}
# Arguments are JSON text. In the tokens, "|" stands for a bar of full width, "_" for U+2581.
DEEPSEEK = {
    "USER": "<|User|>{{ m.content }}",
    "TURN": "<|Assistant|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{% endif %}@CLOSE@{{ m.content }}"
    "{% if calls %}<|tool_calls_begin|>{% for c in calls %}@CALL@{% endfor %}<|tool_calls_end|>"
    "{% endif %}<|end_of_sentence|>",
    "RESULT": "<|tool_output_begin|>{{ m.content }}<|tool_output_end|>",
    "PROMPT": "<|Assistant|>",
}
COHERE = {
    "USER": "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>",
    "TURN": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    "{% if m.tool_plan %}<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|>{% endif %}"
    "{% if calls %}<|START_ACTION|>[{% for c in calls %}@CALL@{% endfor %}]<|END_ACTION|>"
    "{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
    "<|END_OF_TURN_TOKEN|>",
    "RESULT": "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ m.content }}"
    "<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>",
    "PROMPT": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
}
# The name of the function is only in the id of the call. Text replies have no thought.
KIMI = {
    "USER": "<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
    "TURN": "<|im_assistant|>assistant<|im_middle|>"
    "<think>{{ m.reasoning_content if calls }}</think>{{ m.content }}"
    "{% if calls %}<|tool_calls_section_begin|>{% for c in calls %}@CALL@{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>",
    "CALL": "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>",
    "RESULT": "<|im_system|>{{ m.name }}<|im_middle|>"
    "{{ '## Return of ' + m.tool_call_id + '\n' + m.content }}<|im_end|>",
    "PROMPT": "<|im_assistant|>assistant<|im_middle|>",
}
# The reply to results follows them without a token of a new turn.
DSML = {
    "USER": "<|User|>{{ m.content }}",
    "TURN": "{% if messages[loop.index0 - 1].role != 'tool' %}<|Assistant|>{% endif %}"
    "<think>{{ m.reasoning_content }}</think>{{ m.content }}"
    "{% if calls %}{{ '\n\n' }}<|DSML|function_calls>{{ '\n' }}"
    "{% for c in calls %}@CALL@{% endfor %}</|DSML|function_calls>{% endif %}<|end_of_sentence|>",
    "CALL": "<|DSML|invoke name=\"{{ c.function.name }}\">{{ '\\n' }}"
    "{% for key, value in c.function.arguments.items() %}"
    '<|DSML|parameter name="{{ key }}" string="{{ (value is string) | tojson }}">'
    "{{ value if value is string else value | tojson }}</|DSML|parameter>"
    "{{ '' if loop.last else '\n' }}{% endfor %}{{ '\n' }}</|DSML|invoke>{{ '\n' }}",
    "RESULT": "{% if messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '\n\n<function_results>' }}{% endif %}{{ '\n<result>' + m.content + '</result>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{ '\n</function_results>\n\n' }}{% endif %}",
    "PROMPT": "{% if messages[-1].role != 'tool' %}<|Assistant|>{% endif %}<think>",
}
TEMPLATES: dict[str, dict[str, str]] = {
    "mistral": MISTRAL
    | {
        "CALL": "{% if c.id | length != 9 %}{{ raise_exception('an id has 9 letters') }}{% endif %}"
        "{{ '[TOOL_CALLS] [' if loop.first else ', ' }}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
        '"id": "{{ c.id }}"}{% if loop.last %}]{% endif %}'
    },
    "mistral_args": MISTRAL
    | {"CALL": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"},
    "mistral_call_id": MISTRAL
    | {
        "CALL": "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
        "{{ c.function.arguments | tojson }}"
    },
    "deepseek_v3": DEEPSEEK
    | {
        "CALL": "{{ '' if loop.first else '\\n' }}<|tool_call_begin|>function<|tool_sep|>"
        "{{ c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```' }}"
        "<|tool_call_end|>",
        "CLOSE": "{% if m.reasoning_content %}</think>{% endif %}",
    },
    "deepseek_v31": DEEPSEEK
    | {
        "CALL": "<|tool_call_begin|>{{ c.function.name }}<|tool_sep|>"
        "{{ c.function.arguments + '' }}<|tool_call_end|>",
        "CLOSE": "</think>",
        "PROMPT": "<|Assistant|><think>",
    },
    "deepseek_v32": DSML,
    "kimi_k2": KIMI,
    "cohere": COHERE
    | {
        "CALL": '{{ \'\\n    {"tool_call_id": "\' }}{{ loop.index0 }}", "tool_name": "'
        '{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
        "{{ '\\n' if loop.last else ',' }}"
    },
}
CONTROL = re.compile(r"<[^<>\s%]+>|\[/?[A-Z_]+\]")


def write_deepseek_tokens(text: str) -> str:
    """Return ``text`` with the characters of DeepSeek's control tokens."""
    return re.sub(
        r"(?<=[</])\|(\w+)\|", lambda match: f"\uff5c{match[1]}\uff5c".replace("_", "\u2581"), text
    )


@cache
def tool_tokenizer(name: str) -> Any:
    """Return a tiny tokenizer with the template ``name`` and its control tokens."""
    template = SKELETON
    for part, text in TEMPLATES[name].items():
        template = template.replace(f"@{part}@", text)
    if name.startswith("deepseek"):
        template = write_deepseek_tokens(template)
    tokenizer = make_tiny_tokenizer()
    control = {*CONTROL.findall(template), "[THINK]", "[/THINK]"} - {"<think>", "</think>"}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(control)})
    tokenizer.chat_template = template
    return tokenizer
