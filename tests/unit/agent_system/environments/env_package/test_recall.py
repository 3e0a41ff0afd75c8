"""Recall: every page is shown once, and the arrow that matters is never on the last two."""

import pytest

from agent_system.environments.env_package.recall.package import PACKAGE, find_answer

TASK = {
    "task_id": "recall/t",
    "data_source": "recall",
    "pages": ["a>c d>f", "b>a e>d", "a>c b>a"],
    "place": "d",
}


def test_every_page_is_shown_once_and_the_place_is_asked_for_at_the_end():
    env = PACKAGE.make(PACKAGE.read_settings())
    texts = [env.reset(TASK, 0).text]
    for _ in range(4):
        observation, reward, done, info = env.step(".")
        texts.append(observation.text)
        assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": True})
    assert texts == ["d+1", "d+1 a>c d>f", "d+1 b>a e>d", "d+1 a>c b>a", "d+1 ?"]
    assert env.step("f")[1:] == (1.0, True, {"won": True, "is_action_valid": True})


def test_wrong_place_ends_the_episode_and_another_action_shows_no_page_again():
    env = PACKAGE.make(PACKAGE.read_settings())
    env.reset(TASK, 0)
    env.step(".")
    observation, reward, done, info = env.step("f")
    assert (observation.text, reward, done) == ("turn the page with .", 0.0, False)
    assert not info["is_action_valid"]
    assert env.step(".")[0].text == "d+1 b>a e>d"
    for _ in range(2):
        env.step(".")
    assert env.step("a")[1:] == (0.0, True, {"won": False, "is_action_valid": True})


@pytest.mark.parametrize(("answer", "is_valid"), [("a", True), ("", False), ("abc", False)])
def test_an_answer_is_valid_if_it_is_one_place(answer, is_valid):
    env = PACKAGE.make(PACKAGE.read_settings())
    env.reset(TASK, 0)
    for _ in range(4):
        env.step(".")
    assert env.step(answer)[1:] == (0.0, True, {"won": False, "is_action_valid": is_valid})


def test_the_last_two_pages_do_not_have_the_arrow():
    settings = PACKAGE.read_settings({"pages": 6, "arrows": 4, "val_tasks": 200})
    places = []
    for task in PACKAGE.tasks(settings, "val"):
        pages = [page.split() for page in task["pages"]]
        assert all(len(page) == 4 for page in pages)
        arrow = f"{task['place']}>{find_answer(task)}"
        starts = [[one[0] for one in page] for page in pages]
        shown = [number for number, page in enumerate(starts) if task["place"] in page]
        assert len(shown) == 1 and arrow in pages[shown[0]]
        places += shown
    assert set(places) == {0, 1, 2, 3}
