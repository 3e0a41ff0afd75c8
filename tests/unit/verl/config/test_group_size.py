"""The group size of an estimator follows from its declaration alone."""

import ast
import subprocess
import sys

import pytest

import rlvcr.core_rlvcr  # noqa: F401  registers rlvcr and copo
from tests.unit.verl.config.test_config_validate import problems
from verl.algos import ADV_ESTIMATORS, register_adv_est
from verl.config.load import load_config
from verl.names import ESTIMATORS, AdvantageEstimator
from verl.trainer import cli

USER_MODULE = """
from verl.algos import register_adv_est

@register_adv_est("{name}"{declared})
def mine(token_level_rewards, response_mask, {reads}traj_index=None):
    return token_level_rewards, token_level_rewards
"""


@pytest.fixture
def registries(monkeypatch):
    monkeypatch.setattr("verl.algos.algorithm_registry.ADV_ESTIMATORS", dict(ADV_ESTIMATORS))
    before = dict(ESTIMATORS)
    yield
    ESTIMATORS.clear()
    ESTIMATORS.update(before)


def compare(index):
    return index, index


def compare_if_given(response_mask, index=None):
    return response_mask, index


def ignore_groups(response_mask):
    return response_mask, response_mask


@pytest.mark.parametrize(
    ("function", "declared", "expected"),
    [
        (compare, True, 8),
        (compare, None, 8),
        (compare, False, 1),
        (compare_if_given, None, 8),
        (ignore_groups, True, 8),
        (ignore_groups, None, 1),
        (ignore_groups, False, 1),
    ],
)
def test_group_size_of_a_user_provided_estimator(registries, function, declared, expected):
    register_adv_est("of_ones_own", compares_group=declared)(function)
    override = "algorithm.adv_estimator=of_ones_own"
    cfg = load_config("ppo_trainer", [override, "actor_rollout_ref.model.external_lib=sys"])
    assert cfg.env.rollout.n == expected
    single_problems = problems(
        override, "env.rollout.n=1", "actor_rollout_ref.model.external_lib=sys"
    )
    refused = [text for text in single_problems if text.startswith("env.rollout.n=1")]
    assert len(refused) == (expected > 1)
    assert all("compares_group=False" in text for text in refused)


def test_shipped_estimators_declare_what_they_register():
    """``verl/names.py`` agrees with the registration, which needs torch."""
    code = "import verl.names; print(verl.names.ESTIMATORS)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    shipped = ast.literal_eval(result.stdout)
    assert list(shipped) == list(AdvantageEstimator)
    assert shipped == {name: ADV_ESTIMATORS[name].compares_group for name in shipped}
    for name, compares in shipped.items():
        n = load_config("ppo_trainer", [f"algorithm.adv_estimator={name}"]).env.rollout.n
        assert n == (8 if compares else 1), name


@pytest.mark.parametrize(
    ("declared", "reads", "expected"),
    [("", "index, ", 8), (", compares_group=True", "", 8), ("", "", 1)],
)
def test_external_module_decides_the_group_size(
    registries, tmp_path, monkeypatch, declared, reads, expected
):
    name = f"plugged_{expected}_{len(declared)}_{len(reads)}"
    (tmp_path / f"{name}.py").write_text(
        USER_MODULE.format(name=name, declared=declared, reads=reads)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    sizes = []
    overrides = [
        f"actor_rollout_ref.model.external_lib={name}",
        f"algorithm.adv_estimator={name}",
        "env.env_name=number_line",
        f"actor_rollout_ref.model.path={tmp_path}",
    ]
    monkeypatch.setattr(cli, "find_problems", lambda *_args, **_kwargs: [])
    cli.run(lambda cfg: sizes.append(cfg.env.rollout.n), argv=overrides)
    assert sizes == [expected]
