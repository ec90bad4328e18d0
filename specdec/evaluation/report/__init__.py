"""What people look at: the page and the Markdown of an evaluation, traces of its answers, runs side by side."""

from specdec.evaluation.report.write import check_installed, write_report

__all__ = ["check_installed", "write_report"]
