"""The search environment: answers, passages, the invented world, and a retrieval server."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pyarrow.parquet
import pytest

from agent_system.environments.env_package.search import retrieval
from agent_system.environments.env_package.search.package import (
    PACKAGE,
    SearchEnv,
    compute_f1,
    exact_match,
    list_tasks,
)
from agent_system.environments.env_package.search.retrieval import (
    LocalRetriever,
    RemoteRetriever,
    RetrievalError,
)
from agent_system.environments.env_package.search.world import build_world
from tests.helpers.gold import GOLD
from tests.helpers.play import make_config
from tests.helpers.refusals import mentions
from tests.helpers.winning import play_episodes
from verl.utils.message_rows import BadRow

read = PACKAGE.read_settings

TASK = {
    "task_id": "x",
    "data_source": "search",
    "question": "On which river?",
    "answers": ["Kelsk", "river Kelsk"],
}


@pytest.mark.parametrize(
    ("given", "answers", "right", "overlap"),
    [
        ("Kelsk", ["Kelsk"], True, 1.0),
        ("  the KELSK. ", ["Kelsk"], True, 1.0),
        ("a goose-stew", ["Goose stew"], False, 0.0),
        ("two rival bakers", ["two rival bakers"], True, 1.0),
        ("rival bakers", ["two rival bakers"], False, 0.8),  # precision 2/2, recall 2/3
        ("the river Kelsk", ["Kelsk", "river Kelsk"], True, 1.0),
        ("Kelsk Kelsk", ["Kelsk"], False, 2 / 3),  # a repeated word counts once
        ("Falsk", ["Kelsk"], False, 0.0),
        ("the", ["a"], True, 1.0),  # nothing is left of either
        ("Kelsk", [], False, 0.0),
    ],
)
def test_answers_are_compared_normalised(given, answers, right, overlap):
    assert exact_match(given, answers) is right
    assert compute_f1(given, answers) == pytest.approx(overlap)


def test_a_search_shows_passages_and_an_answer_ends_the_game():
    env = SearchEnv(read({"topk": 2}))
    env.reset(TASK, 0)
    title, text = next(iter(build_world()[0].items()))
    seen, reward, done, info = env.step(f"SEARCH [ {title} ]")
    assert seen.text.startswith(f"[1] {title}: {text}") and seen.text.count("\n") == 1
    assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": True})
    assert env.step("answer[the Kelsk]")[1:] == (1.0, True, {"won": True, "is_action_valid": True})
    env.reset(TASK, 0)
    assert env.step("answer[Falsk]")[1:] == (0.0, True, {"won": False, "is_action_valid": True})


def test_f1_pays_for_part_of_the_answer_but_is_not_a_win():
    env = SearchEnv(read({"reward": "f1"}))
    env.reset({**TASK, "answers": ["two rival bakers"]}, 0)
    _, reward, done, info = env.step("answer[rival bakers]")
    assert reward == pytest.approx(0.8) and done and not info["won"]


def test_the_anchor_is_what_was_seen_in_whatever_order():
    env = SearchEnv(read({"topk": 1}))
    first, second = list(build_world()[0])[:2]

    def anchor(*searches):
        env.reset(TASK, 0)
        return [env.step(f"search[{words}]")[0].anchor for words in searches][-1]

    assert anchor(first, second) == anchor(second, first, first) != anchor(first)
    assert anchor("qqq zzz") == env.reset(TASK, 0).anchor
    assert env.step("search[qqq zzz]")[0].text == "Nothing was found."


def test_long_passages_are_cut():
    env = SearchEnv(read({"topk": 1, "max_chars": 40}))
    env.reset(TASK, 0)
    title = next(iter(build_world()[0]))
    assert len(env.step(f"search[{title}]")[0].text) == len(f"[1] {title}: ") + 40


def test_every_question_is_answered_by_its_documents_and_found_by_their_titles():
    documents, questions = build_world()
    assert len(documents) > 300 and len({q["question"] for q in questions}) == len(questions) > 1500
    find = LocalRetriever().search
    for question in questions:
        assert question["hops"] == len(question["support"]) in (1, 2)
        assert question["answers"][0] in documents[question["support"][-1]]
    for title in documents:
        assert title in [found for found, _ in find(title, 3)]


def test_two_hops_name_the_second_document_only_in_the_first():
    documents, questions = build_world()
    for question in (q for q in questions if q["hops"] == 2):
        subject, bridge = question["support"]
        assert bridge in documents[subject] and bridge not in question["question"]


def test_questions_about_a_subject_are_in_one_split():
    train, val = list_tasks(read({}), "train"), list_tasks(read({}), "val")
    assert not {t["support"][0] for t in train} & {t["support"][0] for t in val}
    assert (
        {t["data_source"] for t in train}
        == {t["data_source"] for t in val}
        == {"search_1hop", "search_2hop"}
    )
    assert {t["hops"] for t in list_tasks(read({"max_hops": 1}), "train")} == {1}


def test_questions_may_come_from_files(tmp_path):
    for split, line in (
        ("train", {"answers": ["b"]}),
        ("val", {"golden_answers": "c", "data_source": "nq"}),
    ):
        (tmp_path / split).write_text(json.dumps({"question": f"{split}?", **line}) + "\n\n")
    section = {f"{split}_questions": str(tmp_path / split) for split in ("train", "val")}
    assert list_tasks(read(section), "train") == [
        {
            "task_id": "search/train?",
            "data_source": "search",
            "question": "train?",
            "answers": ["b"],
        }
    ]
    assert (
        list_tasks(read(section), "val")[0]["answers"] == ["c"]
        and list_tasks(read(section), "val")[0]["data_source"] == "nq"
    )


SEARCH_R1 = {
    "question": None,
    "env_kwargs": {"question": "who?", "ground_truth": {"target": ["ann"]}, "data_source": "nq"},
}


@pytest.mark.parametrize(
    "row, answers",
    [
        ({"question": "who?", "golden_answers": ["ann", "anne"]}, ["ann", "anne"]),
        ({"question": "who?", "answers": None, "golden_answers": "ann"}, ["ann"]),
        ({"question": "who?", "answers": 7}, ["7"]),
        (SEARCH_R1, ["ann"]),
        (SEARCH_R1 | {"reward_model": {"ground_truth": {"target": "eve"}}}, ["eve"]),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_questions_of_other_data_sets_are_read(tmp_path, row, answers, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    (task,) = list_tasks(read({"train_questions": str(path)}), "train")
    assert (task["question"], task["answers"]) == ("who?", answers)


@pytest.mark.parametrize(
    "row", [{}, {"question": "who?"}, {"question": " ", "answers": ["a"]}, {"answers": ["a"]}]
)
def test_rows_without_question_or_answer_are_refused_with_their_place(tmp_path, row):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(BadRow) as refused:
        list_tasks(read({"val_questions": str(path)}), "val")
    assert refused.value.problems[0].startswith(f"env.search.val_questions='{path}': row 0: column")


# ---- a retrieval server --------------------------------------------------------------------------


@contextmanager
def server(*replies):
    """A server that gives ``replies`` (status, body) in turn, the last one again and again; yields
    (url, requests).
    """
    left, asked = list(replies), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = left.pop(0) if len(left) > 1 else left[0]
            if status is None:  # silence
                release.wait(5)
                return
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    release = threading.Event()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/retrieve", asked
    finally:
        release.set()
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(retrieval, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(retrieval, "LONGEST_WAIT_S", 0.01)


def passages(*contents):
    return {
        "result": [[{"document": {"id": "1", "contents": text}, "score": 2.5} for text in contents]]
    }


def test_a_server_is_asked_as_search_r1_does():
    with server((200, passages('"Kelsk"\nA river.\ud83d', "Ashham\nA town.\nOld."))) as (
        url,
        asked,
    ):
        env = SearchEnv(read({"search_url": url, "topk": 2}))
        env.reset(TASK, 0)
        seen = env.step("search[where is it]")[0]
    assert asked == [{"queries": ["where is it"], "topk": 2, "return_scores": True}]
    assert seen.text == "[1] Kelsk: A river.?\n[2] Ashham: A town.\nOld."
    assert seen.state.endswith("Ashham; Kelsk")


def test_a_server_without_scores_is_understood():
    with server((200, {"result": [[{"contents": "Kelsk\nA river."}]]})) as (url, _):
        assert RemoteRetriever(url, 5.0, 1).search("x", 3) == [("Kelsk", "A river.")]


def test_half_a_character_in_a_query_is_sent_as_it_is():
    with server((200, passages("Kelsk\nA river."))) as (url, asked):
        RemoteRetriever(url, 5.0, 1).search("where \ud83d", 1)
    assert asked[0]["queries"] == ["where \ud83d"]


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense"])
def test_a_server_of_this_machine_is_not_asked_through_a_proxy(monkeypatch, proxy):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
    with server((200, passages("Kelsk\nA river."))) as (url, _):
        assert RemoteRetriever(url, 5.0, 1).search("x", 1) == [("Kelsk", "A river.")]


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_the_proxy_of_another_server_is_named(monkeypatch, proxy):
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(retrieval.RetrievalError, check=mentions("127.0.0.1:9", "HTTP_PROXY")):
        RemoteRetriever("http://search.invalid/retrieve", 5.0, 1).search("x", 1)


def test_a_busy_server_is_asked_again():
    with server((503, "busy"), (429, "slower"), (200, passages("Kelsk\nA river."))) as (url, asked):
        assert RemoteRetriever(url, 5.0, 3).search("x", 1) == [("Kelsk", "A river.")]
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("reply", "attempts", "why"),
    [
        ((500, "broken"), 3, "did not answer in 3 attempts .*500"),
        ((404, "where?"), 1, "did not answer in 1 attempts .*404"),
        ((None, None), 3, "did not answer in 3 attempts .*Timeout"),
        ((200, "not JSON"), 1, "did not answer in 1 attempts .*JSON"),
        ((200, {"error": "no index"}), 1, "returned no list of passages: .*no index"),
        ((200, {"result": []}), 1, "returned no list of passages"),
        ((200, {"result": [["text"]]}), 1, "returned no list of passages"),
    ],
)
def test_a_server_that_fails_is_named_with_the_reason(reply, attempts, why):
    with server(reply) as (url, asked):
        with pytest.raises(
            RetrievalError, match=f"env.search.search_url={url}: the retrieval server .*{why}"
        ):
            RemoteRetriever(url, 0.2, 3).search("x", 1)
        assert len(asked) == attempts


def test_nobody_at_the_address():
    with server((200, {})) as (url, _):
        pass
    with pytest.raises(RetrievalError, check=mentions(2, "ConnectError")):
        RemoteRetriever(url, 0.5, 2).search("x", 1)


def test_what_is_no_url_is_refused_before_anything_starts():
    with pytest.raises(ValueError, check=mentions("env.search.search_url='localhost:8000'")):
        list_tasks(read({"search_url": "localhost:8000"}), "train")


def test_episodes_are_won_with_a_server_and_broken_by_its_failure():
    documents, _ = build_world()
    everything = passages(*(f'"{title}"\n{text}' for title, text in documents.items()))
    section = {"topk": 20, "timeout": 5.0, "retries": 0}
    question = {"question": "Where?", "answers": [next(iter(documents))], "support": ["x"]}

    def policy(task):
        return GOLD["search"]({**task, **question})

    with server((200, everything)) as (url, asked):
        lost = play_episodes("search", policy, groups=1, n=2, search_url=url, **section)
        assert len(asked) == 2 and not lost.non_tensor_batch["aborted"].any()
    with (
        server((500, "broken")) as (url, _),
        pytest.raises(RuntimeError, match="no trajectory can be trained on"),
    ):
        play_episodes(
            "search", lambda task: lambda prompt: "search[x]", groups=1, search_url=url, **section
        )


def test_it_may_wait_without_holding_up_others():
    assert SearchEnv.placement == "thread"
    assert make_config("search").env.step_timeout_s > SearchEnv(read({})).settings.timeout * (
        1 + SearchEnv(read({})).settings.retries
    ), "the deadline of a step leaves room for every attempt"
