"""The page: figures, charts and plays of a run put into the template."""

import base64
import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from verl.record.config_values import flatten_config
from verl.record.report.axes import number
from verl.record.report.cards import cards, duration
from verl.record.report.charts import draw
from verl.record.report.comparison import arms, comparison_path
from verl.record.report.comparison import sections as compared
from verl.record.report.figures import sections
from verl.record.report.plays import Chunk, affordable, embedded, index, pack, packed, play_files
from verl.record.report.run_data import RunData, load_run
from verl.utils import jsonl

logger = logging.getLogger(__name__)
HERE = Path(__file__).parent / "web"
STYLES = ("style.css", "plays.css")
SCRIPTS = (
    "codec.js",
    "choose.js",
    "dom.js",
    "charts.js",
    "play.js",
    "compare.js",
    "states.js",
    "browser.js",
    "live.js",
    "page.js",
)


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into ``run_dir``; returns its path.

    Raises ``FileNotFoundError`` for no run.
    """
    run = load_run(run_dir)
    jsonl.write_text(run.directory.report_path, render_report(run))
    return run.directory.report_path


def refresh_report(run_dir: str | Path) -> Path | None:
    """``write_report`` for a trainer: a report that cannot be written is a warning, not the end of
    the run.
    """
    try:
        return write_report(run_dir)
    except Exception:  # the tracker boundary
        logger.warning("the report of %s could not be written", run_dir, exc_info=True)
        return None


def write_comparison(run_dirs: Sequence[str | Path], path: Path | None = None) -> Path:
    """Write one page of several runs to ``path``, by default ``comparison.html`` in the nearest
    folder that they share; returns where it is.

    Raises ``FileNotFoundError`` for no run.
    """
    runs = [load_run(run_dir) for run_dir in run_dirs]
    path = path or comparison_path(run_dirs)
    jsonl.write_text(path, render_comparison(runs))
    return path


def render_report(run: RunData) -> str:
    """The HTML text: no file, script, font or address outside of it."""
    chunks = [pack(file) for file in affordable(play_files(run.directory))]
    texts = [(chunk.summary["name"], embedded(chunk.packed)) for chunk in chunks]
    return _rendered("page.html.j2", **_values(run, chunks), chunks=texts)


def render_live(run: RunData, stamp: str) -> str:
    """The same page for a server that hands out plays when they are asked for; ``stamp`` names the
    state of the run that it shows.
    """
    chunks = [pack(file) for file in affordable(play_files(run.directory))]
    return _rendered("page.html.j2", **_values(run, chunks), chunks=[], stamp=stamp)


def _values(run: RunData, chunks: Sequence[Chunk]) -> dict[str, Any]:
    head = _head(run)
    return {
        "title": f"{head['project']} / {head['experiment']}",
        "head": head,
        "cards": cards(run),
        "sections": sections(run),
        "index": embedded(packed(index(chunks))),
        "settings": list(flatten_config(run.config).items()),
        "facts": _facts(run.facts),
        "table": _last_values(run),
    }


def render_comparison(runs: Sequence[RunData]) -> str:
    """The HTML text of a page of several ``runs``; it has their curves, not their plays."""
    groups = arms(runs)
    return _rendered(
        "comparison.html.j2",
        title=" against ".join(groups),
        groups=groups,
        sections=compared(groups),
    )


def _rendered(template: str, stamp: str = "", **values: object) -> str:
    script = _joined(SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    # What is no part of this script does not run, whatever a play says.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    if stamp:
        policy += "; connect-src 'self'"
    values |= {
        "style": Markup(_joined(STYLES)),
        "script": Markup(script),
        "policy": policy,
        "stamp": stamp,
        "written": time.strftime("%Y-%m-%d %H:%M"),
    }
    return _environment().get_template(template).render(values)


def _environment() -> Environment:
    loader = FileSystemLoader(HERE)
    # Names of tasks, settings and metrics are foreign text: none of it may become markup.
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(draw=draw)
    return environment


def _joined(names: Sequence[str]) -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in names)


def _head(run: RunData) -> dict[str, Any]:
    steps = [line["step"] for line in run.metrics]
    times = [line["time"] for line in run.metrics if "time" in line]
    last = steps[-1] if steps else 0
    total = run.setting("trainer.total_training_steps")
    return {
        "project": run.setting("trainer.project_name") or run.directory.path.parent.name,
        "experiment": run.setting("trainer.experiment_name") or run.directory.path.name,
        "progress": f"step {last} of {total}" if total else f"step {last}",
        "finished": bool(total) and last >= total,
        # By the clock: what lay between two starts of a run is in it.
        "elapsed": duration(times[-1] - times[0]) if len(times) > 1 else "",
        "tags": _tags(run),
    }


def _tags(run: RunData) -> list[str]:
    group = run.setting("env.rollout.n")
    batch = run.setting("data.train_batch_size")
    seed = run.setting("trainer.seed")
    tags = [
        run.setting("env.env_name"),
        run.setting("algorithm.adv_estimator"),
        run.setting("actor_rollout_ref.model.path"),
        f"{batch} tasks \N{MULTIPLICATION SIGN} {group} episodes" if batch and group else None,
        f"seed {seed}" if seed is not None else None,
        f"stand-in: {run.facts['stand_in']}" if run.facts.get("stand_in") else None,
    ]
    return [str(tag) for tag in tags if tag]


def _facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    apart = ("starts", "command")
    known = {k: value for k, value in facts.items() if k not in apart and value is not None}
    rows = flatten_config(known)
    if "command" in facts:
        rows["command"] = " ".join(map(str, facts["command"]))
    if len(facts.get("starts", [])) > 1:
        rows["starts"] = json.dumps([start.get("time") for start in facts["starts"]])
    return [(key, str(value)) for key, value in rows.items()]


def _last_values(run: RunData) -> list[tuple[str, str, str, str]]:
    """Name, first, last and number of values of every metric."""
    rows = []
    for name in run.names:
        _, values = run.points(name)
        if values:
            rows.append((name, number(values[0]), number(values[-1]), str(len(values))))
    return rows
