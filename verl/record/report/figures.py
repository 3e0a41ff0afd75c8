"""Which charts and key figures a report shows.

A chart whose metrics were never logged does not appear.
"""

from dataclasses import dataclass, field

from verl.record.report.axes import number
from verl.record.report.charts import Chart, Series, smoothed
from verl.record.report.run_data import RunData

LEVELS = (1, 2, 3, 4)
LEVEL_NAMES = {1: "1 act at once", 2: "2 read the situation", 3: "3 reflect", 4: "4 plan"}
TIME_PARTS = {  # metric -> name, in the order of a training step
    "timing_s/gen": "playing",
    "timing_s/gen_engine": "generation",
    "timing_s/gen_env": "environments",
    "timing_s/alternatives": "alternative thoughts",
    "timing_s/pack": "building rows",
    "timing_s/scoring": "scoring",
    "timing_s/old_log_prob": "log-probs",
    "timing_s/ref": "reference log-probs",
    "timing_s/values": "values",
    "timing_s/reward": "rewards",
    "timing_s/adv": "advantages",
    "timing_s/update_critic": "critic update",
    "timing_s/update_actor": "policy update",
    "timing_s/update_weights": "weight sync",
}
INSIDE_GEN = (
    "gen_engine",
    "gen_env",
    "alternatives",
    "pack",
    "scoring",
)  # what timing_s/gen consists of
SINGLES = {  # metric -> (title, axis label); one small chart each
    "actor/pg_loss": ("Policy loss", "loss"),
    "critic/vf_loss": ("Value loss", "loss"),
    "actor/kl_loss": ("KL to the reference", "nats per token"),
    "actor/entropy": ("Entropy of the policy", "nats per token"),
    "actor/grad_norm": ("Gradient norm", "L2 norm"),
    "actor/ppo_kl": ("KL of one iteration", "nats per token"),
    "actor/pg_clipfrac": ("Clipped tokens", "share of tokens"),
    "actor/lr": ("Learning rate", "learning rate"),
    "critic/advantages/mean": ("Mean advantage", "advantage"),
}


@dataclass
class Card:
    """One key figure."""

    label: str
    value: str
    note: str = ""
    tone: str = ""  # good | bad


@dataclass
class Section:
    """A heading with charts below it; ``columns`` charts a row."""

    title: str
    lead: str
    charts: list[Chart] = field(default_factory=list)
    columns: int = 2


def sections(run: RunData) -> list[Section]:
    """All sections that have something to show."""
    found = [
        success(run),
        thinking(run),
        effort(run),
        optimisation(run),
        time_spent(run),
        health(run),
    ]
    return [section for section in found if section.charts]


def line(run: RunData, metric: str, name: str, color: str) -> Series:
    """A metric as a line."""
    return Series(name, *run.points(metric), color)


def keep(charts: list[Chart]) -> list[Chart]:
    """The charts that have at least one point."""
    for chart in charts:
        chart.series = [series for series in chart.series if series.xs]
    return [chart for chart in charts if chart.series]


def success(run: RunData) -> Section:
    """Held-out success with intervals, train success raw and smoothed."""
    xs, ys = run.points("val/success_rate")
    bounds = [run.interval(x) for x in xs]
    held_out = Series("held-out tasks, 95% bootstrap interval", xs, ys, "accent", markers=True)
    held_out.low, held_out.high = [b[0] for b in bounds], [b[1] for b in bounds]
    raw = line(run, "episode/success_rate", "training tasks", "second")
    raw.faint = True
    smooth = Series("training tasks, smoothed", raw.xs, smoothed(raw.ys), "second")
    high = max([*raw.ys, *(b[1] for b in bounds), 0.0])
    span = (0.0, 1.0 if high > 0.75 else None)
    main = Chart(
        "Success rate",
        "episodes won",
        [raw, smooth, held_out],
        "line",
        "percent",
        1120,
        330,
        y_range=span,
    )
    sources = [
        name for name in run.names if name.startswith("val/") and name.endswith("/success_rate")
    ]
    charts = [main]
    if len(sources) > 1:
        colors = ("accent", "second", "level-3", "level-4", "level-2", "level-1")
        lines = [
            line(run, name, name.split("/")[1], color)
            for name, color in zip(sources, colors, strict=False)
        ]
        for series in lines:
            series.markers = True
        charts.append(
            Chart(
                "Held-out success by task type", "episodes won", lines, "line", "percent", 1120, 260
            )
        )
    return Section(
        "Success", "Held-out tasks are a frozen panel that is never trained on.", keep(charts), 1
    )


def thinking(run: RunData) -> Section:
    """Level shares, success and score per level, length of thoughts."""
    shares = [line(run, f"rlvcr/level_share_{k}", LEVEL_NAMES[k], f"level-{k}") for k in LEVELS]
    wins = [line(run, f"rlvcr/level_success_{k}", LEVEL_NAMES[k], f"level-{k}") for k in LEVELS]
    for series in wins:
        series.ys = smoothed(series.ys)
    logprob = line(run, "rlvcr/score_logprob", "log-prob of the action", "accent")
    entropy = line(run, "rlvcr/score_entropy", "entropy over the action", "second")
    tokens = line(run, "rlvcr/thought_tokens_mean", "tokens", "accent")
    charts = [
        Chart(
            "Share of thinking levels", "steps", shares, "stacked", "percent", y_range=(0.0, 1.0)
        ),
        Chart("Success of episodes by level (smoothed)", "episodes won", wins, form="percent"),
        Chart("Thought length", "tokens per step", [tokens], y_range=(0.0, None)),
        Chart("Certainty about the action", "nats per token", [logprob, entropy]),
    ]
    return Section(
        "Thinking",
        "How much the policy thinks, and what its thoughts are worth to it.",
        keep(charts),
    )


def effort(run: RunData) -> Section:
    """Tokens and steps per episode."""
    tokens = [
        line(run, "rollout/tokens_per_episode", "training tasks", "second"),
        line(run, "val/tokens_per_episode", "held-out tasks", "accent"),
    ]
    tokens[1].markers = True
    length = [
        line(run, "episode/length", "training tasks", "second"),
        line(run, "val/episode_length", "held-out", "accent"),
    ]
    lengths, steps = (
        run.points("rollout/tokens_per_episode"),
        dict(zip(*run.points("episode/length"), strict=True)),
    )
    both = [(x, y / steps[x]) for x, y in zip(*lengths, strict=True) if steps.get(x)]
    per_step = Series("tokens", [x for x, _ in both], [y for _, y in both], "second")
    charts = [
        Chart(
            "Sampled tokens per episode",
            "tokens",
            tokens,
            y_range=(0.0, None),
            width=352,
            height=200,
        ),
        Chart(
            "Sampled tokens per step",
            "tokens",
            [per_step],
            y_range=(0.0, None),
            width=352,
            height=200,
        ),
        Chart("Steps per episode", "steps", length, y_range=(0.0, None), width=352, height=200),
    ]
    return Section("Effort", "What an episode costs.", keep(charts), 3)


def optimisation(run: RunData) -> Section:
    """One small chart per quantity of the update."""
    charts = [
        Chart(title, label, [line(run, name, title, "accent")], width=352, height=190, names=[name])
        for name, (title, label) in SINGLES.items()
    ]
    return Section("Optimisation", "The policy update, iteration by iteration.", keep(charts), 3)


def time_parts(run: RunData) -> dict[str, str]:
    """The parts of an iteration that add up to it: playing as a whole only where its own parts were
    not measured.
    """
    logged = {metric: name for metric, name in TIME_PARTS.items() if metric in run.names}
    if "timing_s/gen_engine" in logged:
        del logged["timing_s/gen"]
        return logged
    return {
        metric: name
        for metric, name in logged.items()
        if metric.removeprefix("timing_s/") not in INSIDE_GEN
    }


def time_spent(run: RunData) -> Section:
    """Stacked seconds per iteration and throughput."""
    parts = list(time_parts(run).items())
    layers = [line(run, metric, name, f"time-{i % 8}") for i, (metric, name) in enumerate(parts)]
    charts = [
        Chart("Time per iteration", "seconds", layers, "stacked", "seconds", y_range=(0.0, None)),
        Chart(
            "Throughput",
            "tokens per second",
            [line(run, "perf/throughput", "tokens per second", "accent")],
            y_range=(0.0, None),
        ),
    ]
    return Section(
        "Time", "Where an iteration goes; validation and checkpoints are not in it.", keep(charts)
    )


def health(run: RunData) -> Section:
    """Engine against trainer, aborted trajectories, what could not be parsed."""
    diff = [
        line(run, f"training/rollout_probs_diff_{kind}", kind, color)
        for kind, color in (("max", "second"), ("mean", "accent"))
    ]
    for series in diff:
        pairs = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y > 0]
        series.xs, series.ys = [x for x, _ in pairs], [y for _, y in pairs]
    fails = [name for name in run.names if name.startswith("rlvcr/parse_fail")]
    lines = [
        line(run, name, name.removeprefix("rlvcr/parse_fail_"), f"time-{i % 8}")
        for i, name in enumerate(fails)
    ]
    aborted = line(run, "rollout/aborted", "aborted", "second")
    charts = [
        Chart(
            "Engine against trainer",
            "probability difference",
            diff,
            log=True,
            width=352,
            height=200,
        ),
        Chart(
            "Steps that could not be parsed",
            "share of steps",
            lines,
            form="percent",
            width=352,
            height=200,
        ),
        Chart(
            "Aborted trajectories",
            "trajectories",
            [aborted],
            y_range=(0.0, None),
            width=352,
            height=200,
        ),
    ]
    return Section("Health", "What should stay near zero.", keep(charts), 3)


def cards(run: RunData) -> list[Card]:
    """The key figures at the top of the page."""
    found = [*_success_cards(run)]
    change = (
        ("tokens per episode", "rollout/tokens_per_episode", "{:.0f}"),
        ("thought tokens / step", "rlvcr/thought_tokens_mean", "{:.1f}"),
    )
    for label, metric, form in change:
        first, last = run.first(metric), run.last(metric, 3)
        if first is not None and last is not None:
            found.append(Card(label, form.format(last), f"was {form.format(first)} at the start"))
    seconds = run.last("timing_s/step", 5)
    if seconds is not None:
        total = sum(run.points("timing_s/step")[1])
        found.append(
            Card("time per iteration", f"{seconds:.1f} s", f"{duration(total)} in all iterations")
        )
    difference = run.last("training/rollout_probs_diff_mean")
    if difference is not None:
        tone = "bad" if difference > 2e-2 else ""
        found.append(
            Card(
                "engine against trainer",
                number(difference),
                "mean difference of probabilities",
                tone,
            )
        )
    return found


def _success_cards(run: RunData) -> list[Card]:
    xs, ys = run.points("val/success_rate")
    if not xs:
        last = run.last("episode/success_rate", 5)
        return (
            []
            if last is None
            else [Card("train success", f"{last:.1%}", "mean of the last 5 steps")]
        )
    low, high = run.interval(xs[-1])
    found = [
        Card(
            "held-out success",
            f"{ys[-1]:.1%}",
            f"95% interval {low:.1%} to {high:.1%}, step {xs[-1]}",
        )
    ]
    if len(xs) > 1:
        before = run.interval(xs[0])
        gain = 100 * (ys[-1] - ys[0])
        note = f"from {ys[0]:.1%} ({before[0]:.1%} to {before[1]:.1%}) at step {xs[0]}"
        found.append(
            Card("gain over the start", f"{gain:+.1f} pts", note, "good" if gain > 0 else "bad")
        )
    return found


def duration(seconds: float) -> str:
    """Seconds as a short text: 45 s, 6 min 40 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
