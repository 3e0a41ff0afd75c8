"""The key figures at the top of a report."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl.record.report.axes import number
from verl.record.report.run_data import RunData
from verl.report_sections import KeyFigure, arrange, contributions

LARGE_DRIFT = 2e-2  # mean difference of probabilities at which engine and trainer disagree
KEY_FIGURES = (KeyFigure("tokens per episode", "rollout/tokens_per_episode", "{:.0f}"),)


@dataclass
class Card:
    """One key figure."""

    label: str
    value: str
    note: str = ""
    tone: str = ""  # good | bad


def cards(run: RunData) -> list[Card]:
    """The key figures that ``run`` has values for."""
    added = [figure for contribution in contributions() for figure in contribution.key_figures]
    return [
        *_success(run),
        *_changes(run, arrange(KEY_FIGURES, added)),
        *_time(run),
        *_drift(run),
    ]


def _success(run: RunData) -> list[Card]:
    xs, ys = run.points("val/success_rate")
    if not xs:
        # One step plays a handful of tasks; its rate alone jumps too much to be a key figure.
        last = run.last("episode/success_rate", 5)
        if last is None:
            return []
        return [Card("train success", f"{last:.1%}", "mean of the last 5 steps")]
    low, high = run.interval(xs[-1])
    note = f"95% interval {low:.1%} to {high:.1%}, step {xs[-1]}"
    found = [Card("held-out success", f"{ys[-1]:.1%}", note)]
    if len(xs) > 1:
        first_low, first_high = run.interval(xs[0])
        gain = 100 * (ys[-1] - ys[0])
        note = f"from {ys[0]:.1%} ({first_low:.1%} to {first_high:.1%}) at step {xs[0]}"
        tone = "good" if gain > 0 else "bad"
        found.append(Card("gain over the start", f"{gain:+.1f} pts", note, tone))
    return found


def _changes(run: RunData, figures: Sequence[KeyFigure]) -> list[Card]:
    """Figures with what they were at the start."""
    found = []
    for figure in figures:
        first = run.first(figure.metric)
        last = run.last(figure.metric, 3)
        if first is not None and last is not None:
            note = f"was {figure.form.format(first)} at the start"
            found.append(Card(figure.label, figure.form.format(last), note))
    return found


def _time(run: RunData) -> list[Card]:
    seconds = run.last("timing_s/step", 5)
    if seconds is None:
        return []
    total = sum(run.points("timing_s/step")[1])
    return [Card("time per iteration", f"{seconds:.1f} s", f"{duration(total)} in all iterations")]


def _drift(run: RunData) -> list[Card]:
    difference = run.last("training/rollout_probs_diff_mean")
    if difference is None:
        return []
    tone = "bad" if difference > LARGE_DRIFT else ""
    note = "mean difference of probabilities"
    return [Card("engine against trainer", number(difference), note, tone)]


def duration(seconds: float) -> str:
    """Seconds as a short text: 45 s, 6 min 40 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
