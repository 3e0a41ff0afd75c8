"""LoRA before a run: adapters, weight sync and reference are checked and described in the plan."""

import json

import pytest

from tests.helpers.adapter_run import save_random_adapter
from tests.helpers.refusals import allowed, fix
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.load import load_config
from verl.config.memory import PolicySize, estimate_cpu_node_bytes
from verl.config.plan import make_plan
from verl.trainer.launch.ppo import build_worker_specs
from verl.trainer.launch.preflight import inspect_start
from verl.trainer.launch.preflight_lora import resolve_lora_sync
from verl.trainer.launch.preflight_model import collect_model_facts
from verl.trainer.ppo.ray_trainer import Role

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
KL = "actor_rollout_ref.actor.use_kl_loss=true"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = make_tiny_policy(tmp_path_factory.mktemp("policy"))
    for name in ("judge", "dora", "damaged", "other"):
        save_random_adapter(directory, directory / name)
    for name, value in {"dora": {"use_dora": True}, "damaged": {"r": 3}}.items():
        path = directory / name / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | value))
    save_random_adapter(directory, directory / "tied_head", targets=("lm_head",))
    larger = make_tiny_policy(tmp_path_factory.mktemp("larger"), hidden=96)
    save_random_adapter(larger, directory / "larger")
    return directory


def configure(policy, *overrides, rank=4):
    words = [f"{MODEL}.path={policy}", "env.env_name=number_line", f"{MODEL}.lora_rank={rank}"]
    return load_config("ppo_trainer", [*words, "algorithm.adv_estimator=grpo", *overrides])


def find_problems(policy, *overrides, **values):
    return list(inspect_start(configure(policy, *overrides, **values)).problems)


@pytest.mark.parametrize("name", ["dora", "damaged", "larger", "tied_head", "missing"])
def test_unusable_adapter_is_refused_before_the_start(policy, name):
    assert find_problems(policy, f"{MODEL}.adapters={{judge: {policy}/judge}}") == []
    (problem,) = find_problems(policy, f"{MODEL}.adapters={{judge: {policy}/{name}}}")
    assert problem.startswith(f"{MODEL}.adapters.judge='{policy}/{name}'")
    assert allowed(problem) and fix(problem)


@pytest.mark.parametrize("targets", ["lm_head", "[q_proj,embed_tokens]", "[q_porj]"])
@pytest.mark.parametrize("section", [MODEL, "critic.model"])
def test_targets_that_cannot_be_sent_or_trained_are_refused(policy, section, targets):
    overrides = [f"{section}.target_modules={targets}", f"{section}.lora_rank=4"]
    problems = find_problems(policy, "algorithm.adv_estimator=gae", *overrides, rank=0)
    assert problems and all(p.startswith(f"{section}.target_modules") for p in problems), problems


SYNCS = [
    ([f"{ROLLOUT}.name=vllm"], 4, "adapter"),
    ([f"{ROLLOUT}.name=hf"], 600, "adapter"),
    ([f"{ROLLOUT}.name=vllm"], 600, "rank 512"),
    ([f"{ROLLOUT}.name=tests.helpers.scripted_engine:ScriptedEngine"], 4, "ScriptedEngine"),
    ([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.lora_sync=merged"], 4, "lora_sync=merged"),
]


@pytest.mark.parametrize(("overrides", "rank", "expected"), SYNCS)
def test_plan_says_what_a_sync_sends_and_why(policy, overrides, rank, expected):
    cfg = configure(policy, *overrides, KL, rank=rank)
    sync, reason = resolve_lora_sync(cfg)
    assert (sync == "adapter") == (reason == "") == (expected == "adapter")
    text = make_plan(cfg, collect_model_facts(cfg)).format_text()
    (line,) = [line for line in text.splitlines() if line.strip().startswith("LoRA ")]
    assert expected in line and "reference policy is the base model" in line
    if reason and "merged" not in expected:
        adapters = f"{MODEL}.adapters={{judge: {policy}/judge}}"
        for needs_adapter in (f"{ROLLOUT}.lora_sync=adapter", adapters):
            problems = find_problems(policy, *overrides, needs_adapter, rank=rank)
            (problem,) = [text for text in problems if text.startswith(f"{ROLLOUT}.lora_sync")]
            assert reason in problem


def test_reference_of_a_run_with_lora_needs_no_model(policy):
    roles, needed_bytes = [], []
    for rank in (0, 4):
        cfg = configure(policy, KL, rank=rank)
        spec = build_worker_specs(cfg.with_values({"trainer.device": "cpu"}))[Role.Actor]
        roles.append(sorted(spec.role_names))
        needed_bytes.append(estimate_cpu_node_bytes(cfg, PolicySize(1_000_000_000)))
    assert roles == [["actor", "ref"], ["actor"]]
    # Gradient, moments and the second model are not needed, and checkpoints have no moments.
    assert needed_bytes[0] - needed_bytes[1] == (12 + 4 + 8) * 1_000_000_000
