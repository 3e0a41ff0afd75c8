r"""Draw the thinking levels that policies choose, by situation, as an SVG.

A situation is a kind of state that the environment names. The SVG has a square for each situation
and level. The more often the level is chosen there, the darker is the square. The required level of
the situation has a frame.

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
from verl.utils.commands import run_reporting_mistakes
from verl.utils.files import write_page

PREFIX = "val/levels_in/"
SIDE = 44  # side of a square, in pixels
LEFT = 64
TOP = 66
GAP = 48  # pixels between two grids
INK = "#1a2230"
SHADE = "#2563c9"
FRAME = "#d9772b"


@dataclass(frozen=True)
class SituationShares:
    """Share of turns at each level, and the required level if it is known, by situation."""

    title: str
    situations: tuple[str, ...]
    shares: Mapping[str, tuple[float, ...]]
    required_levels: Mapping[str, int]


def read_situation_shares(title: str, directory: str) -> SituationShares:
    """Read the last ``val/levels_in/*`` metrics of the run directory ``directory``.

    Raises ``SystemExit`` if there are none.
    """
    lines = [
        line for line in read_metrics(directory) if any(key.startswith(PREFIX) for key in line)
    ]
    if not lines:
        raise SystemExit(
            f"{directory}: its metrics contain no {PREFIX}*; fix: name a run directory of python "
            "-m verl.trainer.main_eval, in an environment whose observations name their situation"
        )
    metrics = lines[-1]
    situation_names = [
        key.removeprefix(PREFIX).rpartition("/")[0] for key in metrics if PREFIX in key
    ]
    situations = tuple(dict.fromkeys(situation_names))
    return SituationShares(
        title,
        situations,
        {name: _level_shares(metrics, name) for name in situations},
        {
            name: int(metrics[f"{PREFIX}{name}/needed_level"])
            for name in situations
            if f"{PREFIX}{name}/needed_level" in metrics
        },
    )


def _level_shares(metrics: Mapping[str, float], name: str) -> tuple[float, ...]:
    return tuple(metrics[f"{PREFIX}{name}/share_{level}"] for level in LEVELS)


def draw_shares(measurements: Sequence[SituationShares]) -> str:
    """Return a standalone SVG with one grid of squares per measurement, in one row."""
    height = TOP + SIDE * max(len(measurement.situations) for measurement in measurements) + 16
    pitch = len(LEVELS) * SIDE + GAP
    width = LEFT + pitch * len(measurements)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, panel in enumerate(measurements):
        parts += _draw_grid(panel, LEFT + number * pitch)
    for row, situation in enumerate(measurements[0].situations):
        y = TOP + SIDE * row + SIDE / 2 + 5
        parts.append(f'<text x="{LEFT - 10}" y="{y}" text-anchor="end">{situation}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _draw_grid(measurement: SituationShares, left: int) -> list[str]:
    """Return the SVG elements of one grid whose first column begins at x = ``left``."""
    parts = [f'<text x="{left}" y="20" font-weight="600" fill="{INK}">{measurement.title}</text>']
    for column, level in enumerate(LEVELS):
        x = left + SIDE * column + SIDE / 2
        parts.append(
            f'<text x="{x}" y="{TOP - 10}" text-anchor="middle" font-size="11">level {level}</text>'
        )
    for row, situation in enumerate(measurement.situations):
        for column, level in enumerate(LEVELS):
            share = measurement.shares[situation][column]
            x = left + SIDE * column
            y = TOP + SIDE * row
            needed = measurement.required_levels.get(situation) == level
            frame = f'stroke="{FRAME}" stroke-width="3"' if needed else 'stroke="#e3e7ed"'
            parts.append(
                f'<rect x="{x + 2}" y="{y + 2}" width="{SIDE - 4}" height="{SIDE - 4}" '
                f'fill="{SHADE}" fill-opacity="{share:.3f}" {frame}/>'
            )
            # White text on dark squares.
            ink = "#fff" if share > 0.5 else INK
            parts.append(
                f'<text x="{x + SIDE / 2}" y="{y + SIDE / 2 + 5}" text-anchor="middle" '
                f'fill="{ink}">{100 * share:.0f}</text>'
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
    measurements = []
    for words in args.runs:
        title, _, directory = words.partition("=")
        measurements.append(read_situation_shares(title, directory))
    write_page(args.svg, draw_shares(measurements), "--svg")
    return 0


if __name__ == "__main__":
    sys.exit(run_reporting_mistakes(main))
