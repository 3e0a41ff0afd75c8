"""Recall: what is shown when, and that no page after the first four has the code."""

from agent_system.environments.env_package.recall.package import PACKAGE, find_digit

TASK = {
    "task_id": "recall/t",
    "data_source": "recall",
    "pages": ["a3 f1", "c9 b0", "a3 c9"],
    "key": "f",
}


def test_every_page_is_shown_once_and_the_digit_is_the_answer():
    env = PACKAGE.make(PACKAGE.read_settings())
    texts = [env.reset(TASK, 0).text]
    for _ in range(4):
        observation, reward, done, info = env.step("next")
        texts.append(observation.text)
        assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": True})
    assert texts == ["find f", "page a3 f1", "page c9 b0", "page a3 c9", "tell f"]
    assert env.step("1")[1:] == (1.0, True, {"won": True, "is_action_valid": True})


def test_wrong_digit_ends_the_episode_and_another_action_shows_no_page_again():
    env = PACKAGE.make(PACKAGE.read_settings())
    env.reset(TASK, 0)
    env.step("next")
    observation, reward, done, info = env.step("1")
    assert (observation.text, reward, done) == ("answer with next", 0.0, False)
    assert not info["is_action_valid"]
    assert env.step("next")[0].text == "page c9 b0"
    for _ in range(2):
        env.step("next")
    assert env.step("3")[1:] == (0.0, True, {"won": False, "is_action_valid": True})


def test_code_is_asked_for_that_is_not_on_the_last_two_pages():
    settings = PACKAGE.read_settings({"pages": 6, "codes": 4, "val_tasks": 200})
    pages = []
    for task in PACKAGE.tasks(settings, "val"):
        assert all(len(page.split()) == 4 for page in task["pages"])
        shown = [n for n, page in enumerate(task["pages"]) if task["key"] in page]
        assert len(shown) == 1 and task["key"] + find_digit(task) in task["pages"][shown[0]]
        pages += shown
    assert set(pages) == {0, 1, 2, 3}
