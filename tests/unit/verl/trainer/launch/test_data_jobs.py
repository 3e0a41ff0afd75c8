"""A job with data files uses their rows as tasks of one turn, graded by the configured function."""

import json

import pytest

from agent_system.environments.env_registry import REGISTRY, get_package
from agent_system.reward_manager import load_reward_manager
from tests.helpers.refusals import FIX, list_logged, mentions
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.config.load import find_keys_without_effect, to_dict, to_yaml
from verl.config.schema import PPOConfig
from verl.config.settings import Problem
from verl.config.validate import find_problems
from verl.trainer import main_ppo
from verl.trainer.launch.dry_run import perform_dry_run
from verl.trainer.launch.extensions import load_config, read_config
from verl.trainer.launch.preflight_prompts import find_prompt_problems

POLICY = "actor_rollout_ref.model.path=some/policy"
GROUP = "actor_rollout_ref.rollout.n"
PLACEHOLDER = "data.train_files=/root/data/verl-agent/text/train.parquet"


def find_dry_run_problems(cfg: PPOConfig) -> list[Problem]:
    """Return the problems that ``perform_dry_run`` finds."""
    return list(perform_dry_run(cfg).problems)


def config(*overrides):
    return load_config("ppo_trainer", [POLICY, *overrides])


def problems(*overrides):
    return find_problems(config(*overrides), check_files=False)


def test_data_keys_of_the_job_reach_the_environment():
    cfg = config(
        "data.train_files=[a.parquet,b.parquet]",
        "data.val_files=c.jsonl",
        "data.prompt_key=question",
        "data.reward_fn_key=from",
        "data.custom_cls.path=rows.py",
        "data.custom_cls.name=Rows",
        "custom_reward_function.path=grade.py",
        "custom_reward_function.name=grade",
        "+custom_reward_function.reward_kwargs.bonus=2",
        f"{GROUP}=5",
    )
    dataset = cfg.env.dataset
    assert (cfg.env.env_name, cfg.env.max_steps, cfg.env.rollout.n) == ("dataset", 1, 5)
    assert (dataset.train_files, dataset.val_files) == (["a.parquet", "b.parquet"], ["c.jsonl"])
    assert (dataset.prompt_key, dataset.reward_fn_key) == ("question", "from")
    assert (dataset.custom_cls.path, dataset.custom_cls.name) == ("rows.py", "Rows")
    assert (dataset.reward.path, dataset.reward.name) == ("grade.py", "grade")
    assert dataset.reward.reward_kwargs == {"bonus": 2}
    assert cfg.env.val_tasks is None
    assert find_problems(cfg, check_files=False) == []


def test_timeout_of_the_function_sets_the_grader_timeout():
    files, seconds = "data.train_files=a.jsonl", "custom_reward_function.timeout_s"
    assert config(files).env.dataset.grade_s == 10
    for value, step_timeout in ((60, 70), (30, 31), (20, 30)):
        cfg = config(files, f"{seconds}={value}", f"env.step_timeout_s={step_timeout}")
        assert cfg.env.dataset.grade_s == value and find_problems(cfg, check_files=False) == []
    (problem,) = problems(files, f"{seconds}=60")
    assert (problem.key_path, problem.code) == (seconds, "conflicting_keys")
    assert "env.step_timeout_s=70" in problem
    (problem,) = problems(files, f"{seconds}=60", "env.dataset.grade_s=5")
    assert (problem.key_path, problem.code) == (seconds, "conflicting_keys")
    assert "env.dataset.grade_s=5.0" in problem


def test_without_files_the_default_environment_is_used():
    for overrides in ([], [PLACEHOLDER], ["env.env_name="]):
        cfg = config(*overrides)
        assert (cfg.env.env_name, cfg.env.max_steps, cfg.env.val_tasks) == ("alfworld", 50, 128)
    explicit = config("env.env_name=dataset", PLACEHOLDER, "env.max_steps=2", "env.val_tasks=7")
    assert (explicit.env.dataset.train_files, explicit.env.max_steps) == ([], 2)
    assert explicit.env.val_tasks == 7
    assert config("env.env_name=reasoning_gym").env.max_steps == 1


def test_dumped_config_is_read_unchanged(tmp_path):
    cfg = config("data.train_files=a.jsonl", "env.dataset.prompt_key=q", "env.rollout.n=3")
    (tmp_path / "again.yaml").write_text(to_yaml(cfg))
    reloaded = load_config("again", config_path=str(tmp_path))
    assert to_dict(reloaded) == to_dict(cfg) and find_problems(reloaded, check_files=False) == []


@pytest.mark.parametrize(
    "overrides, code, key, fix",
    [
        (
            ["data.train_files=a.jsonl", "env.dataset.train_files=[b.jsonl]"],
            "conflicting_keys",
            "data.train_files=['a.jsonl']",
            "env.dataset.train_files",
        ),
        (
            [
                "data.train_files=a.jsonl",
                "custom_reward_function.path=a.py",
                "env.dataset.reward.path=b.py",
            ],
            "conflicting_keys",
            "custom_reward_function.path='a.py'",
            "env.dataset.reward.path",
        ),
        (
            ["data.train_files=a.jsonl", f"{GROUP}=5", "env.rollout.n=4"],
            "conflicting_keys",
            f"{GROUP}=5",
            "env.rollout.n",
        ),
        (
            ["env.env_name=number_line", "data.reward_fn_key=source"],
            "no_effect",
            "data.reward_fn_key='source'",
            "data.train_files",
        ),
        (
            ["env.env_name=number_line", "data.train_files=a.jsonl"],
            "no_effect",
            "data.train_files=['a.jsonl']",
            "env.env_name",
        ),
    ],
)
def test_contradicting_keys_are_refused(overrides, code, key, fix):
    (problem,) = problems(*overrides)
    assert problem.startswith(f"{key}: ") and problem.code == code
    assert fix in problem.partition(FIX)[2]


def test_value_of_wrong_type_is_refused_as_a_value():
    parsed = read_config("ppo_trainer", [POLICY, "data.train_files=3", "env.dataset=4"])
    assert any(problem.startswith("data.train_files=3") for problem in parsed.problems)


def test_prompt_filter_is_marked_where_it_has_no_effect():
    overrides = ["data.filter_overlong_prompts=true", "data.truncation=left"]
    assert set(find_keys_without_effect(config(*overrides), "cpu")) >= {
        "data.filter_overlong_prompts",
        "data.truncation",
    }
    assert find_keys_without_effect(config("data.train_files=a.jsonl", overrides[0]), "cpu") == {}
    # Prompts of the tools environment include the tools, and are neither dropped nor truncated.
    tools = config("env.env_name=tools", "data.train_files=a.jsonl", *overrides)
    assert set(find_keys_without_effect(tools, "cpu")) >= {
        "data.filter_overlong_prompts",
        "data.truncation",
    }


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_settings_declare_whether_the_package_can_fit_its_prompts(name):
    package = get_package(name)
    assert package.settings.can_drop_or_truncate_prompts == (package.task_text is not None)


@pytest.mark.parametrize(
    "overrides, name",
    [
        ([], "quickstart"),
        ([PLACEHOLDER], "quickstart"),
        (["data.train_files=[a.parquet]"], "ppo_trainer"),
        (["+data.train_files='a.parquet'"], "ppo_trainer"),
        ([POLICY], "ppo_trainer"),
    ],
)
def test_command_with_data_files_starts_from_the_neutral_config(overrides, name):
    assert main_ppo.choose_config_name(overrides) == name


@pytest.fixture
def job(tmp_path):
    """Return the overrides of a job with one row, graded by ``grade.py``."""
    row = {"prompt": "6 x 7?", "ground_truth": "42", "data_source": "sums"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "grade.py").write_text(
        "def ok(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n"
        "    return float(solution_str == ground_truth) + bonus\n"
        "def crash(**kwargs): raise RuntimeError('grader down')\n"
        "def nothing(**kwargs): return None\n"
        "def parts(**kwargs): return {'accuracy': 1, 'format': 0.5, 'why': 'so'}\n"
        "def trajectory(data_source, steps, extra_info, scale): return scale * len(steps)\n"
    )
    return [
        f"data.train_files={tmp_path}/rows.jsonl",
        f"custom_reward_function.path={tmp_path}/grade.py",
    ]


def test_function_grades_answers_in_the_environment(job):
    cfg = config(*job, "custom_reward_function.name=ok")
    assert load_reward_manager(cfg).compute_score is None
    assert find_dry_run_problems(cfg) == []


@pytest.mark.parametrize(
    ("name", "why"), [("crash", "RuntimeError: grader down"), ("nothing", "'None'")]
)
def test_failing_grader_is_found_before_the_start(job, name, why):
    (problem,) = find_dry_run_problems(config(*job, f"custom_reward_function.name={name}"))
    assert (problem.key_path, problem.code) == ("custom_reward_function.path", "failed_call")
    assert "dataset/train/0" in problem and why in problem


@pytest.mark.parametrize(("num_shared", "num_warnings"), [(0, 0), (2, 1)])
def test_validation_prompts_that_are_training_prompts_are_counted(
    tmp_path, caplog, num_shared, num_warnings
):
    first_numbers = {"train": 0, "val": 4 - num_shared}
    for split, first_number in first_numbers.items():
        numbers = range(first_number, first_number + 4)
        rows = [{"prompt": f"{n} + 1?", "ground_truth": str(n + 1)} for n in numbers]
        (tmp_path / split).write_text("\n".join(map(json.dumps, rows)))
    cfg = config(*(f"data.{split}_files={tmp_path}/{split}" for split in first_numbers))
    assert list(find_prompt_problems(cfg, make_tiny_tokenizer())) == []
    keys = ("data.train_files", "data.val_files")
    messages = list_logged(caplog, find_prompt_problems.__module__, *keys)
    assert len(messages) == num_warnings
    assert all(message.startswith("2 of 4 ") for message in messages)


def test_reward_kwargs_reach_the_function_that_scores_episodes(job):
    overrides = ["env.env_name=number_line", job[1], "custom_reward_function.name=trajectory"]
    cfg = config(*overrides, "+custom_reward_function.reward_kwargs.scale=3")
    score = load_reward_manager(cfg).compute_score
    assert score is not None and score(data_source="d", steps=[1, 2], extra_info={}) == 6
    with pytest.raises(TypeError, check=mentions("'scale'")):
        load_reward_manager(config(*overrides))


GDPO = "algorithm.adv_estimator=gdpo"


def test_weights_combine_rewards_and_are_shared_with_gdpo(job):
    overrides = [*job, "custom_reward_function.name=parts", GDPO]
    cfg = config(*overrides, "+reward_model.weights={accuracy: 1, format: 0.2}")
    assert cfg.env.dataset.reward.weights == {"accuracy": 1.0, "format": 0.2}
    assert cfg.algorithm.gdpo_reward_keys == ["accuracy", "format"]
    assert cfg.algorithm.gdpo_reward_weights == [1.0, 0.2]
    assert find_dry_run_problems(cfg) == []
    (problem,) = find_dry_run_problems(config(*overrides[:-1], "+reward_model.weights={fromat: 1}"))
    assert problem.code == "failed_call" and "'fromat'" in problem
    (problem,) = find_dry_run_problems(config(*overrides[:-1]))
    assert problem.code == "failed_call" and "reward_model.weights" in problem
    explicit = config(
        *overrides, "algorithm.gdpo_reward_keys=[format]", "+reward_model.weights={format: 2}"
    )
    assert explicit.algorithm.gdpo_reward_weights == []


def test_weights_without_a_function_are_refused():
    for overrides in ([], ["data.train_files=a.jsonl"], ["env.env_name=number_line"]):
        (problem,) = problems(*overrides, "+reward_model.weights={accuracy: 1}")
        assert (problem.key_path, problem.code) == ("reward_model.weights", "no_effect")
    with_function = ["data.train_files=a.jsonl", "env.dataset.reward.path=g.py"]
    assert problems(*with_function, "+reward_model.weights={accuracy: 1}") == []
