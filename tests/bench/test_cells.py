"""Cells of a journal: what ended is kept and left out, what failed or hung is tried again, but not for ever."""

import os
import subprocess
import sys

import pytest
import torch

from specdec.bench.common.journal import AGAIN, Journal, ended, last_lines
from specdec.bench.common.machine import device_is_lost
from specdec.common.provenance import read_records


def test_what_is_due(tmp_path):
    path = tmp_path / "x.jsonl"
    journal = Journal(path)
    for cell in ("done", "failed", "hangs"):
        journal.begin(cell)
    journal.end("done", {"value": 1})
    journal.end("failed", {"value": 2}, failed=True)
    cells = ["hangs", "failed", "done", "new"]
    assert Journal(path, resume=True).due(cells) == ["new", "hangs", "failed"]  # what was begun comes last
    assert Journal(path).due(cells) == cells  # a run of its own
    again = Journal(path, resume=True, always={"note": "x"})
    again.begin("failed")
    again.end("failed", {"value": 3}, failed=True)
    for _ in range(2):
        again.begin("hangs")
    assert Journal(path, resume=True).due(cells) == ["new"]
    found = ended(read_records(path))
    assert [(record["cell"], record.get("value")) for record in found] == [("done", 1), ("failed", 3), ("hangs", None)]
    assert found[1]["note"] == "x"
    assert found[2]["bench"] == "lost"


def test_the_end_of_a_text():
    assert last_lines("\n".join(map(str, range(50))), 2) == "48\n49"
    assert len(last_lines("x" * 10000)) == 4000


def test_a_device_is_lost_when_nothing_runs_any_more(monkeypatch):
    assert not device_is_lost()

    def raise_error():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", raise_error)
    assert device_is_lost()


def run_pytest(folder, *options, environment=()):
    plugin = ["-p", "specdec.bench.campaign.cells", "-p", "no:cacheprovider", "-o", "python_files=[tb]*_*.py"]
    command = [sys.executable, "-m", "pytest", *plugin, "-o", "python_functions=test_* bench_*", f"--rootdir={folder}"]
    settings = {**os.environ, **dict(environment)}
    settings.pop("PYTEST_XDIST_WORKER", None)  # pytest-benchmark takes no times below a worker of xdist
    command += ["--cells", str(folder / "x.jsonl"), *options, str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=settings)
    return done.returncode, done.stdout + done.stderr


BENCHMARKS = """
import os
def bench_right(benchmark):
    benchmark.extra_info["p50_us"] = 7.0
    benchmark(lambda: None)
def bench_wrong(benchmark): assert 1 == 2, "not the definition's result"
def bench_dies(benchmark): os._exit(9)
def bench_after(benchmark): benchmark(lambda: None)
"""


def test_benchmarks_that_die_keep_what_was_measured_and_go_on(tmp_path):
    (tmp_path / "bench_x.py").write_text(BENCHMARKS)
    assert run_pytest(tmp_path)[0] == 9
    right, wrong, lost = ended(read_records(tmp_path / "x.jsonl"))
    assert (right["bench"], right["name"], right["p50_us"]) == ("kernel", "bench_right", 7.0)
    assert right["provenance"].keys() >= {"git_sha", "device", "torch", "triton", "argv", "utc"}
    assert wrong["name"] == "bench_wrong"
    assert "not the definition's result" in wrong["failure"]
    assert lost["cell"].endswith("bench_dies")
    run_pytest(tmp_path)  # begins with what was never begun, and dies again
    names = {record["cell"].split("::")[-1] for record in ended(read_records(tmp_path / "x.jsonl"))}
    assert names == {"bench_right", "bench_wrong", "bench_dies", "bench_after"}
    for _ in range(2):
        status, _ = run_pytest(tmp_path)
    assert status == 5  # nothing is left: what failed twice and what died three times are given up


TESTS = """
import pytest, torch
from hypothesis import given, settings, strategies as st
examples = []
@settings(max_examples=20, deadline=None)
@given(st.integers())
def test_property(number): examples.append(number)
def test_examples(): assert len(set(examples)) <= 3
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_float(dtype, size): assert dtype == torch.bfloat16
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_float(dtype): assert dtype == torch.float32
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integer(dtype): pass
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_kind(kind): pass
def test_skipped(): pytest.skip("not here")
"""


def outcomes(folder):
    records = ended(read_records(folder / "x.jsonl"))
    return {record["name"].split("::")[-1]: record["outcome"] for record in records}


def test_few_examples_and_one_dtype(tmp_path):
    (tmp_path / "test_x.py").write_text(TESTS)
    status, output = run_pytest(tmp_path, "--few")
    assert status == 0, output
    floats = {"test_float[1-torch.bfloat16]", "test_float[2-torch.bfloat16]", "test_other_float[torch.float32]"}
    others = {"test_integer[torch.int32]", "test_integer[torch.int64]", "test_kind[eagle]", "test_kind[eagle3]"}
    passed = floats | others | {"test_property", "test_examples"}
    assert outcomes(tmp_path) == {**dict.fromkeys(passed, "passed"), "test_skipped": "skipped"}
    assert run_pytest(tmp_path, "--few")[0] == 5


@pytest.mark.parametrize(("option", "kinds"), [("--kinds", {"eagle"}), ("--other-kinds", {"eagle3"})])
def test_kinds_are_chosen_by_their_whole_names(tmp_path, option, kinds):
    (tmp_path / "test_x.py").write_text(TESTS)
    run_pytest(tmp_path, option, "eagle,hydra", "-k", "not float and not examples")
    found = outcomes(tmp_path)
    assert {name for name in found if "kind" in name} == {f"test_kind[{kind}]" for kind in kinds}
    assert ("test_skipped" in found) == (option == "--other-kinds")


def test_a_lost_device_ends_the_process_and_the_next_goes_on(tmp_path):
    """Whoever runs after a kernel that broke the context would fail for nothing."""
    (tmp_path / "conftest.py").write_text("import specdec.bench.campaign.cells as c\nc.device_is_lost = lambda: True\n")
    (tmp_path / "test_x.py").write_text("def test_a(): assert False\ndef test_b(): pass\n")
    status, output = run_pytest(tmp_path)
    assert status == AGAIN, output
    assert outcomes(tmp_path) == {"test_a": "failed"}
    assert run_pytest(tmp_path)[0] == AGAIN
    assert outcomes(tmp_path) == {"test_a": "failed", "test_b": "passed"}
