"""Kernel benchmarks write their figures as soon as they have them, where `--records FILE` asks for it.

pytest-benchmark writes its JSON at the end, and nothing if a run is interrupted within a benchmark. Here a run that is
cut off, or that dies with the GPU's context, has kept what it measured. A benchmark that fails leaves a record without
figures.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from specdec.bench.common.provenance import append_record


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--records`."""
    parser.addoption("--records", type=Path, help="JSON-lines file that the figures are appended to")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Append the record of a benchmark that was run."""
    report = yield
    path = item.config.getoption("records")
    if path is not None and not report.skipped and (call.when == "call" or report.failed):
        benchmark = getattr(item, "funcargs", {}).get("benchmark")
        figures = benchmark.extra_info if benchmark is not None and report.passed else {}
        failure = {"failure": str(call.excinfo.value)[:500]} if call.excinfo is not None else {}
        append_record(path, {"bench": "kernel", "name": item.name, **figures, **failure})
    return report
