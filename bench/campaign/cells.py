"""A plugin of pytest by which tests and kernel benchmarks are cells of a journal: written down as they end, resumable.

    pytest -p specdec.bench.campaign.cells --cells results.jsonl --few tests/kernels

pytest's own reports are written at the end, and not at all if the process is killed. Here whatever ended is kept, a run
with the same file leaves out what ended well, and what failed is tried once more, after all others. Where a failure
took the GPU's context with it the process ends with the status AGAIN, and the caller goes on in a new one.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from specdec.bench.common.journal import AGAIN, Journal, last_lines
from specdec.bench.common.machine import device_is_lost

__all__ = ["FEW_EXAMPLES"]

FEW_EXAMPLES = 3
_JOURNAL = pytest.StashKey[Journal]()
_SETTINGS = "_hypothesis_internal_use_settings"  # where hypothesis and its own plugin keep a test's settings


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("campaign")
    group.addoption("--cells", type=Path, help="JSON-lines file of what began and ended; what ended well is left out")
    group.addoption(
        "--few", action="store_true", help=f"{FEW_EXAMPLES} examples of a property, one floating-point dtype of a test"
    )
    group.addoption("--kinds", default="", help="only tests whose parameter `kind` is one of these, comma-separated")
    group.addoption("--other-kinds", default="", help="leave out tests whose parameter `kind` is one of these")


def pytest_configure(config: pytest.Config) -> None:
    """Read the journal."""
    if config.option.cells is not None:
        config.stash[_JOURNAL] = Journal(config.option.cells, resume=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not asked for or has ended; what was begun before comes last."""
    kept = [item for item in items if _is_of_kind(item, config)]
    if config.option.few:
        kept = _few(kept)
    journal = config.stash.get(_JOURNAL, None) or Journal(None)
    kept = [item for item in kept if journal.is_due(item.nodeid)]
    remaining = {*kept}
    config.hook.pytest_deselected(items=[item for item in items if item not in remaining])
    items[:] = sorted(kept, key=lambda item: (journal.starts[item.nodeid], _is_slow_to_compile(item)))


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def _is_of_kind(item: pytest.Item, config: pytest.Config) -> bool:
    kind = _parameters(item).get("kind")
    wanted, unwanted = (option.split(",") for option in (config.option.kinds, config.option.other_kinds))
    return (not config.option.kinds or kind in wanted) and kind not in unwanted


def _is_slow_to_compile(item: pytest.Item) -> bool:
    """A provider that PyTorch compiles, at another than the most telling shape: ours come first at all shapes."""
    found = _parameters(item)
    if "provider" not in found or "op" not in found:
        return False
    op = found["op"]
    return bool(op.providers[found["provider"]].compiled and found["shape"] != op.shapes[0])


def _few(items: list[pytest.Item]) -> list[pytest.Item]:
    """Fewer examples, and one dtype where a test has several floating-point ones: time goes to compiling kernels."""
    from hypothesis import settings  # only tests need it

    dtypes: dict[str, list[str]] = {}
    for item in items:
        test = getattr(item, "obj", None)
        before = getattr(test, _SETTINGS, None)
        if before is not None and before.max_examples > FEW_EXAMPLES:
            setattr(getattr(test, "__func__", test), _SETTINGS, settings(before, max_examples=FEW_EXAMPLES))
        if (dtype := _float_dtype(item)) is not None:
            dtypes.setdefault(_test_of(item), []).append(dtype)
    chosen = {test: "torch.bfloat16" if "torch.bfloat16" in found else found[0] for test, found in dtypes.items()}
    return [item for item in items if _float_dtype(item) in (None, chosen.get(_test_of(item)))]


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _float_dtype(item: pytest.Item) -> str | None:
    dtype = _parameters(item).get("dtype")
    return str(dtype) if getattr(dtype, "is_floating_point", False) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note that a test begins."""
    if (journal := item.config.stash.get(_JOURNAL, None)) is not None:
        journal.begin(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note how a test ended, and end the process if the device is lost."""
    report = yield
    journal = item.config.stash.get(_JOURNAL, None)
    if journal is not None and (report.failed or report.skipped or call.when == "call"):
        journal.end(item.nodeid, _record(item, report), failed=report.failed)
        if report.failed and device_is_lost():
            pytest.exit("the device is lost", returncode=AGAIN)
    return report


def _record(item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
    """A benchmark's figures, or a test's outcome; with the end of what it said if it failed."""
    detail = {"failure": last_lines(report.longreprtext)} if report.failed else {}
    benchmark = getattr(item, "funcargs", {}).get("benchmark")
    if benchmark is None:
        return {"bench": "test", "file": item.path.stem, "name": item.nodeid, "outcome": report.outcome, **detail}
    figures = benchmark.extra_info if report.passed else {}
    return {"bench": "kernel", "name": item.name, "outcome": report.outcome, **figures, **detail}
