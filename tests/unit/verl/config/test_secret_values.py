"""Secrets are masked, and settings with similar names are not."""

import pytest

from verl.config.settings import secret_values
from verl.config.settings.secret_values import (
    find_masked_keys,
    is_secret_name,
    mask_arguments,
    mask_secrets,
    mask_text,
    register_secrets,
)


@pytest.mark.parametrize(
    "name",
    [
        "API_KEY",
        "WANDB_API_KEY",
        "api_key",
        "apiKey",
        "HF_TOKEN",
        "token",
        "auth_token",
        "secret",
        "CLIENT_SECRET",
        "password",
        "db_password",
        "credentials",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "private_key",
        *("Authorization", "Proxy-Authorization", "bearer", "auth", "X-Auth", "x-api-key"),
        *("pwd", "DB_PASS", "GITHUB_PAT", "SENTRY_DSN", "SLACK_WEBHOOK", "cookie", "jwt", "oauth2"),
        *("signing_key", "ssh_key", "storage_key", "master_key", "connection_string"),
        *("api_keys", "access_tokens", "passwords"),
    ],
)
def test_secret_names_are_recognised(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "tokenizer_path",
        "max_tokens",
        "max_turn_tokens",
        "prompt_key",
        "reward_fn_key",
        "image_key",
        "key",
        "messages_key",
        "pad_token",
        "eos_token",
        "token_level_rewards",
        "price_per_tokens",
        "keyboard",
        *("author", "token_ids", "num_key_value_heads", "pass", "compass", "patience", "keys"),
        *("partition_key", "session_dir", "tokens", "num_tokens", "pinned"),
    ],
)
def test_other_names_are_not_secret(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "value, masked",
    [
        (
            {"env_vars": {"A": "x", "B": "${oc.env:B}"}},
            {"env_vars": {"A": "***", "B": "${oc.env:B}"}},
        ),
        ([{"command": "sh", "env": {"X": "y"}}], [{"command": "sh", "env": {"X": "***"}}]),
        (
            [{"command": "sh", "environment": {"X": "y"}}],
            [{"command": "sh", "environment": {"X": "***"}}],
        ),
        ({"a": [{"HF_TOKEN": "x"}]}, {"a": [{"HF_TOKEN": "***"}]}),
        ({"secret": {"nested": ["x"]}}, {"secret": {"nested": ["***"]}}),
        ({"headers": {"Authorization": "Bearer x"}}, {"headers": {"Authorization": "***"}}),
        ({"args": ["--token", "x", "-v"]}, {"args": ["--token", "***", "-v"]}),
        ({"args": ["--api-key=x", "y"]}, {"args": ["--api-key=***", "y"]}),
        ({"command": "run --token x -v"}, {"command": "run --token *** -v"}),
        ({"command": "run --password 'x y' -v"}, {"command": "run --password *** -v"}),
        ({"command": "run -p x -p 8080 -v"}, {"command": "run -p *** -p 8080 -v"}),
        (
            {"args": ["-p", "x", "--pass", "y", "-p", "80", "-token", "z"]},
            {"args": ["-p", "***", "--pass", "***", "-p", "80", "-token", "***"]},
        ),
        (
            {"args": ["--password=x", "y", "--token", "-v"]},
            {"args": ["--password=***", "y", "--token", "-v"]},
        ),
        ({"env": ["HF_TOKEN=x"]}, {"env": ["HF_TOKEN=***"]}),
        ({"url": "https://h/?token=x"}, {"url": "https://h/?token=***"}),
        ({"TOKEN": b"x"}, {"TOKEN": "***"}),
        ({"note": "password: hint"}, {"note": "password: hint"}),
        ({"url": "http://me:pw@host/x"}, {"url": "http://me:***@host/x"}),
        ({"prompt_key": "prompt", "max_tokens": 4}, {"prompt_key": "prompt", "max_tokens": 4}),
    ],
)
def test_secret_values_are_masked(value, masked):
    assert mask_secrets(value) == masked


def test_command_lines_are_masked():
    arguments = [
        "ray_init.runtime_env={env_vars:{A:x}}",
        "env.kwargs={api_key: x, size: 3}",
        "a.b=c",
        *("--password", "x y", "-p", "x", "--verbose", "y", "-p", "8080"),
        "env.kwargs={args: [--password, x, '-p', 'x y', -v, 2]}",
        "a.b=--token x",
    ]
    assert mask_arguments(arguments) == [
        *("ray_init.runtime_env=***", "env.kwargs={api_key: ***, size: 3}", "a.b=c"),
        *("--password", "***", "-p", "***", "--verbose", "y", "-p", "8080"),
        "env.kwargs={args: [--password, ***, '-p', ***, -v, 2]}",
        "a.b=--token ***",
    ]
    assert mask_text("fix: mkdir -p folder") == "fix: mkdir -p folder"
    assert mask_text("HF_TOKEN=abc data.prompt_key=q") == "HF_TOKEN=*** data.prompt_key=q"


def test_registered_secrets_are_masked_in_any_text(monkeypatch):
    monkeypatch.setattr(secret_values, "_registered_secrets", set())
    values = {"HF_TOKEN": "hf_abcdefgh", "API_KEY": "short", "HF_TOKEN_PATH": "/home/me/token"}
    register_secrets({"env": [{"env": values}], "pad_token": "<|endoftext|>", "n": 3})
    text = "401 for hf_abcdefgh in a short time; /home/me/token <|endoftext|> 3"
    assert mask_text(text) == text.replace("hf_abcdefgh", "***")


VALUE = "abcdefgh12345678"


@pytest.mark.parametrize(
    "text",
    [
        f"curl -H 'Authorization: Bearer {VALUE}'",
        f"--token {VALUE}",
        f"--api-key={VALUE}",
        f"https://h/?api_key={VALUE}",
        f"api_key='abc {VALUE}'",
        f"sk-proj-{VALUE * 2}",
        f"hf_{VALUE * 2}",
        f"ghp_{VALUE * 2}",
        "AKIA" + VALUE.upper(),
        f"eyJ{VALUE}.{VALUE}.{VALUE}",
    ],
)
def test_secrets_are_masked_by_option_and_by_form(text):
    assert VALUE not in mask_text(text).lower() and "***" in mask_text(text)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://me:p@ssw0rd@host/x", "http://me:***@host/x"),
        ("http://me:pa/ssw0rd@host/x", "http://me:***@host/x"),
        ("http://a:b@h,http://c:d@h/x", "http://a:***@h,http://c:***@h/x"),
        ("http://host:80/models@v2", "http://host:80/models@v2"),
        ('{"url":"http://host:80/x","mail":"a@b"}', '{"url":"http://host:80/x","mail":"a@b"}'),
        ("Authorization: Token abcdefgh, b: c", "Authorization: ***, b: c"),
        ("gsk_" + "a" * 24, "***"),
        ("npm_" + "a" * 36, "***"),
    ],
)
def test_passwords_with_separators_and_schemes_are_masked_whole(text, masked):
    assert mask_text(text) == masked


@pytest.mark.parametrize("part", ["token", "a-", "://a:b", "x@", "eyJ-", "://a:x@"])
def test_long_texts_are_masked_in_linear_time(part):
    text = part * 4000  # in quadratic time, this takes minutes
    assert len(mask_text(text)) < 2 * len(text)


def test_masked_keys_are_those_whose_values_were_masked():
    values = {
        "env": {"HF_TOKEN": "hf_secret1"},
        "url": "http://me:secret1@host:80/x",
        "command": ["run", "--token", "secret1", "--api-key=secret1"],
        "servers": {"one": [{"headers": {"Authorization": "Bearer secret1"}}]},
    }
    paths = ["env.HF_TOKEN", "url", "command", "servers.one"]
    assert list(find_masked_keys(mask_secrets(values))) == paths
    assert list(find_masked_keys(values)) == []
    texts = {"prompt": "A rule:\n***\nThis is ***important***.", "stars": "****", "n": 3}
    assert list(find_masked_keys(texts)) == []
