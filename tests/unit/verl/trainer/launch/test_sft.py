"""Supervised training: encoding of rows, batches, the training loop, and the saved policy."""

import json
import math
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_system.tokens.bridge import ChatBridge
from tests.helpers.chat_tokenizers import chat_tokenizer
from tests.helpers.refusals import has_problem, mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.load import default_config, load_config
from verl.config.schema import SFTConfig
from verl.config.schema.model import OptimConfig
from verl.config.settings import ConfigError
from verl.models.loader import load_causal_lm
from verl.models.policy import PolicyModel
from verl.trainer.launch import sft
from verl.trainer.launch.sft import (
    check_expert,
    encode_episode,
    load_records,
    make_rows,
    prepare_initial_policy,
    run_sft,
    split_held_out,
)
from verl.trainer.launch.sft_ranks import SFTProgress
from verl.trainer.sft.rows import SFTRow, plan_batches
from verl.trainer.sft.trainer import OptimizerStepResult, SFTTrainer
from verl.utils.checkpoint import CheckpointManager
from verl.utils.progress import count_heartbeats
from verl.utils.tables import read_rows
from verl.utils.watchdog import Stalled
from verl.workers.engine import NonFiniteWeightsError, TrainEngine
from verl.workers.engine_state import gather_full_weights

EPISODE = [
    {"role": "user", "content": "You are in the room. On the table you see a mug."},
    {"role": "assistant", "content": "<level>1</level><think></think><action>take mug</action>"},
    {"role": "user", "content": "You take the mug."},
    {
        "role": "assistant",
        "content": "<level>2</level><think>book</think><action>go to shelf</action>",
    },
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1)


@pytest.fixture(scope="module")
def bridge(policy):
    return ChatBridge(AutoTokenizer.from_pretrained(policy))


def rows_of(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        SFTRow(
            tuple(torch.randint(3, 40, (n,), generator=g).tolist()),
            tuple([0.0] + [1.0, 0.5] * n)[:n],
        )
        for n in lengths
    ]


def trainer_of(policy, rows, batches, **options):
    optim = OptimConfig(lr=1e-2, warmup_style="cosine", total_training_steps=len(batches))
    return SFTTrainer(
        TrainEngine(PolicyModel(load_causal_lm(policy)), device="cpu", optim=optim),
        rows,
        batches,
        **options,
    )


def test_episode_is_encoded_like_a_rollout(bridge):
    """Prompt, turns and bridges equal those of the ledger. The agent's text and end-of-turn tokens
    have weight 1, all others less."""
    row = encode_episode(bridge, EPISODE, 0.25, 512)
    assert row is not None
    expected = bridge.encode_first_prompt(EPISODE[:1])
    weights = []
    weights += [0.25] * len(expected)
    for reply, answer in ((EPISODE[1], EPISODE[2]), (EPISODE[3], None)):
        reply_ids = list(bridge.encode_text(reply["content"]))
        expected, weights = expected + reply_ids, weights + [1.0] * len(reply_ids)
        if answer:
            # The end of turn was not sampled, so it is in the bridge.
            link = bridge.make_inter_turn_tokens(reply_ids, answer["content"])
            expected += link.all_ids
            weights += [1.0] + [0.25] * (len(link.all_ids) - 1)
    assert row.input_ids == (*expected, bridge.end_of_turn_id)
    assert row.loss_weights == (*weights, 1.0)


def test_message_weights_replace_role_weights(bridge):
    plain = encode_episode(bridge, EPISODE, 0.25, 512)
    message_weights = [0.0, 0.0, 1.0, None]
    weighted = [
        m if w is None else {**m, "weight": w}
        for m, w in zip(EPISODE, message_weights, strict=True)
    ]
    row = encode_episode(bridge, weighted, 0.25, 512)
    assert plain is not None and row is not None and row.input_ids == plain.input_ids
    first_reply = len(bridge.encode_text(EPISODE[1]["content"])) + 1  # with its end of turn
    start = len(bridge.encode_first_prompt(EPISODE[:1]))
    last_reply = len(bridge.encode_text(EPISODE[3]["content"])) + 1
    answer = len(row) - start - first_reply - last_reply
    expected = [0.0] * (start + first_reply) + [1.0] * (answer + last_reply)
    assert list(row.loss_weights) == expected
    # No token to train on is left.
    assert encode_episode(bridge, weighted, 0.25, start + first_reply) is None


def test_long_episode_is_truncated_after_a_whole_turn(bridge):
    whole = encode_episode(bridge, EPISODE, 0.5, 512)
    assert whole is not None
    truncated = encode_episode(bridge, EPISODE, 0.5, len(whole) - 1)
    assert truncated is not None
    assert truncated.input_ids == whole.input_ids[: len(truncated)]
    assert len(truncated) < len(whole) and truncated.input_ids[-1] == bridge.end_of_turn_id
    assert bridge.tokenizer.decode(truncated.input_ids).endswith("take mug</action><|im_end|>")
    assert encode_episode(bridge, EPISODE, 0.5, 10) is None


TALK = [
    {"role": "system", "content": "Rules:\n- be brief\n"},
    {"role": "user", "content": "You see a desk."},
    {"role": "assistant", "content": "go north"},
    {"role": "user", "content": " Nothing happens.\n"},
    {"role": "assistant", "content": "look"},
]


@pytest.mark.parametrize("template", ["chatml", "bos", "system in the first", "trims", "parts"])
@pytest.mark.parametrize("kind", ["bytes", "first", "always", "unigram", "llama", "llama, legacy"])
def test_rows_have_the_tokens_of_the_template(kind, template):
    """Training tokens equal the tokens of the rendered conversation."""
    tokenizer = chat_tokenizer(kind, template)
    bridge = ChatBridge(tokenizer)
    row = encode_episode(bridge, TALK, 0.0, 4096)
    assert row is not None
    text = bridge.template.render(TALK, add_generation_prompt=False)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(row.input_ids) == whole[: len(row)]
    assert row.input_ids[-1] == bridge.end_of_turn_id and len(whole) - len(row) < 3
    pairs = zip(row.input_ids, row.loss_weights, strict=True)
    trained_text = tokenizer.decode([token for token, weight in pairs if weight == 1])
    end = tokenizer.decode([bridge.end_of_turn_id])
    assert [part.strip() for part in trained_text.split(end)] == ["go north", "look", ""]


@pytest.mark.parametrize(
    "template, messages",
    [
        ("no generation prompt", TALK[:3]),
        ("another generation prompt", TALK[:3]),
        ("opens a thought", TALK[:3]),
        ("system in the last", TALK),
    ],
)
def test_episode_that_no_prompt_can_produce_is_refused(template, messages):
    cfg = load_config("sft_trainer", [], SFTConfig)
    with pytest.raises(ConfigError):
        make_rows(cfg, [{"messages": messages}], chat_tokenizer("bytes", template))


def test_batches_have_about_the_requested_tokens():
    lengths = [7 + (13 * i) % 50 for i in range(200)]
    plan = plan_batches(lengths, 256, epochs=2, total_steps=None, seed=0)
    sizes = [sum(lengths[row] for row in batch) for batch in plan]
    assert sorted(row for batch in plan for row in batch) == sorted([*range(200)] * 2)
    assert 240 < sum(sizes[:-1]) / (len(sizes) - 1) < 272 and max(sizes) < 256 + 57 / 2 + 1
    assert plan == plan_batches(lengths, 256, 2, None, 0) != plan_batches(lengths, 256, 2, None, 1)
    assert (
        plan_batches(lengths, 256, 1, None, 0)
        == plan[: len(plan_batches(lengths, 256, 1, None, 0))]
    )
    assert len(plan_batches(lengths, 256, 1, total_steps=100, seed=0)) == 100
    assert plan_batches([500, 3], 256, 1, None, 0, shuffle=False) == [
        [0],
        [1],
    ]  # a long row is a batch alone


def test_loss_is_the_weighted_mean(policy):
    rows = rows_of([9, 14, 5])
    metrics = trainer_of(policy, rows, [[0, 1, 2]]).train_step([0, 1, 2])
    model, total, weight = (
        AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        0.0,
        0.0,
    )
    for row in rows:
        ids = torch.tensor(row.input_ids)
        with torch.no_grad():
            log_probs = (
                model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            )
        weights = torch.tensor(row.loss_weights[1:])
        total, weight = total - (weights * log_probs).sum(), weight + weights.sum()
    assert metrics["train/loss"] == pytest.approx(float(total / weight), abs=1e-5)


@pytest.mark.parametrize("env_weight", [0.5, 1.0, 2.0])
def test_agent_loss_is_the_mean_over_trained_tokens_of_the_agent(policy, bridge, env_weight):
    """Neither ``env_loss_weight`` nor the weights of user messages change which tokens count."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    episode = [*EPISODE[:2], {**EPISODE[2], "weight": 1.0}, {**EPISODE[3], "weight": 0.0}]
    for messages, num_trained in ((EPISODE, 2), (episode, 1)):
        row = encode_episode(bridge, messages, env_weight, 512)
        assert row is not None
        replies = [tuple(bridge.encode_turn(message["content"])) for message in messages[1::2]]
        ids = torch.tensor(row.input_ids)
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        losses = -log_probs.gather(-1, ids[1:, None])[:, 0]
        start = len(bridge.encode_first_prompt(messages[:1]))
        ends = [start + len(replies[0]), len(row)]
        spans = [(start, ends[0]), (ends[1] - len(replies[1]), ends[1])][:num_trained]
        assert [row.input_ids[a:b] for a, b in spans] == replies[:num_trained]
        agent_losses = torch.cat([losses[a - 1 : b - 1] for a, b in spans])
        metrics = trainer_of(policy, [row], [[0]]).train_step([0])
        assert metrics["train/agent_loss"] == pytest.approx(float(agent_losses.mean()), abs=1e-5)


def test_weight_of_a_first_token_has_no_effect(policy):
    """No token predicts it, so neither the loss nor the gradient norm counts its weight."""
    measured = []
    for first in (0.0, 5.0):
        rows = [
            replace(row, loss_weights=(first, *row.loss_weights[1:])) for row in rows_of([9, 5])
        ]
        trainer = trainer_of(policy, rows, [[0, 1]])
        metrics = trainer.train_step([0, 1])
        measured.append((metrics["train/loss"], metrics["train/grad_norm"]))
    assert measured[0] == pytest.approx(measured[1], rel=1e-6)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    total = torch.zeros(())
    for row in rows_of([9, 5]):
        ids, weights = torch.tensor(row.input_ids), torch.tensor(row.loss_weights[1:])
        logs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        total = total - (weights * logs).sum()
    weight = sum(sum(row.loss_weights[1:]) for row in rows_of([9, 5]))
    (total / weight).backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    assert measured[0][1] == pytest.approx(norm**0.5, rel=1e-4)


def test_micro_batches_do_not_change_a_step(policy):
    rows, measured = rows_of([9, 14, 5, 20, 11]), []
    for max_tokens in (1000, 20):
        trainer = trainer_of(policy, rows, [[0, 1, 2, 3, 4]], max_tokens=max_tokens)
        metrics = trainer.train_step([0, 1, 2, 3, 4])
        measured.append((metrics["train/loss"], metrics["train/grad_norm"]))
    assert measured[0] == pytest.approx(measured[1], rel=1e-5)


def test_training_lowers_the_held_out_loss(policy):
    """Rows count upwards, so the next token can be predicted."""
    rows = [SFTRow(tuple(range(start, start + 20)), (1.0,) * 20) for start in range(10, 60)]
    records = []
    batches = plan_batches([20] * 40, 100, epochs=6, total_steps=None, seed=0)
    train = [row for i, row in enumerate(rows) if i % 5]
    trainer_of(policy, train, batches, val_rows=rows[::5], test_freq=10).fit(records.append)
    losses = {r.step: r.metrics["val/loss"] for r in records if "val/loss" in r.metrics}
    assert list(losses) == [0, 10, 20, 30, 40, len(batches)] and records[-1].is_last
    assert losses[len(batches)] < 0.5 * losses[0]


def test_resumed_training_equals_uninterrupted_training(policy, tmp_path):
    rows = rows_of([10] * 12)
    batches = plan_batches([10] * 12, 20, epochs=1, total_steps=None, seed=0)
    checkpoints = CheckpointManager(tmp_path)
    whole = trainer_of(policy, rows, batches, save_freq=4, checkpoints=checkpoints)
    whole.fit(lambda _: None)
    assert sorted(checkpoints.find_checkpoints()) == [4, 6]
    rest = trainer_of(policy, rows, batches)
    rest.resume(checkpoints.find_checkpoints()[4])
    steps = []
    rest.fit(lambda record: steps.append(record.step))
    assert steps == [5, 6]
    expected = gather_full_weights(whole.engine)
    for name, tensor in gather_full_weights(rest.engine).items():
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0)


def test_step_of_a_checkpoint_is_reported_before_the_checkpoint_exists(policy, tmp_path):
    """A run that is killed after the checkpoint and then resumed does not repeat the step."""
    checkpoints = CheckpointManager(tmp_path)
    rows, batches = rows_of([10] * 2), [[0], [1]]
    trainer = trainer_of(policy, rows, batches, save_freq=1, checkpoints=checkpoints)
    saved_steps_by_step = {}
    trainer.fit(lambda record: saved_steps_by_step.update({record.step: list_saved(checkpoints)}))
    assert saved_steps_by_step == {0: [], 1: [], 2: [1]}
    assert list_saved(checkpoints) == [1, 2]


def list_saved(checkpoints: CheckpointManager) -> list[int]:
    return sorted(checkpoints.find_checkpoints())


def test_held_out_episodes_share_no_task_with_training():
    records = [{"task_id": str(i // 3)} for i in range(10)]
    train, held_out = split_held_out(records, 2)
    assert len(held_out) == 2 and len(train) == 6
    assert not {r["task_id"] for r in train} & {r["task_id"] for r in held_out}


def test_invalid_rows_and_files_are_refused(tmp_path):
    for ids, weights in (((1, 2, 3), (1.0,)), ((1,), (1.0,)), ((1, 2), (1.0, 0.0))):
        with pytest.raises(ValueError):
            SFTRow(ids, weights)
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a"')
    with pytest.raises(ValueError, check=mentions("rows.jsonl, line 2")):
        list(read_rows(tmp_path / "rows.jsonl"))
    with pytest.raises(ValueError, check=mentions("csv")):
        list(read_rows(tmp_path / "rows.csv"))


@pytest.mark.parametrize("new", [True, False])
def test_run_sft_creates_a_policy_from_files(policy, tmp_path, new):
    """Train from messages (new policy and tokenizer) and from token ids (given policy), and load
    the saved directory."""
    cfg = default_config(SFTConfig)
    cfg.env.env_name = "alfworld"
    cfg.trainer.default_local_dir, cfg.model.save_path = (
        str(tmp_path / "run"),
        str(tmp_path / "made" / "policy"),
    )
    cfg.trainer.total_training_steps, cfg.trainer.device, cfg.trainer.num_threads = 6, "cpu", 1
    cfg.optim.lr, cfg.data.tokens_per_batch, cfg.model.path = (
        1e-2,
        200,
        None if new else str(policy),
    )
    cfg.model.new.hidden_size, cfg.model.new.num_hidden_layers, cfg.model.new.intermediate_size = (
        32,
        1,
        64,
    )
    record = (
        {"messages": EPISODE} if new else {"input_ids": [*range(5, 60)], "loss_weights": [1.0] * 55}
    )
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(record)}\n" * 8)
    cfg.data.train_files, cfg.data.val_files = (
        [str(tmp_path / "train.jsonl")],
        [str(tmp_path / "val.jsonl")],
    )
    made = run_sft(cfg)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(made),
        AutoTokenizer.from_pretrained(made),
    )
    assert len(tokenizer) <= model.config.vocab_size
    metrics = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [m["step"] for m in metrics] == list(range(7))
    before, after = metrics[0]["val/loss"], metrics[-1]["val/loss"]
    assert after < before
    (row,) = make_rows(cfg, [record], tokenizer)
    ids = torch.tensor(row.input_ids)
    with torch.no_grad():
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    weights = torch.tensor(row.loss_weights[1:])
    assert float(-(weights * log_probs).sum() / weights.sum()) == pytest.approx(after, abs=1e-4)


def test_resumed_run_continues_schedule_and_token_count(policy, tmp_path):
    """The cosine of ``optim.total_training_steps`` steps continues, as does the sum of tokens."""
    cfg = default_config(SFTConfig)
    cfg.env.env_name, cfg.model.path = "alfworld", str(policy)
    cfg.trainer.default_local_dir = str(tmp_path / "run")
    cfg.model.save_path = str(tmp_path / "policy")
    cfg.trainer.device, cfg.trainer.num_threads, cfg.trainer.save_freq = "cpu", 1, 2
    cfg.optim.lr, cfg.optim.total_training_steps, cfg.data.tokens_per_batch = 1e-2, 12, 60
    record = {"input_ids": [*range(5, 35)], "loss_weights": [1.0] * 30}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(record)}\n" * 8)
    cfg.data.train_files = [str(tmp_path / "train.jsonl")]
    for steps in (2, 3):
        cfg.trainer.total_training_steps = steps
        run_sft(cfg)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines][1:]  # without the line before the first step
    assert [m["perf/total_num_tokens"] for m in metrics] == [60.0, 120.0, 180.0]
    # No step of warm-up: 5% of 12, rounded down.
    rates = [1e-2 * (1 + math.cos(math.pi * step / 11)) / 2 for step in range(3)]
    assert [m["train/lr"] for m in metrics] == pytest.approx(rates)


def test_stalled_supervised_run_is_ended(tmp_path, monkeypatch):
    cfg = SFTConfig()
    cfg.trainer.default_local_dir = str(tmp_path)
    cfg.trainer.stall_timeout_s = 0.1
    monkeypatch.setattr(sft, "load_records", lambda _: threading.Event().wait(60))
    with pytest.raises(Stalled, check=mentions("episodes")):
        run_sft(cfg)
    assert list((tmp_path / "logs").glob("stacks-*.txt"))


def test_steps_are_heartbeats_without_a_logger(tmp_path):
    cfg = SFTConfig()
    cfg.trainer.logger = []
    before = count_heartbeats()
    with SFTProgress(cfg, tmp_path, total_steps=2) as progress:
        for step in (1, 2):
            progress.on_step(OptimizerStepResult(step, {"train/loss": 1.0}, is_last=step == 2))
    assert count_heartbeats() == before + 2


def number_line_config(tmp_path, *overrides):
    """Return a config with few demonstrations of the number line, written below ``tmp_path``."""
    return load_config(
        "sft_trainer",
        [
            "env.env_name=number_line",
            "env.max_steps=12",
            "data.episodes=30",
            "data.val_episodes=6",
            "data.num_workers=1",
            f"data.data_dir={tmp_path}",
            *overrides,
        ],
        SFTConfig,
    )


def test_demonstrations_come_from_the_expert_of_the_environment(tmp_path):
    train, held_out = load_records(number_line_config(tmp_path))
    assert len(held_out) == 6 and 12 <= len(train) <= 30
    assert not {r["task_id"] for r in train} & {r["task_id"] for r in held_out}
    assert {level for record in train for level in record["levels"]} == {1, 2, 3, 4}


@pytest.mark.parametrize(("levels", "drawn"), [("[1,4]", {1, 4}), ("[]", {None})])
def test_demonstrations_have_the_requested_levels(tmp_path, levels, drawn):
    train, _ = load_records(number_line_config(tmp_path, f"data.levels={levels}"))
    assert {level for record in train for level in record["levels"]} == drawn
    reply = train[0]["messages"][-1]["content"]
    assert reply.startswith("<level>") == bool(drawn - {None})


def test_environment_without_expert_is_refused_with_alternatives(tmp_path):
    cfg = number_line_config(tmp_path, "env.env_name=shop")
    alternatives = ("number_line", "data.train_files")
    expected = has_problem("unknown_name", "env.env_name", "'shop'", *alternatives)
    with pytest.raises(ConfigError, check=expected):
        check_expert(cfg)


def test_needed_levels_require_an_expert_that_knows_them(tmp_path):
    cfg = number_line_config(tmp_path, "data.needed_level_share=0.5")
    expected = has_problem("out_of_range", "data.needed_level_share", "'number_line'")
    with pytest.raises(ConfigError, check=expected):
        check_expert(cfg)
    check_expert(number_line_config(tmp_path, "env.env_name=relay", "data.needed_level_share=0.5"))


def test_window_history_makes_a_row_per_turn(tmp_path):
    episodes, _ = load_records(number_line_config(tmp_path, "data.val_episodes=0"))
    overrides = ["data.val_episodes=0", "data.history=window", "env.history_length=1"]
    turns, _ = load_records(number_line_config(tmp_path, *overrides))
    assert len(turns) == sum(len(episode["levels"]) for episode in episodes)
    assert all(
        [m["role"] for m in turn["messages"]][-2:] == ["user", "assistant"] for turn in turns
    )
    first = episodes[0]
    first_turns = turns[: len(first["levels"])]
    assert [turn["levels"] for turn in first_turns] == [[level] for level in first["levels"]]
    # The replies are the same. Each prompt shows the turn before, without its thought.
    replies = [m["content"] for m in first["messages"] if m["role"] == "assistant"]
    assert [turn["messages"][-1]["content"] for turn in first_turns] == replies
    action = re.findall(r"<action>(.*)</action>", replies[0])[0]
    assert action in first_turns[1]["messages"][-2]["content"]
    assert "<think>" not in first_turns[1]["messages"][-2]["content"]


def test_environment_symbols_are_single_tokens_of_a_new_policy(tmp_path):
    cfg = number_line_config(
        tmp_path, "env.env_name=relay", "model.new.hidden_size=8", "model.new.head_dim=8"
    )
    tokenizer = AutoTokenizer.from_pretrained(prepare_initial_policy(cfg, [], tmp_path / "policy"))
    ids = tokenizer.encode("d+3 a>b j>c", add_special_tokens=False)
    assert [tokenizer.decode([one]) for one in ids] == ["d", "+3", " a>b", " j>c"]


def test_policy_with_infinite_weights_is_not_saved(policy, tmp_path):
    rows, batches = rows_of([9, 14]), [[0, 1]] * 4
    checkpoints = CheckpointManager(tmp_path, max_to_keep=1)
    trainer = trainer_of(policy, rows, batches, save_freq=1, checkpoints=checkpoints)
    steps = []

    def on_step(record):
        steps.append(record.step)
        if record.step == 2:
            optim: Any = trainer.engine.optim
            optim.lr = torch.inf  # the config refuses an infinite value

    with pytest.raises(NonFiniteWeightsError):
        trainer.fit(on_step)
    assert steps == [0, 1, 2] and list(checkpoints.find_checkpoints()) == [2]
