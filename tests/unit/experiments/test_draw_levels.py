"""Tests of the picture that compares levels with required levels, from written metrics."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from experiments import draw_levels
from tests.helpers.refusals import mentions

SVG = "{http://www.w3.org/2000/svg}"


def write_metrics(directory, shares, required=None):
    directory.mkdir()
    metrics = {"step": 0, "val/success_rate": 0.5}
    for name, level_shares in shares.items():
        for level, share in zip((1, 2, 3, 4), level_shares, strict=True):
            metrics[f"val/levels_in/{name}/share_{level}"] = share
        if required:
            metrics[f"val/levels_in/{name}/needed_level"] = float(required[name])
    (directory / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    return directory


def test_every_share_has_a_square_and_required_levels_a_frame(tmp_path):
    required = {"+0": 1, "+7": 4}
    before = write_metrics(
        tmp_path / "a", {"+0": (0.25,) * 4, "+7": (0.1, 0.2, 0.3, 0.4)}, required
    )
    after = write_metrics(tmp_path / "b", {"+0": (1.0, 0, 0, 0), "+7": (0, 0, 0.1, 0.9)}, required)
    path = tmp_path / "levels.svg"
    assert draw_levels.main([f"before={before}", f"after={after}", "--svg", str(path)]) == 0
    root = ElementTree.parse(path).getroot()
    squares = [r for r in root.iter(f"{SVG}rect") if r.get("fill-opacity")]
    assert [float(square.get("fill-opacity", "")) for square in squares] == [
        *(0.25, 0.25, 0.25, 0.25, 0.1, 0.2, 0.3, 0.4),
        *(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.9),
    ]
    framed = [n for n, square in enumerate(squares) if square.get("stroke-width") == "3"]
    assert framed == [0, 7, 8, 15]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"before", "after", "+0", "+7", "level 4", "90"} <= set(texts)


def test_situations_without_a_required_level_have_no_frame(tmp_path):
    run = write_metrics(tmp_path / "a", {"take": (0.25,) * 4})
    assert draw_levels.read_level_shares("x", str(run)).required_levels == {}


def test_run_without_measured_situations_is_refused(tmp_path):
    run = write_metrics(tmp_path / "a", {})
    with pytest.raises(SystemExit, check=mentions("main_eval")):
        draw_levels.main([f"x={run}", "--svg", str(tmp_path / "x.svg")])
