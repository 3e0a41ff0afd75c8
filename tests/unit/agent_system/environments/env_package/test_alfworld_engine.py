"""The memoised engine says what the installed one says, and the environment built on it keeps the
protocol.
"""

import random
import sys

import pytest

pytest.importorskip("alfworld")

from agent_system.environments.env_package.alfworld import games, grammar
from agent_system.environments.env_package.alfworld.package import PACKAGE
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings

read = PACKAGE.read_settings

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"


def drawn(kind, index=0):
    settings = AlfworldSettings(task_types=(kind,), receptacles=(4, 6), objects=(3, 5))
    return games.game_file(games.generate(settings, "train", index))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where translated games are kept."""
    return tmp_path_factory.mktemp("translations")


@pytest.fixture(scope="module")
def engine(kept):
    from agent_system.environments.env_package.alfworld.engine import Engine

    engine = Engine(kept)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def installed():
    """ALFWorld's own engine, as its environment class makes it."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv

    return AlfredDemangler(
        PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)), shuffle=False
    )


def choose(rng, commands):
    """Mostly commands that change something; now and then one the engine does not know."""
    if rng.random() < 0.1:
        return "fly to the moon"
    verbs = ("take", "move", "open", "clean", "heat", "cool", "use", "slice")
    changing = [command for command in commands if command.startswith(verbs)]
    return rng.choice(changing if changing and rng.random() < 0.6 else commands)


@pytest.mark.parametrize("kind", ["clean", "heat", "cool", "light", "two"])
def test_same_texts_commands_and_wins_as_the_installed_engine(engine, installed, kind):
    from agent_system.environments.env_package.alfworld.engine import strip_banner

    game, rng = drawn(kind), random.Random(kind)
    engine.load(game)
    installed.load(game)
    mine, theirs = engine.reset(), installed.reset()
    for _ in range(12):
        assert mine.text == strip_banner(theirs.feedback)
        assert list(mine.commands) == theirs["admissible_commands"]
        assert mine.won == theirs["won"]
        command = choose(rng, theirs["admissible_commands"])
        mine, theirs = engine.step(command), installed.step(command)[0]
        assert mine.is_valid == (theirs.feedback != "Nothing happens.")


def test_a_game_starts_the_same_again_and_engines_do_not_share_state(engine, kept):
    from agent_system.environments.env_package.alfworld.engine import Engine

    game, other = drawn("pick"), Engine(kept)
    engine.load(game)
    other.load(game)
    first = engine.reset()
    other.reset()
    goto = next(command for command in first.commands if command.startswith("go to"))
    moved = engine.step(goto)
    assert moved.text != other.step("look").text
    assert engine.reset() == first
    assert engine.step(goto) == moved
    other.close()


def test_engines_come_and_go(engine, kept):
    """Closing engines and making new ones neither crashes nor mixes up games."""
    from agent_system.environments.env_package.alfworld.engine import Engine

    engine.load(drawn("pick"))
    first = engine.reset()
    for number in range(1, 6):
        passing = [Engine(kept), Engine(kept)]
        for other in passing:
            other.load(drawn("pick", index=number))
            assert other.reset() != first
        for other in passing:
            other.close()
            other.close()  # twice is no harm
    assert engine.step("look").text != "Nothing happens."
    assert engine.reset() == first


def opening(engine, game):
    """What is seen first, and after every command that is possible then."""
    engine.load(game)
    first = engine.reset()
    answers = []
    for command in first.commands:
        answers.append(engine.step(command))
        engine.reset()
    return first, answers


@pytest.fixture
def translator(monkeypatch):
    """The module, with nothing in memory, and the problems that it translates from here on."""
    from agent_system.environments.env_package.alfworld import planner

    translate = planner._translate_problem
    planner.load_translation.cache_clear()
    made = []

    def counted(domain, problem):
        made.append(problem)
        return translate(domain, problem)

    monkeypatch.setattr(planner, "_translate_problem", counted)
    yield planner, made
    planner.load_translation.cache_clear()


def test_what_one_process_translated_another_reads(translator, tmp_path):
    from agent_system.environments.env_package.alfworld.engine import Engine

    module, made = translator
    game = drawn("heat")
    engine = Engine(tmp_path)
    seen = opening(engine, game)
    module.load_translation.cache_clear()  # as in another process
    assert opening(engine, game) == seen
    engine.load(drawn("heat", index=1))
    assert len(made) == 2
    engine.close()


@pytest.mark.parametrize("harm", [lambda text: text[:-9], lambda text: "", lambda _: "{}"])
def test_a_damaged_translation_is_made_again(translator, tmp_path, harm):
    from agent_system.environments.env_package.alfworld.engine import Engine

    module, made = translator
    engine = Engine(tmp_path)
    seen = opening(engine, drawn("pick"))
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(harm(whole))
    module.load_translation.cache_clear()
    assert opening(engine, drawn("pick")) == seen
    assert len(made) == 2 and path.read_text() == whole
    engine.close()


@pytest.mark.usefixtures("translator")
def test_games_are_played_where_no_translation_can_be_kept(tmp_path, caplog):
    from agent_system.environments.env_package.alfworld.engine import Engine

    file = tmp_path / "a file"
    file.write_text("")
    engine = Engine(file / "translations")
    engine.load(drawn("pick"))
    assert engine.reset().commands and "cannot cache the translation" in caplog.text
    engine.close()


def test_the_translator_leaves_the_command_line_alone(engine):
    before = list(sys.argv)
    engine.load(drawn("pick", index=3))
    assert sys.argv == before


@pytest.mark.parametrize(
    "sentence", ["sit, then rest", r"say \"hi\" to Bob's dog", "put a mug in desk"]
)
def test_a_task_sentence_of_any_kind(engine, installed, sentence):
    game = drawn("pick", index=1)
    before, _, after = game["grammar"].partition("Your task is to: ")
    game["grammar"] = before + f"Your task is to: {sentence}" + after[after.index('."') :]
    engine.load(game)
    installed.load(game)
    assert engine.reset().text == installed.reset().feedback.removeprefix(BANNER)


def test_environment_protocol(tmp_path):
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
    there = env.step(goto)[0]
    assert there.anchor != first.anchor
    assert twin.step(goto)[0].anchor == there.anchor
    assert env.reset(tasks[1], 0).text != first.text
    env.close()
    twin.close()


@pytest.mark.parametrize("expression", ["r.name or r.id", " 'a ' + o.name", "r"])
def test_expressions_of_the_grammar_are_compiled(expression):
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
def test_a_game_whose_text_would_run_as_code_is_refused(expression):
    with pytest.raises(grammar.UnsafeGame):
        grammar._compile_expression(expression)
