"""Tests of the memoised engine and of the environment built on it.

The engine gives the same texts, commands and successes as the installed ALFWorld engine.
"""

import random
import sys

import pytest

from tests.helpers.refusals import list_logged

pytest.importorskip("alfworld")

from agent_system.environments.env_package.alfworld import games, grammar
from agent_system.environments.env_package.alfworld.package import PACKAGE
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings

read = PACKAGE.read_settings

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"


def make_game(kind, index=0):
    settings = AlfworldSettings(task_types=(kind,), receptacles=(4, 6), objects=(3, 5))
    return games.build_game_file_content(games.generate_game(settings, "train", index))


@pytest.fixture(scope="module")
def translation_folder(tmp_path_factory):
    """Return the folder of the translated games."""
    return tmp_path_factory.mktemp("translations")


@pytest.fixture(scope="module")
def engine(translation_folder):
    from agent_system.environments.env_package.alfworld.engine import Engine

    engine = Engine(translation_folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def installed_engine():
    """Return ALFWorld's own engine, made as its environment class makes it."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv

    return AlfredDemangler(
        PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)), shuffle=False
    )


def choose_command(rng, admissible_commands):
    """Return mostly a command that changes the state, and sometimes an unknown command."""
    if rng.random() < 0.1:
        return "fly to the moon"
    verbs = ("take", "move", "open", "clean", "heat", "cool", "use", "slice")
    changing = [command for command in admissible_commands if command.startswith(verbs)]
    return rng.choice(changing if changing and rng.random() < 0.6 else admissible_commands)


@pytest.mark.parametrize("kind", ["clean", "heat", "cool", "light", "two"])
def test_engine_agrees_with_the_installed_engine(engine, installed_engine, kind):
    from agent_system.environments.env_package.alfworld.engine import strip_banner

    game, rng = make_game(kind), random.Random(kind)
    engine.load(game)
    installed_engine.load(game)
    state, reference = engine.reset(), installed_engine.reset()
    for _ in range(12):
        assert state.text == strip_banner(reference.feedback)
        assert list(state.admissible_commands) == reference["admissible_commands"]
        assert state.won == reference["won"]
        command = choose_command(rng, reference["admissible_commands"])
        state, reference = engine.step(command), installed_engine.step(command)[0]
        assert state.is_valid == (reference.feedback != "Nothing happens.")


def test_reset_repeats_the_start_and_engines_share_no_state(engine, translation_folder):
    from agent_system.environments.env_package.alfworld.engine import Engine

    game, other = make_game("pick"), Engine(translation_folder)
    engine.load(game)
    other.load(game)
    first = engine.reset()
    other.reset()
    goto = next(command for command in first.admissible_commands if command.startswith("go to"))
    moved = engine.step(goto)
    assert moved.text != other.step("look").text
    assert engine.reset() == first
    assert engine.step(goto) == moved
    other.close()


def test_engines_can_be_created_and_closed_repeatedly(engine, translation_folder):
    """Creating and closing engines neither crashes nor mixes up games."""
    from agent_system.environments.env_package.alfworld.engine import Engine

    engine.load(make_game("pick"))
    first = engine.reset()
    for number in range(1, 6):
        others = [Engine(translation_folder), Engine(translation_folder)]
        for other in others:
            other.load(make_game("pick", index=number))
            assert other.reset() != first
        for other in others:
            other.close()
            other.close()  # closing twice is allowed
    assert engine.step("look").text != "Nothing happens."
    assert engine.reset() == first


def observe_first_commands(engine, game):
    """Return the first state, and the state after each of its commands."""
    engine.load(game)
    first = engine.reset()
    answers = []
    for command in first.admissible_commands:
        answers.append(engine.step(command))
        engine.reset()
    return first, answers


@pytest.fixture
def translator(monkeypatch):
    """Yield the planner module with an empty cache, and a list of the problems it translates."""
    from agent_system.environments.env_package.alfworld import planner

    translate = planner._translate_problem
    planner.load_pddl_translation.cache_clear()
    translated = []

    def record_problem(domain, problem):
        translated.append(problem)
        return translate(domain, problem)

    monkeypatch.setattr(planner, "_translate_problem", record_problem)
    yield planner, translated
    planner.load_pddl_translation.cache_clear()


def test_stored_translation_is_read_by_another_process(translator, tmp_path):
    from agent_system.environments.env_package.alfworld.engine import Engine

    module, translated = translator
    game = make_game("heat")
    engine = Engine(tmp_path)
    expected = observe_first_commands(engine, game)
    module.load_pddl_translation.cache_clear()  # a new process would start without it
    assert observe_first_commands(engine, game) == expected
    engine.load(make_game("heat", index=1))
    assert len(translated) == 2
    engine.close()


@pytest.mark.parametrize("damage", [lambda text: text[:-9], lambda text: "", lambda _: "{}"])
def test_damaged_translation_is_replaced(translator, tmp_path, damage):
    from agent_system.environments.env_package.alfworld.engine import Engine

    module, translated = translator
    engine = Engine(tmp_path)
    expected = observe_first_commands(engine, make_game("pick"))
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(damage(whole))
    module.load_pddl_translation.cache_clear()
    assert observe_first_commands(engine, make_game("pick")) == expected
    assert len(translated) == 2 and path.read_text() == whole
    engine.close()


def test_game_loads_where_no_translation_can_be_stored(translator, tmp_path, caplog):
    from agent_system.environments.env_package.alfworld.engine import Engine

    file = tmp_path / "a file"
    file.write_text("")
    engine = Engine(file / "translations")
    engine.load(make_game("pick"))
    assert engine.reset().admissible_commands
    assert list_logged(caplog, translator[0].__name__, file / "translations")
    engine.close()


def test_translator_does_not_change_sys_argv(engine):
    before = list(sys.argv)
    engine.load(make_game("pick", index=3))
    assert sys.argv == before


@pytest.mark.parametrize(
    "sentence", ["sit, then rest", r"say \"hi\" to Bob's dog", "put a mug in desk"]
)
def test_task_sentence_with_special_characters_is_read(engine, installed_engine, sentence):
    game = make_game("pick", index=1)
    before, _, after = game["grammar"].partition("Your task is to: ")
    game["grammar"] = before + f"Your task is to: {sentence}" + after[after.index('."') :]
    engine.load(game)
    installed_engine.load(game)
    assert engine.reset().text == installed_engine.reset().feedback.removeprefix(BANNER)


def test_environment_keeps_the_protocol(tmp_path):
    section = {
        "data_dir": str(tmp_path),
        "source": "generated",
        "val_games": 2,
        "task_types": ["pick"],
    }
    tasks = PACKAGE.tasks(read(section), "val")
    env, twin = PACKAGE.make(read(section)), PACKAGE.make(read(section))
    assert env.placement == "process"
    first = env.reset(tasks[0], 1)
    assert first == twin.reset(tasks[0], 2)
    assert not first.info["won"]
    observation, reward, done, info = env.step("dance")
    assert (observation.text, reward, done, info["is_action_valid"]) == (
        "Nothing happens.",
        0.0,
        False,
        False,
    )
    assert observation.anchor == first.anchor
    goto = next(action for action in info["admissible_actions"] if action.startswith("go to"))
    assert env.step("inventory")[0].anchor == first.anchor
    moved = env.step(goto)[0]
    assert moved.anchor != first.anchor
    assert twin.step(goto)[0].anchor == moved.anchor
    assert env.reset(tasks[1], 0).text != first.text
    env.close()
    twin.close()


@pytest.mark.parametrize("expression", ["r.name or r.id", " 'a ' + o.name", "r"])
def test_grammar_expression_is_compiled(expression):
    assert grammar._compile_expression(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('id')",
        "r.__class__",
        "[x for x in r]",
        "r.name()",
        "(lambda: r)",
        "r[0]",
    ],
)
def test_game_text_that_would_run_as_code_is_refused(expression):
    with pytest.raises(grammar.UnsafeGameError):
        grammar._compile_expression(expression)
