"""Tests of the search environment: answers, passages, the invented world and a retrieval server."""

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
    is_exact_match,
    list_tasks,
)
from agent_system.environments.env_package.search.retrieval import (
    RemoteRetriever,
    RetrievalError,
    search_world,
)
from agent_system.environments.env_package.search.world import build_corpus_and_questions
from tests.helpers.expert_policies import GOLD
from tests.helpers.number_line_world import make_config
from tests.helpers.refusals import has_problem, mentions
from tests.helpers.solvability import play_episodes
from verl.config.settings import ConfigError
from verl.utils.message_rows import InvalidRowError

read = PACKAGE.read_settings

TASK = {
    "task_id": "x",
    "data_source": "search",
    "question": "On which river?",
    "answers": ["Kelsk", "river Kelsk"],
}


@pytest.mark.parametrize(
    ("given", "answers", "is_right", "overlap"),
    [
        ("Kelsk", ["Kelsk"], True, 1.0),
        ("  the KELSK. ", ["Kelsk"], True, 1.0),
        ("a goose-stew", ["Goose stew"], False, 0.0),
        ("two rival bakers", ["two rival bakers"], True, 1.0),
        ("rival bakers", ["two rival bakers"], False, 0.8),  # precision 2/2, recall 2/3
        ("the river Kelsk", ["Kelsk", "river Kelsk"], True, 1.0),
        ("Kelsk Kelsk", ["Kelsk"], False, 2 / 3),  # a repeated word counts once
        ("Falsk", ["Kelsk"], False, 0.0),
        ("the", ["a"], False, 0.0),  # texts of articles or punctuation alone are kept
        ("", ["The The"], False, 0.0),
        ("!", ["A"], False, 0.0),
        ("", ["?"], False, 0.0),
        ("A.", ["A."], True, 1.0),
        ("Kelsk", [], False, 0.0),
    ],
)
def test_answers_are_normalised_before_comparison(given, answers, is_right, overlap):
    assert is_exact_match(given, answers) is is_right
    assert compute_f1(given, answers) == pytest.approx(overlap)


def test_search_shows_passages_and_answer_ends_the_episode():
    env = SearchEnv(read({"topk": 2}))
    env.reset(TASK, 0)
    title, text = next(iter(build_corpus_and_questions()[0].items()))
    observation, reward, done, info = env.step(f"SEARCH [ {title} ]")
    assert observation.text.startswith(f"[1] {title}: {text}") and observation.text.count("\n") == 1
    assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": True})
    assert env.step("answer[the Kelsk]")[1:] == (1.0, True, {"won": True, "is_action_valid": True})
    env.reset(TASK, 0)
    assert env.step("answer[Falsk]")[1:] == (0.0, True, {"won": False, "is_action_valid": True})


def test_f1_rewards_a_partial_answer_without_success():
    env = SearchEnv(read({"reward": "f1"}))
    env.reset({**TASK, "answers": ["two rival bakers"]}, 0)
    _, reward, done, info = env.step("answer[rival bakers]")
    assert reward == pytest.approx(0.8) and done and not info["won"]


def test_anchor_is_the_set_of_seen_passages():
    env = SearchEnv(read({"topk": 1}))
    first, second = list(build_corpus_and_questions()[0])[:2]

    def anchor(*searches):
        env.reset(TASK, 0)
        return [env.step(f"search[{words}]")[0].anchor for words in searches][-1]

    assert anchor(first, second) == anchor(second, first, first) != anchor(first)
    assert anchor("qqq zzz") == env.reset(TASK, 0).anchor
    assert env.step("search[qqq zzz]")[0].text == "Nothing was found."


def test_long_passages_are_truncated():
    env = SearchEnv(read({"topk": 1, "max_chars": 40}))
    env.reset(TASK, 0)
    title = next(iter(build_corpus_and_questions()[0]))
    assert len(env.step(f"search[{title}]")[0].text) == len(f"[1] {title}: ") + 40


def test_every_question_has_documents_found_by_their_titles():
    documents, questions = build_corpus_and_questions()
    assert len(documents) > 300 and len({q["question"] for q in questions}) == len(questions) > 1500
    for question in questions:
        assert question["hops"] == len(question["support"]) in (1, 2)
        assert question["answers"][0] in documents[question["support"][-1]]
    for title in documents:
        assert title in [found_title for found_title, _ in search_world(title, 3)]


def test_two_hop_question_omits_its_second_document():
    documents, questions = build_corpus_and_questions()
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


def test_questions_can_be_read_from_files(tmp_path):
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
def test_questions_of_other_datasets_are_read(tmp_path, row, answers, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    (task,) = list_tasks(read({"train_questions": str(path)}), "train")
    assert (task["question"], task["answers"]) == ("who?", answers)


def test_repeated_questions_of_a_file_are_merged_unless_their_answers_differ(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [("who?", ["x", "y"]), ("who?", ["y", "x"]), ("what?", ["z"]), ("who?", ["z"])]
    lines = [json.dumps({"question": question, "answers": answers}) for question, answers in rows]
    path.write_text("\n".join(lines))
    tasks = list_tasks(read({"train_questions": str(path)}), "train")
    assert [(task["task_id"], task["answers"]) for task in tasks] == [
        ("search/who?", ["x", "y"]),
        ("search/what?", ["z"]),
        ("search/who?#2", ["z"]),
    ]


@pytest.mark.parametrize(
    "row", [{}, {"question": "who?"}, {"question": " ", "answers": ["a"]}, {"answers": ["a"]}]
)
def test_row_without_question_or_answer_is_named(tmp_path, row):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    expected = has_problem("wrong_cell", "env.search.val_questions", path, "row 0")
    with pytest.raises(InvalidRowError, check=expected):
        list_tasks(read({"val_questions": str(path)}), "val")


# ---- a retrieval server --------------------------------------------------------------------------


@contextmanager
def serve(*replies):
    """Run a server that sends ``replies`` (status, body) in turn and repeats the last one.

    Yields (url, requests).
    """
    remaining_replies, requests = list(replies), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = (
                remaining_replies.pop(0) if len(remaining_replies) > 1 else remaining_replies[0]
            )
            if status is None:  # no reply, so that the client times out
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
        yield f"http://127.0.0.1:{http.server_port}/retrieve", requests
    finally:
        release.set()
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(retrieval, "FIRST_RETRY_WAIT_S", 0.001)
    monkeypatch.setattr(retrieval, "MAX_RETRY_WAIT_S", 0.01)


def make_reply(*contents):
    return {
        "result": [[{"document": {"id": "1", "contents": text}, "score": 2.5} for text in contents]]
    }


def test_server_gets_the_requests_of_search_r1():
    with serve((200, make_reply('"Kelsk"\nA river.\ud83d', "Ashham\nA town.\nOld."))) as (
        url,
        requests,
    ):
        env = SearchEnv(read({"search_url": url, "topk": 2}))
        env.reset(TASK, 0)
        observation = env.step("search[where is it]")[0]
    assert requests == [{"queries": ["where is it"], "topk": 2, "return_scores": True}]
    assert observation.text == "[1] Kelsk: A river.?\n[2] Ashham: A town.\nOld."
    assert observation.state.endswith("Ashham; Kelsk")


def test_reply_without_scores_is_read():
    with serve((200, {"result": [[{"contents": "Kelsk\nA river."}]]})) as (url, _):
        assert RemoteRetriever(url, 5.0, 1).search("x", 3) == [("Kelsk", "A river.")]


def test_lone_surrogate_in_a_query_is_sent_unchanged():
    with serve((200, make_reply("Kelsk\nA river."))) as (url, requests):
        RemoteRetriever(url, 5.0, 1).search("where \ud83d", 1)
    assert requests[0]["queries"] == ["where \ud83d"]


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense"])
def test_local_server_is_reached_without_the_proxy(monkeypatch, proxy):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
    with serve((200, make_reply("Kelsk\nA river."))) as (url, _):
        assert RemoteRetriever(url, 5.0, 1).search("x", 1) == [("Kelsk", "A river.")]


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_failing_proxy_is_named(monkeypatch, proxy):
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(retrieval.RetrievalError, check=mentions("127.0.0.1:9", "HTTP_PROXY")):
        RemoteRetriever("http://search.invalid/retrieve", 5.0, 1).search("x", 1)


def test_busy_server_gets_another_attempt():
    with serve((503, "busy"), (429, "slower"), (200, make_reply("Kelsk\nA river."))) as (
        url,
        requests,
    ):
        assert RemoteRetriever(url, 5.0, 3).search("x", 1) == [("Kelsk", "A river.")]
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("reply", "attempts", "reasons"),
    [
        ((500, "broken"), 3, [3, 500]),
        ((404, "where?"), 1, [1, 404]),
        ((None, None), 3, [3, "Timeout"]),
        ((200, "not JSON"), 1, [1, "JSON"]),
        ((200, {"error": "no index"}), 1, ["no index"]),
        ((200, {"result": []}), 1, ["[]"]),
        ((200, {"result": [["text"]]}), 1, ["[['text']]"]),
    ],
)
def test_failing_server_is_named_with_the_reason(reply, attempts, reasons):
    # On a busy machine a server needs a second to read a request.
    timeout_s = 1.0 if reply == (None, None) else 30.0
    with serve(reply) as (url, requests):
        expected = mentions(f"env.search.search_url={url}", *reasons)
        with pytest.raises(RetrievalError, check=expected):
            RemoteRetriever(url, timeout_s, 3).search("x", 1)
        assert len(requests) == attempts


def test_unreachable_server_is_an_error():
    with serve((200, {})) as (url, _):
        pass
    with pytest.raises(RetrievalError, check=mentions(2, "ConnectError")):
        RemoteRetriever(url, 0.5, 2).search("x", 1)


def test_invalid_url_is_refused_before_the_start():
    refused = has_problem("invalid_syntax", "env.search.search_url", "'localhost:8000'")
    with pytest.raises(ConfigError, check=refused):
        list_tasks(read({"search_url": "localhost:8000"}), "train")


def test_episodes_use_the_server_and_fail_when_it_fails():
    documents, _ = build_corpus_and_questions()
    all_passages = make_reply(*(f'"{title}"\n{text}' for title, text in documents.items()))
    section = {"topk": 20, "timeout": 5.0, "retries": 0}
    question = {"question": "Where?", "answers": [next(iter(documents))], "support": ["x"]}

    def policy(task):
        return GOLD["search"]({**task, **question})

    with serve((200, all_passages)) as (url, requests):
        data = play_episodes("search", policy, groups=1, n=2, search_url=url, **section)
        assert len(requests) == 2 and not data.non_tensor_batch["aborted"].any()
    with (
        serve((500, "broken")) as (url, _),
        pytest.raises(RuntimeError, check=mentions("'rollout/left_out_aborted': 8")),
    ):
        play_episodes(
            "search", lambda task: lambda prompt: "search[x]", groups=1, search_url=url, **section
        )


def test_step_runs_in_a_thread_with_time_for_every_attempt():
    assert SearchEnv.placement == "thread"
    assert make_config("search").env.step_timeout_s > SearchEnv(read({})).settings.timeout * (
        1 + SearchEnv(read({})).settings.retries
    ), "the deadline of a step must exceed the time of all attempts"
