"""LoRA before a run: adapters, weight sync and reference are checked and described in the plan."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.adapter_run import save_random_adapter
from tests.helpers.model_families import ROW_WISE
from tests.helpers.refusals import allowed, fix
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.adapter_files import WEIGHTS_FILE
from verl.config.load import load_config
from verl.config.memory import PolicySize, estimate_cpu_node_bytes
from verl.config.plan import PlanFacts, make_plan
from verl.trainer.launch.ppo import build_worker_specs
from verl.trainer.launch.preflight import run_preflight_checks
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
    change_config(directory / "dora", use_dora=True)
    change_config(directory / "damaged", r=3)
    save_random_adapter(directory, directory / "tied_head", targets=("lm_head",))
    larger = make_tiny_policy(tmp_path_factory.mktemp("larger"), hidden=96)
    save_random_adapter(larger, directory / "larger")
    return directory


def change_config(directory, **values):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(directory, change):
    tensors = load_file(directory / WEIGHTS_FILE)
    save_file({name: change(value) for name, value in tensors.items()}, directory / WEIGHTS_FILE)


def configure(policy, *overrides, rank=4):
    words = [f"{MODEL}.path={policy}", "env.env_name=number_line", f"{MODEL}.lora_rank={rank}"]
    return load_config("ppo_trainer", [*words, "algorithm.adv_estimator=grpo", *overrides])


def find_problems(policy, *overrides, **values):
    return list(run_preflight_checks(configure(policy, *overrides, **values)).problems)


@pytest.mark.parametrize("name", ["dora", "damaged", "larger", "tied_head", "missing"])
def test_unusable_adapter_is_refused_before_the_start(policy, name):
    assert find_problems(policy, f"{MODEL}.adapters={{judge: {policy}/judge}}") == []
    (problem,) = find_problems(policy, f"{MODEL}.adapters={{judge: {policy}/{name}}}")
    assert problem.startswith(f"{MODEL}.adapters.judge='{policy}/{name}'")
    assert allowed(problem) and fix(problem)


START = f"{MODEL}.lora_adapter_path"
PARTS = ("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj")


def test_rank_scale_and_targets_are_those_of_the_start_adapter(policy):
    cfg = configure(policy, f"{START}={policy}/judge", rank=0)
    model = cfg.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (8, 16.0)
    assert model.target_modules == ["q_proj", "up_proj"]
    assert find_problems(policy, f"{START}={policy}/judge", rank=0) == []
    equal_values = [f"{MODEL}.lora_alpha=16", f"{MODEL}.target_modules=[up_proj,q_proj]"]
    assert find_problems(policy, f"{START}={policy}/judge", *equal_values, rank=8) == []
    text = make_plan(cfg, PlanFacts(**collect_model_facts(cfg))).format_text()
    assert f"{policy}/judge" in text and "rank 8" in text


def test_scale_of_rank_stabilised_lora_is_kept(policy):
    directory = policy / "rslora"
    save_random_adapter(policy, directory)
    change_config(directory, use_rslora=True)
    alpha = configure(policy, f"{START}={directory}", rank=0).actor_rollout_ref.model.lora_alpha
    assert alpha / 8 == pytest.approx(16 / 8**0.5)


def test_adapter_of_some_layers_needs_their_names(policy):
    save_random_adapter(policy, policy / "parts", targets=PARTS)
    (problem,) = find_problems(policy, f"{START}={policy}/parts", rank=0)
    names = [f"model.{name}" for name in PARTS]
    assert problem.startswith(f"{MODEL}.target_modules") and ",".join(names) in fix(problem)
    targets = f"{MODEL}.target_modules=[{','.join(names)}]"
    assert find_problems(policy, f"{START}={policy}/parts", targets, rank=0) == []


@pytest.mark.parametrize("name", ["dora", "damaged", "larger", "tied_head", "missing"])
def test_unusable_start_adapter_is_refused_before_the_start(policy, name):
    (problem, *_) = find_problems(policy, f"{START}={policy}/{name}", rank=0)
    assert problem.startswith(f"{START}='{policy}/{name}'") and allowed(problem) and fix(problem)


@pytest.mark.parametrize(
    ("override", "rank", "key", "value"),
    [
        (f"{MODEL}.lora_rank=16", 16, "lora_rank", "8"),
        (f"{MODEL}.lora_alpha=32", 8, "lora_alpha", "16.0"),
    ],
)
def test_settings_that_contradict_the_start_adapter_are_refused(policy, override, rank, key, value):
    problems = find_problems(policy, f"{START}={policy}/judge", override, rank=rank)
    assert [problem.partition("=")[0] for problem in problems][:1] == [f"{MODEL}.{key}"]
    assert allowed(problems[0]) == value


HOSTILE = {
    "pickle": lambda d: (d / WEIGHTS_FILE).rename(d / "adapter_model.bin"),
    "truncated": lambda d: (d / WEIGHTS_FILE).write_bytes((d / WEIGHTS_FILE).read_bytes()[:-9]),
    "no header": lambda d: (d / WEIGHTS_FILE).write_bytes(b"\xff" * 64),
    "no json": lambda d: (d / "adapter_config.json").write_text("{"),
    "deep json": lambda d: (d / "adapter_config.json").write_text("[" * 100_000),
    "a list": lambda d: (d / "adapter_config.json").write_text("[]"),
    "kind": lambda d: change_config(d, peft_type="IA3"),
    "rank text": lambda d: change_config(d, r="8"),
    "rank bool": lambda d: change_config(d, r=True),
    "alpha text": lambda d: change_config(d, lora_alpha="16"),
    "alpha nan": lambda d: change_config(d, lora_alpha=float("nan")),
    "alpha huge": lambda d: change_config(d, lora_alpha=10**400),
    "pissa": lambda d: change_config(d, init_lora_weights="pissa"),
    "alora": lambda d: change_config(d, alora_invocation_tokens=[1, 2]),
    "rslora text": lambda d: change_config(d, use_rslora="false"),
    "integers": lambda d: change_tensors(d, lambda t: t.to(torch.int8)),
    "nan": lambda d: change_tensors(d, lambda t: t * float("nan")),
    "flat": lambda d: change_tensors(d, lambda t: t.flatten()),
    "no tensors": lambda d: save_file({}, d / WEIGHTS_FILE),
    "other names": lambda d: save_file({"x.lora_A.weight": torch.ones(8, 8)}, d / WEIGHTS_FILE),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_start_adapter_is_refused(policy, tmp_path, kind):
    directory = tmp_path / "adapter"
    shutil.copytree(policy / "judge", directory)
    HOSTILE[kind](directory)
    (problem, *_) = find_problems(policy, f"{START}={directory}", rank=0)
    assert problem.startswith(f"{START}='{directory}'") and allowed(problem) and fix(problem)


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
    text = make_plan(cfg, PlanFacts(**collect_model_facts(cfg))).format_text()
    (line,) = [line for line in text.splitlines() if line.strip().startswith("LoRA ")]
    assert expected in line and "base model" in line
    if reason and "merged" not in expected:
        adapters = f"{MODEL}.adapters={{judge: {policy}/judge}}"
        for needs_adapter in (f"{ROLLOUT}.lora_sync=adapter", adapters):
            problems = find_problems(policy, *overrides, needs_adapter, rank=rank)
            (problem,) = [text for text in problems if text.startswith(f"{ROLLOUT}.lora_sync")]
            assert reason in problem


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3.5"])
def test_adapters_of_models_with_row_wise_passes_are_merged_for_vllm(name, tmp_path):
    ROW_WISE[name]().save_pretrained(tmp_path)
    sync, reason = resolve_lora_sync(configure(tmp_path, f"{ROLLOUT}.name=vllm"))
    assert sync == "merged" and ROW_WISE[name]().model_type in reason
    assert resolve_lora_sync(configure(tmp_path, f"{ROLLOUT}.name=hf")) == ("adapter", "")


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
