"""Fictional world of the search environment: documents and questions.

Names, sentences and questions are in ``world.json``. Relations, such as the birthplace of a person,
are drawn from a fixed seed, so the world is always the same. Knowledge of the real world does not
help, so a policy has to search.
"""

import itertools
import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl.utils.seeds import derive_seed

TABLES = Path(__file__).with_name("world.json")
Entity = dict[str, Any]  # "name" and the fields of its kind; a value may be another entity


@lru_cache(maxsize=1)
def build_world() -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the documents (title to text) and the questions.

    A question has ``question``, ``answers``, ``support`` (titles to search for) and ``hops``.
    """
    tables = json.loads(TABLES.read_text(encoding="utf-8"))
    world = _build_entities(tables)
    documents = {}
    questions = []
    for entity_kind, entities in world.items():
        sentences = tables["kinds"][entity_kind]["documents"]
        question_forms = tables["kinds"][entity_kind]["questions"]
        for index, entity in enumerate(entities):
            field_texts = {field: _value_text(value) for field, value in entity.items()}
            # Alternate the sentence templates, so that documents of a kind are worded differently.
            documents[entity["name"]] = sentences[index % len(sentences)].format(**field_texts)
            questions += [
                _make_question(entity, question_form, path, tables["aliases"])
                for question_form, path in question_forms
            ]
    return documents, questions


def _build_entities(tables: dict[str, Any]) -> dict[str, list[Entity]]:
    """Return all entities by kind, such as persons and towns.

    Entities may refer only to entities of kinds that come earlier in ``tables``.
    """
    # One random generator serves all tables in order. A change of a table therefore changes all
    # entities below it.
    rng = random.Random(derive_seed("search", "world"))
    lexicon = tables["words"]
    world = {}
    for entity_kind, kind_table in tables["kinds"].items():
        heads, separator, tails = kind_table["name"]
        names = [separator.join(pair) for pair in itertools.product(lexicon[heads], lexicon[tails])]
        # Draw without replacement: two entities with one name would share a document.
        world[entity_kind] = [{"name": name} for name in rng.sample(names, kind_table["count"])]
        for entity in world[entity_kind]:
            for field, source in kind_table["fields"].items():
                entity[field] = _draw_value(source, entity, lexicon, world, rng)
    return world


def _draw_value(source: str, entity: Entity, words: dict, world: dict, rng: random.Random) -> Any:
    """Return a random value for a field of ``entity``.

    ``source`` is one of:

    - ``pick:LIST``: a word of that list.
    - ``of:KIND``: an entity of that kind.
    - ``int:LOW:HIGH``: an integer.
    - ``after:FIELD.FIELD:LOW:HIGH``: the year in that field plus LOW to HIGH years.
    """
    source_kind, argument, *bounds = source.split(":")
    if source_kind == "pick":
        return rng.choice(words[argument])
    if source_kind == "of":
        return rng.choice(world[argument])
    if source_kind == "int":
        return rng.randint(int(argument), int(bounds[0]))
    return _follow_path(entity, argument)[-1] + rng.randint(*map(int, bounds))


def _follow_path(entity: Entity, path: str) -> list[Any]:
    values = [entity]
    for field in path.split("."):
        values.append(values[-1][field])
    return values


def _value_text(value: Any) -> str:
    return value["name"] if isinstance(value, dict) else str(value)


def _make_question(
    entity: Entity, words: str, path: str, aliases: dict[str, list[str]]
) -> dict[str, Any]:
    # The last value of the path is the answer. The documents of all earlier ones are required.
    *path_values, answer = _follow_path(entity, path)
    answer_templates = ["{}", *aliases.get(path.rpartition(".")[2], [])]
    return {
        "question": words.format(name=entity["name"]),
        "answers": [template.format(_value_text(answer)) for template in answer_templates],
        "support": [value["name"] for value in path_values],
        "hops": len(path_values),
    }
