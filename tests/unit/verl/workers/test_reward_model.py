"""The reward model's score is that of a conversation's last token, whatever stands beside it."""

import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_tokenizer
from tests.helpers.trainer_fakes import Group, played_rows
from verl.config.schema.critic import RewardModelConfig
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.credit import ModelRewards, broadcast_outcomes
from verl.workers.reward_model import RewardModelWorker, last_token_scores

KINDS = {
    "llama": (LlamaConfig, LlamaForSequenceClassification),
    "qwen2": (Qwen2Config, Qwen2ForSequenceClassification),
}


def talk(*words):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": word} for n, word in enumerate(words)]


TALKS = [
    talk("2 + 2?", "four"),
    talk("what is the capital of France, and why is it not Lyon?", "It is Paris"),
    talk("a?", "b", "c?", "d"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def saved(tmp_path, tokenizer):
    """A tiny random model of ``kind`` with ``labels``, as a directory."""

    def make(kind="qwen2", labels=1, cls=None, **more):
        torch.manual_seed(0)
        config_cls, model_cls = KINDS[kind]
        config = config_cls(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_labels=labels,
            pad_token_id=tokenizer.eos_token_id,
            **more,
        )
        directory = tmp_path / f"{kind}{labels}"
        (cls or model_cls)(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return str(directory)

    return make


def section(path, **fields):
    return RewardModelConfig(enable=True, dtype="float32").model_copy(
        update={"model": RewardModelConfig().model.model_copy(update={"path": path}), **fields}
    )


def worker(path, **fields):
    made = RewardModelWorker(section(path, **fields), device="cpu")
    made.init_model()
    return made


def plain_forward(path, tokenizer, talks):
    """The head on the last hidden state of every conversation, one by one and without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    scores = []
    for messages in talks:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state
            scores.append(model.score(hidden[0, -1]).item())
    return scores


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_scores_are_those_of_a_plain_forward_in_any_batch(saved, tokenizer, kind, size):
    path = saved(kind)
    data = DataProto.from_dict(non_tensors={"messages": object_array(TALKS)})
    scores = worker(path, micro_batch_size_per_gpu=size).compute_rm_score(data)
    expected = plain_forward(path, tokenizer, TALKS)
    assert scores.batch["rm_scores"].tolist() == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in expected}) == len(TALKS)


def test_a_row_that_ends_with_the_padding_token_is_read_to_its_end(saved):
    """transformers alone would read the score before the trailing end-of-turn tokens."""
    model = worker(saved())._model
    end = model.config.pad_token_id
    rows = [[5, 6, end, end], [5, 6], [7]]
    found = last_token_scores(model, rows)
    for row, score in zip(rows, found, strict=True):
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([row])).last_hidden_state
            assert score.item() == pytest.approx(model.score(hidden[0, -1]).item(), abs=1e-5)
    assert model.config.pad_token_id == end


def test_rows_without_a_conversation_have_no_score(saved):
    data = DataProto.from_dict(non_tensors={"messages": object_array([[], TALKS[0], []])})
    scores = worker(saved()).compute_rm_score(data).batch["rm_scores"]
    assert scores.isnan().tolist() == [True, False, True]


def test_of_a_long_conversation_the_end_is_read(saved, tokenizer):
    made = worker(saved(), max_length=4)
    whole = worker(saved())._encode_truncated(TALKS[1])
    assert made._encode_truncated(TALKS[1]) == whole[-4:] and len(whole) > 4


def test_a_model_that_gives_no_single_learnt_number_is_refused(saved):
    with pytest.raises(ValueError, check=mentions(3)):
        worker(saved("llama", labels=3))
    with pytest.raises(ValueError, check=mentions("score.weight")):
        worker(saved("llama", cls=LlamaForCausalLM))
    with pytest.raises(FileNotFoundError, match="neither a directory"):
        worker("/nowhere/at/all")


def test_a_hub_name_with_its_commit_is_found_in_the_cache(saved, monkeypatch):
    """As ``verl.models.hub.pinned`` tells every worker."""
    asked = []

    def snapshot(name, revision, allow_patterns):
        asked.append((name, revision))
        return saved()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    data = DataProto.from_dict(non_tensors={"messages": object_array(TALKS)})
    scores = worker("owner/judge@0123abc").compute_rm_score(data).batch["rm_scores"]
    assert asked == [("owner/judge", "0123abc")] and not scores.isnan().any()


class Scorer(Group):
    """A group that gives every conversation its score."""

    def __init__(self, scores):
        super().__init__([], "judge")
        self.scores = scores
        self.columns = []

    def compute_rm_score(self, data):
        self.columns = [*data.tensor_keys(), *data.non_tensor_batch]
        return DataProto.from_dict({"rm_scores": torch.tensor(self.scores)})


class Rules:
    """The first row earned something at its first token."""

    def __call__(self, data):
        scores = torch.zeros(len(data), 3)
        scores[0, 0] = 1.0
        return scores

    def step_rewards(self, data):
        return object_array([[1.0], *[[]] * (len(data) - 1)])


def test_every_row_gets_the_score_of_its_trajectory_beside_the_rule():
    batch = played_rows()
    nothing = float("nan")
    batch.non_tensor_batch["messages"] = object_array([[], TALKS[0], [], TALKS[1]])
    group = Scorer([nothing, 2.0, nothing, -1.0])
    rewards = ModelRewards(Rules(), group, section("x", weight=0.5, rule_weight=3.0))
    scores = rewards(batch)
    assert group.columns == ["messages"]
    assert scores.sum(-1).tolist() == [4.0, 1.0, -0.5, -0.5]
    assert scores[0].tolist() == [3.0, 0.0, 1.0] and scores[1].tolist() == [1.0, 0.0, 0.0]
    assert list(rewards.step_rewards(batch)) == [[3.0], [], [], []]
    named = [parts["model"] for parts in batch.non_tensor_batch["reward_parts"]]
    assert named == [2.0, 2.0, -1.0, -1.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_no_zero(value):
    trajectories = np.array(["a", "b"], dtype=object)
    with pytest.raises(ValueError, check=mentions("trajectory b")):
        broadcast_outcomes(torch.tensor([1.0, value]), trajectories)
