"""Question answering with a search engine: environment, tasks and prompts."""

import re
import string
import unicodedata
from collections import Counter
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts
from agent_system.environments.env import Env, Observation, Step, Task
from agent_system.environments.env_package.search import retrieval
from agent_system.environments.env_package.search.settings import SearchSettings
from agent_system.environments.env_package.search.world import build_corpus_and_questions
from agent_system.environments.package import EnvPackage
from agent_system.environments.tasks import make_task_ids_unique
from verl.utils.message_rows import DataRow, read_table
from verl.utils.seeds import derive_seed

NAME = "search"
RULES = """\
You answer a question with the help of a search engine. Each turn you do one of two things:
search[words to look for] shows you the best passages; search[...] again as often as you need.
answer[your answer] ends the game. Give the answer alone, a name or a number, \
without a sentence around it."""
ACTION_PATTERN = re.compile(r"(search|answer)\s*\[(.*)\]", re.DOTALL | re.IGNORECASE)
ARTICLE_PATTERN = re.compile(r"\b(a|an|the)\b")
PUNCTUATION_REMOVAL = str.maketrans("", "", string.punctuation)
VAL_DIVISOR = 5  # the questions about one subject in five belong to validation


class SearchEnv(Env):
    """Environment with search and answer actions. An answer ends the episode.

    An action that is neither a search nor an answer, or that has no text, changes nothing and is
    not valid. The anchor consists of the question and the sorted titles of all passages that the
    agent has received. The caller limits the number of turns.
    """

    placement = "thread"  # a request to the server blocks its thread

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self._search = retrieval.search_world
        if settings.search_url is not None:
            server_arguments = (settings.search_url, settings.timeout, 1 + settings.retries)
            self._search = retrieval.RemoteRetriever(*server_arguments).search
        self._task: Task = {}
        self._seen_titles: set[str] = set()

    def reset(self, task: Task, seed: int) -> Observation:
        self._task = task
        self._seen_titles = set()
        return self._make_observation(f"Question: {task['question']}")

    def step(self, action: str) -> Step:
        match = ACTION_PATTERN.fullmatch(action.strip())
        verb, text = (match.group(1).lower(), match.group(2).strip()) if match else ("", "")
        info = {"won": False, "is_action_valid": bool(text)}
        if not text:
            message = "That is no action. Write search[words to look for] or answer[your answer]."
            return self._make_observation(message), 0.0, False, info
        if verb == "search":
            passages = self._search(text, self.settings.topk)
            self._seen_titles.update(title for title, _ in passages)
            return self._make_observation(self._format_passages(passages)), 0.0, False, info
        answers = self._task["answers"]
        info["won"] = is_exact_match(text, answers)
        uses_f1 = self.settings.reward == "f1"
        reward = compute_f1(text, answers) if uses_f1 else float(info["won"])
        message = "That is right." if info["won"] else "That is not the answer."
        return self._make_observation(message), reward, True, info

    def gold_path(self, task: Task) -> list[str]:
        """Return searches for the documents of ``task``, then its answer."""
        search_actions = [f"search[{title}]" for title in task.get("support", ())]
        return [*search_actions, f"answer[{task['answers'][0]}]"]

    def _format_passages(self, passages: list[retrieval.Passage]) -> str:
        lines = [
            f"[{n}] {title}: {text[: self.settings.max_chars]}"
            for n, (title, text) in enumerate(passages, 1)
        ]
        return "\n".join(lines) or "Nothing was found."

    def _make_observation(self, text: str) -> Observation:
        # Sort the titles, because the order of searches does not change what the agent knows.
        state_key = f"{self._task['question']} | {'; '.join(sorted(self._seen_titles))}"
        info = {"admissible_actions": ["search[<words>]", "answer[<answer>]"]}
        return Observation(text, anchor=state_key, info=info)


def normalize_answer(text: str) -> str:
    """Return lower case text without punctuation, articles and extra spaces, as in SQuAD.

    A text that consists of these only, such as "A" or "?", keeps them. Otherwise it would equal an
    empty answer.
    """
    # Remove punctuation before articles: otherwise the "a" of "a.m." would count as an article.
    raw_text = " ".join(unicodedata.normalize("NFKC", text).lower().split())
    text = raw_text.translate(PUNCTUATION_REMOVAL)
    # Also remove non-ASCII quotes and dashes.
    text = "".join(
        character for character in text if not unicodedata.category(character).startswith("P")
    )
    return " ".join(ARTICLE_PATTERN.sub(" ", text).split()) or raw_text


def is_exact_match(answer_text: str, truths: list[str]) -> bool:
    return normalize_answer(answer_text) in {normalize_answer(truth) for truth in truths}


def compute_f1(answer_text: str, truths: list[str]) -> float:
    """Return the largest F1 score (0 to 1) of the words of ``answer_text`` and one of ``truths``.

    F1 is the harmonic mean of precision and recall. Example: "Ada Byron" against "Ada Lovelace"
    gives 2 * 1 / (2 + 2) = 0.5.
    """

    def compute_f1_of_pair(truth: str) -> float:
        answer_words = normalize_answer(answer_text).split()
        truth_words = normalize_answer(truth).split()
        # Repeated words count as often as they occur. Two empty texts have an F1 of 1.0.
        num_common_words = sum((Counter(answer_words) & Counter(truth_words)).values())
        return (
            2 * num_common_words / (len(answer_words) + len(truth_words))
            if num_common_words
            else float(answer_words == truth_words)
        )

    return max(map(compute_f1_of_pair, truths), default=0.0)


def list_tasks(settings: SearchSettings, split: str) -> list[Task]:
    """Return one task per question, from a file or from the fictional world.

    Rows with the same question and answers give one task, with other answers several. In the
    fictional world, the questions about one subject in five belong to ``val``.
    """
    path = settings.val_questions if split == "val" else settings.train_questions
    if path:
        tasks_by_content: dict[object, Task] = {}
        for row in read_table(f"env.{NAME}.{split}_questions", [path]):
            task = _make_task_from_row(row)
            content = (task["question"], frozenset(task["answers"]))
            tasks_by_content.setdefault(content, task)
        return make_task_ids_unique(tasks_by_content.values())
    return [
        {
            # The question is part of the id, so that a question in both splits is detected.
            "task_id": f"{NAME}/{question['question']}",
            "data_source": f"{NAME}_{question['hops']}hop",
            **question,
        }
        for question in build_corpus_and_questions()[1]
        if question["hops"] <= settings.max_hops
        # The subject, which is the first required document, determines the split. A question of
        # two hops also asks for a fact about a second subject, which may be in the other split.
        and (derive_seed(NAME, question["support"][0]) % VAL_DIVISOR == 0) == (split == "val")
    ]


def _make_task_from_row(row: DataRow) -> Task:
    """Convert a row with the columns of this package, or of Search-R1's files, to a task."""
    # Search-R1 has the columns ``env_kwargs`` and ``reward_model``. They may be null or missing.
    env_kwargs = row.read_object("env_kwargs") or {}
    reward_model = row.read_object("reward_model") or {}
    question = _get_first_not_none(row.read_cell("question"), env_kwargs.get("question"))
    if not isinstance(question, str) or not question.strip():
        allowed_values = "a text there or in env_kwargs.question"
        raise row.make_error("question", f"holds {question!r}", allowed_values, "remove the row")
    answers = _get_first_not_none(
        row.read_cell("answers"),
        row.read_cell("golden_answers"),
        _get_target(reward_model.get("ground_truth")),
        _get_target(env_kwargs.get("ground_truth")),
    )
    answers = answers if isinstance(answers, list) else [answers]
    are_valid_texts = [isinstance(answer, (str, int, float)) and str(answer) for answer in answers]
    if not answers or not all(are_valid_texts):
        allowed_values = "texts there, in golden_answers or in reward_model.ground_truth.target"
        raise row.make_error(
            "answers", f"holds {answers!r}"[:120], allowed_values, "remove the row"
        )
    data_source = _get_first_not_none(
        row.read_cell("data_source"), env_kwargs.get("data_source"), NAME
    )
    return {
        "task_id": f"{NAME}/{question}",
        "data_source": str(data_source),
        "question": question,
        "answers": list(map(str, answers)),
    }


def _get_first_not_none(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _get_target(ground_truth: object) -> Any:
    return ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth


PACKAGE = EnvPackage(
    name=NAME,
    settings=SearchSettings,
    make=SearchEnv,
    tasks=list_tasks,
    prompts=lambda _settings: ChatPrompts(RULES, example="search[mayor of Graz]", keep_first=True),
)
