"""Checkpoints are exported to directories that transformers and peft load, with equal log-probs."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from tests.helpers.model_families import SCALED, build_family
from tests.helpers.policy_rows import (
    critic_config,
    padded_scores,
    policy_config,
    random_rows,
    wait_for_files,
)
from tests.helpers.refusals import has_problem, list_logged, raise_mistakes
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from verl.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from verl.config.schema.tools import ExportConfig
from verl.config.settings import ConfigError
from verl.models.export import save_adapters
from verl.models.lora import add_lora
from verl.records import WrittenFiles
from verl.trainer import main_export
from verl.trainer.launch.export import find_starting_model
from verl.utils.checkpoint import CheckpointManager
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1, std=0.2)


def trained_run(config: ActorRolloutRefConfig, run: Path) -> tuple[Path, torch.Tensor]:
    """Return the checkpoint of a trained actor in a run directory, and the log-probs of its
    weights."""
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    data = random_rows()
    worker.update_actor(data)
    worker.update_actor(data)
    run.mkdir()
    tree = {"actor_rollout_ref": config.model_dump(mode="json")}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))

    def write(directory: Path) -> list[WrittenFiles]:
        worker.save_checkpoint(str(directory / "actor"))
        return [wait_for_files(worker)]

    saved = CheckpointManager(run / "checkpoints").save(2, write, {"global_step": 2})
    return saved, worker.compute_log_prob(data).batch["old_log_probs"]


def with_lora(path: Path) -> ActorRolloutRefConfig:
    config = policy_config(path)
    config.model.lora_rank = 4
    config.model.lora_alpha = 8.0
    return config


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("role", ["", "actor"])
def test_export_has_the_log_probs_of_the_trainer(policy, tmp_path, capsys, lora, role):
    config = with_lora(policy) if lora else policy_config(policy)
    checkpoint, expected = trained_run(config, tmp_path / "run")
    target = tmp_path / "exported"
    assert main_export.main([f"checkpoint={checkpoint / role}", f"target={target}"]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    actual, _ = padded_scores(target, random_rows())
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    before, _ = padded_scores(policy, random_rows())
    assert (before - expected).abs().max() > 1e-4  # training changed the weights
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.config._attn_implementation == "sdpa" and model.config.use_cache
    assert AutoTokenizer.from_pretrained(target)("go to").input_ids


def test_exported_experts_have_the_names_in_the_files_of_the_starting_model(tmp_path):
    """transformers fuses the experts of a layer. vLLM knows only the names in the files."""
    policy, target = tmp_path / "policy", tmp_path / "exported"
    build_family(SCALED["deepseek-v3"]()).save_pretrained(policy)
    make_tiny_tokenizer().save_pretrained(policy)
    checkpoint, expected = trained_run(policy_config(policy), tmp_path / "run")
    assert main_export.main([f"checkpoint={checkpoint}", f"target={target}"]) == 0
    names, original_names = (
        load_file(path / "model.safetensors").keys() for path in (target, policy)
    )
    assert names == original_names
    actual, _ = padded_scores(target, random_rows())
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_weights_are_written_in_the_requested_dtype(policy, tmp_path, capsys):
    checkpoint, _ = trained_run(policy_config(policy), tmp_path / "run")
    written = {}
    for dtype in ("float32", "bfloat16"):
        target = tmp_path / dtype
        arguments = [f"checkpoint={checkpoint}", f"target={target}", f"dtype={dtype}"]
        assert main_export.main(arguments) == 0
        written[dtype] = load_file(target / "model.safetensors")
        assert {tensor.dtype for tensor in written[dtype].values()} == {getattr(torch, dtype)}
        assert AutoConfig.from_pretrained(target).dtype == getattr(torch, dtype)
    for name, tensor in written["float32"].items():
        torch.testing.assert_close(written["bfloat16"][name], tensor.bfloat16(), atol=0, rtol=0)
    assert main_export.main([*arguments, "dtype=int8"]) == 2
    assert "dtype=" in capsys.readouterr().err


@pytest.mark.parametrize("has_config", [True, False])
def test_adapter_is_exported_with_the_scale_in_the_checkpoint(policy, tmp_path, has_config):
    checkpoint, expected = trained_run(with_lora(policy), tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    arguments = [f"checkpoint={checkpoint}", f"target={tmp_path / 'merged'}"]
    if has_config:  # as a later start of the run with another scale wrote it
        tree = yaml.safe_load(file.read_text())
        tree["actor_rollout_ref"]["model"]["lora_alpha"] = 80.0
        file.write_text(yaml.safe_dump(tree))
    else:
        file.unlink()
        arguments.append(f"model_path={policy}")
    assert main_export.main(arguments) == 0
    actual, _ = padded_scores(tmp_path / "merged", random_rows())
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_pinned_model_of_the_run_has_priority(tmp_path, role):
    """config.yaml may have a path relative to the working directory of the run."""
    for name in ("pinned", "written", "given"):
        (tmp_path / name).mkdir()
    run = tmp_path / "run"
    run.mkdir()
    section = "critic" if role == "critic" else "actor_rollout_ref"
    model = {"path": str(tmp_path / "written"), "lora_rank": 4}
    (run / "config.yaml").write_text(yaml.safe_dump({section: {"model": model}}))

    def find(pinned, **values):
        (run / "run_plan.yaml").write_text(yaml.safe_dump({f"{section}.model.path": pinned}))
        cfg = ExportConfig(checkpoint=str(run / "checkpoints" / "c"), role=role, **values)
        return find_starting_model(cfg, run / "checkpoints" / "c" / role)

    origin = find(str(tmp_path / "pinned"))
    assert origin.path == str(tmp_path / "pinned") and origin.options == {"lora_rank": 4}
    # The run was copied to another machine.
    assert find(str(tmp_path / "absent")).path == str(tmp_path / "written")
    assert find(3).path == str(tmp_path / "written")
    given = str(tmp_path / "given")
    assert find(str(tmp_path / "pinned"), model_path=given).path == given


@pytest.mark.parametrize(("family", "is_warned"), [("glm4_moe", True), ("qwen2", False)])
def test_adapters_that_peft_loads_elsewhere_are_named(family, is_warned, caplog, tmp_path):
    sizes = {"first_k_dense_replace": 1, "n_routed_experts": 4} if family == "glm4_moe" else {}
    config = AutoConfig.for_model(
        family,
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        **sizes,
    )
    lm = add_lora(AutoModelForCausalLM.from_config(config), rank=2, alpha=4)
    save_adapters(lm, {}, "lm.", tmp_path / "adapters", tmp_path)
    assert bool(list_logged(caplog, save_adapters.__module__, family)) == is_warned


def test_exported_adapters_load_on_the_base_model(policy, tmp_path):
    peft = pytest.importorskip("peft")
    checkpoint, expected = trained_run(with_lora(policy), tmp_path / "run")
    target = tmp_path / "adapters"
    arguments = [f"checkpoint={checkpoint}", f"target={target}", "lora=adapters"]
    assert main_export.main(arguments) == 0
    assert not (target / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(policy)
    peft.PeftModel.from_pretrained(base, target).merge_and_unload().save_pretrained(
        tmp_path / "joined"
    )
    actual, _ = padded_scores(tmp_path / "joined", random_rows())
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_exported_adapter_starts_a_run_with_equal_log_probs(policy, tmp_path):
    pytest.importorskip("peft")
    checkpoint, expected = trained_run(with_lora(policy), tmp_path / "run")
    exported = tmp_path / "adapters"
    arguments = [f"checkpoint={checkpoint}", f"target={exported}", "lora=adapters"]
    assert main_export.main(arguments) == 0
    config = with_lora(policy)
    config.model.lora_adapter_path = str(exported)
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    data = random_rows()
    assert torch.equal(worker.compute_log_prob(data).batch["old_log_probs"], expected)
    base = ActorWorker(policy_config(policy), device="cpu")
    base.init_model()
    reference = worker.compute_ref_log_prob(data).batch["ref_log_prob"]
    torch.testing.assert_close(
        reference, base.compute_log_prob(data).batch["old_log_probs"], atol=1e-6, rtol=0
    )
    # A run that continues from a checkpoint has its adapter, and not the one it started from.
    continued, expected = trained_run(config, tmp_path / "continued")
    worker.load_checkpoint(str(continued / "actor"))
    assert torch.equal(worker.compute_log_prob(data).batch["old_log_probs"], expected)
    again = tmp_path / "again"
    config.model.lora_adapter_path = str(exported)
    arguments = [f"checkpoint={continued}", f"target={again}", "lora=adapters"]
    assert main_export.main(arguments) == 0
    first, second = (load_file(path / "adapter_model.safetensors") for path in (exported, again))
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_exported_adapter_of_a_critic_gives_its_values(policy, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    config = critic_config(policy)
    config.model.lora_rank, config.model.lora_alpha = 4, 8.0
    critic = CriticWorker(config, device="cpu")
    critic.init_model()
    data = random_rows()
    for _ in range(2):
        critic.update_critic(data)
    (tmp_path / "run").mkdir()
    tree = {"critic": config.model_dump(mode="json"), "actor_rollout_ref": {"model": {}}}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(tree))

    def write(directory: Path) -> list[WrittenFiles]:
        critic.save_checkpoint(str(directory / "critic"))
        return [wait_for_files(critic)]

    checkpoint = CheckpointManager(tmp_path / "run" / "checkpoints").save(1, write, {})
    target = tmp_path / "critic"
    arguments = [f"checkpoint={checkpoint}", f"target={target}", "role=critic"]
    raise_mistakes(monkeypatch)
    with pytest.raises(ConfigError, check=has_problem("conflicting_keys", "lora")):
        main_export.main(arguments)
    with pytest.raises(ConfigError, check=has_problem("no_checkpoint", "checkpoint")):
        main_export.main([*arguments[:2], "lora=adapters"])
    assert main_export.main([*arguments, "lora=adapters"]) == 0
    base = AutoModelForTokenClassification.from_pretrained(policy, num_labels=1)
    model = peft.PeftModel.from_pretrained(base, target).eval()
    expected = critic.compute_values(data).batch["values"]
    batch = data.batch
    assert expected.abs().max() > 0
    for row in range(len(data)):
        present = batch["attention_mask"][row].bool()
        with torch.no_grad():
            ids = batch["input_ids"][row][present]
            scores = model(ids[None]).logits[0, :, 0]
        values = torch.zeros(len(present))
        values[present] = scores
        width = expected.shape[1]
        before = values[-width - 1 : -1] * batch["response_mask"][row]
        torch.testing.assert_close(before, expected[row], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "arguments", "code", "key"),
    [
        ("other", [], "wrong_weights", "checkpoint"),
        ("torn", [], "altered_file", "checkpoint"),
        ("nothing", [], "no_checkpoint", "checkpoint"),
        ("none", ["lora=adapters"], "conflicting_keys", "lora"),
        ("none", ["model_path=no/such/dir"], "missing_file", "model_path"),
        ("nameless", [], "missing_key", "model_path"),
        ("none", ["lora=apart"], "out_of_range", "lora"),
        ("none", ["target=/proc/x"], "not_writable", "target"),
        ("none", ["target=/dev/null/x"], "not_writable", "target"),
        ("none", [f"target={'x' * 300}"], "not_writable", "target"),
        ("lora_rank", [], "unsupported_model", "model_path"),
        ("override_config", [], "unsupported_model", "model_path"),
        ("none", ["lorra=merged"], "unknown_key", "lorra"),
    ],
)
def test_invalid_export_is_refused(policy, tmp_path, monkeypatch, change, arguments, code, key):
    checkpoint, _ = trained_run(policy_config(policy), tmp_path / "run")
    if change == "other":
        arguments = [f"model_path={make_tiny_policy(tmp_path / 'wide', hidden=64, layers=1)}"]
    if change == "torn":
        (shards,) = (checkpoint / "actor").glob("shard-*-00001-of-*")
        with shards.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x7f")
    if change == "nothing":
        checkpoint = tmp_path
    if change in ("lora_rank", "override_config"):
        file = tmp_path / "run" / "config.yaml"
        tree = yaml.safe_load(file.read_text())
        tree["actor_rollout_ref"]["model"][change] = "x"
        file.write_text(yaml.safe_dump(tree))
    if change == "nameless":
        (tmp_path / "run" / "config.yaml").unlink()
    target = tmp_path / "exported"
    raise_mistakes(monkeypatch)
    with pytest.raises(ConfigError, check=has_problem(code, key)):
        main_export.main([f"checkpoint={checkpoint}", f"target={target}", *arguments])
    assert not target.exists()


def test_required_keys_are_named_and_help_is_shown(capsys, monkeypatch):
    raise_mistakes(monkeypatch)
    for key in ("checkpoint", "target"):
        with pytest.raises(ConfigError, check=has_problem("missing_key", key)):
            main_export.main(["lora=merged"])
    assert main_export.main(["--help"]) == 0
    assert "lora  (" in capsys.readouterr().out


def test_export_deletes_only_files_that_it_wrote(policy, tmp_path, monkeypatch):
    checkpoint, _ = trained_run(policy_config(policy), tmp_path / "run")
    user_file = tmp_path / "precious" / "sub" / "thesis.txt"
    user_file.parent.mkdir(parents=True)
    user_file.write_text("mine")
    monkeypatch.chdir(tmp_path / "precious")
    targets = {
        "foreign": user_file.parent.parent,
        "the run": tmp_path / "run",
        "inside the run": checkpoint / "actor" / "exported",
        "above": tmp_path,
        "a file": user_file,
        "here": Path(),
    }
    for target in targets.values():
        assert main_export.main([f"checkpoint={checkpoint}", f"target={target}"]) == 2
    assert user_file.read_text() == "mine" and (checkpoint / "manifest.json").is_file()
    arguments = [f"checkpoint={checkpoint}", f"target={tmp_path / 'exported'}"]
    # An earlier export may be replaced.
    assert main_export.main(arguments) == main_export.main(arguments) == 0
    (tmp_path / "exported" / "notes.txt").write_text("mine")
    assert main_export.main(arguments) == 2
    assert main_export.main([*arguments, "overwrite=true"]) == 0
    assert not (tmp_path / "exported" / "notes.txt").exists()
