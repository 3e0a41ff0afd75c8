"""Tests of the registry: names resolve to packages, and wrong names are explained."""

import dataclasses
import subprocess
import sys

import pytest

from agent_system.environments import env_registry as registry
from agent_system.environments.env_package.reasoning_gym.settings import ReasoningGymSettings
from agent_system.environments.package import EnvPackage
from tests.helpers.refusals import FIX, has_problem, mentions, suggests
from verl.config.schema.env import EnvConfig
from verl.config.settings import ConfigError
from verl.trainer.launch.extensions import load_config


@pytest.fixture(autouse=True)
def restore_registry(monkeypatch):
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))


def test_registered_name_gives_its_package():
    package = registry.get_package("number_line")
    assert isinstance(package, EnvPackage) and package.name == "number_line"


def test_variant_after_a_slash_is_the_same_environment():
    assert registry.find_entry("alfworld/AlfredTWEnv") == registry.find_entry("alfworld")


def test_unknown_name_lists_known_names_and_the_nearest():
    with pytest.raises(
        registry.UnknownEnvironmentError, check=suggests("alfworld", "'alfwrld'", "number_line")
    ):
        registry.get_package("alfwrld")


def test_import_path_needs_no_registration():
    assert registry.get_package("tests.helpers.faulty_envs:PACKAGE").name == "faulty"


def test_import_path_of_another_type_is_refused():
    with pytest.raises(TypeError, check=mentions("EnvPackage")):
        registry.get_package("tests.helpers.faulty_envs:__name__")


def test_import_path_with_unknown_name_gets_a_suggestion():
    with pytest.raises(
        registry.UnknownEnvironmentError, check=suggests("PACKAGE", "faulty_envs", "PAKAGE")
    ):
        registry.get_package("tests.helpers.faulty_envs:PAKAGE")


@pytest.mark.parametrize("import_path", ["no_such_lab:PACKAGE", "no_such_lab.guess:PACKAGE"])
def test_import_path_of_a_missing_module_names_the_module(import_path):
    with pytest.raises(
        registry.MissingExtraError,
        check=mentions("'no_such_lab'"),
    ):
        registry.get_package(import_path)


def test_missing_import_of_a_user_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "needy_lab.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(registry.MissingExtraError, check=mentions("'no_such_library'")):
        registry.get_package("needy_lab:PACKAGE")


def test_unknown_name_shows_how_to_name_a_user_package():
    with pytest.raises(
        registry.UnknownEnvironmentError, check=mentions("'potions'", "potions:PACKAGE")
    ):
        registry.get_package("potions")


def test_missing_dependency_names_the_extra(monkeypatch):
    monkeypatch.setitem(
        registry.REGISTRY,
        "lab",
        registry.RegistryEntry("no_such_lab.package:PACKAGE", extra="envs"),
    )
    with pytest.raises(
        registry.MissingExtraError, check=mentions("'lab'", "'no_such_lab'", ".[envs]")
    ):
        registry.get_package("lab")


def test_users_register_an_import_path_or_a_function():
    registry.register_env("by_path", "tests.helpers.faulty_envs:PACKAGE")

    @registry.register_env("by_function")
    def make():
        return registry.get_package("by_path")

    assert registry.get_package("by_path").name == "faulty"
    assert registry.find_entry("by_function").import_path.startswith(f"{__name__}:")


def test_environment_layer_imports_neither_torch_nor_ray():
    code = (
        "import sys, agent_system.environments.pool.environment_pool, "
        "agent_system.environments.manager, agent_system.environments.pool.worker; "
        "from agent_system.environments.env_registry import get_package; "
        "get_package('number_line'); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'transformers', 'tensordict')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def read_generator(env_name: str, **section: str) -> str:
    env = EnvConfig.model_validate({"env_name": env_name, "reasoning_gym": section})
    settings = registry.read_env_settings(env)
    assert isinstance(settings, ReasoningGymSettings)
    return settings.task


def test_variant_selects_the_generator():
    assert read_generator("reasoning_gym/gcd") == "gcd"
    assert read_generator("reasoning_gym", task="gcd") == "gcd"
    assert read_generator("reasoning_gym/gcd", task="gcd") == "gcd"
    assert read_generator("reasoning_gym/gcd", task="chain_sum") == "gcd", (
        "the default of env.reasoning_gym.task is no contradiction"
    )
    with pytest.raises(
        ConfigError,
        check=mentions("reasoning_gym/gcd'", "env.reasoning_gym.task='lcm'", "env.env_name"),
    ):
        read_generator("reasoning_gym/gcd", task="lcm")


def test_variant_is_selected_by_an_override():
    for overrides in ([], ["env.reasoning_gym.val_tasks=3"]):
        config = load_config("ppo_trainer", ["env.env_name=reasoning_gym/gcd", *overrides])
        settings = registry.read_env_settings(config.env)
        assert isinstance(settings, ReasoningGymSettings) and settings.task == "gcd"


WITHOUT_VARIANTS = [
    name for name in registry.REGISTRY if not registry.find_settings_class(name).variant_key
]


@pytest.mark.parametrize("name", WITHOUT_VARIANTS)
def test_variant_of_an_environment_without_variants_is_refused(name):
    expected = has_problem("unknown_name", "env.env_name", f"{FIX}env.env_name={name}")
    with pytest.raises(ConfigError, check=expected):
        registry.read_env_settings(EnvConfig(env_name=f"{name}/x"))
    for alias in registry.find_settings_class(name).variant_aliases:
        registry.read_env_settings(EnvConfig(env_name=f"{name}/{alias}"))


@pytest.mark.parametrize("name", ["reasoning_gym", "textarena", "textworld", "textworld_express"])
def test_listed_variant_names_select_their_variant(name):
    names = registry.list_selectable_names(name)
    assert len(set(names)) == len(names) >= 4
    for env_name in names:
        settings = registry.read_env_settings(EnvConfig(env_name=env_name))
        assert f"{name}/{getattr(settings, settings.variant_key)}" == env_name


def test_package_without_variants_has_one_name():
    assert registry.list_selectable_names("number_line") == ["number_line"]


def test_variants_with_a_missing_module_name_the_extra(monkeypatch):
    def absent():
        raise ModuleNotFoundError("gone", name="gone")

    package = dataclasses.replace(registry.get_package("number_line"), variants=absent)
    monkeypatch.setitem(
        registry.REGISTRY, "far", registry.RegistryEntry(f"{__name__}:far", extra="envs")
    )
    monkeypatch.setitem(globals(), "far", lambda: package)
    with pytest.raises(registry.MissingExtraError, check=mentions("'far'", "'gone'", ".[envs]")):
        registry.list_selectable_names("far")


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("settings", dict),
        ("settings", ReasoningGymSettings()),
        ("make", 3),
        ("tasks", []),
        ("prompts", "text"),
        ("project", None),
        ("stop", "</action>"),
        ("stop", ("",)),
        ("stop", None),
        ("expert", dict),
    ],
)
def test_package_with_a_field_of_another_type_is_refused(field_name, value):
    package = registry.get_package("number_line")
    with pytest.raises(TypeError, check=mentions(f"{field_name}=", "'number_line'")):
        dataclasses.replace(package, **{field_name: value})
