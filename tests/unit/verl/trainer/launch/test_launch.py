"""Start of a run: the policy it starts from, and the number of optimizer steps."""

import subprocess
import sys
import threading

import pytest

from tests.helpers.number_line_world import make_config
from tests.helpers.refusals import mentions
from verl.config.derive import is_policy_missing
from verl.config.settings import ConfigError
from verl.models import hub
from verl.trainer.launch import ppo as launch
from verl.trainer.launch import sft
from verl.trainer.launch.run_plan import count_optimizer_steps
from verl.utils.stacks import STACKS_DIR
from verl.utils.watchdog import Stalled


def test_missing_policy_is_refused_and_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        sft, "create_policy", lambda cfg: pytest.fail("no cold start was requested")
    )
    for path in ("nobody/no-such-model", str(tmp_path / "nothing")):
        config = make_config()
        config.actor_rollout_ref.model.path = config.critic.model.path = path
        with pytest.raises(ConfigError, check=mentions("actor_rollout_ref.model.path")):
            launch.pin_model_paths(config)


def test_hub_name_resolves_to_its_cached_directory(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / name)
    )
    assert hub.model_directory("owner/model") == str(tmp_path / "owner/model")
    assert hub.model_directory(str(tmp_path)) == str(tmp_path)


def test_cold_start_is_needed_only_when_the_policy_is_missing(tmp_path):
    config = make_config()
    config.actor_rollout_ref.model.path = str(tmp_path / "policy")
    assert not is_policy_missing(config)
    config.cold_start.enable = True
    assert is_policy_missing(config)
    (tmp_path / "policy").mkdir()
    assert not is_policy_missing(config)


COLD_START_SCRIPT = """
import sys
from verl.config.schema import SFTConfig
from verl.trainer.launch import sft
from verl.utils.progress import Progress

def stand_in(cfg):
    with Progress("imitating", 2, "steps") as progress:
        progress.add_done()

sft.run_sft = stand_in
sft.run_cold_start(SFTConfig())
"""


def test_cold_start_writes_stacks_and_heartbeats_for_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv(STACKS_DIR, str(tmp_path))
    subprocess.run([sys.executable, "-c", COLD_START_SCRIPT], check=True, timeout=120)
    assert {path.suffix for path in tmp_path.iterdir()} == {".txt", ".moved"}
    assert next(tmp_path.glob("*.txt")).read_text() == "cold start\n"


@pytest.mark.parametrize("stage", ["tasks", "policy"])
def test_stages_before_ray_are_watched(tmp_path, monkeypatch, stage):
    config = make_config()
    config.trainer.default_local_dir = str(tmp_path)
    config.trainer.stall_timeout_s = 0.1
    hanging = {"tasks": "open_environments", "policy": "pin_model_paths"}[stage]
    monkeypatch.setattr(launch, "open_environments", lambda _: (None, None))
    monkeypatch.setattr(launch, hanging, lambda _: threading.Event().wait(60))
    with pytest.raises(Stalled, check=mentions(stage)):
        launch.run_ppo(config)


def test_disabled_critic_needs_no_model(tmp_path):
    config = make_config()
    config.actor_rollout_ref.model.path, config.critic.model.path = (
        str(tmp_path),
        str(tmp_path / "nothing"),
    )
    config.critic.enable = False
    launch.pin_model_paths(config)
    config.critic.enable = True
    with pytest.raises(ConfigError, check=mentions("critic.model.path")):
        launch.pin_model_paths(config)


def test_critic_warmup_reduces_the_actor_optimizer_steps():
    config = make_config()
    config.trainer.total_training_steps, config.trainer.critic_warmup = 10, 4
    actor, critic = config.actor_rollout_ref.actor, config.critic
    assert count_optimizer_steps(config, train_tasks=100) == {
        "actor_rollout_ref.actor.optim.total_training_steps": 6
        * actor.ppo_mini_batches
        * actor.ppo_epochs,
        "critic.optim.total_training_steps": 10 * critic.ppo_mini_batches * critic.ppo_epochs,
    }
