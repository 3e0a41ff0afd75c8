"""``algorithm.rlvcr.prompts`` reaches the policy: from the command line to the first prompt of the
engine.
"""

import pytest

from agent_system.environments.env import shows_level_prompts
from agent_system.environments.env_package.alfworld.package import PACKAGE as ALFWORLD
from agent_system.environments.env_package.number_line.package import (
    LEVEL_TEXTS,
    LEVELS_ANSWER_FORMAT,
)
from agent_system.environments.env_package.number_line.package import PACKAGE as NUMBER_LINE
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings, check_level_prompts
from rlvcr.settings import get_rlvcr_settings
from tests.helpers.number_line_world import make_world
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.config.load import load_config

OVERRIDES = [
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


def first_prompt(overrides, is_train):
    config, tokenizer = load_config("ppo_trainer", overrides), make_tiny_tokenizer()
    config.actor_rollout_ref.rollout.val_kwargs.do_sample = True
    group, envs, (engine,) = make_world(tokenizer, config)
    collector = TrajectoryCollector(config, tokenizer)
    try:
        thinking = is_train and get_rlvcr_settings(config.algorithm).enable
        settings = RolloutSettings.from_config(
            config, envs.package, is_train, samples_alternatives=thinking
        )
        collector._generate_batch(envs.gen_batch(1, 1), group, settings)
    finally:
        collector.close()
    return tokenizer.decode(engine.requests[0].prompt_ids)


@pytest.mark.parametrize("history", ["append", "window"])
@pytest.mark.parametrize("is_train", [True, False])
def test_level_text_from_the_command_line_is_in_the_prompt(history, is_train):
    prompt = first_prompt([*OVERRIDES, f"env.history={history}"], is_train)
    expected = LEVELS_ANSWER_FORMAT.format(
        LEVEL_TEXTS[1], "say {where} the mug is.", LEVEL_TEXTS[3], "plan for a desk."
    )
    assert prompt.count(expected) == 1
    assert LEVEL_TEXTS[2] not in prompt and LEVEL_TEXTS[4] not in prompt


def test_default_level_texts_are_in_the_prompt():
    assert LEVELS_ANSWER_FORMAT.format(*LEVEL_TEXTS.values()) in first_prompt(
        OVERRIDES[:-2], is_train=True
    )


def test_prompt_without_levels_has_no_level_texts():
    overrides = [*OVERRIDES, "algorithm.adv_estimator=grpo", "env.rollout.n=2"]
    assert "mug is" not in first_prompt(overrides, is_train=True)


def test_full_alfworld_prompt_describes_the_levels():
    section = {"prompt": "full", "level_prompts": {3: "think of the drawer."}}
    full = ALFWORLD.prompts(ALFWORLD.read_settings(section))
    text = full.system(True)
    without = full.system(False)
    assert text is not None and without is not None
    assert "\n3: think of the drawer.\n" in text and "\n4: as 3," in text
    assert "drawer" not in without
    assert shows_level_prompts(full)
    assert not shows_level_prompts(ALFWORLD.prompts(ALFWORLD.read_settings({"prompt": "compact"})))


def test_key_that_is_no_level_is_refused():
    with pytest.raises(ValueError, check=mentions(5, "1, 2, 3, 4")):
        NUMBER_LINE.prompts(NUMBER_LINE.read_settings({"level_prompts": {"5": "dream"}}))


def test_level_texts_without_a_place_in_the_prompt_are_refused():
    overrides = ["algorithm.rlvcr.prompts.2=look"]
    config = load_config("quickstart", overrides)
    with pytest.raises(
        ValueError,
        check=mentions("algorithm.rlvcr.prompts"),
    ):
        check_level_prompts(config, ALFWORLD)
    full = load_config("quickstart", [*overrides, "env.alfworld.prompt=full"])
    check_level_prompts(full, ALFWORLD)
