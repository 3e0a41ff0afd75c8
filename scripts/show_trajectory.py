"""Print a trajectory of a run: its turns, thinking levels, and advantages of tokens in colour.

python scripts/show_trajectory.py runs/rlvcr/quickstart        # a success of the last training step
python scripts/show_trajectory.py runs/rlvcr/quickstart/rollouts/12.jsonl -n 3 --contexts
python scripts/show_trajectory.py runs/rlvcr/quickstart --step 12 --lost
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.record.report.run_data import load_run
from verl.record.report.trajectory_chunks import count_sampled_tokens, read_trajectories
from verl.utils.commands import convert_read_errors, run_and_report_mistakes
from verl.utils.logging import escape_control_characters

PIPE_WIDTH = 160  # columns
LEVEL_STYLES: dict[object, str] = {
    1: "black on bright_cyan",
    2: "white on blue",
    3: "white on purple4",
    4: "white on deep_pink4",
}


def escape_texts(value: Any) -> Any:
    """Return a JSON value with the control characters of its texts escaped."""
    if isinstance(value, str):
        return escape_control_characters(value)
    if isinstance(value, list):
        return [escape_texts(item) for item in value]
    if isinstance(value, dict):
        return {key: escape_texts(item) for key, item in value.items()}
    return value


def get_advantage_style(strength: float) -> str:
    """Return a green or red background for an advantage that is scaled to [-1, 1]."""
    # Start at a visible shade, so that a small credit looks different from zero.
    shade = int(40 + 110 * abs(strength))
    if strength > 0:
        return f"on rgb(20,{shade},60)"
    if strength < 0:
        return f"on rgb({shade + 30},35,35)"
    return ""


def find_advantage_scale(turns: Sequence[Mapping[str, Any]]) -> float:
    """Return the 95th percentile of the absolute advantages of all tokens in ``turns``."""
    # Do not use the maximum: one outlier would make the colours of all other tokens invisible.
    absolute_advantages = sorted(
        abs(value or 0.0) for turn in turns for _, value in turn.get("token_credit", [])
    )
    return (
        max(absolute_advantages[int(0.95 * (len(absolute_advantages) - 1))], 1e-9)
        if absolute_advantages
        else 1.0
    )


def format_response(turn: Mapping[str, Any], scale: float) -> Text:
    """Return the response of a turn. Colours show the advantage of each token / ``scale``."""
    if not turn.get("token_credit"):
        return Text(turn.get("response", ""))
    # Use Text: in a plain string, rich would parse square brackets of the response as markup.
    text = Text()
    for token, credit in turn["token_credit"]:
        value = credit or 0.0  # the file has null for a value that is not finite
        strength = math.copysign(min(1.0, abs(value) / scale), value)
        text.append(token, style=get_advantage_style(round(strength, 2)))
    return text


def format_thought_table(turn: dict) -> Table:
    """Return a table with the thought and the scores of each thinking level in this turn."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("level", "thought", "tokens", "cost", "log-prob", "entropy"):
        table.add_column(name, justify="left" if name == "thought" else "right")
    for level_context in sorted(turn["contexts"], key=lambda context: context["level"]):
        number_keys = ("cost", "score_logprob", "score_entropy")
        number_cells = [
            f"{level_context[key]:.2f}" if level_context.get(key) is not None else ""
            for key in number_keys
        ]
        thought = Text(
            level_context["thought"] or "-", style="bold" if level_context.get("original") else ""
        )
        thought.append(" (sampled)" if level_context.get("original") else "", style="dim")
        table.add_row(
            Text(f" {level_context['level']} ", style=LEVEL_STYLES[level_context["level"]]),
            thought,
            str(level_context["tokens"]),
            *number_cells,
        )
    return table


def format_turn_header(turn: dict) -> Text:
    """Return one line with number, level, action, reward and advantages of a turn."""
    level = turn.get("level")
    header = Text(f"{turn['step'] + 1:>3} ", style="bold")
    style = LEVEL_STYLES.get(level, "white on grey35")
    header.append(f" {level or '?'} ", style=style)
    header.append(f" {turn.get('action', '')}", style="bold")
    for label, style in (
        ("level forced" if turn.get("level_forced") else "", "yellow"),
        ((turn.get("parse_failure") or "").replace("_", " "), "red"),
        ("not valid" if not turn.get("is_action_valid", True) else "", "red"),
        (f"reward {turn['reward']:g}" if turn.get("reward") else "", "green"),
        (f"advantage {turn['advantage']:+.2f}" if turn.get("token_credit") else "", "dim"),
        (f"thinking {turn['think_advantage']:+.2f}" if turn.get("think_advantage") else "", "dim"),
        (f"of it cost {turn['think_cost']:+.2f}" if turn.get("think_cost") else "", "dim"),
    ):
        header.append(f"  {label}" if label else "", style=style)
    return header


def print_trajectory(
    row: Mapping[str, Any], console: Console, prompt: bool, contexts: bool
) -> None:
    """Print the trajectory ``row``, optionally with its prompt and the thoughts of all levels."""
    row = escape_texts(row)
    turns = row["steps"]
    advantage_scale = find_advantage_scale(turns)
    outcome = "[bold green]success[/]" if row.get("won") else "[bold red]no success[/]"
    task_name, trajectory_name = escape(str(row.get("task_id"))), escape(str(row.get("traj_uid")))
    title = (
        f"{outcome} {task_name} [dim]{trajectory_name}[/] return {escape(str(row.get('return')))}"
    )
    console.print(Rule(title, align="left"))
    if prompt:
        console.print(Text(row.get("prompt", ""), style="dim"))
    for turn in turns:
        console.print(Text("    " + turn.get("observation", ""), style="italic dim"))
        console.print(format_turn_header(turn))
        console.print(Text("    ") + format_response(turn, advantage_scale))
        if turn.get("summary"):
            console.print(
                Text("    summary: ", "bold") + format_response(turn["summary"], advantage_scale)
            )
        if contexts and turn.get("contexts"):
            console.print(format_thought_table(turn))
    num_tokens = count_sampled_tokens(turns)
    summary = Text(f"{len(turns)} steps, {num_tokens} sampled tokens", style="dim")
    if any("token_credit" in turn for turn in turns):
        summary.append("; credit of a token: ").append(
            "more likely", style=get_advantage_style(1.0)
        )
        summary.append(" ").append("less likely", style=get_advantage_style(-1.0))
    console.print(summary)


def find_rollout_file(path: Path, step: int | None, validation: bool) -> Path:
    """Return ``path`` if it is a file, else the rollout file of ``step`` (None: the last step)."""
    if path.is_file():
        return path
    run = load_run(path)
    available_steps = run.directory.rollout_steps(validation)
    if not available_steps or (step is not None and step not in available_steps):
        raise SystemExit(
            f"{path} has no rollouts of step {step}; allowed: one of {available_steps}"
        )
    return run.directory.rollout_path(available_steps[-1] if step is None else step, validation)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the trajectories that the command line selects."""
    parser = argparse.ArgumentParser(description="Print trajectories of a run.")
    parser.add_argument("path", type=Path, help="run directory or rollouts/<step>.jsonl")
    parser.add_argument("--step", type=int, help="training step; default: the last one")
    parser.add_argument("--val", action="store_true", help="of the validation of that step")
    parser.add_argument("-n", "--index", type=int, help="the n-th trajectory of the file, from 0")
    parser.add_argument("--lost", action="store_true", help="a trajectory without success")
    parser.add_argument("--uid", help="all trajectories of this group")
    parser.add_argument("--prompt", action="store_true", help="print the prompt too")
    parser.add_argument(
        "--contexts", action="store_true", help="print the thoughts of the other levels too"
    )
    args = parser.parse_args(argv)
    path = find_rollout_file(args.path, args.step, args.val)
    with convert_read_errors(path):
        rows = [row for row in read_trajectories(path) if args.uid in (None, row.get("uid"))]
    if args.index is not None:
        rows = rows[args.index : args.index + 1]
    elif args.uid is None:
        # If no trajectory has the requested outcome, show the first trajectory.
        rows = [row for row in rows if bool(row.get("won")) is not args.lost][:1] or rows[:1]
    if not rows:
        raise SystemExit(f"{path} has no such trajectory")
    console = Console()
    if not console.is_terminal:
        # In a pipe, rich would cut titles at 80 columns.
        console = Console(width=PIPE_WIDTH)
    for row in rows:
        with convert_read_errors(path):
            print_trajectory(row, console, args.prompt, args.contexts)


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
