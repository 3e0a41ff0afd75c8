r"""Draw the thinking levels that policies choose, by situation, as an SVG.

A situation is a kind of state that the environment names. The SVG has a square for each situation
and level. A square is darker if the level is chosen more often in this situation. The square of the
required level has a frame.

    python experiments/draw_levels.py before=runs/relay/cold-eval after=runs/relay/rlvcr-eval \
        --svg levels.svg

The run directories are those of ``main_eval``, which measures the shares (``val/levels_in/*``).
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvcr.levels import LEVELS
from verl.record.tracking import read_metrics
from verl.utils.commands import run_and_report_mistakes
from verl.utils.files import write_html_or_svg

METRIC_PREFIX = "val/levels_in/"
# Sizes are in pixels.
SQUARE_SIDE = 44
LEFT_MARGIN = 64
TOP_MARGIN = 66
GRID_GAP = 48  # distance of two grids
TEXT_COLOR = "#1a2230"
SQUARE_COLOR = "#2563c9"
FRAME_COLOR = "#d9772b"


@dataclass(frozen=True)
class RunLevels:
    """Share of turns at each thinking level, and the required level where known, by situation."""

    title: str
    shares: Mapping[str, tuple[float, ...]]
    required_levels: Mapping[str, int]


def read_level_shares(title: str, directory: str) -> RunLevels:
    """Read the metrics ``val/levels_in/*`` of the last validation of a run directory.

    Raises ``SystemExit`` if there are none.
    """
    metrics_by_validation = [
        {
            key.removeprefix(METRIC_PREFIX): value
            for key, value in line.items()
            if key.startswith(METRIC_PREFIX)
        }
        for line in read_metrics(directory)
    ]
    metrics = next(filter(None, reversed(metrics_by_validation)), None)
    if metrics is None:
        raise SystemExit(
            f"{directory}: its metrics contain no {METRIC_PREFIX}*; fix: name a run directory of "
            "python -m verl.trainer.main_eval, in an environment whose observations name their "
            "situation"
        )
    situations = dict.fromkeys(key.rpartition("/")[0] for key in metrics)
    return RunLevels(
        title,
        {name: tuple(metrics[f"{name}/share_{level}"] for level in LEVELS) for name in situations},
        {
            name: int(metrics[f"{name}/needed_level"])
            for name in situations
            if f"{name}/needed_level" in metrics
        },
    )


def render_shares(measurements: Sequence[RunLevels]) -> str:
    """Return a standalone SVG with one grid per run: a line per situation, a column per level."""
    num_lines = max(len(measurement.shares) for measurement in measurements)
    height = TOP_MARGIN + SQUARE_SIDE * num_lines + 16
    grid_pitch = len(LEVELS) * SQUARE_SIDE + GRID_GAP
    width = LEFT_MARGIN + grid_pitch * len(measurements)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, measurement in enumerate(measurements):
        parts += _render_grid(measurement, LEFT_MARGIN + number * grid_pitch)
    for row, situation in enumerate(measurements[0].shares):
        y = TOP_MARGIN + SQUARE_SIDE * row + SQUARE_SIDE / 2 + 5
        parts.append(f'<text x="{LEFT_MARGIN - 10}" y="{y}" text-anchor="end">{situation}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _render_grid(measurement: RunLevels, left: int) -> list[str]:
    """Return the SVG elements of one run, whose first column begins at x = ``left``."""
    parts = [
        f'<text x="{left}" y="20" font-weight="600" fill="{TEXT_COLOR}">{measurement.title}</text>'
    ]
    for column, level in enumerate(LEVELS):
        x = left + SQUARE_SIDE * column + SQUARE_SIDE / 2
        parts.append(
            f'<text x="{x}" y="{TOP_MARGIN - 10}" text-anchor="middle" font-size="11">'
            f"level {level}</text>"
        )
    for row, (situation, shares) in enumerate(measurement.shares.items()):
        for column, (level, share) in enumerate(zip(LEVELS, shares, strict=True)):
            x = left + SQUARE_SIDE * column
            y = TOP_MARGIN + SQUARE_SIDE * row
            is_required = measurement.required_levels.get(situation) == level
            frame = (
                f'stroke="{FRAME_COLOR}" stroke-width="3"' if is_required else 'stroke="#e3e7ed"'
            )
            parts.append(
                f'<rect x="{x + 2}" y="{y + 2}" '
                f'width="{SQUARE_SIDE - 4}" height="{SQUARE_SIDE - 4}" '
                f'fill="{SQUARE_COLOR}" fill-opacity="{share:.3f}" {frame}/>'
            )
            # White text on dark squares.
            text_color = "#fff" if share > 0.5 else TEXT_COLOR
            parts.append(
                f'<text x="{x + SQUARE_SIDE / 2}" y="{y + SQUARE_SIDE / 2 + 5}" '
                f'text-anchor="middle" '
                f'fill="{text_color}">{100 * share:.0f}</text>'
            )
    return parts


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="TITLE=DIR", help="main_eval's run directories")
    parser.add_argument("--svg", type=Path, required=True, help="file to write")
    args = parser.parse_args(argv)
    titles_and_runs = (argument.partition("=")[::2] for argument in args.runs)
    measurements = [read_level_shares(title, run) for title, run in titles_and_runs]
    write_html_or_svg(args.svg, render_shares(measurements), "--svg")
    return 0


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
