"""Config files that cannot be parsed, or that have keys in the wrong place."""

import pytest

from verl.config.load import load_config, read_config
from verl.config.settings import ConfigError
from verl.config.validate import find_problems

BASE = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {model: {path: org/policy}}\n"


def exponential_yaml(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        "defaults: [mine]\n",
        "defaults: [_self_, other]\n",
        "defaults: [ppo_trainer, /group/leaf]\n",
        exponential_yaml(12),
        f"env: {{kwargs: {{a: {'[' * 100_000}{']' * 100_000}}}}}",
        "".join(f"{'  ' * depth}a:\n" for depth in range(900)),
        "env: &a {kwargs: {x: *a}}\n",
        f"env: {{kwargs: {{a: [{','.join(['1'] * 40_000)}]}}}}",
        f"env: {{kwargs: {{a: '{'x' * 3_000_000}'}}}}",
        "defaults: {a: 1}\n",
        "defaults: [3]\n",
        "- a\n- b\n",
        "a: 1\n---\nb: 2\n",
        "a: !!python/object/apply:os.system ['id']\n",
        "trainer: {seed: '${unclosed'}\n",
        "? [a, b]\n: 1\n",
        "null: 1\n",
        "trainer: {seed: 1, seed: 2}\n",
    ],
    ids=lambda text: text[:30],
)
def test_unreadable_file_is_refused_by_name(text, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text("defaults: [mine]\n")
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "leaf.yaml").write_text("defaults: [/mine]\n")
    with pytest.raises(ConfigError) as caught:
        load_config("mine", config_path=str(tmp_path))
    (problem,) = caught.value.problems
    assert problem.startswith(("config 'mine'", "config 'leaf'", "config 'other'"))
    assert problem.code == "unreadable_file"
    assert "\n" not in problem and "; allowed: " in problem and "; fix: " in problem


def problems_of(text: str, tmp_path):
    (tmp_path / "mine.yaml").write_text(BASE + text)
    parsed = read_config("mine", config_path=str(tmp_path))
    return parsed, [
        *parsed.problems,
        *find_problems(parsed.config, check_files=False, lacks_invalid_keys=True),
    ]


@pytest.mark.parametrize(
    ("text", "key", "code"),
    [
        ("trainer.seed: 3\n", "trainer.seed", "invalid_syntax"),
        ("5: 3\n", "5", "invalid_syntax"),
        ("true: 3\n", "True", "invalid_syntax"),
        ("env: {rollout.n: 4}\n", "env.rollout.n", "invalid_syntax"),
        (
            "env: {number_line.size: 9, env_name: number_line}\n",
            "env.number_line.size",
            "invalid_syntax",
        ),
        ("env: {env_name: alfworld, alfworld: {1: 9}}\n", "env.alfworld.1", "invalid_syntax"),
        ("algorithm: {kl_ctrl.kl_coef: 0.5}\n", "algorithm.kl_ctrl.kl_coef", "invalid_syntax"),
        ("algorithm: {rlvcr: {7: 0.1}}\n", "algorithm.rlvcr.7", "invalid_syntax"),
        ("data.max_prompt_length: 64\n", "data.max_prompt_length", "invalid_syntax"),
        ("trainer: {sede: 3}\n", "trainer.sede", "unknown_key"),
        ("modle: x\n", "modle", "unknown_key"),
    ],
)
def test_misplaced_key_is_the_only_problem(text, key, code, tmp_path):
    _, (problem,) = problems_of(text, tmp_path)
    assert (problem.key_path, problem.code) == (key, code)


def test_key_with_dots_sets_the_key_it_names(tmp_path):
    parsed, _ = problems_of("trainer.seed: 3\nenv: {rollout.n: 4}\n", tmp_path)
    assert parsed.config.trainer.seed == 3 and parsed.config.env.rollout.n == 4


def test_keys_of_free_sections_may_have_dots(tmp_path):
    text = "reward_model: {weights: {a.b: 1.0}}\ncustom_reward_function: {path: rewards.py}\n"
    parsed, problems = problems_of(text, tmp_path)
    assert not problems and parsed.config.reward_model.weights == {"a.b": 1.0}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("trainer: {seed: '${env.seed}'}\nenv: {seed: '${trainer.seed}'}\n", "env.seed"),
        ("trainer: {project_name: 'a${trainer.project_name}'}\n", "trainer.project_name"),
        ("critic: {model: {path: '${critic.model.path}'}}\n", "critic.model.path"),
        ("trainer: '${env}'\nenv: '${trainer}'\n", "env"),
        ("trainer: {seed: '${trainer.nothing}'}\n", "trainer.seed"),
        ("trainer: {seed: '${oc.env:NOT_THERE_AT_ALL}'}\n", "trainer.seed"),
        ("actor_rollout_ref: {model: {path: '${nowhere}'}}\n", "actor_rollout_ref.model.path"),
    ],
)
def test_unresolvable_reference_is_the_only_problem(text, key, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\n" + text)
    overrides = [] if "actor_rollout_ref" in text else ["actor_rollout_ref.model.path=org/policy"]
    parsed = read_config("mine", overrides, config_path=str(tmp_path))
    problems = [
        *parsed.problems,
        *find_problems(parsed.config, check_files=False, lacks_invalid_keys=True),
    ]
    assert [(problem.key_path, problem.code) for problem in problems] == [(key, "invalid_syntax")]
