"""The table that compares credit audits of several runs."""

import json

import pytest

from experiments.audit_table import main
from tests.helpers.refusals import has_problem
from verl.utils.commands import UsageError


def write_audit(run_dir, points, scores):
    audit = {
        "points": points,
        "levels": [[-0.25, -0.5, 0.0], [0.0, -0.1, 0.1], [0.0, -0.1, 0.1], [0.25, 0.0, 0.5]],
        "second_audit": {"name": "second_audit", "chosen": [0.9, 0.8, 1.0], "all_levels": None},
        "scores": scores,
    }
    (run_dir / "audit").mkdir(parents=True)
    (run_dir / "audit" / "audit.json").write_text(json.dumps({"audit": audit, "points": []}))
    return run_dir


def test_rules_and_environments_are_compared(tmp_path, capsys):
    entropy = {"name": "entropy", "chosen": [0.5, 0.25, 0.75], "all_levels": [0.1, 0.0, 0.2]}
    gigpo = {"name": "gigpo", "chosen": [-0.1, -0.4, 0.2], "all_levels": None}
    constant = {"name": "grpo", "chosen": [float("nan")] * 3, "all_levels": None}
    relay = write_audit(tmp_path / "relay", 20, [entropy, gigpo])
    quickstart = write_audit(tmp_path / "quickstart", 100, [entropy, constant])
    main([f"relay={relay}", f"quickstart={quickstart}"])
    assert capsys.readouterr().out.splitlines() == [
        "| | relay | quickstart |",
        "|---|---|---|",
        "| audited turns | 20 | 100 |",
        "| effect of levels 1 to 4 on the return"
        " | -0.25 +0.00 +0.00 +0.25 | -0.25 +0.00 +0.00 +0.25 |",
        "| second audit | +0.90 (+0.80 to +1.00) | +0.90 (+0.80 to +1.00) |",
        "| entropy | +0.50 (+0.25 to +0.75) | +0.50 (+0.25 to +0.75) |",
        "| gigpo | -0.10 (-0.40 to +0.20) |  |",
    ]
    main([f"relay={relay}", "--over", "all_levels"])
    rules = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[4:]]
    assert rules == ["entropy"], "gigpo and the second audit have no value over all levels"


@pytest.mark.parametrize(
    ("argument", "code"),
    [("relay", "invalid_syntax"), ("relay=", "invalid_syntax"), ("relay=missing", "missing_file")],
)
def test_wrong_arguments_are_refused(argument, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, check=has_problem(code)):
        main([argument])
