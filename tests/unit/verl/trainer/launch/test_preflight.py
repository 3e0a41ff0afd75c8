"""Invalid input is refused before Ray, games or a cold start, with status 2, key, value, allowed
values and fix."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Blip2Config,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    Llama4Config,
    MambaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from agent_system.environments.env_package.number_line import package as number_line
from rlvcr.levels import PLAIN_FORMAT
from tests.helpers.refusals import allowed, fix, missing_parts, raise_mistakes, suggestion
from tests.helpers.tiny_model import CHAT_TEMPLATE, make_tiny_policy, make_tiny_tokenizer
from verl.config.load import load_config
from verl.config.plan import PlanFacts, make_plan
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Problem
from verl.trainer import main_eval, main_ppo
from verl.trainer.launch.preflight import run_preflight_checks
from verl.trainer.launch.preflight_machine import find_machine_problems
from verl.trainer.launch.preflight_model import collect_model_facts
from verl.workers.rollout import create_engine

RLVCR = ["algorithm.adv_estimator=rlvcr", "env.env_name=number_line"]
ROW = {"prompt": "What is six times seven?", "ground_truth": "42"}


def find_start_problems(cfg: PPOConfig) -> list[Problem]:
    """Return the problems that ``run_preflight_checks`` finds."""
    return list(run_preflight_checks(cfg).problems)


@pytest.fixture(autouse=True)
def policy(tmp_path):
    """Save a policy to the directory whose files the tests change."""
    return make_tiny_policy(tmp_path)


@pytest.fixture
def refuse(monkeypatch, tmp_path):
    """Return a function that runs ``main_ppo`` with overrides and returns the single problem it
    names."""

    def start(cfg):
        raise AssertionError("the run was started")

    monkeypatch.setattr(main_ppo, "train", start)
    raise_mistakes(monkeypatch)

    def run(*overrides: str) -> Problem:
        with pytest.raises(ConfigError) as refused:
            main_ppo.main([f"actor_rollout_ref.model.path={tmp_path}", *overrides])
        (problem,) = refused.value.problems
        assert allowed(problem) and fix(problem), problem
        return problem

    return run


@pytest.mark.parametrize(
    ("key", "value", "choices", "instead"),
    [
        (
            "algorithm.rlvcr.mode",
            "mean_std",
            "one of mean_norm, mean_std_norm",
            "mean_std_norm",
        ),
        (
            "algorithm.rlvcr.score",
            "logprobs",
            "one of entropy, logprob, prob",
            "logprob",
        ),
        (
            "algorithm.rlvcr.combine",
            "gate",
            "one of additive, gated, success, reweight",
            "gated",
        ),
        (
            "algorithm.rlvcr.alternatives",
            "7",
            "one of all, one",
            "algorithm.rlvcr.alternatives='all'",
        ),
        (
            "algorithm.rlvcr.epsilon_levels",
            1.5,
            "float >= 0 and <= 1",
            "epsilon_levels=0.0",
        ),
    ],
)
def test_unknown_choice_is_refused(refuse, key, value, choices, instead):
    problem = refuse(*RLVCR, f"{key}={value}")
    assert (
        problem.startswith(f"{key}={value!r}")
        and allowed(problem) == choices
        and instead in fix(problem)
    )


def test_single_alternative_cannot_be_reweighted(refuse):
    problem = refuse(*RLVCR, "algorithm.rlvcr.alternatives=one", "algorithm.rlvcr.combine=reweight")
    assert problem.startswith("algorithm.rlvcr.alternatives='one'") and allowed(problem) == "all"


def test_single_alternative_cannot_be_divided_by_its_std(refuse):
    problem = refuse(
        *RLVCR, "algorithm.rlvcr.alternatives=one", "algorithm.rlvcr.mode=mean_std_norm"
    )
    assert problem.startswith("algorithm.rlvcr.alternatives='one'")
    assert "algorithm.rlvcr.alternatives=all" in fix(
        problem
    ) and "algorithm.rlvcr.mode=mean_norm" in fix(problem)


def test_prompt_of_an_unknown_level_is_refused(refuse):
    problem = refuse(*RLVCR, "algorithm.rlvcr.prompts.0=nothing")
    assert problem.startswith(
        "algorithm.rlvcr.prompts={'0': 'nothing'}"
    ) and "1, 2, 3, 4" in allowed(problem)


def test_environment_that_requests_no_levels_is_refused(refuse, monkeypatch, policy):
    monkeypatch.setattr(number_line.NumberLinePrompts, "asks_for_levels", False)
    problem = refuse(*RLVCR)
    assert (problem.key_path, problem.code) == ("env.env_name", "conflicting_keys")
    monkeypatch.undo()
    overrides = [f"actor_rollout_ref.model.path={policy}", "env.env_name=number_line"]
    cfg = load_config("ppo_trainer", overrides)
    assert not cfg.env.levels and find_start_problems(cfg) == []


def test_environment_that_cannot_be_imported_is_refused(refuse):
    for name, code in (
        ("no_such_lab.grid:PACKAGE", "missing_package"),
        ("tests.helpers.jobs:__dict__", "wrong_type"),
    ):
        problem = refuse(RLVCR[0], f"env.env_name='{name}'")
        assert (problem.key_path, problem.code) == ("env.env_name", code) and name in problem


def make_overlapping_tasks(settings, split):
    return [{"task_id": str(i), "data_source": "s", "start": i, "target": 0} for i in (1, 2)]


class TextlessPrompts(number_line.NumberLinePrompts):
    def first(self, observation, levels):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None

    def turn(self, observation):
        return observation.no_such_text  # pyright: ignore[reportAttributeAccessIssue]

    def window(self, first):  # pyright: ignore[reportIncompatibleMethodOverride]
        return first.text


@pytest.mark.parametrize(
    ("changed_fields", "history", "code", "content"),
    [
        ({"tasks": make_overlapping_tasks}, "append", "wrong_cell", "'1'"),
        ({"tasks": lambda: []}, "append", "failed_call", "TypeError("),
        ({"prompts": TextlessPrompts}, "append", "failed_call", "prompts.first("),
        ({"prompts": TextlessPrompts}, "window", "failed_call", "prompts.window("),
        ({"project": lambda text: text}, "append", "failed_call", "project("),
        ({"project": lambda text: (None, True)}, "append", "failed_call", "project("),
        ({"project": lambda text: text.parse()}, "append", "failed_call", "project("),
    ],
)
def test_functions_of_a_package_are_called_before_the_start(
    monkeypatch, policy, changed_fields, history, code, content
):
    package = replace(number_line.PACKAGE, **changed_fields)
    monkeypatch.setattr(number_line, "PACKAGE", package)
    overrides = [f"actor_rollout_ref.model.path={policy}", "env.env_name=number_line"]
    cfg = load_config("ppo_trainer", [*overrides, f"env.history={history}"])
    (problem,) = find_start_problems(cfg)
    assert (problem.key_path, problem.code) == ("env.env_name", code) and content in problem
    assert allowed(problem) and fix(problem)


@pytest.mark.parametrize(
    ("overrides", "code", "key"),
    [
        (
            ["env.sokoban.dim_room=[5,5]", "env.sokoban.min_moves=50"],
            "conflicting_keys",
            "env.sokoban",
        ),
        (["env.alfworld.source=official"], "missing_file", "env.alfworld.source"),
        (["env.twenty_questions.words=[dog]"], "out_of_range", "env.twenty_questions.words"),
        (["env.mixture.parts=[number_line,relay]", "env.train_tasks=1"], "no_rows", "'relay'"),
    ],
)
def test_each_mistake_in_the_settings_of_an_environment_has_its_code(
    monkeypatch, policy, overrides, code, key
):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    name = overrides[0].split(".")[1]
    model = f"actor_rollout_ref.model.path={policy}"
    (problem,) = find_start_problems(
        load_config("ppo_trainer", [model, f"env.env_name={name}", *overrides])
    )
    assert (problem.key_path, problem.code) == ("env.env_name", code) and key in problem


def save_merging_tokenizer(directory):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, initial_alphabet=alphabet)
    raw.train_from_iterator(
        [PLAIN_FORMAT.render_prefix(level) for level in (1, 2, 3, 4)] * 9, trainer
    )
    merging = PreTrainedTokenizerFast(tokenizer_object=raw)
    merging.chat_template = CHAT_TEMPLATE
    merging.save_pretrained(directory)


def test_tokenizer_that_merges_digit_and_tag_is_refused(refuse, tmp_path):
    save_merging_tokenizer(tmp_path)
    problem = refuse(*RLVCR)
    assert problem.startswith(f"actor_rollout_ref.model.path='{tmp_path}'")
    assert problem.code == "unsupported_template"
    make_tiny_tokenizer().save_pretrained(tmp_path)
    assert (
        find_start_problems(
            load_config("ppo_trainer", [f"actor_rollout_ref.model.path={tmp_path}", *RLVCR])
        )
        == []
    )


def test_start_tokenizer_of_a_cold_start_is_checked(tmp_path):
    overrides = [f"actor_rollout_ref.model.path={tmp_path}/made", "cold_start.enable=true", *RLVCR]
    overrides += [f"cold_start.overrides=['model.path={tmp_path}']"]
    save_merging_tokenizer(tmp_path)
    (problem,) = find_start_problems(load_config("ppo_trainer", overrides))
    assert problem.startswith(f"actor_rollout_ref.model.path='{tmp_path}'")
    assert problem.code == "unsupported_template"


def test_truncated_sampling_distribution_is_refused_for_training(refuse):
    for name, value, neutral in (("top_p", 0.9, 1.0), ("top_k", 50, -1)):
        key = f"actor_rollout_ref.rollout.{name}"
        problem = refuse(*RLVCR, f"{key}={value}")
        assert problem.startswith(f"{key}={value}: ")
        assert str(neutral) in allowed(problem) and f"{key}={neutral}" in fix(problem)


SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


def save_model(config, directory):
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


TWO_RANKS_PER_ROW = [
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
]


ULYSSES_KEY = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "conv"),
        (GptOssConfig(**SIZES, **EXPERTS, head_dim=8, intermediate_size=64), "attention"),
    ],
)
def test_model_with_row_wise_passes_needs_one_rank_per_row(refuse, tmp_path, config, reason):
    save_model(config, tmp_path)
    problem = refuse(*RLVCR, *TWO_RANKS_PER_ROW)
    assert problem.startswith(f"{ULYSSES_KEY}=2: ") and f"{ULYSSES_KEY}=1" in fix(problem)
    assert problem.code == "unsupported_model" and config.model_type in problem
    overrides = [f"actor_rollout_ref.model.path={tmp_path}", *RLVCR]
    cfg = load_config("ppo_trainer", overrides)
    assert find_start_problems(cfg) == []
    passes = dict(make_plan(cfg, PlanFacts(**collect_model_facts(cfg))).iterate_labelled_lines())
    assert reason in passes["forward passes"] and not passes["forward passes"].startswith("packed")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Llama4Config(architectures=["Llama4ForConditionalGeneration"]), "Llama4ForCausalLM"),
        (Blip2Config(), "pixel_values"),
    ],
    ids=["llama4", "blip-2"],
)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_model_without_a_text_model_is_refused(refuse, tmp_path, config, reason, lora_rank):
    config.save_pretrained(tmp_path)
    problem = refuse(*RLVCR, f"actor_rollout_ref.model.lora_rank={lora_rank}")
    assert problem.code == "unsupported_model" and "docs/models.md" in fix(problem)
    assert config.model_type in problem and reason in problem


@pytest.mark.parametrize(
    ("config", "engine", "is_slow"),
    [
        (
            MambaConfig(vocab_size=400, hidden_size=32, state_size=8, num_hidden_layers=2),
            "hf",
            True,
        ),
        (MistralConfig(**SIZES), "hf", False),
        (GptOssConfig(**SIZES, **EXPERTS, head_dim=8, intermediate_size=64), "vllm", False),
    ],
)
def test_plan_states_that_the_engine_has_no_cache(tmp_path, config, engine, is_slow):
    save_model(config, tmp_path)
    overrides = [
        f"actor_rollout_ref.model.path={tmp_path}",
        f"actor_rollout_ref.rollout.name={engine}",
    ]
    cfg = load_config("ppo_trainer", overrides)
    plan = dict(make_plan(cfg, PlanFacts(**collect_model_facts(cfg))).iterate_labelled_lines())
    assert ("mamba" in plan["rollout"]) == is_slow


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("qwen3", "packed ("), ("qwen3_5", "row by row (")],
)
def test_plan_before_a_cold_start_names_the_path_of_its_policy(architecture, expected, tmp_path):
    path = f"actor_rollout_ref.model.path={tmp_path}/made"
    cold_start = f"cold_start.overrides=['model.new.architecture={architecture}']"
    overrides = [path, cold_start, "trainer.device=cpu"]
    cfg = load_config("number_line_hybrid", overrides)
    assert find_start_problems(cfg) == []
    plan = dict(make_plan(cfg, PlanFacts(**collect_model_facts(cfg))).iterate_labelled_lines())
    assert plan["forward passes"].startswith(expected)
    split_rows = load_config("number_line_hybrid", [*overrides, *TWO_RANKS_PER_ROW])
    problems = [problem for problem in find_start_problems(split_rows) if ULYSSES_KEY in problem]
    assert len(problems) == (architecture == "qwen3_5")


def test_plan_before_a_cold_start_from_a_model_names_its_path(tmp_path):
    save_model(MistralConfig(**SIZES, sliding_window=600), tmp_path)
    overrides = [f"actor_rollout_ref.model.path={tmp_path}/made", "cold_start.enable=true"]
    for start, limit in ((tmp_path, 600), (tmp_path / "missing", None)):
        cold_start = f"cold_start.overrides=['model.path={start}']"
        facts = collect_model_facts(load_config("ppo_trainer", [*overrides, cold_start]))
        assert facts.get("max_packed_tokens") == limit


def test_override_of_an_unknown_config_value_is_refused(refuse, tmp_path):
    save_model(Qwen2Config(**SIZES), tmp_path)
    overrides = [f"actor_rollout_ref.model.path={tmp_path}", *RLVCR]
    assert find_start_problems(load_config("ppo_trainer", overrides)) == []
    key = "actor_rollout_ref.model.override_config"
    problem = refuse(*RLVCR, f"+{key}.hiden_size=64")
    assert problem.startswith(f"{key}.hiden_size=64: ") and suggestion(problem) == "hidden_size"


@pytest.mark.parametrize(
    "override",
    ["use_sliding_window=true", "rope_theta=100", "rope_scaling={rope_type: linear, factor: 4}"],
)
def test_override_that_changes_other_values_too_is_accepted(tmp_path, override):
    save_model(Qwen2Config(**SIZES), tmp_path)
    key = "actor_rollout_ref.model.override_config"
    overrides = [f"actor_rollout_ref.model.path={tmp_path}", f"+{key}.{override}", *RLVCR]
    assert find_start_problems(load_config("ppo_trainer", overrides)) == []


def test_override_of_another_type_is_refused(refuse, tmp_path):
    save_model(Qwen2Config(**SIZES), tmp_path)
    key = "actor_rollout_ref.model.override_config.hidden_size"
    problem = refuse(*RLVCR, f"+{key}=wide")
    assert problem.startswith(f"{key}='wide': ")


def test_separate_critic_model_is_checked(tmp_path):
    overrides = ["algorithm.adv_estimator=gae", f"critic.model.path={tmp_path}/critic"]
    save_model(Qwen2Config(**SIZES), tmp_path)
    save_model(Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8), tmp_path / "critic")
    path = f"actor_rollout_ref.model.path={tmp_path}"
    ranks = ["trainer.n_gpus_per_node=2", "critic.ulysses_sequence_parallel_size=2"]
    cfg = load_config("ppo_trainer", [path, *overrides, *ranks])
    problems = [problem for problem in find_start_problems(cfg) if "gemma2" in problem]
    assert len(problems) == 1
    assert problems[0].startswith("critic.ulysses_sequence_parallel_size=2: ")


def test_rows_longer_than_the_window_are_not_packed(refuse, tmp_path):
    save_model(MistralConfig(**SIZES, sliding_window=600), tmp_path)
    lengths = ["data.max_prompt_length=300", "data.max_response_length=300"]
    alternatives = "algorithm.rlvcr.max_alternative_tokens=64"
    problem = refuse(*RLVCR, *lengths, alternatives, *TWO_RANKS_PER_ROW)
    assert "600" in problem and "664" in problem
    overrides = [f"actor_rollout_ref.model.path={tmp_path}", "env.env_name=number_line"]
    for length, is_longer in ((300, False), (301, True)):
        cfg = load_config(
            "ppo_trainer", [*overrides, lengths[0], f"data.max_response_length={length}"]
        )
        assert find_start_problems(cfg) == []
        plan = dict(make_plan(cfg, PlanFacts(**collect_model_facts(cfg))).iterate_labelled_lines())
        assert plan["forward passes"].startswith("packed ")
        assert plan["forward passes"].count("600 tokens") == 1 + is_longer


def test_rows_longer_than_the_context_are_refused_with_vllm(refuse, tmp_path, monkeypatch):
    overrides = ["env.env_name=number_line", "data.max_response_length=2049"]
    problem = refuse(*overrides)
    assert problem.code == "does_not_fit" and "max_model_len=4097" in problem
    assert "4096 or less" in problem
    path = f"actor_rollout_ref.model.path={tmp_path}"
    for changes in (["actor_rollout_ref.rollout.name=hf"], ["data.max_prompt_length=2047"]):
        cfg = load_config("ppo_trainer", [path, *overrides, *changes])
        assert find_start_problems(cfg) == []
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "True")  # as vLLM reads it
        assert find_start_problems(load_config("ppo_trainer", [path, *overrides])) == []
    config_file = tmp_path / "config.json"
    tree = json.loads(config_file.read_text())
    tree["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    config_file.write_text(json.dumps(tree))
    assert find_start_problems(load_config("ppo_trainer", [path, *overrides])) == []


class EngineWithoutLogprobs:
    """An engine that does not return log-probs."""

    gives_logprobs = False


def test_engine_without_log_probs_is_refused(refuse, monkeypatch):
    monkeypatch.setitem(
        sys.modules,
        "my_lab_engines",
        SimpleNamespace(EngineWithoutLogprobs=EngineWithoutLogprobs, Unsaid=object),
    )
    for name in ("my_lab_engines:EngineWithoutLogprobs", "my_lab_engines:Unsaid"):
        problem = refuse(*RLVCR, f"actor_rollout_ref.rollout.name={name}")
        assert problem.startswith(f"actor_rollout_ref.rollout.name='{name}': ")
        assert allowed(problem).startswith("vllm, hf")
    assert "no_such_lab" in refuse(*RLVCR, "actor_rollout_ref.rollout.name=no_such_lab:Engine")
    problem = refuse(*RLVCR, "actor_rollout_ref.rollout.name=vlm")
    assert suggestion(problem) == "vllm" and problem.code == "unknown_name"


def test_user_engine_is_created_by_its_import_path(monkeypatch):
    created = []

    def engine(config, path, **options):
        created.append((config, path, options))
        return "engine"

    monkeypatch.setitem(sys.modules, "my_lab_engines", SimpleNamespace(engine=engine))
    section = load_config("ppo_trainer").actor_rollout_ref.rollout
    assert create_engine("my_lab_engines:engine", section, "policy", seed=3) == "engine"
    assert created[0][:2] == (section, "policy") and created[0][2]["seed"] == 3


def test_invalid_reward_configuration_is_refused(refuse, tmp_path):
    problem = refuse(*RLVCR, "+reward_model.reward_kwargs.penalti=1")
    assert (
        problem.startswith("reward_model.reward_kwargs={'penalti': 1}: ") and "'penalti'" in problem
    )
    assert problem.code == "unknown_key"
    (tmp_path / "mine.py").write_text("def short(**_):\n    return 1.0\n")
    function = [
        f"custom_reward_function.path={tmp_path}/mine.py",
        "custom_reward_function.name=short",
    ]
    problem = refuse(*RLVCR, function[0], "custom_reward_function.name=shortt")
    assert problem.code == "unknown_name" and suggestion(problem) == "short"
    problem = refuse(*RLVCR, *function, "reward_model.reward_manager=step")
    key = "reward_model.reward_manager"
    assert (problem.key_path, problem.code) == (key, "conflicting_keys")
    assert "custom_reward_function.path" in problem
    overrides = [f"actor_rollout_ref.model.path={tmp_path}", *RLVCR, *function]
    assert find_start_problems(load_config("ppo_trainer", overrides)) == []
    (tmp_path / "mine.py").write_text("import no_such_module")
    problem = refuse(*RLVCR, *function)
    assert problem.code == "missing_package" and "no_such_module" in problem


def test_evaluation_has_the_same_checks(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(main_eval, "run_evaluation", lambda cfg: pytest.fail("the run was started"))
    monkeypatch.setattr(number_line.NumberLinePrompts, "asks_for_levels", False)
    assert main_eval.main([f"actor_rollout_ref.model.path={tmp_path}", *RLVCR]) == 2
    assert "env.env_name='number_line'" in capsys.readouterr().err


def test_corrupt_model_files_are_refused(policy, capsys):
    path = f"actor_rollout_ref.model.path={policy}"
    for name, why in (("tokenizer.json", "tokenizer"), ("config.json", "JSON")):
        (policy / name).write_text("{")
        assert main_ppo.main([path, *RLVCR]) == 2
        error_line = capsys.readouterr().err.splitlines()[1]
        assert (
            error_line.startswith(f"  - actor_rollout_ref.model.path='{policy}': ")
            and why in error_line
        )


def test_more_devices_than_available_are_refused(policy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    overrides = [f"actor_rollout_ref.model.path={policy}", *RLVCR]
    for device in ("auto", "cuda"):
        cfg = load_config(
            "ppo_trainer", [*overrides, f"trainer.device={device}", "trainer.n_gpus_per_node=3"]
        )
        (problem,) = find_machine_problems(cfg)
        assert (problem.key_path, problem.code) == ("trainer.n_gpus_per_node", "does_not_fit")
        assert not missing_parts(allowed(problem), 2)
    cfg = load_config(
        "ppo_trainer", [*overrides, "trainer.device=cpu", "trainer.n_gpus_per_node=3"]
    )
    assert list(find_machine_problems(cfg)) == []
    separate = [*overrides, "trainer.device=cuda", "actor_rollout_ref.rollout.nnodes=1"]
    assert list(find_machine_problems(load_config("ppo_trainer", separate))) == []
    cfg = load_config("ppo_trainer", [*separate, "trainer.n_gpus_per_node=2"])
    (problem,) = find_machine_problems(cfg)
    key = "actor_rollout_ref.rollout.nnodes"
    assert (problem.key_path, problem.code) == (key, "does_not_fit") and "4 GPUs" in problem


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("nowhere", "invalid_syntax"),
        ("127.0.0.1:1", "failed_call"),
        ("ray://127.0.0.1:1", "failed_call"),
    ],
)
def test_unreachable_cluster_is_refused(policy, address, code, monkeypatch):
    overrides = [f"actor_rollout_ref.model.path={policy}", *RLVCR]
    cfg = load_config("ppo_trainer", [*overrides, f"ray_init.address='{address}'"])
    (problem,) = find_machine_problems(cfg)
    assert (problem.key_path, problem.code) == ("ray_init.address", code)
    assert f"={address!r}: " in problem and "`ray start" in fix(problem)
    monkeypatch.setenv("RAY_ADDRESS", address)
    (problem,) = find_machine_problems(load_config("ppo_trainer", overrides))
    assert problem.startswith(f"RAY_ADDRESS={address!r}") and "unset RAY_ADDRESS" in problem


def test_unwritable_directory_is_refused_and_none_is_created(policy, tmp_path):
    (tmp_path / "file").touch()
    overrides = [f"actor_rollout_ref.model.path={policy}", *RLVCR]
    run = f"trainer.default_local_dir={tmp_path}/runs/new"
    cfg = load_config(
        "ppo_trainer", [*overrides, run, f"trainer.rollout_data_dir={tmp_path}/file/on"]
    )
    (problem,) = find_machine_problems(cfg)
    assert problem.startswith(f"trainer.rollout_data_dir='{tmp_path}/file/on': ")
    assert problem.code == "not_writable"
    assert not (tmp_path / "runs").exists()


def test_existing_lora_modules_are_accepted(policy):
    key = "actor_rollout_ref.model"
    overrides = [f"{key}.path={policy}", *RLVCR, f"{key}.lora_rank=4"]
    for modules in ("all-linear", "q_proj", "[q_proj,mlp.up_proj]"):
        assert (
            find_start_problems(
                load_config("ppo_trainer", [*overrides, f"{key}.target_modules={modules}"])
            )
            == []
        )
    cfg = load_config("ppo_trainer", [*overrides, f"{key}.target_modules=[q_proj,nothing,void]"])
    assert len(find_start_problems(cfg)) == 2


@pytest.mark.parametrize(
    ("rows", "override", "code", "key"),
    [
        ([ROW], "data.max_prompt_length=5", "does_not_fit", "data.max_prompt_length"),
        ([{"text": "2?"}], "data.max_prompt_length=64", "missing_column", "data.train_files"),
    ],
)
def test_rows_of_files_are_read_before_the_start(policy, tmp_path, rows, override, code, key):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    overrides = [f"data.{split}_files={file}" for split in ("train", "val")]
    overrides += [f"actor_rollout_ref.model.path={policy}", override]
    problems = find_start_problems(load_config("ppo_trainer", overrides))
    assert (problems[0].code, problems[0].key_path) == (code, key)
