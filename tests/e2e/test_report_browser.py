"""Tests of the report in a browser: clicks, keys, width, colours.

Screenshots are written to the folder in ``RLVCR_SCREENSHOTS``.
"""

import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from tests.helpers.browser import DESKTOP, PHONE, Browser, find_browser
from tests.helpers.fake_run import fake_run
from verl.record.report import write_comparison, write_report
from verl.record.report.serve import LiveServer
from verl.utils import jsonl

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium on the path, and RLVCR_BROWSER names none"
)
HOSTILE = '</script><script>document.title = "taken"</script><img src=x onerror="taken()">'
ADDRESS = "[location.hash, document.activeElement.className || document.activeElement.id]"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    run_dir = fake_run(tmp_path_factory.mktemp("runs") / "quickstart", steps=12, validate_every=6)
    path = run_dir / "rollouts" / "1.jsonl"
    rows = list(jsonl.read(path))
    for row in rows[:8]:
        row["task_id"] = row["prompt"] = HOSTILE
        row["steps"][0]["observation"] = row["steps"][0]["action"] = HOSTILE
    jsonl.write(path, rows)
    tokens = list(jsonl.read(run_dir / "tokens" / "1.jsonl"))
    tokens[0]["steps"][0]["tokens"][0] = HOSTILE
    jsonl.write(run_dir / "tokens" / "1.jsonl", tokens)
    return write_report(run_dir).as_uri()


@pytest.fixture(scope="module")
def browser():
    with Browser(find_browser() or "") as opened:
        yield opened


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory):
    folder = Path(os.environ.get("RLVCR_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_values(browser, selector, what="textContent"):
    return browser.evaluate(
        f"[...document.querySelectorAll('{selector}')].map((node) => node.{what})"
    )


def test_point_of_a_curve_opens_the_trajectories_of_its_step(browser, report):
    browser.show(report)
    browser.click("svg.opens[aria-label^='Success rate']", right=0.06, down=0.6)
    # Step 0 has only validation trajectories.
    assert browser.evaluate("[kind.value, step.value]") == ["val", "0"]
    browser.click("svg.opens[aria-label^='Policy loss']", right=0.2)
    assert browser.evaluate("[kind.value, step.value]") == ["train", "1"]
    assert len(read_values(browser, "button.trajectory")) == 32


def test_return_bar_opens_its_trajectories(browser, report):
    browser.show(report)
    bars = read_values(browser, ".bin", "getAttribute('aria-label')")
    assert [label.split(":")[0] for label in bars] == ["return 0", "return 1"]
    browser.click(".bin:last-of-type .hit")
    num_successes = int(bars[1].split()[2])
    assert set(read_values(browser, "button.trajectory .outcome")) == {"success"}
    assert len(read_values(browser, "button.trajectory")) == num_successes
    browser.click(".bin.chosen .hit")
    assert len(read_values(browser, "button.trajectory")) == 32


def test_keyboard_navigates_the_trajectories(browser, report):
    browser.show(report)
    browser.evaluate("document.querySelector('#list button').focus()")
    browser.press("j")
    browser.wait("document.querySelector('#list button[aria-current=true]') !== null")
    first = browser.evaluate(ADDRESS)
    browser.press("k")
    browser.press("Enter")
    browser.wait("document.activeElement.id === 'shown'")
    assert browser.evaluate(ADDRESS) == ["#train-12/0", "shown"] and first[1] == "trajectory"
    browser.press("Escape")
    assert browser.evaluate(ADDRESS) == ["#trajectories", "trajectory"]
    assert browser.evaluate("shown.hidden")
    outlined = "getComputedStyle(document.activeElement).outlineStyle"
    assert browser.evaluate(outlined) == "solid"
    browser.press("ArrowLeft")
    assert browser.evaluate("[step.value, document.activeElement.className]") == ["1", "trajectory"]
    chart = "document.querySelector(\"svg.opens[aria-label^='Policy loss']\")"
    browser.evaluate(f"{chart}.focus()")
    browser.press("ArrowRight")
    browser.press("Enter")
    assert browser.evaluate("[kind.value, step.value]") == ["train", "12"]


def test_texts_of_a_trajectory_are_not_markup(browser, report):
    browser.show(f"{report}#train-1/0")
    browser.wait("!shown.hidden")
    assert browser.evaluate("document.title") == "rlvcr / quickstart"
    for selector in ("#shown h3", "#shown .observation", "#shown .turn .response", "#list .group"):
        assert HOSTILE in read_values(browser, selector)[0], selector
    assert browser.evaluate("document.querySelectorAll('main script, main img').length") == 0


def test_trajectories_of_a_group_are_shown_side_by_side(browser, report):
    browser.show(f"{report}#train-12/3")
    browser.press("g")
    browser.wait("document.querySelector('.side-by-side') !== null")
    assert len(read_values(browser, ".side-by-side th[scope=col]")) == 8
    assert read_values(browser, ".side-by-side th[scope=col] .outcome")[:2] == [
        "success",
        "failure",
    ]
    marked = len(read_values(browser, ".side-by-side td.differs"))
    differences = [
        text for text in read_values(browser, ".side-by-side th p") if "differs from turn" in text
    ]
    assert marked == len(differences) > 0
    browser.click(".side-by-side th[scope=col]:nth-child(3) button")
    browser.wait("document.querySelector('.side-by-side .outcome').textContent === 'failure'")
    assert browser.evaluate("location.hash").endswith("/group")
    browser.press("t")
    browser.wait("document.querySelector('.side-by-side') === null")


def test_arrow_of_the_state_graph_opens_its_trajectories(browser, report, screenshots):
    browser.show(f"{report}#train-12/3")
    browser.press("s")
    browser.wait("document.querySelector('svg.states') !== null")
    colours = read_values(browser, ".arrow .edge", "getAttribute('class')")
    assert {"edge up", "edge down"} <= set(colours)
    states = read_values(browser, ".state", "getAttribute('aria-label')")
    assert "at countertop 1" in states and {"success", "failure"} <= set(states)
    browser.click(".arrow")
    assert "credit" in read_values(browser, ".details b")[0]
    browser.evaluate("shown.scrollIntoView()")
    browser.screenshot(screenshots / "states.png")
    browser.click(".details button")
    browser.wait("document.querySelector('svg.states') === null")
    assert re.fullmatch(r"#train-12/\d", browser.evaluate("location.hash"))


def test_tokens_are_coloured_by_the_selected_number(browser, report):
    browser.show(f"{report}#train-12/3")
    choose = "(() => { const s = document.querySelector('.overlays select'); s.value = '%s';"
    choose += "s.dispatchEvent(new Event('change')); })()"
    assert read_values(browser, ".overlays option", "value") == [
        "advantage",
        "entropy",
        "gap",
        "mask",
    ]
    for name, style in (
        ("entropy", "heat"),
        ("gap", "up"),
        ("mask", "masked"),
        ("advantage", "up"),
    ):
        browser.evaluate(choose % name)
        assert len(read_values(browser, f".turn .response .{style}")) > 0, name
    # A token that was not sampled has no advantage.
    assert read_values(browser, ".turn .response span", "className")[0] == ""


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_fits_the_screen_and_follows_the_colour_scheme(
    browser, report, screenshots, size, dark
):
    browser.show(report, size, dark)
    browser.wait("!shown.hidden")
    assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
    colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", colour)[0])
    assert (red < 60) == dark
    browser.evaluate("trajectories.scrollIntoView()")
    name = (
        f"trajectories_{'phone' if size == PHONE else 'desktop'}_{'dark' if dark else 'light'}.png"
    )
    browser.screenshot(screenshots / name)
    assert (screenshots / name).stat().st_size > 10_000


def test_comparison_page_fits_a_phone_and_opens_no_trajectories(browser, tmp_path):
    runs = [
        fake_run(tmp_path / f"{name}_{seed}", 4, 2, rollouts=False, seed=seed, estimator=name)
        for name in ("rlvcr", "grpo")
        for seed in (1, 2)
    ]
    browser.show(write_comparison(runs).as_uri(), PHONE)
    assert browser.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    assert len(read_values(browser, "path.band")) > 10
    assert read_values(browser, "svg.opens, #trajectories") == []


def test_step_without_trajectories_shows_the_nearest(browser, report):
    browser.show(report)
    browser.click("svg.opens[aria-label^='Policy loss']", right=0.55)
    assert browser.evaluate("[kind.value, step.value]") in (["train", "1"], ["train", "12"])
    browser.evaluate("step.value = 'all'; step.dispatchEvent(new Event('change'))")
    assert len(read_values(browser, "button.trajectory")) == 60
    # The rest of the list is added when it is scrolled into view.
    browser.evaluate("list.lastElementChild.scrollIntoView()")
    browser.wait("document.querySelectorAll('button.trajectory').length === 64")


def test_served_page_follows_its_run(browser, tmp_path):
    run_dir = fake_run(tmp_path / "run", steps=2, validate_every=2)
    with LiveServer(run_dir, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        browser.show(f"{server.page_url}#train-2/1")
        browser.wait("!shown.hidden")
        browser.evaluate("window.mark = 1; list.querySelectorAll('button')[2].focus()")
        rows = list(jsonl.read(run_dir / "rollouts" / "2.jsonl"))
        jsonl.write(run_dir / "rollouts" / "3.jsonl", rows)
        metrics = {"step": 3, "episode/success_rate": 0.5, "actor/pg_loss": 0.1}
        jsonl.append(run_dir / "metrics.jsonl", metrics)
        browser.wait("step.options.length === 4 && live.textContent === 'live'")
        assert "step 3 of 30" in browser.evaluate("head.textContent")
        # The shown trajectory and the keyboard focus stay.
        selection = (
            "[step.value, location.hash, document.activeElement.dataset.position, window.mark]"
        )
        assert browser.evaluate(selection) == ["2", "#train-2/1", "2", 1]
        browser.evaluate("document.activeElement.blur()")
        browser.click("svg.opens[aria-label^='Policy loss']", right=0.95)
        assert browser.evaluate("[kind.value, step.value]") == ["train", "3"]
        browser.press("Enter")
        browser.wait("location.hash === '#train-3/0'")
        server.shutdown()
        thread.join(10)
    browser.wait("live.textContent.startsWith('not live')")


def test_browser_is_found_on_the_path_or_by_variable(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("RLVCR_BROWSER", raising=False)
    assert find_browser() is None
    monkeypatch.setenv("RLVCR_BROWSER", "/opt/chrome")
    assert find_browser() == "/opt/chrome"
