"""A run continues from a checkpoint without the LoRA adapter from which it started."""

import json
import shutil

import pytest
import torch

from tests.helpers.adapter_run import save_random_adapter
from tests.helpers.policy_rows import critic_config, random_rows, wait_for_files
from tests.helpers.refusals import allowed, has_problem, mentions, missing_parts
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.adapter_files import read_saved_adapter
from verl.config.load import load_config, to_yaml
from verl.config.plan import PlanFacts, make_plan
from verl.config.schema import SFTConfig
from verl.config.settings import ConfigError
from verl.record.run_dir import LOCK_FILE
from verl.trainer.launch.preflight import run_preflight_checks
from verl.trainer.launch.preflight_model import collect_model_facts
from verl.trainer.launch.preflight_resume import find_changed_task_problems
from verl.trainer.launch.preflight_sft import find_sft_problems
from verl.trainer.launch.run_plan import build_adapter_resume_overrides
from verl.utils.checkpoint import CheckpointManager
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker
from verl.workers.engine_state import gather_full_weights, save_engine

MODEL = "actor_rollout_ref.model"
START = f"{MODEL}.lora_adapter_path"


@pytest.fixture
def directory(tmp_path):
    """Return a directory with a policy, an adapter of it, and the space for a run."""
    make_tiny_policy(tmp_path / "policy", hidden=32, layers=1, std=0.2)
    save_random_adapter(tmp_path / "policy", tmp_path / "adapter")
    return tmp_path


def configure(directory, *overrides):
    values = {
        f"{MODEL}.path": directory / "policy",
        START: directory / "adapter",
        "trainer.default_local_dir": directory / "run",
        "env.env_name": "number_line",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.dtype": "float32",
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "actor_rollout_ref.actor.ppo_mini_batches": 1,
    }
    words = [f"{key}={value}" for key, value in values.items()]
    return load_config("ppo_trainer", [*words, *overrides])


def start_actor(cfg):
    actor = ActorWorker(cfg.actor_rollout_ref, device="cpu")
    actor.init_model()
    return actor


def save(directory, actor, step=1, critic=None):
    workers = {"actor": actor} if critic is None else {"actor": actor, "critic": critic}

    def write(target):
        for role, worker in workers.items():
            worker.save_checkpoint(str(target / role))
        return [wait_for_files(worker) for worker in workers.values()]

    run = directory / "run"
    run.mkdir(exist_ok=True)
    (run / LOCK_FILE).touch()  # marks the directory of a run
    return CheckpointManager(run / "checkpoints").save(step, write, {})


def save_with_critic(directory, critic_name, **lora):
    """Save an actor without adapter, and a critic of the policy ``critic_name``."""
    config = critic_config(directory / critic_name)
    config.model = config.model.model_copy(update={**lora, "target_modules": ["q_proj", "up_proj"]})
    critic = CriticWorker(config, device="cpu")
    critic.init_model()
    return save(directory, start_actor(configure(directory, f"{START}=null")), critic=critic)


def train(directory):
    actor = start_actor(configure(directory))
    actor.update_actor(random_rows())
    return actor, save(directory, actor)


def compute_log_probs(actor):
    data = random_rows()
    policy = actor.compute_log_prob(data).batch["old_log_probs"]
    return policy, actor.compute_ref_log_prob(data).batch["ref_log_prob"]


def remove(directory):
    shutil.rmtree(directory / "adapter")


def replace(directory):
    remove(directory)
    save_random_adapter(directory / "policy", directory / "adapter", 4, ("k_proj",))


@pytest.mark.parametrize("change", [remove, replace])
def test_resumed_run_does_not_read_the_adapter_from_which_it_started(directory, change):
    actor, checkpoint = train(directory)
    change(directory)
    cfg = configure(directory)
    model = cfg.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (8, 16.0)
    assert model.target_modules == ["q_proj", "up_proj"]
    assert list(run_preflight_checks(cfg).problems) == []
    assert (
        f"from {checkpoint}" in make_plan(cfg, PlanFacts(**collect_model_facts(cfg))).format_text()
    )
    started = cfg.with_values(build_adapter_resume_overrides(cfg))
    resumed = start_actor(started)
    resumed.load_checkpoint(f"{started.trainer.resume_from_path}/actor")
    weights, expected = (gather_full_weights(a.train_engine) for a in (resumed, actor))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    pairs = zip(compute_log_probs(resumed), compute_log_probs(actor), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_run_from_a_given_checkpoint_needs_no_start_adapter(directory):
    _, checkpoint = train(directory)
    remove(directory)
    overrides = [f"trainer.default_local_dir={directory}/other", "trainer.resume_mode=resume_path"]
    overrides.append(f"trainer.resume_from_path={checkpoint}")
    cfg = configure(directory, *overrides)
    assert list(run_preflight_checks(cfg).problems) == []
    assert build_adapter_resume_overrides(cfg)["trainer.resume_from_path"] == str(checkpoint)


def test_missing_adapter_is_refused_unless_the_run_resumes(directory):
    train(directory)
    remove(directory)
    cfg = configure(directory, "trainer.resume_mode=disable")
    assert [text.partition("=")[0] for text in run_preflight_checks(cfg).problems] == [START]


def test_run_without_valid_checkpoint_reads_the_start_adapter(directory):
    _, checkpoint = train(directory)
    (shard,) = (checkpoint / "actor").glob("shard-*-00001-of-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ConfigError, check=has_problem("no_checkpoint")):
        build_adapter_resume_overrides(configure(directory))
    cfg = configure(directory, "trainer.resume_mode=disable")
    assert build_adapter_resume_overrides(cfg) == {}
    remove(directory)
    with pytest.raises(ConfigError, check=has_problem("unreadable_file", START)):
        build_adapter_resume_overrides(cfg)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        (f"{MODEL}.lora_alpha=32", "16.0"),
        (f"{MODEL}.lora_rank=16", "8"),
        (f"{MODEL}.target_modules=[q_proj]", "2"),
    ],
)
def test_other_settings_than_those_of_the_checkpoint_are_refused(directory, override, value):
    train(directory)
    settings = [f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=16", f"{START}=null"]
    settings += [f"{MODEL}.target_modules=[q_proj,up_proj]"]
    assert list(run_preflight_checks(configure(directory, *settings)).problems) == []
    (problem,) = run_preflight_checks(configure(directory, *settings, override)).problems
    assert problem.startswith(override.partition("=")[0]) and not missing_parts(
        allowed(problem), value
    )


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("lora_alpha=32", "8.0"),
        ("lora_rank=16", "4"),
        ("target_modules=[q_proj]", "2"),
    ],
)
def test_other_settings_than_those_of_the_critic_are_refused(directory, override, value):
    checkpoint = save_with_critic(directory, "policy", lora_rank=4, lora_alpha=8.0)
    settings = [f"{START}=null", "algorithm.adv_estimator=gae"]
    settings += [f"critic.model.path={directory / 'policy'}", "critic.model.lora_rank=4"]
    settings += ["critic.model.lora_alpha=8", "critic.model.target_modules=[q_proj,up_proj]"]
    assert list(run_preflight_checks(configure(directory, *settings)).problems) == []
    changed = f"critic.model.{override}"
    (problem,) = run_preflight_checks(configure(directory, *settings, changed)).problems
    assert problem.startswith(changed.partition("=")[0]) and not missing_parts(
        allowed(problem), value
    )
    assert str(checkpoint) in problem


def test_weights_are_not_loaded_for_another_scale(directory):
    config = critic_config(directory / "policy")
    config.model.lora_rank, config.model.lora_alpha = 4, 8.0
    critic = CriticWorker(config, device="cpu")
    critic.init_model()
    critic.save_checkpoint(str(directory / "critic"))
    wait_for_files(critic)
    critic.load_checkpoint(str(directory / "critic"))
    config.model.lora_alpha = 16.0
    other = CriticWorker(config, device="cpu")
    other.init_model()
    with pytest.raises(ValueError, check=mentions("lora_alpha=8")):
        other.load_checkpoint(str(directory / "critic"))


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {},
        {"adapter": None},
        {"adapter": {"rank": "8", "alpha": 16.0, "modules": []}},
        {"adapter": {"rank": 8, "alpha": float("nan"), "modules": []}},
        {"adapter": {"rank": 8, "alpha": 16.0, "modules": 3}},
    ],
)
def test_unreadable_settings_are_none(tmp_path, record):
    if record is not None:
        (tmp_path / "engine.json").write_text(json.dumps(record))
    assert read_saved_adapter(tmp_path) is None


def test_checkpoint_of_another_model_or_without_critic_is_refused(directory):
    """The refusal comes before any process starts and before config.yaml is replaced."""

    def find_problems(*overrides):
        return list(
            run_preflight_checks(configure(directory, f"{START}=null", *overrides)).problems
        )

    checkpoint = save(directory, start_actor(configure(directory, f"{START}=null")))
    assert find_problems() == []
    for name, hidden, layers in (("narrow", 16, 1), ("deep", 32, 2)):
        make_tiny_policy(directory / name, hidden=hidden, layers=layers, std=0.2)
        other_model = f"{MODEL}.path={directory}/{name}"
        (problem,) = find_problems(other_model)
        assert (problem.key_path, problem.code) == (f"{MODEL}.path", "wrong_weights")
        assert str(checkpoint) in problem
        assert find_problems(other_model, "trainer.resume_mode=disable") == []
    (problem,) = find_problems("algorithm.adv_estimator=gae")
    assert (problem.key_path, problem.code) == ("critic.enable", "no_checkpoint")


@pytest.mark.parametrize(("stored_rank", "rank"), [(0, 4), (4, 0)])
def test_only_one_of_run_and_checkpoint_has_an_adapter(directory, stored_rank, rank):
    def set_rank(value):
        return configure(directory, f"{START}=null", f"{MODEL}.lora_rank={value}")

    checkpoint = save(directory, start_actor(set_rank(stored_rank)))
    assert list(run_preflight_checks(set_rank(stored_rank)).problems) == []
    (problem,) = run_preflight_checks(set_rank(rank)).problems
    assert problem.startswith(f"{MODEL}.lora_rank={rank}: ") and str(checkpoint) in problem
    assert allowed(problem) == str(stored_rank)


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: b"\xff" * len(data)])
def test_damaged_checkpoint_is_left_to_the_run(directory, damage):
    """The run verifies the digests. It continues from an older checkpoint, or names the fault."""
    cfg = configure(directory, f"{START}=null")
    checkpoint = save(directory, start_actor(cfg))
    (shard,) = (checkpoint / "actor").glob("shard-*-00001-of-*")
    shard.write_bytes(damage(shard.read_bytes()))
    assert list(run_preflight_checks(cfg).problems) == []


def test_other_model_than_that_of_the_critic_is_refused(directory):
    make_tiny_policy(directory / "narrow", hidden=16, layers=1)
    checkpoint = save_with_critic(directory, "narrow")
    settings = [f"{START}=null", "algorithm.adv_estimator=gae"]

    def find_problems(name, *overrides):
        path = f"critic.model.path={directory / name}"
        return list(
            run_preflight_checks(configure(directory, *settings, path, *overrides)).problems
        )

    assert find_problems("narrow") == []
    (problem,) = find_problems("policy")
    assert (problem.key_path, problem.code) == ("critic.model.path", "wrong_weights")
    assert str(checkpoint) in problem
    (problem,) = find_problems("narrow", "critic.model.lora_rank=4")
    assert (problem.key_path, problem.code) == ("critic.model.lora_rank", "conflicting_keys")
    assert allowed(problem) == "0"


def test_checkpoint_of_the_other_program_is_refused(directory):
    """A checkpoint of main_sft has the policy in its top directory, one of main_ppo in actor."""
    actor = start_actor(configure(directory, f"{START}=null"))
    of_ppo = save(directory, actor, 1)
    of_sft = save_supervised(directory, actor, 2)

    def find_problems(find, *overrides):
        return [(problem.key_path, problem.code) for problem in find(*overrides)]

    def inspect_ppo(*overrides):
        return run_preflight_checks(configure(directory, f"{START}=null", *overrides)).problems

    def inspect_sft(*overrides):
        return find_sft_problems(configure_sft(directory, *overrides))

    by_path = "trainer.resume_mode=resume_path"
    for inspect, readable, other in [
        (inspect_ppo, of_ppo, of_sft),
        (inspect_sft, of_sft, of_ppo),
    ]:
        assert find_problems(inspect, by_path, f"trainer.resume_from_path={readable}") == []
        refused = find_problems(inspect, by_path, f"trainer.resume_from_path={other}")
        assert refused == [("trainer.resume_from_path", "no_checkpoint")]
    # The newest checkpoint of the run directory is that of main_sft.
    assert find_problems(inspect_ppo) == [("trainer.default_local_dir", "no_checkpoint")]
    assert find_problems(inspect_sft) == []


@pytest.mark.parametrize(
    ("override", "key", "code"),
    [
        ("model.path={}/narrow", "model.path", "wrong_weights"),
        ("model.lora_rank=0", "model.lora_rank", "conflicting_keys"),
        ("model.lora_rank=8", "model.lora_rank", "conflicting_keys"),
        ("model.lora_alpha=32", "model.lora_alpha", "conflicting_keys"),
        ("model.target_modules=[v_proj]", "model.target_modules", "conflicting_keys"),
    ],
)
def test_supervised_run_refuses_a_checkpoint_of_another_model(directory, override, key, code):
    lora = {"lora_rank": 4, "lora_alpha": 16, "target_modules": "[q_proj]"}
    words = [f"{MODEL}.{name}={value}" for name, value in lora.items()]
    checkpoint = save_supervised(
        directory, start_actor(configure(directory, f"{START}=null", *words))
    )
    make_tiny_policy(directory / "narrow", hidden=16, layers=1)
    settings = [f"model.{name}={value}" for name, value in lora.items()]
    assert find_sft_problems(configure_sft(directory, *settings)) == []
    cfg = configure_sft(directory, *settings, override.format(directory))
    (problem,) = find_sft_problems(cfg)
    assert (problem.key_path, problem.code) == (key, code) and str(checkpoint) in problem


def save_supervised(directory, actor, step=1):
    """Save the policy of ``actor`` as a checkpoint of ``main_sft``."""
    run = directory / "run"
    run.mkdir(exist_ok=True)
    (run / LOCK_FILE).touch()
    return CheckpointManager(run / "checkpoints").save(
        step, lambda target: save_engine(actor.train_engine, target).wait_for_files() and None, {}
    )


def configure_sft(directory, *overrides):
    (directory / "rows.jsonl").write_text('{"input_ids": [5, 6], "loss_weights": [0, 1]}\n')
    words = [
        f"model.path={directory / 'policy'}",
        f"model.save_path={directory / 'made'}",
        f"data.train_files=[{directory / 'rows.jsonl'}]",
        f"trainer.default_local_dir={directory / 'run'}",
    ]
    return load_config("sft_trainer", [*words, *overrides], SFTConfig)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("env.env_name", "frozen_lake"),
        ("algorithm.adv_estimator", "gigpo"),
        ("trainer.seed", 5),
        ("env.seed", 5),
    ],
)
def test_run_of_another_task_does_not_continue(directory, key, value):
    (directory / "run").mkdir()
    (directory / "run" / LOCK_FILE).touch()
    checkpoint = CheckpointManager(directory / "run/checkpoints").save(1, lambda target: [], {})
    (directory / "run/config.yaml").write_text(to_yaml(configure(directory)))
    assert list(find_changed_task_problems(configure(directory))) == []
    # A new trainer.seed also changes env.seed, its default.
    problem, *_ = find_changed_task_problems(configure(directory, f"{key}={value}"))
    assert (problem.key_path, problem.code) == (key, "conflicting_keys")
    for mode in (
        ["trainer.resume_mode=disable"],
        ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"],
        ["trainer.val_only=true"],
        [f"trainer.default_local_dir={directory}/other"],
    ):
        assert list(find_changed_task_problems(configure(directory, f"{key}={value}", *mode))) == []


@pytest.mark.parametrize("key", ["data.train_files", "actor_rollout_ref.model.path"])
def test_moved_files_of_a_resumed_run_give_a_warning(directory, caplog, key):
    (directory / "run").mkdir()
    (directory / "run" / LOCK_FILE).touch()
    CheckpointManager(directory / "run/checkpoints").save(1, lambda target: [], {})
    stored = configure(directory, f"{key}=/old/a")
    (directory / "run/config.yaml").write_text(to_yaml(stored))
    moved = configure(directory, f"{key}=/new/a")
    assert list(find_changed_task_problems(moved)) == []
    (message,) = caplog.messages
    assert message.startswith(f"{key}=") and "/old/a" in message and "global_step_1" in message
