"""Page that compares several runs, grouped into arms of an experiment: curves and a table.

Runs form one arm if their configurations differ only in seeds and names. A curve of an arm is the
mean over its runs with the 95% bootstrap interval of that mean.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from verl.record.config_values import flatten_config
from verl.record.report.charts import FORMATS, Chart, Series, smooth_values
from verl.record.report.figures import DrawnSection, NumberTable, read_built_in_sections
from verl.record.report.run_data import RunData
from verl.report_sections import Curve, Plot, ReportSection, load_contributions
from verl.utils.statistics import bootstrap_interval

ARM_COLORS = ("accent", "second", "ramp-4", "ramp-3", "time-5", "time-7")
RESAMPLES = 1000  # bootstrap samples of the runs of an arm, for each point of a curve
MOST_KEYS = 2  # maximum number of settings in the name of an arm
# Keys that may differ within an arm, in addition to seeds.
NAMES = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir")

Arms = Mapping[str, Sequence[RunData]]


def group_into_arms(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Group ``runs`` by the settings in which they differ, which name the arm.

    If they are more than ``MOST_KEYS``, the common part of the directory names is the name.
    """
    settings = [_arm_settings(run) for run in runs]
    keys = sorted({key for of_run in settings for key in of_run})
    differing = [key for key in keys if len({of_run.get(key) for of_run in settings}) > 1]
    grouped: dict[tuple[Any, ...], list[RunData]] = {}
    for run, of_run in zip(runs, settings, strict=True):
        grouped.setdefault(tuple(of_run.get(key) for key in differing), []).append(run)
    named: dict[str, list[RunData]] = {}
    for values, members in grouped.items():
        pairs = [f"{key.rpartition('.')[2]}={v}" for key, v in zip(differing, values, strict=True)]
        name = ", ".join(pairs) if 0 < len(pairs) <= MOST_KEYS else _shared_name(members)
        # The directories of two arms may have the same common prefix.
        named[name if name not in named else f"{name} ({len(named) + 1})"] = members
    return named


def _arm_settings(run: RunData) -> dict[str, Any]:
    flat = flatten_config(run.config)
    return {k: v for k, v in flat.items() if "seed" not in k.split(".")[-1] and k not in NAMES}


def _shared_name(runs: Sequence[RunData]) -> str:
    names = [run.directory.path.name for run in runs]
    if len(names) == 1:
        return names[0]
    prefix = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    # Remove the common beginning of suffixes such as _s1 and _s2.
    return re.sub(r"[_.-](seed|s)?$", "", "".join(letters[0] for letters in prefix)) or names[0]


def build_settings_table(groups: Arms) -> NumberTable:
    """Return the table of the settings in which the arms differ."""
    settings = [_arm_settings(runs[0]) for runs in groups.values()]
    keys = sorted({key for of_arm in settings for key in of_arm})
    rows = [[key, *(str(of_arm.get(key, "")) for of_arm in settings)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return NumberTable("Settings that differ", ["setting", *groups], differing)


def comparison_sections(groups: Arms) -> list[DrawnSection]:
    """Return the sections with the curves and tables of ``groups``."""
    added = [section for contribution in load_contributions() for section in contribution.sections]
    built_in = read_built_in_sections()
    effort = built_in["effort"]
    # A chart of each curve: with several curves the arms could not be distinguished.
    effort_plots = tuple(
        replace(plot, title=f"{plot.title}, {curve.name}", curves=(curve,))
        for plot in effort.plots
        if isinstance(plot, Plot)
        for curve in plot.curves
        if isinstance(curve, Curve)
    )
    plans = [
        built_in["compared_success"],
        replace(effort, plots=effort_plots, columns=2),
        built_in["optimisation"],
        *added,
    ]
    sections = [_draw_section(groups, plan) for plan in plans]
    sections[0].tables = [build_value_table(groups), build_settings_table(groups)]
    return [section for section in sections if section.charts or section.tables]


def _draw_section(groups: Arms, plan: ReportSection) -> DrawnSection:
    # Only charts of one metric, because with several the arms could not be distinguished.
    plots = [plot for plot in plan.plots if isinstance(plot, Plot) and len(plot.curves) == 1]
    charts = [chart for chart in (draw_arms(groups, plot) for plot in plots) if chart.series]
    return DrawnSection(plan.title, plan.lead, charts, plan.columns)


def draw_arms(groups: Arms, plot: Plot) -> Chart:
    """Draw the first metric of ``plot`` with one curve per arm that has logged it."""
    curve = plot.curves[0]
    series = []
    # Colours repeat if there are more arms than colours; the cursor shows the name of an arm.
    for (name, runs), color in zip(groups.items(), cycle(ARM_COLORS), strict=False):
        line = arm_series(name, runs, curve, color) if isinstance(curve, Curve) else None
        if line is not None and line.xs:
            series.append(line)
    return Chart.from_plan(replace(plot, kind="line", log=False), series)


def arm_series(name: str, runs: Sequence[RunData], curve: Curve, color: str) -> Series:
    """Return mean and interval of a metric over ``runs``, at the steps that all of them logged."""
    values = []
    for run in runs:
        xs, ys = run.metric_points(curve.metric)
        values.append(dict(zip(xs, smooth_values(ys) if curve.smooth else ys, strict=True)))
    steps = sorted(set.intersection(*(set(of_run) for of_run in values)))
    at_steps = [[of_run[step] for of_run in values] for step in steps]
    label = f"{name}, {len(runs)} seeds" if len(runs) > 1 else name
    line = Series(label, steps, [fmean(each) for each in at_steps], color, markers=curve.markers)
    if len(runs) > 1:
        bounds = [bootstrap_interval(each, resamples=RESAMPLES) for each in at_steps]
        line.low = [low for low, _ in bounds]
        line.high = [high for _, high in bounds]
        line.band = True
    return line


COLUMNS = (
    ("held-out before", "val/success_rate", 0, "percent"),
    ("held-out after", "val/success_rate", -1, "percent"),
    ("tokens / episode before", "val/tokens_per_episode", 0, "number"),
    ("tokens / episode after", "val/tokens_per_episode", -1, "number"),
    ("s / step", "timing_s/step", -1, "number"),
)


def build_value_table(groups: Arms) -> NumberTable:
    """Return the table of metrics before and after training, per arm (mean, interval) and run."""
    head = ["arm", "seeds", *(title for title, _, _, _ in COLUMNS)]
    lines = []
    for name, runs in groups.items():
        lines.append([name, str(len(runs)), *_value_cells(runs)])
        if len(runs) > 1:
            seeds = [str(run.config_value("trainer.seed", "")) for run in runs]
            of_runs = zip(runs, seeds, strict=True)
            lines += [
                [f"· {run.directory.path.name}", s, *_value_cells([run])] for run, s in of_runs
            ]
    return NumberTable("Before and after", head, lines)


def _value_cells(runs: Sequence[RunData]) -> list[str]:
    return [_value_cell(runs, metric, index, form) for _, metric, index, form in COLUMNS]


def _value_cell(runs: Sequence[RunData], metric: str, place: int, form: str) -> str:
    """Format the mean over ``runs`` of the value at index ``place``, with its interval.

    ``place`` 0 is the value before training, -1 the last one. Empty if a run lacks it.
    """
    points = [run.metric_points(metric) for run in runs]
    if not all(values for _, values in points):
        return ""
    if place == 0 and any(steps[0] != 0 for steps, _ in points):
        return ""
    run_values = [values[place] for _, values in points]
    show = FORMATS[form]
    if len(run_values) == 1:
        return show(run_values[0])
    low, high = bootstrap_interval(run_values)
    return f"{show(fmean(run_values))} ({show(low)} to {show(high)})"


def comparison_path(run_dirs: Sequence[str | Path]) -> Path:
    """Return the default path of a comparison: in the nearest common folder of the runs."""
    folders = [Path(run_dir).absolute() for run_dir in run_dirs]
    return Path(os.path.commonpath(folders)) / "comparison.html"
