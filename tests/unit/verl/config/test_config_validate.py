"""Cross-field checks: each impossible combination is refused with its key, the allowed values and a
fix."""

import pytest

from tests.helpers.refusals import allowed, fix, mentions, suggestion, suggests
from verl.config.cold_start import build_cold_start_config
from verl.config.load import (
    find_keys_without_effect,
    load_config,
    read_config,
    to_yaml,
    warn_without_effect,
)
from verl.config.problems import RegisteredNames
from verl.config.schema import SFTConfig
from verl.config.settings import ConfigError, Problem
from verl.config.validate import find_problems

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
CARRY = "env.rollout.carry_over"
OVERLAP = "trainer.rollout_overlap=one_step"
GDPO = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[accuracy,format]"]
ROLLOUT = "actor_rollout_ref.rollout"
GRADER = "custom_reward_function.path=rewards.py"
GAE = ["algorithm.adv_estimator=gae"]
RLVCR = ["algorithm.adv_estimator=rlvcr"]
JUDGE = ["reward_model.enable=true", "reward_model.model.path=org/judge"]
PATH = "actor_rollout_ref.model.path=some/policy"

# Overrides that contradict each other, and the key that is refused.
LORA = ["actor_rollout_ref.model.lora_rank=8"]
REF = "actor_rollout_ref.ref"
IMPOSSIBLE = [
    (["actor_rollout_ref.model.path=null"], "actor_rollout_ref.model.path"),
    (["reward_model.enable=true"], "reward_model.model.path"),
    (["reward_model.weight=0.5"], "reward_model.weight"),
    (
        [*JUDGE, "algorithm.adv_estimator=remax"],
        "algorithm.adv_estimator",
    ),
    ([*JUDGE, "algorithm.filter_groups.enable=true"], "algorithm.filter_groups.enable"),
    ([GRADER, "algorithm.filter_groups.enable=true"], "algorithm.filter_groups.enable"),
    ([*JUDGE, "algorithm.adv_estimator=gigpo"], "algorithm.adv_estimator"),
    ([GRADER, "algorithm.adv_estimator=hgpo"], "algorithm.adv_estimator"),
    ([*JUDGE, *RLVCR, "algorithm.rlvcr.expand=mixed_groups"], "algorithm.rlvcr.expand"),
    ([GRADER, *RLVCR, "algorithm.rlvcr.expand=mixed_groups"], "algorithm.rlvcr.expand"),
    (["algorithm.adv_estimator=gpro"], "algorithm.adv_estimator"),
    ([f"{ACTOR}.policy_loss.loss_mode=vanila"], f"{ACTOR}.policy_loss.loss_mode"),
    ([f"{ROLLOUT}.name=vlm"], f"{ROLLOUT}.name"),
    ([f"{ROLLOUT}.lora_sync=adapter"], f"{ROLLOUT}.lora_sync"),
    (["actor_rollout_ref.model.adapters={judge: DIR}"], "actor_rollout_ref.model.adapters"),
    ([*LORA, "actor_rollout_ref.model.adapters={base: DIR}"], "actor_rollout_ref.model.adapters"),
    (
        [*LORA, "actor_rollout_ref.model.adapters={judge: DIR}", f"{ROLLOUT}.lora_sync=merged"],
        f"{ROLLOUT}.lora_sync",
    ),
    (
        [*LORA, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.dtype=bfloat16", f"{REF}.dtype=float32"],
        f"{REF}.dtype",
    ),
    (["algorithm.adv_estimator=gae", "critic.enable=false"], "critic.enable"),
    (["algorithm.adv_estimator=grpo", "env.rollout.n=1"], "env.rollout.n"),
    (
        [
            "algorithm.adv_estimator=gae",
            "env.rollout.n=1",
            "algorithm.filter_groups.enable=true",
        ],
        "env.rollout.n",
    ),
    (["trainer.critic_warmup=3"], "trainer.critic_warmup"),
    ([*GDPO, "algorithm.gdpo_reward_keys=[]"], "algorithm.gdpo_reward_keys"),
    ([*GDPO, "algorithm.gdpo_reward_weights=[1.0]"], "algorithm.gdpo_reward_weights"),
    ([*GDPO, "algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward"),
    (
        [*GDPO, f"{ACTOR}.use_invalid_action_penalty=true"],
        f"{ACTOR}.use_invalid_action_penalty",
    ),
    *[
        ([*GDPO, f"+reward_model.reward_kwargs.{name}=1"], f"reward_model.reward_kwargs.{name}")
        for name in ("token_price", "relative_token_price", "overlong_len")
    ],
    *[
        ([f"algorithm.adv_estimator={name}", "env.rollout.n=1"], "env.rollout.n")
        for name in ("grpo_passk", "graphgpo", "hgpo")
    ],
    (
        [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"],
        f"{CORRECTION}.rollout_is",
    ),
    (
        [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_rs=geometric"],
        f"{CORRECTION}.rollout_rs",
    ),
    (
        ["env.allow_retokenized=true", f"{CORRECTION}.rollout_is=sequence"],
        f"{CORRECTION}.rollout_is",
    ),
    (
        ["env.allow_retokenized=true", f"{CORRECTION}.bypass_mode=true"],
        f"{CORRECTION}.bypass_mode",
    ),
    ([OVERLAP, f"{CORRECTION}.rollout_is=null"], f"{CORRECTION}.rollout_is"),
    ([OVERLAP, "env.allow_retokenized=true"], "trainer.rollout_overlap"),
    ([OVERLAP, "algorithm.adv_estimator=remax"], "trainer.rollout_overlap"),
    ([f"{CARRY}=1"], CARRY),
    ([OVERLAP, f"{CARRY}=9", "data.train_batch_size=8"], CARRY),
    ([OVERLAP, f"{CARRY}=1", "algorithm.filter_groups.enable=true"], CARRY),
    ([f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.tau_neg=0"], f"{ACTOR}.tau_neg"),
    (
        [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_ub=0.5"],
        f"{ACTOR}.policy_loss.clip_cov_lb",
    ),
    (
        ["algorithm.adv_estimator=rlvcr", "algorithm.rlvcr.enable=false"],
        "algorithm.rlvcr.enable",
    ),
    (["algorithm.adv_estimator=rlvcr", "env.levels=false"], "env.levels"),
    (
        ["algorithm.rlvcr.alternatives=one", "algorithm.rlvcr.combine=reweight"],
        "algorithm.rlvcr.alternatives",
    ),
    (
        ["algorithm.adv_estimator=copo", "algorithm.rlvcr.alternatives=one"],
        "algorithm.rlvcr.alternatives",
    ),
    (
        ["algorithm.adv_estimator=rlvcr", "algorithm.rlvcr.step_fraction=0"],
        "algorithm.rlvcr.step_fraction",
    ),
    (
        ["algorithm.adv_estimator=grpo", "algorithm.rlvcr.permute=true"],
        "algorithm.rlvcr.permute",
    ),
    (
        [*RLVCR, "algorithm.rlvcr.price_in=group", "algorithm.rlvcr.permute=true"],
        "algorithm.rlvcr.permute",
    ),
    (
        ["algorithm.adv_estimator=gigpo", "algorithm.rlvcr.credit=posterior"],
        "algorithm.rlvcr.credit",
    ),
    (
        [
            "algorithm.adv_estimator=grpo",
            "algorithm.rlvcr.enable=true",
            "algorithm.rlvcr.permute=true",
        ],
        "algorithm.rlvcr.permute",
    ),
    (
        ["algorithm.adv_estimator=grpo", "algorithm.rlvcr.level_bonus_w=0.3"],
        "algorithm.rlvcr.level_bonus_w",
    ),
    (
        [*RLVCR, "algorithm.rlvcr.credit=posterior", "algorithm.rlvcr.level_bonus_w=0.3"],
        "algorithm.rlvcr.level_bonus_w",
    ),
    (
        [
            *RLVCR,
            "algorithm.rlvcr.credit=posterior",
            "algorithm.rlvcr.combine=additive",
            "algorithm.rlvcr.max_alternative_tokens=16",
        ],
        "algorithm.rlvcr.max_alternative_tokens",
    ),
    (
        ["algorithm.adv_estimator=grpo", "algorithm.rlvcr.epsilon_levels=0.3"],
        "algorithm.rlvcr.epsilon_levels",
    ),
    (
        [
            "algorithm.adv_estimator=rlvcr",
            "algorithm.rlvcr.combine=additive",
            "algorithm.rlvcr.price_in=gate",
        ],
        "algorithm.rlvcr.price_in",
    ),
    (
        ["algorithm.rlvcr.mode=mean_std_norm", "algorithm.rlvcr.std_floor=0"],
        "algorithm.rlvcr.std_floor",
    ),
    (["algorithm.rlvcr.prompts.5=dream"], "algorithm.rlvcr.prompts"),
    ([f"{ROLLOUT}.max_model_len=2559"], f"{ROLLOUT}.max_model_len"),
    (["env.max_turn_tokens=513"], "env.max_turn_tokens"),
    (["env.compact.enable=true", "env.max_turn_tokens=64"], "env.compact.enable"),
    (
        ["env.history=chat", "env.compact.enable=true", "env.compact.max_summary_tokens=500"],
        "env.compact.max_summary_tokens",
    ),
    (
        [f"{ROLLOUT}.enable_chunked_prefill=false", f"{ROLLOUT}.max_num_batched_tokens=1024"],
        f"{ROLLOUT}.max_num_batched_tokens",
    ),
    (
        [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=2559"],
        f"{ACTOR}.ppo_max_token_len_per_gpu",
    ),
    ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=null"], f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    ([f"{ACTOR}.ppo_mini_batch_size=5"], f"{ACTOR}.ppo_mini_batch_size"),
    ([f"{ACTOR}.ppo_mini_batches=3"], f"{ACTOR}.ppo_mini_batches"),
    (
        [f"{ACTOR}.ppo_mini_batches=64", "trainer.n_gpus_per_node=4"],
        f"{ACTOR}.ppo_mini_batches",
    ),
    ([*GAE, "critic.ppo_mini_batch_size=5"], "critic.ppo_mini_batch_size"),
    ([*GAE, "critic.ppo_mini_batches=3"], "critic.ppo_mini_batches"),
    ([f"{ACTOR}.grad_clip=0"], f"{ACTOR}.grad_clip"),
    (["critic.grad_clip=0"], "critic.grad_clip"),
    ([f"{ACTOR}.optim.eps=0"], f"{ACTOR}.optim.eps"),
    (["algorithm.kl_ctrl.target_kl=0"], "algorithm.kl_ctrl.target_kl"),
    ([f"{ACTOR}.clip_ratio_low=1.0"], f"{ACTOR}.clip_ratio_low"),
    ([f"{ACTOR}.clip_ratio_c=1.0"], f"{ACTOR}.clip_ratio_c"),
    (["critic.optim.betas=[0.9]"], "critic.optim.betas"),
    ([f"{ACTOR}.optim.betas=[0.9,1.0]"], f"{ACTOR}.optim.betas"),
    ([f"{ACTOR}.checkpoint.contents=[optimizer]"], f"{ACTOR}.checkpoint.contents"),
    (["critic.checkpoint.contents=[model,hf_model]"], "critic.checkpoint.contents"),
    (
        [f"{ROLLOUT}.name=hf", f"+{ROLLOUT}.engine_kwargs.swap_space=4"],
        f"{ROLLOUT}.engine_kwargs",
    ),
    ([f"{ROLLOUT}.temperature=0"], f"{ROLLOUT}.temperature"),
    ([f"{ROLLOUT}.do_sample=false"], f"{ROLLOUT}.do_sample"),
    ([f"{ROLLOUT}.top_p=0"], f"{ROLLOUT}.top_p"),
    ([f"{ROLLOUT}.top_p=0.9"], f"{ROLLOUT}.top_p"),
    ([f"{ROLLOUT}.top_k=50"], f"{ROLLOUT}.top_k"),
    (["trainer.val_only=true", f"{ROLLOUT}.top_p=0"], f"{ROLLOUT}.top_p"),
    ([f"{ROLLOUT}.val_kwargs.top_k=0"], f"{ROLLOUT}.val_kwargs.top_k"),
    ([f"{ROLLOUT}.temperature=0.005"], f"{ROLLOUT}.temperature"),
    ([f"{ROLLOUT}.val_kwargs.temperature=0.009"], f"{ROLLOUT}.val_kwargs.temperature"),
    ([f"{ROLLOUT}.n=8"], f"{ROLLOUT}.n"),
    (["trainer.device=cuda", f"{ROLLOUT}.num_workers=2"], f"{ROLLOUT}.num_workers"),
    (
        ["trainer.n_gpus_per_node=4", f"{ACTOR}.fsdp_config.fsdp_size=3"],
        f"{ACTOR}.fsdp_config.fsdp_size",
    ),
    (["ray_init.address=auto", "ray_init.num_cpus=4"], "ray_init.num_cpus"),
    (["trainer.resume_mode=resume_path"], "trainer.resume_from_path"),
    (["data.custom_cls.path=mine.py"], "data.custom_cls.path"),
    (["env.env_name=shop", "data.train_files=gsm8k/train.parquet"], "data.train_files"),
    (
        [
            "env.env_name=search",
            "data.train_files=[data/verl-agent/text/train.parquet,nq.jsonl]",
        ],
        "data.train_files",
    ),
    (["env.env_name=shop", "data.val_files=gsm8k/test.parquet"], "data.val_files"),
    (["data.train_files=a.jsonl", "data.image_key=pictures"], "data.image_key"),
    (["data.prompt_key=question"], "data.prompt_key"),
    ([JUDGE[1]], "reward_model.model.path"),
    (["critic.model.tokenizer_path=org/critic"], "critic.model.tokenizer_path"),
    (["custom_reward_function.name=mine"], "custom_reward_function.name"),
    (["trainer.resume_from_path=a/global_step_1"], "trainer.resume_from_path"),
    (["trainer.logger=[wnadb]"], "trainer.logger"),
    (["env.step_timeout_s=0"], "env.step_timeout_s"),
    (["env.env_name=tools", "env.tools.call_timeout_s=30"], "env.tools.call_timeout_s"),
    (
        ["env.env_name=openenv", "env.openenv.url=ws://a:1", "env.step_timeout_s=20"],
        "env.openenv.timeout_s",
    ),
    (["env.env_name=recall", "env.max_steps=7"], "env.max_steps"),
    (["env.alfworld.task_types=[]"], "env.alfworld.task_types"),
    (["env.alfworld.receptacles=[5,3]"], "env.alfworld.receptacles"),
    (["env.alfworld.objects=[4]"], "env.alfworld.objects"),
    (["env.alfworld.source=generated", "env.val_tasks=500"], "env.val_tasks"),
    (["env.train_tasks=8"], "data.train_batch_size"),
    (["cold_start.enable=true", "cold_start.config_name=nothing"], "cold start"),
    (
        ["cold_start.enable=true", "cold_start.overrides=['data.levels=[1,7]']"],
        "cold start: data.levels",
    ),
    (["cold_start.enable=true", "cold_start.overrides=['env.max_steps=3']"], "cold start"),
]


def problems(
    *overrides: str, names: RegisteredNames | None = None, check_files=False
) -> list[Problem]:
    parsed = read_config("ppo_trainer", [PATH, *overrides])
    cross_field = find_problems(
        parsed.config, names, check_files, lacks_invalid_keys=bool(parsed.problems)
    )
    return [*parsed.problems, *cross_field]


def test_environment_grades_rows_of_files_before_group_filtering():
    """The rows of files are graded during the episode, so filtering knows their rewards."""
    overrides = [GRADER, "algorithm.filter_groups.enable=true", "data.train_files=[rows.jsonl]"]
    assert not [problem for problem in problems(*overrides) if "filter_groups" in problem]


def test_neutral_config_with_a_policy_has_no_problem():
    assert problems() == []


@pytest.mark.parametrize(("overrides", "key"), IMPOSSIBLE)
def test_impossible_combinations_are_refused(overrides, key):
    refusals = problems(*overrides)
    assert refusals and all(problem.startswith(key) for problem in refusals), refusals
    if key != "cold start":
        assert all(allowed(problem) and fix(problem) for problem in refusals)


@pytest.mark.parametrize(
    ("name", "settings", "needed_turns"),
    [
        ("recall", ["env.recall.pages=3"], 5),
        ("relay", ["env.relay.doors=4"], 4),
        ("relay", ["env.kwargs={doors: 5}"], 5),
        ("exam", ["env.exam.questions=3"], 3),
        ("frozen_lake", ["env.frozen_lake.size=5"], 8),
        ("sokoban", ["env.sokoban.min_moves=4"], 4),
        ("shop", [], 3),
        ("textworld/coin_collector", ["env.textworld.level=7"], 7),
        ("textworld", ["env.textworld.game=coin_collector", "env.textworld.level=107"], 7),
        ("mixture", ["env.mixture.parts={recall: 1, number_line: 1}"], 8),
        ("mixture", ["env.mixture.parts={relay: 1}", "env.mixture.kwargs={relay: {doors: 9}}"], 9),
    ],
)
def test_max_steps_must_suffice_for_an_episode(name, settings, needed_turns):
    overrides = [f"env.env_name={name}", *settings]
    assert problems(*overrides, f"env.max_steps={needed_turns}") == []
    (problem,) = problems(*overrides, f"env.max_steps={needed_turns - 1}")
    assert (problem.key_path, problem.code) == ("env.max_steps", "does_not_fit")
    assert fix(problem).startswith(f"env.max_steps={needed_turns}")


def test_turns_are_not_checked_if_rewards_or_settings_do_not_require_them():
    sokoban = ["env.env_name=sokoban", "env.sokoban.min_moves=4", "env.sokoban.reward=gym"]
    assert problems(*sokoban, "env.max_steps=1") == []
    assert problems("env.env_name=textworld", "env.max_steps=1") == []
    assert problems("env.env_name=relay", GRADER, "env.max_steps=1") == []
    (refused_doors,) = problems("env.env_name=relay", "env.relay.doors=many", "env.max_steps=1")
    assert refused_doors.key_path == "env.relay.doors"


SERVER = [
    "env.env_name=twenty_questions",
    "env.twenty_questions.gamemaster=openai",
    "env.twenty_questions.base_url=http://a:1",
    "env.twenty_questions.model=m",
]


@pytest.mark.parametrize(
    ("overrides", "wait", "key"),
    [
        # Four requests, and pauses of 0.2 + 0.4 + 0.8 seconds.
        (["env.env_name=search", "env.search.search_url=http://a:1"], 21.4, "env.search.timeout"),
        # Four requests, and pauses of at most 1 + 1.5 + 2.5 seconds.
        (SERVER, 29, "env.twenty_questions.timeout_s"),
        (["env.env_name=mixture", "env.mixture.parts={tools: 1}"], 10, "env.tools.grade_s"),
        (
            [
                "env.env_name=mixture",
                "env.mixture.parts={number_line: 1, tools: 1}",
                "env.mixture.kwargs={tools: {call_timeout_s: 40}}",
            ],
            40,
            "env.tools.call_timeout_s",
        ),
    ],
)
def test_waits_within_a_step_must_be_shorter_than_its_timeout(overrides, wait, key):
    assert problems(*overrides, f"env.step_timeout_s={wait + 0.1}") == []
    (problem,) = problems(*overrides, f"env.step_timeout_s={wait}")
    assert (problem.key_path, problem.code) == (key, "conflicting_keys")
    assert fix(problem).startswith(f"env.step_timeout_s={wait + 10:g}")


def test_waits_for_a_server_are_not_checked_without_a_server():
    timeouts = "{search: {timeout: 40}, twenty_questions: {timeout_s: 40}}"
    parts = "env.mixture.parts={search: 1, twenty_questions: 1}"
    assert problems("env.env_name=mixture", parts, f"env.mixture.kwargs={timeouts}") == []


def test_all_problems_are_reported_together():
    cfg = load_config(
        "ppo_trainer", ["algorithm.adv_estimator=grppo", f"{ACTOR}.ppo_mini_batches=3"]
    )
    reported = find_problems(cfg)
    assert suggests("grpo")(ConfigError(reported))
    assert len(reported) == 3


def test_unknown_estimator_is_allowed_with_external_lib():
    assert (
        problems("algorithm.adv_estimator=mine", "actor_rollout_ref.model.external_lib=my_lab")
        == []
    )


def test_estimator_is_refused_when_the_run_lacks_its_inputs():
    needs = {
        "mine": ["token_level_rewards", "ref_log_prob"],
        "odd": ["moon_phase"],
        "remax": ["reward_baselines"],
        "curious": ["entropys"],
        "gdpo": ["reward_parts"],
    }

    def check(name: str, *more: str) -> list[Problem]:
        return problems(
            f"algorithm.adv_estimator={name}", *more, names=RegisteredNames(estimators=needs)
        )

    (problem,) = check("mine")
    assert (
        problem.key_path == "algorithm.adv_estimator"
        and "'ref_log_prob'" in problem
        and "use_kl_loss=true" in fix(problem)
    )
    assert check("mine", f"{ACTOR}.use_kl_loss=true") == []
    assert "moon_phase" in check("odd")[0] and "old_log_probs" in check("odd")[0]
    assert check("remax") == []
    assert check("curious") == []
    bypassed = check("curious", f"{CORRECTION}.bypass_mode=true")
    assert "bypass_mode=false" in bypassed[0]
    keys = "algorithm.gdpo_reward_keys=[format]"
    assert check("gdpo", keys)[0].key_path == "algorithm.adv_estimator"
    assert check("gdpo", keys, "custom_reward_function.path=rewards.py") == []
    assert "filter_groups.enable=false" in check("remax", "algorithm.filter_groups.enable=true")[0]


def test_environment_names_come_from_the_caller():
    (problem,) = problems("env.env_name=alfwrld", names=RegisteredNames(["alfworld", "sokoban"]))
    assert suggestion(problem) == "alfworld" and "sokoban" in allowed(problem)
    assert problems("env.env_name=alfworld/AlfredTWEnv", names=RegisteredNames(["alfworld"])) == []
    assert problems("env.env_name='my_lab.grid:PACKAGE'", names=RegisteredNames(["alfworld"])) == []


def test_missing_or_empty_directory_is_refused_but_not_a_hub_name(tmp_path):
    def check(path, *overrides):
        return problems(f"actor_rollout_ref.model.path={path}", *overrides, check_files=True)

    assert check(tmp_path / "nothing")[0].code == "missing_file"
    assert check("data/models/nothing")[0].code == "missing_file"
    assert check("Qwen/Qwen2.5-1.5B-Instruct") == []
    assert check(tmp_path / "nothing", "cold_start.enable=true") == []
    policy = tmp_path / "policy"
    policy.mkdir()
    assert check(policy)[0].code == "no_model"
    assert check(policy, "cold_start.enable=true")[0].code == "no_model"
    (policy / "README").touch()
    assert check(policy)[0].code == "no_model"
    checkpoint = tmp_path / "run" / "checkpoints" / "global_step_12"
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    (checkpoint.with_name("global_step_9")).mkdir()
    (checkpoint / "actor" / "engine.json").touch()
    for path in (checkpoint, checkpoint / "actor", checkpoint.parent, tmp_path / "run"):
        fix = check(path)[0].partition("; fix: ")[2]
        assert f"main_export checkpoint={checkpoint} target=DIR" in fix
    (policy / "config.json").touch()
    assert check(policy)[0].code == "no_model"
    (policy / "model.safetensors").touch()
    assert check(policy) == []
    assert suggestion(check(tmp_path / "polciy")[0]) == str(policy)


def test_cold_start_is_on_only_for_the_config_s_own_policy(tmp_path):
    key = "actor_rollout_ref.model.path"
    own_path = load_config("quickstart").actor_rollout_ref.model.path
    assert load_config("quickstart", [f"{key}={own_path}"]).cold_start.enable
    for other in ("data/models/quikstart", "Qwen/Qwen2.5-1.5B-Instruct"):
        assert not load_config("quickstart", [f"{key}={other}"]).cold_start.enable
    # An explicit cold start is made. A user's config names its own policy.
    explicit = [f"{key}=data/models/mine", "cold_start.enable=true"]
    assert load_config("quickstart", explicit).cold_start.enable
    (tmp_path / "mine.yaml").write_text(
        "defaults: [quickstart, _self_]\nactor_rollout_ref: {model: {path: data/models/mine}}\n"
    )
    assert load_config("mine", config_path=str(tmp_path)).cold_start.enable


def test_directory_without_checkpoint_is_refused_with_a_suggestion(tmp_path):
    overrides = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}"]
    (problem,) = problems(*overrides, check_files=True)
    assert (problem.key_path, problem.code) == ("trainer.resume_from_path", "no_checkpoint")
    step = tmp_path / "checkpoints" / "global_step_3"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    assert f"trainer.resume_from_path={step}" in fix(problems(*overrides, check_files=True)[0])
    assert problems(overrides[0], f"trainer.resume_from_path={step}", check_files=True) == []


def test_malformed_yaml_is_named_with_its_line(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {seed: 1\nenv: [\n")
    with pytest.raises(ConfigError, check=mentions("config 'mine'", "mine.yaml", "line 2")):
        load_config("mine", config_path=str(tmp_path))
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, check=mentions("config 'mine'")):
        load_config("mine", config_path=str(tmp_path))


def test_data_job_with_an_environment_is_refused_with_both_fixes():
    overrides = ["env.env_name=shop", "data.train_files=gsm8k/train.parquet", f"{ROLLOUT}.n=5"]
    (problem,) = problems(*overrides)
    assert (problem.key_path, problem.code) == ("data.train_files", "no_effect")
    assert "data.train_files" in fix(problem) and "env.env_name" in fix(problem)
    assert problems(*overrides[1:]) == []
    (problem,) = problems("env.env_name=search", "data.val_files=nq/dev.jsonl")
    assert fix(problem) == "env.search.val_questions=nq/dev.jsonl data.val_files=[]"


def test_loader_switches_and_placeholders_are_accepted():
    overrides = [
        "data.train_files=/root/data/verl-agent/text/train.parquet",
        "data.val_files=[data/verl-agent/visual/test.parquet]",
        "data.filter_overlong_prompts=True",
        "data.truncation=left",
        "data.return_raw_chat=True",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.use_liger=True",
        f"{ROLLOUT}.mode=sync",
        "reward_model.launch_reward_fn_async=True",
        "env.resources_per_worker.num_cpus=1",
    ]
    assert problems(*overrides) == []


def test_environment_names_ignore_case():
    for name in ("Sokoban", "Webshop", "AlfWorld/AlfredTWEnv"):
        cfg = load_config("ppo_trainer", [f"env.env_name={name}"])
        assert cfg.env.env_name.split("/")[0] == name.split("/")[0].lower()
        assert cfg.env.active_section is not None
    assert load_config("ppo_trainer", ["env.env_name=Alfwrld"]).env.env_name == "Alfwrld"


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("env.sciworld.env_step_limit=50", "env.max_steps"),
        ("env.sciworld.port=1", "env.env_name=scienceworld"),
        ("env.alfworld.meta_think=True", "env.levels=true"),
        ("env.webshop.generalization_level=1", "env.alfworld.eval_dataset"),
        ("algorithm.copo.alpha=1", "algorithm.rlvcr"),
    ],
)
def test_keys_of_other_projects_get_the_equivalent_key(override, instead):
    (problem,) = problems(f"+{override}")
    assert (problem.key_path, problem.code) == (override.partition("=")[0], "unknown_key")
    assert instead in fix(problem) and suggestion(problem) is None


def test_greedy_sampling_is_allowed_for_validation_only():
    assert problems(f"{ROLLOUT}.temperature=0", "trainer.val_only=true") == []


def test_sft_config_checks_sizes_and_levels():
    parsed = read_config(
        "sft_trainer",
        [
            "model.new.num_attention_heads=3",
            "data.levels=[0,1]",
            "data.max_length=5000",
            "data.noise=0.95",
            "env.alfworld.objects=[9,1]",
        ],
        SFTConfig,
    )
    cross_field = find_problems(parsed.config, check_files=False, lacks_invalid_keys=True)
    keys = {problem.partition("=")[0] for problem in [*parsed.problems, *cross_field]}
    assert keys == {
        "model.new.num_attention_heads",
        "model.new.num_key_value_heads",
        "data.levels",
        "data.max_length",
        "data.noise",
        "env.alfworld.objects",
    }


def test_cold_start_uses_the_environment_of_the_run(tmp_path):
    overrides = ["env.max_steps=7", "env.alfworld.train_games=99", "trainer.device=cpu"]
    cfg = load_config(
        "quickstart", [*overrides, "data.apply_chat_template_kwargs={enable_thinking: false}"]
    ).as_frozen()
    sft = build_cold_start_config(cfg)
    assert sft.env == cfg.env and sft.model.save_path == cfg.actor_rollout_ref.model.path
    assert sft.trainer.device == "cpu" and sft.data.apply_chat_template_kwargs == {
        "enable_thinking": False
    }
    (tmp_path / "cold_start.yaml").write_text(to_yaml(sft))
    assert load_config("cold_start", schema=SFTConfig, config_path=str(tmp_path)) == sft


def test_user_environment_names_policy_and_cold_start_by_project():
    overrides = ["env.env_name=tests.helpers.faulty_envs:PACKAGE", 'trainer.project_name="my lab"']
    cfg = load_config("small_policy", overrides)
    sft = build_cold_start_config(cfg)
    assert sft.model.save_path == cfg.actor_rollout_ref.model.path == "data/models/my lab"
    assert sft.trainer.default_local_dir == "runs/my lab/sft"
    own_project = ["cold_start.overrides=['trainer.project_name=another']"]
    sft = build_cold_start_config(load_config("small_policy", [*overrides, *own_project]))
    assert sft.trainer.default_local_dir == "runs/another/sft"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{ROLLOUT}.dtype=bfloat16"], "token"),
        ([f"{ROLLOUT}.dtype=float16"], "token"),
        ([f"{ROLLOUT}.dtype=float32"], None),
        ([f"{ROLLOUT}.dtype=float32", f"{CORRECTION}.rollout_is=sequence"], "sequence"),
        ([f"{ROLLOUT}.dtype=bfloat16", f"{CORRECTION}.rollout_is=null"], None),
        ([f"{ROLLOUT}.dtype=bfloat16", f"{CORRECTION}.bypass_mode=true"], None),
        ([f"{ROLLOUT}.dtype=bfloat16", "env.allow_retokenized=true"], None),
        ([f"{ROLLOUT}.dtype=float32", OVERLAP], "token"),
        ([f"{ROLLOUT}.dtype=float32", OVERLAP, f"{CORRECTION}.bypass_mode=true"], None),
        ([f"{ROLLOUT}.dtype=float32", "trainer.rollout_overlap=off"], None),
    ],
)
def test_rollout_correction_is_on_when_the_engine_differs(overrides, expected):
    cfg = load_config("ppo_trainer", overrides)
    correction = cfg.algorithm.rollout_correction
    assert correction.rollout_is == expected
    assert (correction.rollout_rs, correction.rollout_is_threshold) == (None, 2.0)
    assert correction.rollout_rs_threshold == 2.0 and correction.rollout_rs_threshold_lower == 0.5


def test_lower_rejection_bound_is_derived_from_the_upper():
    cfg = load_config("ppo_trainer", [f"{CORRECTION}.rollout_rs_threshold=1.25"])
    assert cfg.algorithm.rollout_correction.rollout_rs_threshold_lower == 0.8


def test_names_agree_with_the_registries():
    from verl import names as shipped
    from verl.algos import losses
    from verl.trainer.launch.extensions import collect_registered_names

    names = collect_registered_names()
    assert names.estimators and names.policy_losses and names.engines
    assert set(shipped.AdvantageEstimator) == set(names.estimators)
    assert set(shipped.POLICY_LOSSES) == set(names.policy_losses)
    assert set(shipped.ENGINES) == set(names.engines)
    kl_names = {name.removesuffix("+") for name in shipped.KL_ESTIMATORS}
    assert kl_names == set(losses._KL_ESTIMATOR_OF_NAME)
    assert set(shipped.LOSS_AGG_MODES) == set(losses.LOSS_AGG_MODES)


def test_estimator_that_ignores_the_reward_model_is_refused():
    needs = {"remax": ["reward_baselines"], "mine": ["reward_baselines"], "other": ["uid"]}
    names = RegisteredNames(estimators=needs)
    for name, refused in (("mine", True), ("remax", True), ("other", False)):
        reported = problems(*JUDGE, f"algorithm.adv_estimator={name}", names=names)
        unscored = [problem for problem in reported if problem.code == "conflicting_keys"]
        assert len(unscored) == refused, reported
    overrides = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[model]"]
    reward = "custom_reward_function.path=rewards.py"
    (problem,) = problems(*JUDGE, *overrides, reward)
    assert (problem.key_path, problem.code) == ("algorithm.adv_estimator", "conflicting_keys")
    assert problems(*overrides, reward) == []


def test_rules_have_weight_zero_with_a_reward_model_by_default():
    assert load_config("ppo_trainer").reward_model.rule_weight == 1.0
    cfg = load_config("ppo_trainer", JUDGE)
    assert (cfg.reward_model.weight, cfg.reward_model.rule_weight) == (1.0, 0.0)
    assert cfg.reward_model.dtype == cfg.actor_rollout_ref.actor.dtype
    assert problems(*JUDGE, "reward_model.rule_weight=0.5") == []


def test_rules_without_effect_under_a_reward_model_are_named(caplog):
    rules = [
        f"{ACTOR}.use_invalid_action_penalty=true",
        "+reward_model.reward_kwargs.token_price=0.5",
        "custom_reward_function.path=rewards.py",
    ]
    keys = {rule.lstrip("+").partition("=")[0].removesuffix(".token_price") for rule in rules}
    cfg = load_config("ppo_trainer", [*JUDGE, *rules])
    assert set(find_keys_without_effect(cfg, "cpu")) == keys
    warn_without_effect(cfg)
    assert "reward_model.rule_weight=1" in caplog.text
    assert find_keys_without_effect(load_config("ppo_trainer", JUDGE), "cpu") == {}
    weighted = load_config("ppo_trainer", [*JUDGE, *rules, "reward_model.rule_weight=1"])
    assert (
        find_keys_without_effect(weighted, "cpu")
        == find_keys_without_effect(load_config("ppo_trainer"), "cpu")
        == {}
    )
