"""Rendering of the report: figures, charts and trajectories of a run in the page template."""

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from verl.record.report.charts import draw_svg, format_number
from verl.record.report.comparison import (
    draw_comparison_sections,
    get_comparison_path,
    group_into_arms,
)
from verl.record.report.figures import draw_report_sections, format_duration, make_headline_cards
from verl.record.report.run_data import RunData, load_run
from verl.record.report.trajectory_chunks import (
    build_trajectory_index,
    compress_json,
    compress_rollout_file,
    encode_base64,
    list_rollout_files,
    select_files_within_budget,
)
from verl.record.run_dir import flatten_config
from verl.utils import jsonl
from verl.utils.files import write_html_or_svg

WEB_FOLDER = Path(__file__).parent / "web"
STYLES = ("style.css", "trajectories.css")
SCRIPTS = (
    "codec.js",
    "choose.js",
    "dom.js",
    "charts.js",
    "trajectory.js",
    "compare.js",
    "states.js",
    "browser.js",
    "live.js",
    "page.js",
)


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into ``run_dir`` and return its path.

    Raises ``FileNotFoundError`` if ``run_dir`` is not a run directory.
    """
    run = load_run(run_dir)
    jsonl.write_text_atomically(run.directory.report_path, render_report(run))
    return run.directory.report_path


def write_comparison(run_dirs: Sequence[str | Path], path: Path | None = None) -> Path:
    """Write a page that compares several runs to ``path``, and return the path.

    Without ``path`` it is ``comparison.html`` in the runs' nearest common folder. Raises
    ``FileNotFoundError`` for a directory that is not a run directory. Raises ``ConfigError`` if
    ``path`` is a file that was not written by this function.
    """
    path = path or get_comparison_path(run_dirs)
    arms = group_into_arms([load_run(run_dir) for run_dir in run_dirs])
    title, sections = " against ".join(arms), draw_comparison_sections(arms)
    html = _render_template("comparison.html.j2", title=title, groups=arms, sections=sections)
    write_html_or_svg(path, html, "--out")
    return path


def render_report(run: RunData, stamp: str = "") -> str:
    """Return the report as self-contained HTML, which loads no other file, script or font.

    With ``stamp`` the page is for ``LiveServer``, which sends trajectories on request. The page
    reloads when the server's stamp of the run's files differs from ``stamp``.
    """
    rollout_files = select_files_within_budget(list_rollout_files(run.directory))
    chunks = [compress_rollout_file(file) for file in rollout_files]
    encoded_chunks = [(chunk.summary["name"], encode_base64(chunk.packed)) for chunk in chunks]
    run_description = _describe_run(run)
    return _render_template(
        "page.html.j2",
        stamp,
        title=f"{run_description['project']} / {run_description['experiment']}",
        head=run_description,
        cards=make_headline_cards(run),
        sections=draw_report_sections(run),
        index=encode_base64(compress_json(build_trajectory_index(chunks))),
        settings=list(flatten_config(run.config).items()),
        facts=_make_fact_rows(run.facts),
        table=_make_metric_rows(run),
        chunks=[] if stamp else encoded_chunks,
    )


def _render_template(template: str, stamp: str = "", **template_values: object) -> str:
    script = _join_files(SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    # Allow only this script: text of a trajectory must not be executed.
    security_policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    if stamp:
        security_policy += "; connect-src 'self'"
    template_values |= {
        "style": Markup(_join_files(STYLES)),
        "script": Markup(script),
        "policy": security_policy,
        "stamp": stamp,
        "written": time.strftime("%Y-%m-%d %H:%M"),
    }
    loader = FileSystemLoader(WEB_FOLDER)
    # Names of tasks, settings and metrics are untrusted text and must not become markup.
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(draw=draw_svg)
    page = environment.get_template(template).render(template_values)
    # Replace lone surrogates, which cannot be encoded. Names of metrics and settings can have them.
    return page.encode(errors="replace").decode()


def _join_files(names: Sequence[str]) -> str:
    return "\n".join((WEB_FOLDER / name).read_text(encoding="utf-8") for name in names)


def _describe_run(run: RunData) -> dict[str, Any]:
    steps = [line["step"] for line in run.metrics]
    times = [line["time"] for line in run.metrics if "time" in line]
    last_step = steps[-1] if steps else 0
    total_steps = run.config_value("trainer.total_training_steps")
    return {
        "project": run.config_value("trainer.project_name") or run.directory.path.parent.name,
        "experiment": run.config_value("trainer.experiment_name") or run.directory.path.name,
        "progress": f"step {last_step} of {total_steps}" if total_steps else f"step {last_step}",
        "finished": bool(total_steps) and last_step >= total_steps,
        # This is wall-clock time, including pauses between two starts of the run.
        "elapsed": format_duration(times[-1] - times[0]) if len(times) > 1 else "",
        "tags": _make_run_tags(run),
    }


def _make_run_tags(run: RunData) -> list[str]:
    group_size = run.config_value("env.rollout.n")
    batch_size = run.config_value("data.train_batch_size")
    seed = run.config_value("trainer.seed")
    size_text = f"{batch_size} tasks \N{MULTIPLICATION SIGN} {group_size} episodes"
    tags = [
        run.config_value("env.env_name"),
        run.config_value("algorithm.adv_estimator"),
        run.config_value("actor_rollout_ref.model.path"),
        size_text if batch_size and group_size else None,
        f"seed {seed}" if seed is not None else None,
        f"stand-in: {run.facts['stand_in']}" if run.facts.get("stand_in") else None,
    ]
    return [str(tag) for tag in tags if tag]


def _make_fact_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    specially_formatted_keys = ("starts", "command")
    other_facts = {
        key: value
        for key, value in facts.items()
        if key not in specially_formatted_keys and value is not None
    }
    rows = flatten_config(other_facts)
    if "command" in facts:
        rows["command"] = " ".join(map(str, facts["command"]))
    if len(facts.get("starts", [])) > 1:
        rows["starts"] = json.dumps([start.get("time") for start in facts["starts"]])
    return [(key, str(value)) for key, value in rows.items()]


def _make_metric_rows(run: RunData) -> list[tuple[str, str, str, str]]:
    """Return (name, first value, last value, number of values) of every metric."""
    rows = []
    for name in run.metric_names:
        _, values = run.metric_points(name)
        if values:
            first_text, last_text = format_number(values[0]), format_number(values[-1])
            rows.append((name, first_text, last_text, str(len(values))))
    return rows
