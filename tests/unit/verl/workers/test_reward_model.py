"""Tests that the score of a conversation is that of its last token in any batch."""

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
from tests.helpers.trainer_fakes import Group, make_trainer_rows
from verl.config.schema.critic import RewardModelConfig
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.credit import CombinedRewards, broadcast_trajectory_scores
from verl.workers.reward_model import RewardModelWorker, last_token_scores

KINDS = {
    "llama": (LlamaConfig, LlamaForSequenceClassification),
    "qwen2": (Qwen2Config, Qwen2ForSequenceClassification),
}


def make_conversation(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]


CONVERSATIONS = [
    make_conversation("2 + 2?", "four"),
    make_conversation("what is the capital of France, and why is it not Lyon?", "It is Paris"),
    make_conversation("a?", "b", "c?", "d"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def save_model(tmp_path, tokenizer):
    """Return a function that saves a tiny random model and returns its directory."""

    def make(kind="qwen2", cls=None, **config_values):
        torch.manual_seed(0)
        config_cls, model_cls = KINDS[kind]
        config = config_cls(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_labels=1,
            pad_token_id=tokenizer.eos_token_id,
            **config_values,
        )
        directory = tmp_path / kind
        (cls or model_cls)(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return str(directory)

    return make


def make_section(path, **fields):
    return RewardModelConfig(enable=True, dtype="float32").model_copy(
        update={"model": RewardModelConfig().model.model_copy(update={"path": path}), **fields}
    )


def make_worker(path, **fields):
    worker = RewardModelWorker(make_section(path, **fields), device="cpu")
    worker.init_model()
    return worker


def score_by_plain_forward(path, tokenizer, conversations):
    """Score each conversation alone and without padding, with the head on its last hidden state."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    scores = []
    for messages in conversations:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state
            scores.append(model.score(hidden[0, -1]).item())
    return scores


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_scores_equal_a_plain_forward_in_any_batch(save_model, tokenizer, kind, size):
    path = save_model(kind)
    data = DataProto.from_dict(non_tensors={"messages": object_array(CONVERSATIONS)})
    scores = make_worker(path, micro_batch_size_per_gpu=size).compute_rm_score(data)
    expected = score_by_plain_forward(path, tokenizer, CONVERSATIONS)
    assert scores.batch["rm_scores"].tolist() == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in expected}) == len(CONVERSATIONS)


def test_row_that_ends_with_the_padding_token_is_read_to_its_end(save_model):
    """transformers alone would score the position before the trailing end-of-turn tokens."""
    model = make_worker(save_model())._model
    end = model.config.pad_token_id
    rows = [[5, 6, end, end], [5, 6], [7]]
    scores = last_token_scores(model, rows)
    for row, score in zip(rows, scores, strict=True):
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([row])).last_hidden_state
            assert score.item() == pytest.approx(model.score(hidden[0, -1]).item(), abs=1e-5)
    assert model.config.pad_token_id == end


def test_rows_without_a_conversation_have_no_score(save_model):
    data = DataProto.from_dict(non_tensors={"messages": object_array([[], CONVERSATIONS[0], []])})
    scores = make_worker(save_model()).compute_rm_score(data).batch["rm_scores"]
    assert scores.isnan().tolist() == [True, False, True]


def test_end_of_a_long_conversation_is_scored(save_model, tokenizer):
    truncating = make_worker(save_model(), max_length=4)
    whole = make_worker(save_model())._encode_truncated(CONVERSATIONS[1])
    assert truncating._encode_truncated(CONVERSATIONS[1]) == whole[-4:] and len(whole) > 4


def test_model_without_a_single_trained_output_is_refused(save_model):
    with pytest.raises(ValueError, check=mentions("score.weight")):
        make_worker(save_model("llama", cls=LlamaForCausalLM))
    with pytest.raises(FileNotFoundError, check=mentions("/nowhere/at/all")):
        make_worker("/nowhere/at/all")


def test_hub_name_with_commit_is_loaded_from_the_cache(save_model, monkeypatch):
    """``verl.models.hub.pinned`` gives every worker a name of this form."""
    requests = []

    def snapshot(name, revision, allow_patterns):
        requests.append((name, revision))
        return save_model()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    data = DataProto.from_dict(non_tensors={"messages": object_array(CONVERSATIONS)})
    scores = make_worker("owner/judge@0123abc").compute_rm_score(data).batch["rm_scores"]
    assert requests == [("owner/judge", "0123abc")] and not scores.isnan().any()


class ScoreGroup(Group):
    """Worker group that returns fixed scores."""

    def __init__(self, scores):
        super().__init__([], "judge")
        self.scores = scores
        self.columns = []

    def compute_rm_score(self, data):
        self.columns = [*data.tensor_keys(), *data.non_tensor_batch]
        return DataProto.from_dict({"rm_scores": torch.tensor(self.scores)})


class FirstTokenReward:
    """Rewards the first row at its first token."""

    def __call__(self, data):
        scores = torch.zeros(len(data), 3)
        scores[0, 0] = 1.0
        return scores

    def step_rewards(self, data):
        return object_array([[1.0], *[[]] * (len(data) - 1)])


def test_model_score_is_added_to_the_rule_reward():
    batch = make_trainer_rows()
    nan = float("nan")
    batch.non_tensor_batch["messages"] = object_array([[], CONVERSATIONS[0], [], CONVERSATIONS[1]])
    group = ScoreGroup([nan, 2.0, nan, -1.0])
    rewards = CombinedRewards(
        FirstTokenReward(), group, make_section("x", weight=0.5, rule_weight=3.0)
    )
    scores = rewards(batch)
    assert group.columns == ["messages"]
    assert scores.sum(-1).tolist() == [4.0, 1.0, -0.5, -0.5]
    assert scores[0].tolist() == [3.0, 0.0, 1.0] and scores[1].tolist() == [1.0, 0.0, 0.0]
    assert list(rewards.step_rewards(batch)) == [[3.0], [], [], []]
    model_parts = [parts["model"] for parts in batch.non_tensor_batch["reward_parts"]]
    assert model_parts == [2.0, 2.0, -1.0, -1.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_score_is_refused(value):
    trajectories = np.array(["a", "b"], dtype=object)
    with pytest.raises(ValueError, check=mentions("trajectory b")):
        broadcast_trajectory_scores(torch.tensor([1.0, value]), trajectories)
