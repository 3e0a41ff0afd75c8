"""Compare runs: held-out success before and after training, tokens, levels and time.

A group of runs that differ in the seed also gets a line with means and standard deviations.

python experiments/compare_runs.py rlvcr=runs/q/rlvcr_s0,runs/q/rlvcr_s1 grpo=runs/q/grpo_s0
python experiments/compare_runs.py rlvcr=... grpo=... --svg success.svg  # also draws train success
"""

import argparse
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.record.report.charts import Chart, Series, draw_svg, smooth_values
from verl.record.report.comparison import ARM_COLORS
from verl.record.report.page import WEB_FOLDER
from verl.record.report.run_data import RunData, load_run
from verl.utils.commands import run_and_report_mistakes
from verl.utils.files import write_html_or_svg

COLUMNS = (
    "",
    "held-out before",
    "held-out after",
    "points",
    "tokens/episode",
    "levels 1-4 after, %",
    "s/iteration",
)
SUCCESS, TOKENS = "val/success_rate", "val/tokens_per_episode"
TRAINING_SUCCESS = "episode/success_rate"
Points = tuple[Sequence[float], list[float]]
"""x values (training steps) of a curve, and its y values"""


def format_success_interval(run: RunData, validation_index: int) -> str:
    """Return held-out success with its 95% bootstrap interval, in percent: "61.2 (55-67)".

    ``validation_index`` is 0 for the validation before training and -1 for the last validation.
    """
    low, high = (
        100 * run.metric_points(f"{SUCCESS}_{bound}")[1][validation_index]
        for bound in ("low", "high")
    )
    return f"{100 * run.metric_points(SUCCESS)[1][validation_index]:.1f} ({low:.0f}-{high:.0f})"


def compute_success_gain(run: RunData) -> float:
    """Return the change of held-out success during training, in percentage points."""
    success_rates = run.metric_points(SUCCESS)[1]
    return 100 * (success_rates[-1] - success_rates[0])


def format_run_cells(run: RunData) -> list[str]:
    """Return the table cells of one run, for all ``COLUMNS`` but the first."""
    tokens_per_episode = run.metric_points(TOKENS)[1]
    level_percentages = [
        100 * (run.last_mean(f"val/level_share_{level}") or 0.0) for level in (1, 2, 3, 4)
    ]
    step_seconds = run.metric_points("timing_s/step")[1]
    return [
        format_success_interval(run, 0),
        format_success_interval(run, -1),
        f"{compute_success_gain(run):+.1f}",
        f"{tokens_per_episode[0]:.0f} → {tokens_per_episode[-1]:.0f}",
        " ".join(f"{percentage:.0f}" for percentage in level_percentages),
        f"{statistics.median(step_seconds):.1f}",
    ]


def format_group_cells(runs: list[RunData]) -> list[str]:
    """Return the cells of the means over ``runs``, which differ in the seed: ``COLUMNS[1:]``."""
    final_success_rates = [100 * run.metric_points(SUCCESS)[1][-1] for run in runs]
    gains = [compute_success_gain(run) for run in runs]
    mean_initial_success = statistics.mean(100 * run.metric_points(SUCCESS)[1][0] for run in runs)
    mean_tokens_per_episode = [
        statistics.mean(run.metric_points(TOKENS)[1][validation_index] for run in runs)
        for validation_index in (0, -1)
    ]
    # Sample standard deviation (n - 1). A single seed has none.
    std_texts = [
        f" ± {statistics.stdev(percentages):.1f}" if len(percentages) > 1 else ""
        for percentages in (final_success_rates, gains)
    ]
    return [
        f"{mean_initial_success:.1f}",
        f"**{statistics.mean(final_success_rates):.1f}**{std_texts[0]}",
        f"**{statistics.mean(gains):+.1f}**{std_texts[1]}",
        f"{mean_tokens_per_episode[0]:.0f} → {mean_tokens_per_episode[1]:.0f}",
        "",
        "",
    ]


def format_run_table(groups: dict[str, list[RunData]]) -> str:
    """Return a Markdown table: one line per run and one per group of several seeds."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for label, runs in groups.items():
        lines += [
            (f"{label}, seed {run.config_value('trainer.seed')}", *format_run_cells(run))
            for run in runs
        ]
        if len(runs) > 1:
            lines.append((f"**{label}**, {len(runs)} seeds", *format_group_cells(runs)))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def draw_success_curves(groups: Mapping[str, Sequence[Points]]) -> str:
    """Return a standalone SVG of the smoothed success on training tasks.

    ``groups`` maps a label to one curve per seed. The curves of single seeds are faint, and the
    curve of their mean is in full colour.
    """
    series = []
    for color, (label, curves) in zip(ARM_COLORS, groups.items(), strict=False):
        series += [Series(label, xs, smooth_values(ys), color, faint=True) for xs, ys in curves]
        # The runs may have stopped at different steps, so the mean ends with the shortest curve.
        shortest_length = min(len(xs) for xs, _ in curves)
        means = [statistics.mean(ys[i] for _, ys in curves) for i in range(shortest_length)]
        series.append(Series(label, curves[0][0][:shortest_length], smooth_values(means), color))
    title = "Success on training tasks"
    chart = Chart(
        title, "success rate, smoothed", series, number_format="percent", width=760, height=330
    )
    # A standalone SVG has no script to show the hover texts.
    figure = re.sub(r' data-hover="[^"]*"', "", draw_svg(chart))
    # Include the colours and CSS rules of the report, because a standalone SVG has no style sheet.
    style = (WEB_FOLDER / "style.css").read_text(encoding="utf-8")
    palette = style.split("[data-theme=", 2)[1].partition("]")[2]  # colours of the light theme
    selectors = ("svg text", ".grid", ".line", ".faint", ".dot", ".whisker", ".c-", ".area")
    css_rules = " ".join(line for line in style.splitlines() if line.startswith(selectors))
    css = f"<style>:root{palette} svg {{ background: #fff }} {css_rules}</style>"
    legend = ""
    legend_spacing = (chart.width - 100) // max(1, len(chart.legend_series))
    for number, legend_entry in enumerate(chart.legend_series):
        text_style = f"fill: var(--{legend_entry.color}); font-weight: 600"
        x = 80 + legend_spacing * number
        legend += f'<text x="{x}" y="26" style="{text_style}">{legend_entry.name}</text>'
    opening_tag, text_after_tag = figure.split(">", 1)
    opening_tag = opening_tag.replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="760" ', 1
    )
    return f"{opening_tag}>{css}{text_after_tag.removesuffix('</svg>')}{legend}</svg>"


def main() -> None:
    """Read the runs, print the table and draw the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "groups", nargs="+", metavar="LABEL=RUN,RUN,...", help="run directories of a label"
    )
    parser.add_argument("--svg", type=Path, help="write the curves of training success here")
    args = parser.parse_args()
    groups = {}
    for argument in args.groups:
        label, separator, runs = argument.partition("=")
        if not separator:
            parser.error(f"{argument!r} is not of the form LABEL=RUN,RUN,...")
        groups[label] = [load_run(run) for run in runs.split(",")]
    print(format_run_table(groups))
    if args.svg:
        curves = {
            label: [run.metric_points(TRAINING_SUCCESS) for run in runs]
            for label, runs in groups.items()
        }
        write_html_or_svg(args.svg, draw_success_curves(curves), "--svg")


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
