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

TABLES_FILE = Path(__file__).with_name("world.json")
# Person, town or other entity of the world. Keys: ``name`` and the fields of its kind. The value of
# a field may be another entity.
Entity = dict[str, Any]


@lru_cache(maxsize=1)
def build_corpus_and_questions() -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the documents, as a dict from title to text, and the questions.

    A question is a dict with ``question``, ``answers``, ``support`` (titles of the required
    documents) and ``hops`` (number of these).
    """
    tables = json.loads(TABLES_FILE.read_text(encoding="utf-8"))
    entities_by_kind = _build_entities(tables)
    documents = {}
    questions = []
    for entity_kind, entities in entities_by_kind.items():
        document_templates = tables["kinds"][entity_kind]["documents"]
        question_templates = tables["kinds"][entity_kind]["questions"]
        for entity_index, entity in enumerate(entities):
            field_texts = {field: _format_value(value) for field, value in entity.items()}
            # Alternate the templates, so that documents of one kind use different words.
            documents[entity["name"]] = document_templates[
                entity_index % len(document_templates)
            ].format(**field_texts)
            questions += [
                _make_question(entity, question_template, path, tables["aliases"])
                for question_template, path in question_templates
            ]
    return documents, questions


def _build_entities(tables: dict[str, Any]) -> dict[str, list[Entity]]:
    """Return all entities of the fictional world by kind, such as persons and towns.

    An entity may refer to another one only if the other one's kind comes earlier in ``tables``.
    """
    # All kinds share one random generator. A change of one kind therefore changes the entities of
    # all later kinds.
    rng = random.Random(derive_seed("search", "world"))
    word_lists = tables["words"]
    entities_by_kind = {}
    for entity_kind, kind_table in tables["kinds"].items():
        first_words_key, separator, last_words_key = kind_table["name"]
        possible_names = [
            separator.join(name_words)
            for name_words in itertools.product(
                word_lists[first_words_key], word_lists[last_words_key]
            )
        ]
        # Draw distinct names, because the name is the title of the document.
        entities_by_kind[entity_kind] = [
            {"name": name} for name in rng.sample(possible_names, kind_table["count"])
        ]
        for entity in entities_by_kind[entity_kind]:
            for field, value_source in kind_table["fields"].items():
                entity[field] = _draw_value(value_source, entity, word_lists, entities_by_kind, rng)
    return entities_by_kind


def _draw_value(
    value_source: str, entity: Entity, word_lists: dict, entities_by_kind: dict, rng: random.Random
) -> Any:
    """Return a random value for a field of ``entity``.

    ``value_source`` is one of:

    - ``pick:LIST``: a random word of the word list LIST.
    - ``of:KIND``: a random entity of the kind KIND.
    - ``int:LOW:HIGH``: a random integer from LOW to HIGH.
    - ``after:FIELD.FIELD:LOW:HIGH``: the year at the path FIELD.FIELD plus LOW to HIGH years.
    """
    source_kind, source_argument, *number_bounds = value_source.split(":")
    if source_kind == "pick":
        return rng.choice(word_lists[source_argument])
    if source_kind == "of":
        return rng.choice(entities_by_kind[source_argument])
    if source_kind == "int":
        return rng.randint(int(source_argument), int(number_bounds[0]))
    return _follow_field_path(entity, source_argument)[-1] + rng.randint(*map(int, number_bounds))


def _follow_field_path(entity: Entity, field_path: str) -> list[Any]:
    path_values = [entity]
    for field in field_path.split("."):
        path_values.append(path_values[-1][field])
    return path_values


def _format_value(value: object) -> str:
    return value["name"] if isinstance(value, dict) else str(value)


def _make_question(
    entity: Entity, question_template: str, field_path: str, aliases_by_field: dict[str, list[str]]
) -> dict[str, Any]:
    # The last value on the path is the answer. The documents of all values before it are required.
    *path_values, answer = _follow_field_path(entity, field_path)
    answer_templates = ["{}", *aliases_by_field.get(field_path.rpartition(".")[2], [])]
    return {
        "question": question_template.format(name=entity["name"]),
        "answers": [
            answer_template.format(_format_value(answer)) for answer_template in answer_templates
        ],
        "support": [value["name"] for value in path_values],
        "hops": len(path_values),
    }
