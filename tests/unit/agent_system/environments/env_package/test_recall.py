"""Recall: every shelf is shown once, and the needed thing is never on the last two."""

from agent_system.environments.env_package.recall.package import PACKAGE, find_answer

TASK = {
    "task_id": "recall/t",
    "data_source": "recall",
    "shelves": ["mug 3 pen 7", "cup 9 egg 1", "pen 7 cup 9"],
    "thing": "mug",
}


def test_every_shelf_is_shown_once_and_the_number_is_asked_for():
    env = PACKAGE.make(PACKAGE.read_settings())
    texts = [env.reset(TASK, 0).text]
    for _ in range(4):
        observation, reward, done, info = env.step("look")
        texts.append(observation.text)
        assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": True})
    assert texts == [
        "need mug",
        "shelf mug 3 pen 7",
        "shelf cup 9 egg 1",
        "shelf pen 7 cup 9",
        "take mug",
    ]
    assert env.step("take mug 3")[1:] == (1.0, True, {"won": True, "is_action_valid": True})


def test_wrong_thing_ends_the_episode_and_another_action_shows_no_shelf_again():
    env = PACKAGE.make(PACKAGE.read_settings())
    env.reset(TASK, 0)
    env.step("look")
    observation, reward, done, info = env.step("take mug 3")
    assert (observation.text, reward, done) == ("go on with look", 0.0, False)
    assert not info["is_action_valid"]
    assert env.step("look")[0].text == "shelf cup 9 egg 1"
    for _ in range(2):
        env.step("look")
    assert env.step("take mug 7")[1:] == (0.0, True, {"won": False, "is_action_valid": True})


def test_the_last_two_shelves_do_not_have_the_needed_thing():
    settings = PACKAGE.read_settings({"shelves": 6, "things": 4, "val_tasks": 200})
    places = []
    for task in PACKAGE.tasks(settings, "val"):
        assert all(len(shelf.split()) == 8 for shelf in task["shelves"])
        shown = [n for n, shelf in enumerate(task["shelves"]) if task["thing"] in shelf.split()]
        assert len(shown) == 1
        assert find_answer(task).removeprefix("take ") in task["shelves"][shown[0]]
        places += shown
    assert set(places) == {0, 1, 2, 3}
