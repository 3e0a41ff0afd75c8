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
    arms: dict[str, dict[int, Result]] = {}
    for result in results:
        arms.setdefault(result["arm"], {})[result["seed"]] = result
    if not arms:
        return "no results yet\n"
    lines = [*_format_arm_means(arms), ""]
    if baseline in arms and len(arms) > 1:
        lines += _format_differences(arms, baseline)
    return "\n".join(lines) + "\n"


def get_value(result: Result, name: str) -> float | None:
    """Return one number of a run: the last value of the metric ``name``, or a derived value.

    There are two derived values. ``MEAN_TRAINING_SUCCESS`` is the mean of the success rate over all
    training steps. ``TOKENS_PER_TURN`` is the number of sampled tokens per turn in the last
    validation. Tokens per episode would be misleading, because an early failure saves tokens.
    """
    metrics = result["metrics"]
    if name == MEAN_TRAINING_SUCCESS:
        curve = metrics.get("episode/success_rate")
        return statistics.fmean(curve) if curve else None
    if name == TOKENS_PER_TURN:
        tokens, length = metrics.get("val/tokens_per_episode"), metrics.get("val/episode_length")
        return tokens[-1] / length[-1] if tokens and length and length[-1] else None
    values = metrics.get(name)
    return values[-1] if values else None


def _format_arm_means(arms: Mapping[str, Mapping[int, Result]]) -> list[str]:
    heads = [name for name, _, _ in COLUMNS]
    lines = [f"| arm | seeds | before | {' | '.join(heads)} | {MEAN_TRAINING_SUCCESS} |"]
    lines.append("|---" * (len(heads) + 4) + "|")
    for arm, by_seed in arms.items():
        arm_results = list(by_seed.values())
        cells = [arm, str(len(arm_results)), _format_initial_success(arm_results)]
        cells += [
            _format_mean_and_std(arm_results, metric, digits) for _, metric, digits in COLUMNS
        ]
        cells.append(_format_mean_and_std(arm_results, MEAN_TRAINING_SUCCESS, 3))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _format_initial_success(results: Sequence[Result]) -> str:
    """Return the mean success of an arm before training, or "" if it was not measured."""
    curves = [result["metrics"].get("val/success_rate", []) for result in results]
    initial_rates = [curve[0] for curve in curves if len(curve) > 1]
    return f"{statistics.fmean(initial_rates):.3f}" if initial_rates else ""


def _format_mean_and_std(results: Sequence[Result], metric: str, digits: int) -> str:
    """Return mean and standard deviation over seeds as text: "0.612 ± 0.034"."""
    seed_values = [value for result in results if (value := get_value(result, metric)) is not None]
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
                _format_interval(
                    _compute_paired_differences(pairs, metric, is_relative=False), digits
                )
            )
        cells.append(
            _format_interval(
                _compute_paired_differences(pairs, TOKENS_PER_TURN, is_relative=True), 1
            )
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _compute_paired_differences(
    pairs: Sequence[tuple[Result, Result]], metric: str, is_relative: bool
) -> list[float]:
    """Return the metric of the first run minus that of the second, for each pair of runs.

    With ``is_relative`` the differences are in percent of the metric of the second run.
    """
    differences = []
    for arm_result, baseline_result in pairs:
        arm_value, baseline_value = (
            get_value(arm_result, metric),
            get_value(baseline_result, metric),
        )
        if arm_value is None or baseline_value is None:
            continue
        differences.append(
            100 * (arm_value - baseline_value) / baseline_value
            if is_relative
            else arm_value - baseline_value
        )
    return differences


def _format_interval(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):+.{digits}f}"
    if len(values) < 2:
        return mean
    low, high = bootstrap_interval(list(values))
    return f"{mean} ({low:+.{digits}f} to {high:+.{digits}f})"
