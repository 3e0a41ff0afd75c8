"""Every shipped config composes, passes all checks that need no files, and has a plan."""

import json
import shutil

import pytest
import yaml

from rlvcr.settings import get_rlvcr_settings
from verl.config.checks.models import CHECKSUMS_FILE
from verl.config.cold_start import build_cold_start_config
from verl.config.compose import BASE_DIR, EXPERIMENTS_DIR, POLICIES_DIR
from verl.config.load import load_config
from verl.config.plan import PlanFacts, PPOPlan, gather_facts, make_plan
from verl.config.plugins import collect_all_keys
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import collect_section_keys, value_at_path
from verl.config.validate import find_problems
from verl.trainer import cli

TREE_KEY = "actor_rollout_ref.model.prefix_tree"
NAMES = sorted(file.stem for file in EXPERIMENTS_DIR.glob("*.yaml"))


def schema_of(name: str) -> type:
    """Return the schema: names of supervised runs end with ``_sft``."""
    return SFTConfig if name.endswith("_sft") else PPOConfig


@pytest.mark.parametrize("name", NAMES)
def test_config_is_shown_checked_and_planned(name):
    schema = schema_of(name)
    shown = cli.parse(["--config-name", name, "--cfg", "job"], schema=schema)
    assert yaml.safe_load(shown.text or "")["trainer"]["project_name"]
    cfg = load_config(name, schema=schema)
    assert find_problems(cfg, check_files=False) == []
    plan = make_plan(cfg, PlanFacts(cores=2, memory_gb=23.5, parameters=500_000, vocab_size=800))
    assert cfg.trainer.default_local_dir in plan.format_text()
    assert plan.find_problems() == []


@pytest.mark.parametrize(
    ("history", "source"),
    [("window", "window (the default of env.history): "), ("chat", "chat (set by env.history; ")],
)
def test_plan_says_why_a_history_is_used(history, source):
    plan = make_plan(load_config("quickstart", [f"env.history={history}"]), PlanFacts())
    assert dict(plan.iterate_labelled_lines())["history"].startswith(source)


@pytest.mark.parametrize(
    ("overrides", "row_wise_reason", "expected"),
    [
        ([], "", ("if that saves 10%", "prefix_tree=auto", "share the first prompt")),
        (["env.history=chat", f"{TREE_KEY}=true"], "", ("prefix_tree=true", "earlier turns")),
        ([f"{TREE_KEY}=false"], "", ("off", f"{TREE_KEY}=false")),
        ([], "recurrent state", ("off", "row by row")),
    ],
)
def test_plan_says_whether_rows_that_share_prefixes_are_merged(
    overrides, row_wise_reason, expected
):
    plan = make_plan(
        load_config("quickstart", overrides), PlanFacts(row_wise_reason=row_wise_reason)
    )
    line = dict(plan.iterate_labelled_lines())["prefix tree"]
    assert all(text in line for text in expected)


def test_plan_names_the_kernels_of_packed_attention():
    for kernels in ("sdpa", "flex"):
        overrides = [f"actor_rollout_ref.model.attn_implementation={kernels}"]
        plan = make_plan(load_config("quickstart", overrides), PlanFacts(row_wise_reason=""))
        assert f"; kernels: {kernels}; " in dict(plan.iterate_labelled_lines())["forward passes"]


@pytest.mark.parametrize("name", NAMES)
def test_config_contains_only_overrides(name):
    tree = yaml.safe_load((EXPERIMENTS_DIR / f"{name}.yaml").read_text())
    assert tree["defaults"][-1] == "_self_" and len(tree["defaults"]) == 2


def test_quickstart_and_its_cold_start_use_the_same_games():
    run, sft = load_config("quickstart"), load_config("quickstart_sft", schema=SFTConfig)
    assert run.env.alfworld == sft.env.alfworld and run.env.max_steps == sft.env.max_steps
    assert sft.data.max_length >= run.data.max_prompt_length + run.data.max_response_length


# Keys of the thinking advantage that determine its formula. ``cost_max`` depends on the policy.
FORMULA = (
    "mode",
    "combine",
    "score",
    "cost_coef",
    "price_in",
    "step_advantage_w",
    "step_fraction",
    "credit",
    "credit_end",
)


def formula_of(name: str) -> tuple[object, ...]:
    settings = get_rlvcr_settings(load_config(name).algorithm)
    return tuple(getattr(settings, key) for key in FORMULA)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_sft")])
def test_recipes_use_a_formula_with_published_results(name):
    """Results are in experiments/quickstart and experiments/relay16."""
    cfg = load_config(name)
    settings = get_rlvcr_settings(cfg.algorithm)
    if settings.enable:
        assert formula_of(name) in (formula_of("quickstart"), formula_of("relay_16"))
        # The level entropy bonus of the published method destroyed the format of small policies.
        assert settings.thinking_diversity_w == 0.01
    if cfg.algorithm.row_weight == "trajectory":  # without effect on token-mean
        assert cfg.actor_rollout_ref.actor.loss_agg_mode.startswith("seq-mean")


QUICKSTART = POLICIES_DIR / "quickstart"
PATH = "actor_rollout_ref.model.path"


@pytest.mark.parametrize("name", ["quickstart", "quickstart_grpo", "quickstart_gigpo"])
def test_quickstart_starts_from_the_shipped_policy(name):
    cfg = load_config(name)
    assert cfg.actor_rollout_ref.model.path == str(QUICKSTART)
    assert find_problems(cfg) == []
    assert gather_facts(cfg).cold_start_config_name == ""


def test_cold_start_recipe_matches_the_shipped_policy(tmp_path):
    cfg = load_config("quickstart", [f"{PATH}={tmp_path}/made", "cold_start.enable=true"])
    assert find_problems(cfg) == [] and gather_facts(cfg).cold_start_config_name == "quickstart_sft"
    recipe, shipped = (
        build_cold_start_config(cfg).model,
        json.loads((QUICKSTART / "config.json").read_text()),
    )
    assert recipe.save_path == f"{tmp_path}/made"
    sizes = recipe.new.model_dump(exclude_none=True)
    assert sizes.pop("architecture") == shipped["model_type"]
    assert {key: shipped[key] for key in sizes} == sizes
    assert shipped["vocab_size"] <= recipe.vocab_size


@pytest.mark.parametrize("name", sorted(file.name for file in QUICKSTART.iterdir()))
def test_altered_or_incomplete_shipped_policy_is_refused(name, tmp_path):
    policy = shutil.copytree(QUICKSTART, tmp_path / "policy")
    cfg = load_config("quickstart", [f"{PATH}={policy}"])
    assert find_problems(cfg) == []
    content = bytearray((policy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (policy / name).write_bytes(content)
    (altered,) = find_problems(cfg)
    assert altered.startswith(f"{PATH}=") and "cold_start.enable=true" in altered
    if name != CHECKSUMS_FILE:
        assert f"{name} is" in altered
        (policy / name).unlink()
        assert find_problems(cfg) == [altered]


def test_cold_start_does_not_replace_a_missing_shipped_policy():
    cfg = load_config("quickstart", [f"{PATH}={POLICIES_DIR}/missing", "cold_start.enable=true"])
    assert [problem.partition("=")[0] for problem in find_problems(cfg)] == [PATH]


def test_depth_cold_start_shows_the_same_history_as_its_run():
    run = load_config("quickstart_depth")
    sft = load_config("quickstart_depth_sft", schema=SFTConfig)
    assert run.cold_start.config_name == "quickstart_depth_sft"
    assert sft.data.history == run.env.history == "window"
    assert sft.env.history_length == run.env.history_length == run.env.max_steps
    assert sft.model.save_path == run.actor_rollout_ref.model.path
    assert value_at_path(sft.data, "needed_level_share") == 0.5
    run_games, sft_games = (cfg.env.model_dump()["alfworld"] for cfg in (run, sft))
    assert run_games["thoughts"] == sft_games["thoughts"] == "carried"
    # Demonstrations include smaller rooms than those of the run, and none larger.
    assert sft_games["receptacles"][0] < run_games["receptacles"][0]
    assert {**sft_games, "receptacles": run_games["receptacles"]} == run_games


@pytest.mark.parametrize("name", ["quickstart_grpo", "quickstart_gigpo"])
def test_variants_share_data_env_and_model_with_the_quickstart(name):
    base, other = load_config("quickstart"), load_config(name)
    assert (
        other.data == base.data
        and other.env == base.env
        and other.actor_rollout_ref == base.actor_rollout_ref
    )
    assert other.trainer.default_local_dir != base.trainer.default_local_dir


def test_quickstart_validation_samples_like_training():
    rollout = load_config("quickstart").actor_rollout_ref.rollout
    assert (
        rollout.val_kwargs.do_sample
        and rollout.val_kwargs.temperature == rollout.temperature == 1.0
    )


def test_plan_counts_match_values_by_hand():
    cfg = load_config("quickstart")
    plan = make_plan(cfg, PlanFacts(cores=4, train_tasks=2000, val_tasks=128))
    assert isinstance(plan, PPOPlan)
    assert (plan.trajectories, plan.max_rows, plan.max_turns) == (128, 128, 128 * 15)
    assert (plan.mini_batches, plan.optimizer_steps, plan.total_optimizer_steps) == (4, 4, 120)
    rlvcr = get_rlvcr_settings(cfg.algorithm)
    expanded = int(128 * 15 * rlvcr.step_fraction)
    assert plan.max_extra_tokens_by_purpose == {
        "alternative thoughts": expanded * 3 * rlvcr.max_alternative_tokens
    }
    assert (plan.ranks, plan.threads_per_rank, plan.threads_per_engine, plan.envs) == (2, 2, 1, 128)


def test_plan_counts_rows_per_turn_in_window_history_and_epochs():
    overrides = [
        "env.history=window",
        "trainer.total_training_steps=null",
        "trainer.total_epochs=2",
    ]
    plan = make_plan(load_config("quickstart", overrides), PlanFacts(train_tasks=100))
    assert isinstance(plan, PPOPlan)
    assert plan.max_rows == 128 * 15
    assert plan.training_steps == 2 * (100 // 16)


def test_base_configs_are_shipped_with_the_package():
    assert {file.stem for file in BASE_DIR.glob("*.yaml")} == {"ppo_trainer", "sft_trainer"}


@pytest.mark.parametrize(
    ("name", "schema"), [("ppo_trainer", PPOConfig), ("sft_trainer", SFTConfig)]
)
def test_base_config_repeats_no_default_of_the_schema(name, schema):
    tree = yaml.safe_load((BASE_DIR / f"{name}.yaml").read_text())
    defaults = {
        key.path: key.default_value
        for key in collect_section_keys(schema).values()
        if not key.is_section
    }
    repeated = [path for path, value in iterate_leaves(tree) if defaults[path] == value]
    assert repeated == []


def iterate_leaves(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from iterate_leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


PRONOUNS = ("its ", "that ", "those ", "them ", "the same", "as above", "as the actor", "such ")


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ("", "3,400 episodes"),
        ("data/a.jsonl", "a.jsonl"),
        ("a.jsonl,b.jsonl,c.jsonl", "a.jsonl, b.jsonl, c.jsonl"),
        ("a.jsonl,b.jsonl,c.jsonl,d,e", "a.jsonl, b.jsonl, c.jsonl and 2 other files"),
    ],
)
def test_title_of_a_supervised_run_names_its_data(files, text):
    cfg = load_config("sft_trainer", [f"data.train_files=[{files}]"], schema=SFTConfig)
    assert make_plan(cfg, PlanFacts()).title == f"rlvcr/sft: imitation of {text}"


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig])
def test_doc_of_a_key_does_not_refer_to_another_key(schema):
    for key in collect_all_keys(schema).values():
        if not key.is_section:
            assert not key.help_text.lower().startswith(PRONOUNS), f"{key.path}: {key.help_text}"


def test_plan_counts_the_logits_computed_at_once():
    from verl.config.memory import MAX_LOGITS as counted
    from verl.models.token_scores import MAX_LOGITS

    assert counted == MAX_LOGITS
