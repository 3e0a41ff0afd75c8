"""``algorithm.rlvcr.prompts`` reaches the policy: from a command line to the first prompt an engine
continues.
"""

import pytest

from agent_system.environments.env_package.alfworld.package import PACKAGE as ALFWORLD
from agent_system.environments.env_package.number_line.package import LEVEL_TEXTS, LEVELS
from agent_system.environments.env_package.number_line.package import PACKAGE as NUMBER_LINE
from agent_system.environments.prompts import shows_level_prompts
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings, check_prompts
from rlvcr.settings import method_settings
from tests.helpers.play import make_world
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.config.load import load_config

WORDS = [
    "actor_rollout_ref.model.path=some/policy",
    "env.env_name=number_line",
    "env.kwargs={size: 6}",
    "env.max_steps=6",
    "env.max_turn_tokens=48",
    "env.rollout.n=1",
    "algorithm.adv_estimator=rlvcr",
    "algorithm.rlvcr.prompts.2='say {where} the mug is.'",
    "+algorithm.rlvcr.prompts.4='plan for a desk.'",
]


def first_prompt(words, is_train):
    config, tokenizer = load_config("ppo_trainer", words), make_tiny_tokenizer()
    config.actor_rollout_ref.rollout.val_kwargs.do_sample = True
    group, envs, (engine,) = make_world(tokenizer, config)
    collector = TrajectoryCollector(config, tokenizer)
    try:
        thinking = is_train and method_settings(config.algorithm).enable
        settings = RolloutSettings.from_config(config, envs.package, is_train, thinking=thinking)
        collector._generate_batch(envs.gen_batch(1, 1), group, settings)
    finally:
        collector.close()
    return tokenizer.decode(engine.requests[0].prompt_ids)


@pytest.mark.parametrize("history", ["append", "window"])
@pytest.mark.parametrize("is_train", [True, False])
def test_a_text_from_the_command_line_is_in_the_first_prompt(history, is_train):
    prompt = first_prompt([*WORDS, f"env.history={history}"], is_train)
    expected = LEVELS.format(
        LEVEL_TEXTS[1], "say {where} the mug is.", LEVEL_TEXTS[3], "plan for a desk."
    )
    assert prompt.count(expected) == 1
    assert LEVEL_TEXTS[2] not in prompt and LEVEL_TEXTS[4] not in prompt


def test_without_texts_the_built_in_ones_are_shown():
    assert LEVELS.format(*LEVEL_TEXTS.values()) in first_prompt(WORDS[:-2], is_train=True)


def test_a_policy_that_is_asked_for_no_levels_sees_none():
    words = [*WORDS, "algorithm.adv_estimator=grpo", "env.rollout.n=2"]
    assert "mug is" not in first_prompt(words, is_train=True)


def test_alfworld_describes_levels_in_its_full_prompts():
    section = {"prompt": "full", "level_prompts": {3: "think of the drawer."}}
    full = ALFWORLD.prompts(ALFWORLD.read_settings(section))
    text = full.system(True)
    without = full.system(False)
    assert text is not None and without is not None
    assert "\n3: think of the drawer.\n" in text and "\n4: as 3," in text
    assert "drawer" not in without
    assert shows_level_prompts(full)
    assert not shows_level_prompts(ALFWORLD.prompts(ALFWORLD.read_settings({"prompt": "compact"})))


def test_keys_are_levels():
    with pytest.raises(ValueError, check=mentions(5, "1, 2, 3, 4")):
        NUMBER_LINE.prompts(NUMBER_LINE.read_settings({"level_prompts": {"5": "dream"}}))


def test_prompts_that_describe_no_levels_refuse_texts_for_them():
    words = ["algorithm.rlvcr.prompts.2=look"]
    config = load_config("quickstart", words)
    with pytest.raises(
        ValueError,
        check=mentions("algorithm.rlvcr.prompts"),
    ):
        check_prompts(config, ALFWORLD)
    full = load_config("quickstart", [*words, "env.alfworld.prompt=full"])
    check_prompts(full, ALFWORLD)
