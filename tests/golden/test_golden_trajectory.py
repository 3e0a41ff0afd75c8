"""Golden trajectory: every tensor and column of its rows, for both history policies, with thinking
advantages.

``python -m tests.golden.test_golden_trajectory`` rewrites the expected rows; read the difference
before committing it.
"""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from rlvcr.settings import get_rlvcr_settings
from tests.helpers.number_line_world import Group, make_config
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import CHAT_TEMPLATE, SPECIAL, TAGS
from verl.names import History
from verl.protocol import DataProto, object_array
from verl.record.rollout_log import format_rollout_lines
from verl.records import BranchRequest, ScoreResult, SpanRequest
from verl.utils import jsonl

EXPECTED = Path(__file__).with_name("two_doors.json")
HISTORIES = ("append", "window")
TURNS = {  # member -> its replies, turn by turn
    0: (
        "<level>2</level><think>doors</think><action>look</action>",
        "<level>1</level><think></think><action>open red</action><|im_end|>",
    ),
    1: (
        "<action>jump</action>",
        "<level>4</level><think>I wonder, and wonder, and wonder, and wonder",
    ),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, plus tags and control tokens. It needs no
    training.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    raw.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class ScriptedMembers:
    """The first member follows ``TURNS[0]``, the other one ``TURNS[1]``. Thoughts name their
    level.
    """

    def __init__(self) -> None:
        self.num_replies = {0: 0, 1: 0}
        self.num_calls = 0

    def __call__(self, request: object, prompt: str) -> str:
        del request
        if prompt.endswith("<think>"):
            return f"thought {prompt[-16]}</think>"
        member = 1 if "jump" in prompt or (self.num_calls and "look" not in prompt) else 0
        self.num_calls += 1
        reply = TURNS[member][self.num_replies[member]]
        self.num_replies[member] += 1
        return reply


def frozen_scores(data: DataProto) -> DataProto:
    """Return scores that depend only on level and length, as exact binary fractions."""

    def score(query: BranchRequest | SpanRequest) -> ScoreResult:
        level = query.label
        return ScoreResult(
            step=query.step,
            label=level,
            logprob=-level / 4,
            entropy=(level * level) / 8,
            mean_prob=1 / (1 << level),
            geometric_prob=0.5,
            num_tokens=query.num_targets,
        )

    branches, spans = data.non_tensor_batch["branches"], data.non_tensor_batch["spans"]
    mask = data.batch["response_mask"].float()
    columns = {
        "branch_scores": [[score(branch) for branch in row] for row in branches],
        "span_scores": [[score(span) for span in row] for row in spans],
    }
    return DataProto.from_dict(
        {"old_log_probs": -0.5 * mask, "entropys": 0.25 * mask},
        {k: object_array(v) for k, v in columns.items()},
    )


def collect(history: History, tokenizer: PreTrainedTokenizerFast) -> DataProto:
    """Return the rows of the golden trajectories."""
    config = make_config(
        "tests.golden.two_doors:PACKAGE", history, n=2, levels=True, kwargs={}, max_steps=3
    )
    get_rlvcr_settings(config.algorithm).enable = True
    get_rlvcr_settings(config.algorithm).cost_coef = 0.5
    config.env.max_turn_tokens = 40
    config.data.max_response_length = 200
    engine = ScriptedEngine(tokenizer, ScriptedMembers())
    envs = make_envs(config)[0]
    collector = TrajectoryCollector(config, tokenizer)
    try:
        return collector.multi_turn_loop(envs.gen_batch(1, 1), Group([engine], frozen_scores), envs)
    finally:
        collector.close()


def make_golden_rows(history: History) -> dict:
    """Return the rows of the golden trajectories as plain data."""
    data = collect(history, byte_tokenizer())
    columns = {key: column.tolist() for key, column in sorted(data.non_tensor_batch.items())}
    columns["steps"] = [[record.to_json() for record in row] for row in columns["steps"]]
    return {
        "tensors": {key: tensor.tolist() for key, tensor in sorted(data.batch.items())},
        "columns": columns,
        "choice_token_ids": list(data.meta_info["choice"].token_ids),
    }


@pytest.mark.parametrize("history", HISTORIES)
def test_rows_equal_the_golden_rows(history):
    expected = json.loads(EXPECTED.read_text())[history]
    actual = json.loads(json.dumps(make_golden_rows(history)))
    assert actual.keys() == expected.keys()
    for part in ("tensors", "columns"):
        assert actual[part].keys() == expected[part].keys()
        for key in expected[part]:
            assert actual[part][key] == expected[part][key], key
    assert actual["choice_token_ids"] == expected["choice_token_ids"]


def test_rollout_file_has_the_keys_of_the_golden_records():
    expected = json.loads(EXPECTED.read_text())["append"]["columns"]["steps"]
    tokenizer = byte_tokenizer()
    lines = list(format_rollout_lines(collect("append", tokenizer), tokenizer))
    for line, records in zip(lines, expected, strict=True):
        for step, record in zip(line["steps"], records, strict=True):
            assert json.dumps(jsonl.to_json_types(step)) == json.dumps(record)


def render(value, depth: int = 2) -> str:
    """Return JSON with one line per entry of the outer dictionaries."""
    if depth < 0 or not isinstance(value, dict):
        return json.dumps(value)
    pad = "  " * (3 - depth)
    entries = ",\n".join(
        f"{pad}{json.dumps(key)}: {render(entry, depth - 1)}" for key, entry in value.items()
    )
    return "{\n" + entries + "\n" + pad[2:] + "}"


if __name__ == "__main__":
    EXPECTED.write_text(
        render({history: make_golden_rows(history) for history in HISTORIES}) + "\n"
    )
