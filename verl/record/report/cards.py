"""Key figures at the top of a report."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl.record.report.axes import format_number
from verl.record.report.run_data import RunData
from verl.report_sections import KeyFigure, insert_entries, load_contributions

LARGE_MISMATCH = 2e-2  # mean difference of engine and trainer probabilities that is shown as bad
KEY_FIGURES = (KeyFigure("tokens per episode", "rollout/tokens_per_episode", "{:.0f}"),)


@dataclass
class Card:
    """One key figure of the report: label, value and a note below it."""

    label: str
    value: str
    note: str = ""
    tone: str = ""  # good | bad


def key_figure_cards(run: RunData) -> list[Card]:
    """Return the key figures whose metrics ``run`` has logged."""
    added = [figure for contribution in load_contributions() for figure in contribution.key_figures]
    return [
        *_success_cards(run),
        *_change_cards(run, insert_entries(KEY_FIGURES, added)),
        *_time_cards(run),
        *_mismatch_cards(run),
    ]


def _success_cards(run: RunData) -> list[Card]:
    xs, ys = run.metric_points("val/success_rate")
    if not xs:
        # A step has few tasks. Its success rate alone is too noisy for a key figure.
        mean_success_rate = run.last_mean("episode/success_rate", 5)
        if mean_success_rate is None:
            return []
        return [Card("train success", f"{mean_success_rate:.1%}", "mean of the last 5 steps")]
    low, high = run.success_interval(xs[-1])
    note = f"95% interval {low:.1%} to {high:.1%}, step {xs[-1]}"
    result = [Card("held-out success", f"{ys[-1]:.1%}", note)]
    if len(xs) > 1:
        first_low, first_high = run.success_interval(xs[0])
        gain = 100 * (ys[-1] - ys[0])
        note = f"from {ys[0]:.1%} ({first_low:.1%} to {first_high:.1%}) at step {xs[0]}"
        tone = "good" if gain > 0 else "bad"
        result.append(Card("gain over the start", f"{gain:+.1f} pts", note, tone))
    return result


def _change_cards(run: RunData, figures: Sequence[KeyFigure]) -> list[Card]:
    """Return cards with the last value of each figure, and its first value in the note."""
    result = []
    for figure in figures:
        first_value = run.first_value(figure.metric)
        last_mean = run.last_mean(figure.metric, 3)
        if first_value is not None and last_mean is not None:
            note = f"was {figure.form.format(first_value)} at the start"
            result.append(Card(figure.label, figure.form.format(last_mean), note))
    return result


def _time_cards(run: RunData) -> list[Card]:
    seconds = run.last_mean("timing_s/step", 5)
    if seconds is None:
        return []
    total = sum(run.metric_points("timing_s/step")[1])
    return [Card("time per step", f"{seconds:.1f} s", f"{format_duration(total)} in all steps")]


def _mismatch_cards(run: RunData) -> list[Card]:
    difference = run.last_mean("training/rollout_probs_diff_mean")
    if difference is None:
        return []
    tone = "bad" if difference > LARGE_MISMATCH else ""
    note = "mean difference of probabilities"
    return [Card("engine against trainer", format_number(difference), note, tone)]


def format_duration(seconds: float) -> str:
    """Format seconds: 45 s, 6 min 40 s, 2 h 05 min."""
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} min"
