"""Page that compares several runs, grouped into arms of an experiment: curves and a table.

Runs form one arm if their configurations differ only in seeds and names. A curve of an arm is the
mean over its runs with the 95% bootstrap interval of that mean.
"""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from verl.record.report.charts import FORMATS, Chart, Series, smooth_values
from verl.record.report.figures import DrawnSection, TextTable, read_built_in_sections
from verl.record.report.run_data import RunData
from verl.record.run_dir import flatten_config
from verl.report_sections import Curve, Plot, ReportSection, load_contributions
from verl.utils.statistics import bootstrap_interval

ARM_COLORS = ("accent", "second", "ramp-4", "ramp-3", "time-5", "time-7")
RESAMPLES = 1000  # number of bootstrap resamples of the runs of an arm, per point of its curve
MAX_NAME_SETTINGS = 2  # maximum number of settings in the name of an arm
# Config keys, in addition to seeds, that are ignored when runs are compared for equal settings.
NAME_KEYS = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir")

Arms = Mapping[str, Sequence[RunData]]


def group_into_arms(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Group runs with equal settings into arms. Return a dict name of the arm -> runs.

    The name lists the settings in which the arms differ. If there are more than
    ``MAX_NAME_SETTINGS``, it is the common prefix of the names of the runs' directories.
    """
    settings_of_runs = [_select_arm_settings(run) for run in runs]
    keys = sorted({key for run_settings in settings_of_runs for key in run_settings})
    values_by_key = {key: {settings.get(key) for settings in settings_of_runs} for key in keys}
    differing_keys = [key for key, values in values_by_key.items() if len(values) > 1]
    runs_by_values: dict[tuple[Any, ...], list[RunData]] = defaultdict(list)
    for run, run_settings in zip(runs, settings_of_runs, strict=True):
        runs_by_values[tuple(run_settings.get(key) for key in differing_keys)].append(run)
    runs_by_name: dict[str, list[RunData]] = {}
    short_keys = [key.rpartition(".")[2] for key in differing_keys]
    for values, arm_runs in runs_by_values.items():
        arm_name = ", ".join(f"{name}={v}" for name, v in zip(short_keys, values, strict=True))
        if not 0 < len(short_keys) <= MAX_NAME_SETTINGS:
            arm_name = _find_common_name(arm_runs)
        # Number the names: the directories of two arms may have the same common prefix.
        if arm_name in runs_by_name:
            arm_name = f"{arm_name} ({len(runs_by_name) + 1})"
        runs_by_name[arm_name] = arm_runs
    return runs_by_name


def _select_arm_settings(run: RunData) -> dict[str, Any]:
    values_by_path = flatten_config(run.config)
    return {
        key: value
        for key, value in values_by_path.items()
        if "seed" not in key.split(".")[-1] and key not in NAME_KEYS
    }


def _find_common_name(runs: Sequence[RunData]) -> str:
    names = [run.directory.path.name for run in runs]
    if len(names) == 1:
        return names[0]
    # If the names end in _s1 and _s2, or seed=1 and seed=2, remove the common "_s" or "seed=".
    prefix = os.path.commonprefix(names)  # noqa: RUF071  the common letters of names, not of paths
    return re.sub(r"[_.-]((seed|s)=?)?$", "", prefix) or names[0]


def build_settings_table(arms: Arms) -> TextTable:
    """Return a table of the settings in which the arms (groups of runs) differ."""
    settings_of_arms = [_select_arm_settings(runs[0]) for runs in arms.values()]
    keys = sorted({key for arm_settings in settings_of_arms for key in arm_settings})
    rows = [[key, *(str(values.get(key, "")) for values in settings_of_arms)] for key in keys]
    differing_rows = [row for row in rows if len(set(row[1:])) > 1]
    return TextTable("Settings that differ", ["setting", *arms], differing_rows)


def draw_comparison_sections(arms: Arms) -> list[DrawnSection]:
    """Return sections with curves and tables that compare arms (groups of runs)."""
    contributed_sections = [
        section for contribution in load_contributions() for section in contribution.sections
    ]
    built_in_sections = read_built_in_sections()
    effort_section = built_in_sections["effort"]
    # Make one chart per curve. In a chart with several curves, readers could not tell arms apart.
    effort_plots = tuple(
        replace(plot, title=f"{plot.title}, {curve.name}", curves=(curve,))
        for plot in effort_section.plots
        if isinstance(plot, Plot)
        for curve in plot.curves
        if isinstance(curve, Curve)
    )
    declarations = [
        built_in_sections["compared_success"],
        replace(effort_section, plots=effort_plots, columns=2),
        built_in_sections["optimisation"],
        *contributed_sections,
    ]
    sections = [_draw_section(arms, declaration) for declaration in declarations]
    sections[0].tables = [build_value_table(arms), build_settings_table(arms)]
    return [section for section in sections if section.charts or section.tables]


def _draw_section(arms: Arms, declaration: ReportSection) -> DrawnSection:
    plots = [plot for plot in declaration.plots if isinstance(plot, Plot) and len(plot.curves) == 1]
    charts = [chart for chart in (draw_arms_chart(arms, plot) for plot in plots) if chart.series]
    return DrawnSection(declaration.title, declaration.lead, charts, declaration.columns)


def draw_arms_chart(arms: Arms, plot: Plot) -> Chart:
    """Draw the first metric of a declared chart: one curve per arm."""
    curve = plot.curves[0]
    arm_curves = []
    # Colours repeat if there are more arms than colours. A tooltip on a curve names its arm.
    for (name, runs), color in zip(arms.items(), cycle(ARM_COLORS), strict=False):
        if isinstance(curve, Curve):
            arm_curves.append(compute_arm_curve(name, runs, curve, color))
    arm_curves = [arm_curve for arm_curve in arm_curves if arm_curve.xs]
    return Chart.from_declaration(replace(plot, kind="line", log=False), arm_curves)


def compute_arm_curve(name: str, runs: Sequence[RunData], curve: Curve, color: str) -> Series:
    """Return a curve of the mean of a metric over ``runs``, with the interval of the mean.

    The curve has only the steps at which all runs logged the metric.
    """
    values_of_runs = []
    for run in runs:
        xs, ys = run.metric_points(curve.metric)
        values_of_runs.append(dict(zip(xs, smooth_values(ys) if curve.smooth else ys, strict=True)))
    steps = sorted(set.intersection(*map(set, values_of_runs)))
    values_of_steps = [[values[step] for values in values_of_runs] for step in steps]
    label = f"{name}, {len(runs)} seeds" if len(runs) > 1 else name
    means = list(map(fmean, values_of_steps))
    arm_curve = Series(label, steps, means, color, markers=curve.markers)
    if len(runs) > 1:
        bounds = [bootstrap_interval(values, resamples=RESAMPLES) for values in values_of_steps]
        arm_curve.low = [low for low, _ in bounds]
        arm_curve.high = [high for _, high in bounds]
        arm_curve.band = True
    return arm_curve


# Title, metric, index of the value (0: before training, -1: at the last step), number format.
VALUE_COLUMNS = (
    ("held-out before", "val/success_rate", 0, "percent"),
    ("held-out after", "val/success_rate", -1, "percent"),
    ("tokens / episode before", "val/tokens_per_episode", 0, "number"),
    ("tokens / episode after", "val/tokens_per_episode", -1, "number"),
    ("s / step", "timing_s/step", -1, "number"),
)


def build_value_table(arms: Arms) -> TextTable:
    """Return the table of metrics before and after training: a line per arm, then per run."""
    column_titles = ["arm", "seeds", *(title for title, _, _, _ in VALUE_COLUMNS)]
    lines = []
    for name, runs in arms.items():
        lines.append([name, str(len(runs)), *_format_value_cells(runs)])
        for run in runs if len(runs) > 1 else ():
            seed = str(run.config_value("trainer.seed", ""))
            lines.append([f"· {run.directory.path.name}", seed, *_format_value_cells([run])])
    return TextTable("Before and after", column_titles, lines)


def _format_value_cells(runs: Sequence[RunData]) -> list[str]:
    return [
        _format_value_cell(runs, metric, index, number_format)
        for _, metric, index, number_format in VALUE_COLUMNS
    ]


def _format_value_cell(
    runs: Sequence[RunData], metric: str, value_index: int, number_format: str
) -> str:
    """Format the mean over ``runs`` of a logged value of ``metric``, with its interval.

    ``value_index`` 0 is the value before training, -1 the value at the last step that all runs
    have. The text names this step if some runs have later ones. It is "" without such a step.
    """
    values_of_runs = [dict(zip(*run.metric_points(metric), strict=True)) for run in runs]
    steps = set.intersection(*map(set, values_of_runs))
    step = max(steps, default=0) if value_index else 0
    if step not in steps:
        return ""
    format_value = FORMATS[number_format]
    step_values = [values[step] for values in values_of_runs]
    if len(step_values) == 1:
        return format_value(step_values[0])
    low, high = bootstrap_interval(step_values)
    text = f"{format_value(fmean(step_values))} ({format_value(low)} to {format_value(high)})"
    is_last_step = not value_index or all(max(values) == step for values in values_of_runs)
    return text if is_last_step else f"{text}, step {step:g}"


def get_comparison_path(run_dirs: Sequence[str | Path]) -> Path:
    """Return the default path of the page: ``comparison.html`` in the runs' common folder."""
    folders = [Path(run_dir).absolute() for run_dir in run_dirs]
    return Path(os.path.commonpath(folders)) / "comparison.html"
