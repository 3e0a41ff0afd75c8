"""Tables of a sweep: means of every arm over seeds, and paired differences from the baseline."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.statistics import bootstrap_interval

Result = Mapping[str, Any]
AREA = "success in training, mean"
TOKENS = "tokens per step"
# Title of a table column, metric, decimal places. Without the metric the cell is empty.
COLUMNS = (
    ("success", "val/success_rate", 3),
    ("tokens/step", TOKENS, 2),
    ("level information", "val/level_information", 2),
)


def format_sweep_report(results: Sequence[Result], baseline: str) -> str:
    """Return two Markdown tables: the arms, and their paired differences from ``baseline``."""
    arms: dict[str, dict[int, Result]] = {}
    for result in results:
        arms.setdefault(result["arm"], {})[result["seed"]] = result
    if not arms:
        return "no results yet\n"
    lines = [*_format_arm_means(arms), ""]
    if baseline in arms and len(arms) > 1:
        lines += _format_differences(arms, baseline)
    return "\n".join(lines) + "\n"


def value_of(result: Result, name: str) -> float | None:
    """Return one number of a run: the last value of the metric ``name``, or a derived value.

    ``AREA`` is the mean of the success rate over all training steps. ``TOKENS`` is the last number
    of sampled tokens per turn. It is per turn because an episode that fails early has few tokens.
    """
    metrics = result["metrics"]
    if name == AREA:
        curve = metrics.get("episode/success_rate")
        return statistics.fmean(curve) if curve else None
    if name == TOKENS:
        return metrics["val/tokens_per_episode"][-1] / metrics["val/episode_length"][-1]
    values = metrics.get(name)
    return values[-1] if values else None


def _format_arm_means(arms: Mapping[str, Mapping[int, Result]]) -> list[str]:
    heads = [name for name, _, _ in COLUMNS]
    lines = [f"| arm | seeds | before | {' | '.join(heads)} | {AREA} |"]
    lines.append("|---" * (len(heads) + 4) + "|")
    for arm, by_seed in arms.items():
        every = list(by_seed.values())
        cells = [arm, str(len(every)), _format_initial_success(every)]
        cells += [_format_mean_and_std(every, metric, digits) for _, metric, digits in COLUMNS]
        lines.append(f"| {' | '.join([*cells, _format_mean_and_std(every, AREA, 3)])} |")
    return lines


def _format_initial_success(results: Sequence[Result]) -> str:
    """Return the mean success before training, or "" if it was not measured."""
    curves = [result["metrics"]["val/success_rate"] for result in results]
    initial_rates = [curve[0] for curve in curves if len(curve) > 1]
    return f"{statistics.fmean(initial_rates):.3f}" if initial_rates else ""


def _format_mean_and_std(results: Sequence[Result], metric: str, digits: int) -> str:
    """Return mean and standard deviation over seeds as text: "0.612 ± 0.034"."""
    seed_values = [value for result in results if (value := value_of(result, metric)) is not None]
    if not seed_values:
        return ""
    mean = f"{statistics.fmean(seed_values):.{digits}f}"
    return mean if len(seed_values) < 2 else f"{mean} ± {statistics.stdev(seed_values):.{digits}f}"


def _format_differences(arms: Mapping[str, Mapping[int, Result]], baseline: str) -> list[str]:
    heads = [name for name, _, _ in COLUMNS]
    lines = [
        f"Differences from {baseline}, over the seeds that both have; 95% bootstrap intervals of "
        "the mean over these seeds (with three seeds: smallest and largest difference).",
        "",
        f"| arm | seeds | {' | '.join(heads)} | tokens, % |",
        "|---" * (len(heads) + 3) + "|",
    ]
    for arm, by_seed in arms.items():
        shared = sorted(set(by_seed) & set(arms[baseline]))
        if arm == baseline or not shared:
            continue
        pairs = [(by_seed[seed], arms[baseline][seed]) for seed in shared]
        cells = [arm, str(len(shared))]
        for _, metric, digits in COLUMNS:
            cells.append(
                _format_interval(_paired_differences(pairs, metric, relative=False), digits)
            )
        cells.append(_format_interval(_paired_differences(pairs, TOKENS, relative=True), 1))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _paired_differences(
    pairs: Sequence[tuple[Result, Result]], metric: str, relative: bool
) -> list[float]:
    """Return the metric of the first run minus that of the second, for each pair.

    With ``relative`` the differences are in percent of the second.
    """
    differences = []
    for arm_result, base_result in pairs:
        arm_value, base = value_of(arm_result, metric), value_of(base_result, metric)
        if arm_value is None or base is None:
            continue
        differences.append(100 * (arm_value - base) / base if relative else arm_value - base)
    return differences


def _format_interval(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):+.{digits}f}"
    if len(values) < 2:
        return mean
    low, high = bootstrap_interval(list(values))
    return f"{mean} ({low:+.{digits}f} to {high:+.{digits}f})"
