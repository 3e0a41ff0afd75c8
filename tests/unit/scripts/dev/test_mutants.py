"""Tests of the mutation runner that run no mutants."""

import pytest

pytest.importorskip("mutmut")

from scripts.dev.mutants.results import AcceptedMutants, find_outdated_changes

SOURCE = """\
LIMIT = 3


class Table:
    def pick(self, rows) -> int:
        return max(
            rows, key=len
        )


def label(text: str) -> str:
    return f"{text} -> done"
"""


def test_reasons_whose_code_does_not_exist_are_listed(tmp_path):
    (tmp_path / "table.py").write_text(SOURCE)
    current = [
        ("module", "LIMIT = 3 -> LIMIT = 4"),
        ("Table.pick", "return max( rows, key=len -> return max( rows, key=None"),
        ("label", 'return f"{text} -> done" -> return f"{text} -> XXdone"'),
    ]
    outdated = [
        ("module", "LIMIT = 2 -> LIMIT = 4"),
        ("Table.pick", "LIMIT = 3 -> LIMIT = 4"),  # the code exists, but not in this function
        ("Table.choose", "rows, key=len -> rows, key=None"),
        ("pick", "done -> XXdone"),
    ]
    reasons = [
        AcceptedMutants("table.py", function, [change], "why")
        for function, change in current + outdated
    ]
    reasons.append(AcceptedMutants("gone.py", "module", ["LIMIT = 3 -> LIMIT = 4"], "why"))
    listed = [
        (reason.function, change) for reason, change in find_outdated_changes(reasons, tmp_path)
    ]
    assert listed == [*outdated, ("module", "LIMIT = 3 -> LIMIT = 4")]
