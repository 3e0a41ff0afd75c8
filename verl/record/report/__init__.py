"""``report.html``: a self-contained page about a run.

``python -m verl.record.report RUN_DIR`` writes it.
"""

from verl.record.report.page import render_report, write_comparison, write_report

__all__ = ["render_report", "write_comparison", "write_report"]
