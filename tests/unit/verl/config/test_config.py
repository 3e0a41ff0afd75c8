"""Typed configuration: accepted and refused values, their messages, and imports without heavy
packages."""

import logging
import subprocess
import sys

import pytest

from rlvcr.settings import get_rlvcr_settings
from tests.helpers.refusals import FIX, has_problem, mentions, suggestion, suggests
from verl.config.compose import expand_sweep
from verl.config.load import (
    default_config,
    find_keys_without_effect,
    load_config,
    to_dict,
    to_yaml,
    warn_without_effect,
)
from verl.config.plugins import collect_all_keys
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.schema.tools import ExportConfig
from verl.config.schema.trainer import TrainerConfig
from verl.config.settings import ConfigError, Problem, collect_section_keys, value_at_path
from verl.trainer import cli
from verl.trainer.command import read_overrides

HEAVY = ("torch", "ray", "vllm", "transformers", "tensordict")
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"

# Every override in published job scripts, with a value from there.
OVERRIDES = [
    "algorithm.adv_estimator=gigpo",
    "algorithm.gamma=0.95",
    "algorithm.lam=0.95",
    "algorithm.use_kl_in_reward=False",
    "algorithm.kl_penalty=low_var_kl",
    "algorithm.norm_adv_by_std_in_grpo=False",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "algorithm.kl_ctrl.horizon=1000",
    "algorithm.kl_ctrl.target_kl=0.1",
    "algorithm.gigpo.step_advantage_w=1.0",
    "algorithm.gigpo.mode=mean_std_norm",
    "algorithm.gigpo.enable_similarity=True",
    "algorithm.gigpo.similarity_thresh=0.95",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.max_num_gen_batches=10",
    "algorithm.rlvcr.enable=True",
    "algorithm.rlvcr.step_advantage_w=1.0",
    "algorithm.rlvcr.thinking_diversity_w=0.5",
    "algorithm.rlvcr.mode=mean_norm",
    "data.train_files=/data/text/train.parquet",
    "data.train_files=['a.parquet','b.parquet']",
    "data.val_files=/data/text/test.parquet",
    "data.train_batch_size=16",
    "data.val_batch_size=128",
    "data.max_prompt_length=2048",
    "data.max_response_length=512",
    "data.filter_overlong_prompts=True",
    "data.truncation=left",
    "data.return_raw_chat=True",
    "data.prompt_key=prompt",
    "data.reward_fn_key=data_source",
    "data.image_key=images",
    "data.shuffle=False",
    "data.custom_cls.path=my_data.py",
    "data.custom_cls.name=MyData",
    f"{MODEL}.path=Qwen/Qwen2.5-1.5B-Instruct",
    f"{MODEL}.use_remove_padding=True",
    f"{MODEL}.enable_gradient_checkpointing=True",
    f"{MODEL}.lora_rank=32",
    f"{MODEL}.lora_alpha=32",
    f"{MODEL}.target_modules=all-linear",
    f"{MODEL}.target_modules=[q_proj,v_proj]",
    f"{MODEL}.trust_remote_code=False",
    f"{MODEL}.override_config.attention_dropout=0.0",
    f"+{MODEL}.override_config.max_position_embeddings=4096",
    f"{MODEL}.external_lib=my_estimators",
    f"{MODEL}.use_liger=True",
    f"{ACTOR}.strategy=fsdp",
    f"{ACTOR}.optim.lr=1e-6",
    f"{ACTOR}.optim.lr_warmup_steps=10",
    f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",
    f"{ACTOR}.optim.weight_decay=0.01",
    f"{ACTOR}.optim.warmup_style=cosine",
    f"{ACTOR}.ppo_mini_batch_size=256",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=32",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=24000",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.grad_clip=1.0",
    f"{ACTOR}.clip_ratio=0.2",
    f"{ACTOR}.clip_ratio_low=0.2",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.clip_ratio_c=10.0",
    f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    f"{ACTOR}.entropy_coeff=0",
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.kl_loss_coef=0.01",
    f"{ACTOR}.kl_loss_type=low_var_kl",
    f"{ACTOR}.use_invalid_action_penalty=True",
    f"{ACTOR}.invalid_action_penalty_coef=0.1",
    f"{ACTOR}.policy_loss.loss_mode=vanilla",
    f"{ACTOR}.shuffle=True",
    f"{ACTOR}.ulysses_sequence_parallel_size=2",
    f"{ACTOR}.use_torch_compile=True",
    f"{ACTOR}.checkpoint.contents=[model,optimizer,extra,hf_model]",
    f"{ACTOR}.fsdp_config.param_offload=True",
    f"{ACTOR}.fsdp_config.optimizer_offload=True",
    f"{ACTOR}.fsdp_config.offload_policy=True",
    f"{ACTOR}.fsdp_config.reshard_after_forward=False",
    f"{ACTOR}.fsdp_config.fsdp_size=-1",
    f"{REF}.log_prob_micro_batch_size_per_gpu=32",
    f"{REF}.fsdp_config.param_offload=True",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.mode=sync",
    f"{ROLLOUT}.temperature=0.9",
    f"{ROLLOUT}.top_k=50",
    f"{ROLLOUT}.top_p=0.95",
    f"{ROLLOUT}.n=1",
    f"{ROLLOUT}.dtype=bfloat16",
    f"{ROLLOUT}.do_sample=True",
    f"{ROLLOUT}.gpu_memory_utilization=0.6",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.max_num_batched_tokens=8192",
    f"{ROLLOUT}.max_num_seqs=1024",
    f"{ROLLOUT}.max_model_len=4096",
    f"{ROLLOUT}.enforce_eager=True",
    f"{ROLLOUT}.free_cache_engine=False",
    f"{ROLLOUT}.enable_chunked_prefill=False",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
    f"+{ROLLOUT}.engine_kwargs.swap_space=4",
    f"{ROLLOUT}.val_kwargs.temperature=0.4",
    f"{ROLLOUT}.val_kwargs.top_k=-1",
    f"{ROLLOUT}.val_kwargs.top_p=1.0",
    f"{ROLLOUT}.val_kwargs.n=1",
    f"{ROLLOUT}.val_kwargs.do_sample=True",
    "critic.optim.lr=1e-5",
    "critic.model.path=Qwen/Qwen2.5-1.5B-Instruct",
    "critic.model.use_remove_padding=True",
    "critic.model.enable_gradient_checkpointing=True",
    "critic.model.fsdp_config.param_offload=False",
    "critic.model.fsdp_config.optimizer_offload=False",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "critic.cliprange_value=0.5",
    "reward_model.enable=False",
    "reward_model.model.path=my_reward_model",
    "reward_model.reward_manager=episode",
    "custom_reward_function.path=my_reward.py",
    "custom_reward_function.name=compute_score",
    "env.env_name=alfworld/AlfredTWEnv",
    "env.env_name=alfworld",
    "env.seed=0",
    "env.max_steps=50",
    "env.history_length=2",
    "env.rollout.n=8",
    "env.resources_per_worker.num_cpus=0.1",
    "env.resources_per_worker.num_gpus=0",
    "env.alfworld.eval_dataset=eval_out_of_distribution",
    "env.sokoban.mode=rgb_array",
    "+env.search.search_url=http://127.0.0.1:8000/retrieve",
    "env.webshop.use_small=True",
    "trainer.total_epochs=150",
    "trainer.total_training_steps=100",
    "trainer.project_name=verl_agent_alfworld",
    "trainer.experiment_name=gigpo_qwen2.5_1.5b",
    "trainer.logger=['console','wandb']",
    "trainer.logger=console",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=2",
    "trainer.device=cpu",
    "trainer.save_freq=-1",
    "trainer.test_freq=5",
    "trainer.val_before_train=True",
    "trainer.val_only=False",
    "trainer.resume_mode=disable",
    "trainer.resume_from_path=False",
    "trainer.resume_from_path=/runs/a/checkpoints/global_step_10",
    "trainer.critic_warmup=0",
    "trainer.balance_batch=False",
    "trainer.default_local_dir=/runs/a",
    "trainer.rollout_data_dir=/runs/a/rollouts",
    "trainer.validation_data_dir=/runs/a/val",
    "trainer.max_actor_ckpt_to_keep=2",
    "trainer.log_val_generations=10",
    "ray_init.num_cpus=8",
]

# An override with a value that its key refuses, and what is allowed.
WRONG_VALUES = [
    ("data.train_batch_size=many", "int >= 1"),
    ("data.train_batch_size=0", "int >= 1"),
    ("trainer.nnodes=1.5", "int >= 1"),
    ("trainer.val_before_train=perhaps", "bool"),
    ("algorithm.rlvcr.score=certainty", "one of entropy, logprob, prob"),
    ("algorithm.rlvcr.mode=std", "one of mean_norm, mean_std_norm"),
    ("algorithm.rlvcr.combine=add", "one of additive, gated, success, reweight"),
    ("algorithm.rlvcr.credit=executed", "one of scored, posterior"),
    ("algorithm.rlvcr.credit=corrected", "one of scored, posterior"),
    ("algorithm.rlvcr.executed_share=0.25", "credit, "),
    ("trainer.device=gpu", "one of auto, cpu, cuda"),
    (f"{ROLLOUT}.top_p=1.5", "float >= 0 and <= 1"),
    (
        f"{ACTOR}.checkpoint.contents=[model,weights]",
        "any of model, optimizer, extra, hf_model",
    ),
    ("trainer=fast", "trainer.KEY"),
]


def load_problems(*overrides: str) -> list[Problem]:
    """Return the problems of loading the neutral config with ``overrides``."""
    with pytest.raises(ConfigError) as caught:
        load_config("ppo_trainer", overrides)
    return caught.value.problems


def published_overrides(turn: int) -> list[str]:
    """Return the overrides with each key once: its first value (turn 1) or its last (turn -1)."""
    return list(
        {
            override.lstrip("+").partition("=")[0]: override for override in OVERRIDES[::turn]
        }.values()
    )


@pytest.mark.parametrize("turn", [1, -1])
def test_every_published_override_sets_its_key(turn):
    cfg = load_config("ppo_trainer", published_overrides(turn))
    for override in published_overrides(turn):
        path, _, text = override.lstrip("+").partition("=")
        value = value_at_path(cfg, path)
        items = text.strip("[]").replace("'", "").split(",")
        allowed = {"False": [False, None], "True": [True]}.get(text, [text, items])
        assert value in allowed or (isinstance(value, int | float) and value == float(text)), (
            override,
            value,
        )


@pytest.mark.parametrize(
    ("override", "guess"),
    [
        ("algorithm.rlvcr.mdoe=mean_norm", "algorithm.rlvcr.mode"),
        ("actor_rollout_ref.rollout.temprature=1", f"{ROLLOUT}.temperature"),
        ("data.max_steps=3", "env.max_steps"),
        ("lr=1e-4", f"{ACTOR}.optim.lr or critic.optim.lr"),
        ("+trainer.total_epoch=3", "trainer.total_epochs"),
    ],
)
def test_unknown_key_names_the_nearest_key(override, guess):
    (problem,) = load_problems(override)
    assert (problem.key_path, problem.code) == (
        override.lstrip("+").partition("=")[0],
        "unknown_key",
    )
    assert suggestion(problem) == guess


def test_unknown_key_lists_the_keys_of_its_section_and_the_value():
    (problem,) = load_problems("trainer.nonsense=17")
    assert problem.startswith("trainer.nonsense=17")
    assert all(name in problem for name in TrainerConfig.model_fields)


def test_unknown_key_in_a_file_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nenv: {max_step: 3}\ntrainer: {nnodes: two}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config("mine", config_path=str(tmp_path))
    assert len(caught.value.problems) == 2
    assert {(problem.key_path, problem.code) for problem in caught.value.problems} == {
        ("env.max_step", "unknown_key"),
        ("trainer.nnodes", "wrong_type"),
    }


def test_retired_key_is_ignored_in_the_config_of_a_run_only(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm:\n  rlvcr:\n    executed_share: 0.25\n")
    with pytest.raises(ConfigError, check=mentions("algorithm.rlvcr.executed_share")):
        load_config("config", config_path=str(tmp_path))
    (tmp_path / "env.json").touch()  # now it is the directory of a run
    config = load_config("config", config_path=str(tmp_path))
    assert not hasattr(get_rlvcr_settings(config.algorithm), "executed_share")
    with pytest.raises(ConfigError, check=mentions("executed_share=0.5")) as refusal:
        load_config("config", ["algorithm.rlvcr.executed_share=0.5"], config_path=str(tmp_path))
    assert len(refusal.value.problems) == 1


@pytest.mark.parametrize(("override", "allowed"), WRONG_VALUES)
def test_wrong_value_names_key_value_and_allowed_values(override, allowed):
    (problem,) = load_problems(override)
    key, _, value = override.partition("=")
    assert problem.startswith(f"{key}=") and value.strip("[]").split(",")[0] in problem
    assert allowed in problem


def test_all_problems_are_listed_together():
    problems = load_problems("data.train_batch_size=many", "trainer.device=gpu", "env.max_steps=0")
    assert len(problems) == 3


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("justaword", "key=value"),
        ("env.seed=[", "env.seed=["),
        ("~env.seed", "env.seed=0"),
        ("~trainer.test_freq", "trainer.test_freq=-1"),
        ("env.seed=1,2", "-m"),
        ("trainer.logger=console,file", "trainer.logger=[console,file]"),
        ("=x", "key=value"),
        ("trainer.test_freq=null", "trainer.test_freq=None: "),
        ("env.seed=${data.nothing}", "data.nothing"),
    ],
)
def test_malformed_override_is_refused_with_a_hint(override, expected):
    assert expected in load_problems(override)[0]


@pytest.mark.parametrize("value", ["~/my models/x", "'~/my models/x'"])
def test_override_may_name_a_path_in_the_home_directory(monkeypatch, value):
    monkeypatch.setenv("HOME", "/home/me")
    cfg = load_config("ppo_trainer", [f"actor_rollout_ref.model.path={value}"])
    assert cfg.actor_rollout_ref.model.path == "/home/me/my models/x"


def test_paths_may_have_equals_signs_and_be_items_of_lists(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    overrides = [
        "data.train_files=[~/a.parquet, b.parquet,~/c d.parquet]",
        "actor_rollout_ref.model.path=runs/x/rlvcr-seed=3/policy",
    ]
    cfg = load_config("ppo_trainer", overrides)
    assert cfg.data.train_files == ["/home/me/a.parquet", "b.parquet", "/home/me/c d.parquet"]
    assert cfg.actor_rollout_ref.model.path == "runs/x/rlvcr-seed=3/policy"


@pytest.mark.parametrize("name", ["1.10", "2024_01_01", "12e5", "007"])
def test_numbers_keep_their_digits_in_text_keys(name):
    cfg = load_config("ppo_trainer", [f"trainer.experiment_name={name}"])
    assert cfg.trainer.experiment_name == name
    assert read_overrides([f"target={name}"], ExportConfig, []).target == name
    jobs = expand_sweep([f"trainer.experiment_name={name},1.1", "env.seed=range(0,1)"])
    assert [job.overrides for job in jobs] == [
        [f"trainer.experiment_name={name}", "env.seed=0"],
        ["trainer.experiment_name=1.1", "env.seed=0"],
    ]


def test_paths_in_the_home_directory_are_values_of_a_sweep():
    jobs = expand_sweep(["actor_rollout_ref.model.path=~/a,~/b c"])
    assert [job.overrides for job in jobs] == [
        ['actor_rollout_ref.model.path="~/a"'],
        ['actor_rollout_ref.model.path="~/b c"'],
    ]


@pytest.mark.parametrize("prefix", ["", "./", "../x/"])
def test_path_of_a_config_is_refused_with_the_options_that_read_it(tmp_path, monkeypatch, prefix):
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    (tmp_path / "x/mine.yaml").write_text("defaults: [quickstart, _self_]\n")
    directory = prefix.rstrip("/") or "."
    options = f"--config-path {directory} --config-name mine"
    for name in (f"{prefix}mine.yaml", f"{prefix}mine"):
        with pytest.raises(ConfigError, check=has_problem("unknown_name", "--config-name")) as info:
            load_config(name)
        assert options in str(info.value)
    with pytest.raises(ConfigError, check=mentions(f"--config-path {tmp_path} --config-name mine")):
        load_config(f"{tmp_path}/mine")
    assert load_config("mine", config_path=directory).trainer.project_name == "quickstart"


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("actor_rollout_ref.rollout.multi_turn.enable=true", "env.max_steps"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=4", "actor.ppo_micro_batch_size_per_gpu"),
        ("critic.ppo_micro_batch_size=4", "critic.ppo_micro_batch_size_per_gpu"),
        ("data.gen_batch_size=64", "data.train_batch_size"),
        ("data.batch_size=64", "data.train_batch_size"),
        ("data.seed=1", "trainer.seed"),
        ("trainer.max_steps=9", "trainer.total_training_steps"),
        ("global_profiler.steps=[1]", "trainer.profile_steps"),
        ("env.sokoban.size=[6,6]", "env.sokoban.dim_room"),
        ("actor_rollout_ref.nccl_timeout=600", ""),
        ("env.sokoban.slippery=true", ""),
        ("trainer.lr=1", ""),
        # Names that only one key has, or whose section is right, are suggested.
        ("trainer.train_batch_size=8", "data.train_batch_size"),
        ("ray_kwargs.ray_init.num_cpus=8", "ray_init.num_cpus"),
        ("env.sokban.dim_room=6", "env.sokoban.dim_room"),
    ],
)
def test_keys_of_other_projects_get_the_equivalent_key(override, fix):
    fix_text = load_problems(override)[0].rpartition(FIX)[2]
    # Without an equivalent key, the fix names none.
    assert fix in fix_text if fix else fix_text and "." not in fix_text


def test_unknown_config_name_suggests_the_nearest():
    with pytest.raises(ConfigError, check=suggests("quickstart")):
        load_config("quikstart")


def test_single_value_becomes_a_list_and_false_no_path():
    cfg = load_config("ppo_trainer", ["trainer.logger=console", "trainer.resume_from_path=False"])
    assert cfg.trainer.logger == ["console"] and cfg.trainer.resume_from_path is None


def test_level_prompts_may_be_keyed_by_numbers(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nalgorithm: {rlvcr: {prompts: {1: act}}}\n"
    )
    cfg = load_config("mine", ["algorithm.rlvcr.prompts.2=look"], config_path=str(tmp_path))
    assert get_rlvcr_settings(cfg.algorithm).prompts == {"1": "act", "2": "look"}


def test_default_formula_of_the_method_is_additive():
    rlvcr = get_rlvcr_settings(
        load_config("ppo_trainer", ["algorithm.adv_estimator=rlvcr"]).algorithm
    )
    assert rlvcr.price_in == "all"
    assert (rlvcr.combine, rlvcr.score, rlvcr.mode) == ("additive", "entropy", "mean_norm")
    assert (rlvcr.step_advantage_w, rlvcr.thinking_diversity_w) == (1.0, 0.5)
    composed = get_rlvcr_settings(load_config("ppo_trainer").algorithm)
    assert composed == get_rlvcr_settings(default_config().algorithm)


def test_derived_values_are_filled():
    cfg = load_config(
        "ppo_trainer",
        [
            "data.max_prompt_length=100",
            "data.max_response_length=50",
            f"{ACTOR}.ppo_mini_batch_size=4",
        ],
    )
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    assert rollout.max_model_len == 150 and cfg.env.max_turn_tokens == 50
    assert actor.ppo_mini_batches == 4  # 16 tasks, 4 per optimizer step
    assert actor.loss_scale_factor == 50.0, "R of the config, not the width of the longest row"
    assert actor.clip_ratio_low == actor.clip_ratio_high == actor.clip_ratio
    assert rollout.log_prob_micro_batch_size_per_gpu == actor.ppo_micro_batch_size_per_gpu
    assert (cfg.critic.enable, get_rlvcr_settings(cfg.algorithm).enable) == (False, False)
    assert load_config("ppo_trainer", ["algorithm.adv_estimator=gae"]).critic.enable is True
    config = load_config("ppo_trainer", ["algorithm.adv_estimator=rlvcr"])
    assert get_rlvcr_settings(config.algorithm).enable is True


def test_mini_batch_size_above_the_batch_means_one_optimizer_step():
    cfg = load_config(
        "ppo_trainer", ["data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=256"]
    )
    assert cfg.actor_rollout_ref.actor.ppo_mini_batches == 1


def test_written_config_loads_to_the_same_values(tmp_path):
    cfg = load_config("quickstart", ["trainer.seed=3"])
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    assert to_dict(load_config("config", config_path=str(tmp_path))) == to_dict(cfg)


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig])
def test_every_key_has_a_type_a_doc_and_an_allowed_default(schema):
    cfg = default_config(schema)
    for key in collect_all_keys(schema).values():
        assert key.help_text and "\n" not in key.help_text, key.path
    for key in collect_section_keys(schema).values():
        value_at_path(cfg, key.path)


def test_keys_without_effect_are_named_in_one_warning(caplog):
    cfg = load_config(
        "ppo_trainer",
        [f"{MODEL}.use_liger=true", f"{ROLLOUT}.free_cache_engine=false", "trainer.device=cpu"],
    )
    with caplog.at_level(logging.WARNING):
        warn_without_effect(cfg)
    (record,) = caplog.records
    assert (
        f"{MODEL}.use_liger" in record.getMessage()
        and f"{ROLLOUT}.free_cache_engine" in record.getMessage()
    )
    assert f"{ROLLOUT}.free_cache_engine" not in find_keys_without_effect(cfg, "cuda")
    caplog.clear()
    warn_without_effect(load_config("ppo_trainer"))
    assert not caplog.records


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig])
def test_help_marks_every_key_without_effect(schema):
    marks = {
        path: key.unused_annotation
        for path, key in collect_all_keys(schema).items()
        if key.unused_annotation
    }
    assert marks
    for path, mark in marks.items():
        text = cli.parse(["--help", path], schema=schema).text or ""
        note = f"no effect: {mark.why}; accepted for {mark.set_by}"
        note = f"refused: {mark.why}; instead: {mark.instead}" if mark.instead else note
        assert f"[{note}]" in text


def test_config_imports_no_heavy_package():
    code = (
        "import sys\n"
        "from verl.trainer.main_ppo import main\n"
        "from verl.config import cold_start, validate, plan\n"
        "from verl.config.load import load_config\n"
        "main(['--cfg', 'job']); main(['--help'])\n"
        "cfg = load_config('quickstart'); validate.find_problems(cfg); plan.make_plan(cfg)\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
