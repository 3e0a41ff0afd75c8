"""Tables of a sweep: means of every arm over seeds, and paired differences from the baseline."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.statistics import bootstrap_interval

Result = Mapping[str, Any]
MEAN_TRAINING_SUCCESS = "success in training, mean"
TOKENS_PER_TURN = "tokens per turn"
# (title of a table column, metric, decimal places); a run without the metric has an empty cell
COLUMNS = (
    ("success", "val/success_rate", 3),
    ("tokens/turn", TOKENS_PER_TURN, 2),
    ("level information", "val/level_information", 2),
)


def format_sweep_report(results: Sequence[Result], baseline: str) -> str:
    """Return two Markdown tables: means of every arm, and paired differences from ``baseline``."""
    results_by_arm: dict[str, dict[int, Result]] = {}
    for result in results:
        results_by_arm.setdefault(result["arm"], {})[result["seed"]] = result
    if not results_by_arm:
        return "no results yet\n"
    lines = [*_format_arm_means(results_by_arm), ""]
    if baseline in results_by_arm and len(results_by_arm) > 1:
        lines += _format_differences(results_by_arm, baseline)
    return "\n".join(lines) + "\n"


def get_value(result: Result, name: str) -> float | None:
    """Return the last value of the metric ``name``, or a derived value; None if it is missing.

    ``MEAN_TRAINING_SUCCESS`` is a mean over all training steps. ``TOKENS_PER_TURN`` is used because
    tokens per episode would be misleading: an early failure saves tokens.
    """
    metrics = result["metrics"]
    if name == MEAN_TRAINING_SUCCESS:
        curve = metrics.get("episode/success_rate")
        return statistics.fmean(curve) if curve else None
    if name == TOKENS_PER_TURN:
        token_curve, length_curve = (
            metrics.get("val/tokens_per_episode"),
            metrics.get("val/episode_length"),
        )
        return (
            token_curve[-1] / length_curve[-1]
            if token_curve and length_curve and length_curve[-1]
            else None
        )
    metric_values = metrics.get(name)
    return metric_values[-1] if metric_values else None


def _format_arm_means(results_by_arm: Mapping[str, Mapping[int, Result]]) -> list[str]:
    columns = (*COLUMNS, (MEAN_TRAINING_SUCCESS, MEAN_TRAINING_SUCCESS, 3))
    lines = [f"| arm | seeds | before | {' | '.join(name for name, _, _ in columns)} |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for arm, results_by_seed in results_by_arm.items():
        results = list(results_by_seed.values())
        cells = [arm, str(len(results)), _format_initial_success(results)]
        cells += [_format_mean_and_std(results, metric, digits) for _, metric, digits in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _format_initial_success(results: Sequence[Result]) -> str:
    """Return the mean success of an arm before training, or "" if it was not measured."""
    success_curves = [result["metrics"].get("val/success_rate", []) for result in results]
    initial_rates = [curve[0] for curve in success_curves if len(curve) > 1]
    return f"{statistics.fmean(initial_rates):.3f}" if initial_rates else ""


def _format_mean_and_std(results: Sequence[Result], metric: str, digits: int) -> str:
    """Return mean and standard deviation over seeds as text: "0.612 ± 0.034"."""
    seed_values = [value for result in results if (value := get_value(result, metric)) is not None]
    if not seed_values:
        return ""
    mean = f"{statistics.fmean(seed_values):.{digits}f}"
    return mean if len(seed_values) < 2 else f"{mean} ± {statistics.stdev(seed_values):.{digits}f}"


def _format_differences(
    results_by_arm: Mapping[str, Mapping[int, Result]], baseline: str
) -> list[str]:
    column_titles = [name for name, _, _ in COLUMNS]
    lines = [
        f"Differences from {baseline}, over the seeds that both have; 95% bootstrap intervals of "
        "the mean over these seeds (with three seeds: smallest and largest difference).",
        "",
        f"| arm | seeds | {' | '.join(column_titles)} | tokens, % |",
        "|---" * (len(column_titles) + 3) + "|",
    ]
    for arm, results_by_seed in results_by_arm.items():
        shared_seeds = sorted(set(results_by_seed) & set(results_by_arm[baseline]))
        if arm == baseline or not shared_seeds:
            continue
        result_pairs = [
            (results_by_seed[seed], results_by_arm[baseline][seed]) for seed in shared_seeds
        ]
        cells = [arm, str(len(shared_seeds))]
        for _, metric, digits in COLUMNS:
            differences = [
                arm_value - baseline_value
                for arm_value, baseline_value in _list_values(result_pairs, metric)
            ]
            cells.append(_format_interval(differences, digits))
        token_pairs = _list_values(result_pairs, TOKENS_PER_TURN)
        percentages = [
            100 * (arm_value - baseline_value) / baseline_value
            for arm_value, baseline_value in token_pairs
        ]
        cells.append(_format_interval(percentages, 1))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _list_values(
    result_pairs: Sequence[tuple[Result, Result]], metric: str
) -> list[tuple[float, float]]:
    """Return the metric of both runs for each pair in which both have it."""
    value_pairs = [
        (get_value(first, metric), get_value(second, metric)) for first, second in result_pairs
    ]
    return [
        (first_value, second_value)
        for first_value, second_value in value_pairs
        if first_value is not None and second_value is not None
    ]


def _format_interval(seed_differences: Sequence[float], digits: int) -> str:
    if not seed_differences:
        return ""
    mean = f"{statistics.fmean(seed_differences):+.{digits}f}"
    if len(seed_differences) < 2:
        return mean
    low, high = bootstrap_interval(list(seed_differences))
    return f"{mean} ({low:+.{digits}f} to {high:+.{digits}f})"
