"""Mistakes that ``main_sft`` refuses before it creates files: one error form, status 2, no
traceback."""

import json

import pytest

from tests.helpers.refusals import missing_parts
from tests.helpers.tiny_model import make_tiny_policy
from verl.trainer import main_sft

OVERRIDES = "model.override_config"
EPISODE = [
    {"role": "user", "content": "You see a mug."},
    {"role": "assistant", "content": "take mug"},
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1)


def sft_arguments(policy, tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={policy}",
        f"data.train_files=[{path}]",
        f"model.save_path={tmp_path}/made",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.device=cpu",
        "--check",
    ]


@pytest.mark.parametrize(
    "rows, extra, key",
    [
        ([{"messages": EPISODE}, {"text": "a"}], [], "data.train_files="),
        ([{"messages": EPISODE[:1]}], [], "data.train_files="),
        ([{"messages": EPISODE, "tools": [{"name": "f"}]}], [], "data.train_files="),
        ([{"input_ids": [1, 2]}], [], "data.train_files="),
        ([{"input_ids": [1, 300000], "loss_weights": [1, 1]}], [], "data.train_files="),
        ([{"input_ids": [1, -2], "loss_weights": [1, 1]}], [], "data.train_files="),
        ([{"input_ids": [1.5, 2], "loss_weights": [1, 1]}], [], "data.train_files="),
        ([{"input_ids": [1, 2], "loss_weights": [1]}], [], "data.train_files="),
        ([{"input_ids": [1, 2], "loss_weights": [1, 0]}], [], "data.train_files="),
        ([{"input_ids": [1, 2], "loss_weights": [0, float("nan")]}], [], "data.train_files="),
        (
            [{"input_ids": [1, 2], "loss_weights": [1, 1], "labels": [1, -100]}],
            [],
            "data.train_files=",
        ),
        (
            [{"input_ids": [1, 2], "loss_weights": [1, 1], "attention_mask": [0, 1]}],
            [],
            "data.train_files=",
        ),
        ([], [], "data.train_files="),
        ([{"messages": EPISODE}], ["data.max_length=3"], "data.max_length="),
        ([{"messages": EPISODE}], ["model.save_path=/proc/made"], "model.save_path="),
        ([{"messages": EPISODE}], ["model.save_path="], "model.save_path="),
        ([{"messages": EPISODE}], [f"model.save_path=/tmp/{'x' * 300}"], "model.save_path="),
        ([{"messages": EPISODE}], ["model.path=nobody/nothing"], "model.path="),
        ([{"messages": EPISODE}], ["model.tokenizer_path=/nowhere"], "model.tokenizer_path="),
        ([{"messages": EPISODE}], ["model.path=null", "model.new.head_dim=3"], "model.new.head"),
        ([{"messages": EPISODE}], ["trainer.nnodes=2"], "trainer.nnodes="),
        ([{"messages": EPISODE}], ["optim.betas=[2,3]"], "optim.betas="),
        ([{"messages": EPISODE}], ["model.override_config={hidden_size: 7}"], "model.path="),
        (
            [{"messages": EPISODE}],
            ["model.override_config={hidden_size: x}"],
            f"{OVERRIDES}.hidden_size=",
        ),
        ([{"messages": EPISODE}], ["model.override_config={nope: 7}"], f"{OVERRIDES}.nope="),
        ([{"messages": EPISODE}], ["optim.lr_warmup_steps=-5"], "optim.lr_warmup_steps="),
        ([{"messages": EPISODE}], ["trainer.seed=99999999999999999999"], "trainer.seed="),
        ([{"messages": EPISODE}], ["data.val_files=[/nowhere.jsonl]"], "data.val_files="),
    ],
)
def test_mistakes_are_refused_before_the_run_directory_is_created(
    policy, tmp_path, capsys, rows, extra, key
):
    assert main_sft.main([*sft_arguments(policy, tmp_path, *rows), *extra]) == 2
    assert f"  - {key}" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_check_of_valid_rows_creates_nothing(policy, tmp_path):
    tokens = {"input_ids": [5, 6], "loss_weights": [0.0, 1.0], "attention_mask": [1, 1]}
    rows = ({"messages": EPISODE}, {"messages": json.dumps(EPISODE)}, tokens)
    assert main_sft.main(sft_arguments(policy, tmp_path, *rows)) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ["packed", "sdpa"]),
        (["model.path=null", "model.new.architecture=qwen3_5"], ["row by row", "linear_attention"]),
    ],
)
def test_plan_names_the_path_of_the_forward_passes(policy, tmp_path, capsys, overrides, expected):
    arguments = sft_arguments(policy, tmp_path, {"messages": EPISODE})
    assert main_sft.main([*arguments, *overrides]) == 0
    plan = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines()[1:-1])
    assert not missing_parts(plan["forward passes"], *expected)
    assert plan["prefix tree"].strip().startswith("off: ")


def test_check_refuses_a_directory_with_user_files(policy, tmp_path, capsys):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "notes.txt").write_text("of the user")
    arguments = sft_arguments(policy, tmp_path, {"messages": EPISODE})
    assert main_sft.main(arguments) == 2
    assert "  - model.save_path=" in capsys.readouterr().err
    assert main_sft.main([*arguments, "model.overwrite=true"]) == 0
    assert (tmp_path / "made" / "notes.txt").exists()
