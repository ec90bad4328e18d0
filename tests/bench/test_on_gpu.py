"""The measurement of a whole machine: value first within a budget, nothing lost when a part fails or is cut off."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from specdec.bench import on_gpu, small_m, stages
from specdec.bench.common import shapes
from specdec.bench.common.machine import describe_machine
from specdec.bench.stages import Outcome, Stage, plan, run_stage, run_stages
from specdec.bench.summary import summarize

ROOT = Path(__file__).resolve().parents[2]
PROVENANCE_KEYS = {"git_sha", "device", "torch", "triton", "argv", "utc"}


def make_stage(name, code="pass", *, least_s=1.0, most_s=60.0, **settings):
    return Stage(name, {name: [sys.executable, "-c", code]}, least_s, most_s, **settings)


def outcomes(found, seconds, folder):
    return {outcome.stage: outcome for outcome in run_stages(found, seconds, folder)}


# The plan


def test_the_least_telling_stages_are_dropped_first():
    found = [make_stage(name, least_s=30) for name in "abcd"]
    assert list(plan(found, 130)) == ["a", "b", "c", "d"]
    assert list(plan(found, 119)) == ["a", "b", "c"]
    assert list(plan(found, 59)) == ["a"]
    assert plan(found, 29) == {}


def test_a_short_stage_may_follow_a_dropped_one():
    found = [make_stage("first", least_s=30), make_stage("long", least_s=60), make_stage("short", least_s=10)]
    assert list(plan(found, 50)) == ["first", "short"]


def test_a_stage_gets_what_the_others_leave_up_to_its_most():
    found = [make_stage("a", least_s=10, most_s=25), make_stage("b", least_s=20, most_s=100)]
    assert plan(found, 35) == {"a": 15, "b": 25}
    assert plan(found, 300) == {"a": 25, "b": 100}


def test_time_that_a_stage_leaves_goes_to_the_next(tmp_path):
    found = outcomes([make_stage("a", least_s=50), make_stage("b", least_s=50)], 60, tmp_path)
    assert [outcome.status for outcome in found.values()] == ["done", "done"]


def test_a_stage_that_no_longer_fits_is_reported(tmp_path):
    found = outcomes([make_stage("a", least_s=5), make_stage("b", least_s=500)], 20, tmp_path)
    assert found["a"].status == "done"
    assert found["b"].status == "no time"
    assert "500 s needed" in found["b"].detail


# Stages that go wrong


def test_no_stage_stops_the_others(tmp_path):
    found = [
        make_stage("raises", "print('so far'); raise SystemExit('broken')"),
        make_stage("dies", "import os; os.abort()"),
        make_stage("hangs", "import time; time.sleep(600)", most_s=1),
        Stage("missing", {"missing": ["no-such-program"]}, 1, 60),
        make_stage("unavailable", unavailable="no such tool"),
        make_stage("works"),
    ]
    result = outcomes(found, 100, tmp_path)
    assert {name: outcome.status for name, outcome in result.items()} == {
        "raises": "failed",
        "dies": "failed",
        "hangs": "cut off",
        "missing": "failed",
        "unavailable": "unavailable",
        "works": "done",
    }
    assert "so far" in result["raises"].detail
    assert "broken" in result["raises"].detail
    assert "no-such-program" in result["missing"].detail
    assert result["unavailable"].detail == "no such tool"
    assert result["hangs"].wall_s < 20


def test_what_ignores_an_interrupt_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "_GRACE_S", 1.0)
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    code = (
        f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {stubborn!r}]); print(c.pid, flush=True)"
    )
    outcome = run_stage(make_stage("a", f"{code}; {stubborn}"), 2, tmp_path)
    assert outcome.status == "cut off"
    child = int((tmp_path / "a.log").read_text().split()[-1])
    for _ in range(100):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} is still there")


def test_commands_of_a_stage_run_side_by_side_and_fail_alone(tmp_path):
    nap = "import time; time.sleep({}); raise SystemExit({})"
    commands = {str(i): [sys.executable, "-c", nap.format(1, i)] for i in range(4)}
    start = time.monotonic()
    outcome = run_stage(Stage("tests", commands, 1, 60, jobs=4), 60, tmp_path)
    assert time.monotonic() - start < 4
    assert outcome.status == "failed"
    assert outcome.commands == {"0": "done", "1": "failed: exit status 1", **{
        str(i): f"failed: exit status {i}" for i in (2, 3)
    }}  # fmt: skip


def test_commands_that_got_no_time_are_named(tmp_path):
    commands = {name: [sys.executable, "-c", "import time; time.sleep(60)"] for name in "ab"}
    outcome = run_stage(Stage("tests", commands, 1, 60), 1, tmp_path)
    assert outcome.status == "cut off"
    assert outcome.commands == {"a": "cut off", "b": "no time"}


def test_variables_are_set_and_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import os; assert 'TRITON_INTERPRET' not in os.environ; assert os.environ['A'] == 'b'"
    assert (
        run_stage(make_stage("a", code, environment={"TRITON_INTERPRET": "", "A": "b"}), 60, tmp_path).status == "done"
    )


# What the stages are


def test_every_benchmark_and_test_file_is_in_a_stage(tmp_path):
    found = {stage.name: stage for stage in on_gpu.stages(tmp_path, dry=False)}
    benchmarks = {path.stem for path in (ROOT / "bench" / "kernels").glob("bench_*.py")}
    assert benchmarks == {name for name in found if name.startswith("bench_")}
    on_device = [*(ROOT / "tests" / "kernels").glob("test_*.py"), *(ROOT / "tests").rglob("test_*_gpu.py")]
    assert set(found["tests"].commands) == {path.stem for path in on_device} > {"test_captured_gpu"}
    assert list(found)[:5] == ["machine", "tests", "small_m", "bench_tree_attention", "decode_7b"]
    assert list(found)[-2:] == ["decode", "decode_all"]
    assert all(stage.jobs == 1 for name, stage in found.items() if name != "tests")
    assert all(stage.environment == {"TRITON_INTERPRET": ""} for stage in found.values())


def test_the_race_detector_is_used_if_there_is_one(tmp_path, monkeypatch):
    def race_check():
        return next(stage for stage in on_gpu.stages(tmp_path, dry=False) if stage.name == "race_check")

    monkeypatch.setattr(on_gpu.shutil, "which", lambda tool: None)
    assert race_check().unavailable == "compute-sanitizer is not on the PATH"
    monkeypatch.setattr(on_gpu.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    assert race_check().unavailable is None
    assert race_check().commands["race_check"][:3] == ["compute-sanitizer", "--tool", "racecheck"]


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        on_gpu.main(["--output", str(tmp_path / "out")])
    assert "expected an NVIDIA GPU, found none" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(RuntimeError, match=r"specdec.bench.small_m: expected an NVIDIA GPU"):
        small_m.main(["--output", str(tmp_path / "out")])


def test_an_unknown_stage_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        on_gpu.main(["--output", str(tmp_path / "out"), "--only", "machine", "attention"])
    assert "expected some of machine, tests, small_m, bench_tree_attention" in capsys.readouterr().err


def test_the_usual_step_is_measured_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = [str(shape) for shape in shapes.step_shapes()]
    assert names[:3] == [f"{model.name}-b1-n64-ctx2048" for model in shapes.MODELS]
    assert len(set(names)) == 3 * 4 * 4 * 3


def test_the_matrices_of_a_model_hold_its_weights():
    sizes = small_m.matrices(shapes.LLAMA_2_7B)
    per_layer = sum(outputs * inputs for name, (outputs, inputs) in sizes.items() if name != "lm_head")
    assert 32 * per_layer + 2 * 32000 * 4096 == pytest.approx(6.74e9, rel=1e-2)
    assert small_m.linear_cost(2, 3, 5, 2) == small_m.Cost(num_bytes=2 * (15 + 10 + 6), num_flops=60)


def test_the_machine_is_described():
    described = describe_machine()
    assert described["packages"]["torch"] == torch.__version__
    assert described["tools"].keys() == {"compute-sanitizer", "ncu", "nvcc"}


# What they leave


def test_a_benchmark_that_dies_keeps_what_was_measured(tmp_path):
    benchmarks = tmp_path / "bench_three.py"
    benchmarks.write_text("""
import os
def bench_right(benchmark):
    benchmark.extra_info["p50_us"] = 7.0
    benchmark(lambda: None)
def bench_wrong(benchmark):
    assert 1 == 2, "not the definition's result"
def bench_lost(benchmark):
    os._exit(9)
""")
    records = tmp_path / "bench_three.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "python_files=bench_*.py"]
    command += ["-o", "python_functions=bench_*", "-p", "specdec.bench.live_records", "--records", records, benchmarks]
    outcome = run_stage(Stage("bench_three", {"bench_three": list(map(str, command))}, 1, 60), 60, tmp_path)
    assert outcome.status == "failed"
    right, wrong = on_gpu.collect(tmp_path, "bench_three")
    assert (right["name"], right["p50_us"]) == ("bench_right", 7.0)
    assert wrong["name"] == "bench_wrong"
    assert "not the definition's result" in wrong["failure"]
    assert right["provenance"].keys() >= PROVENANCE_KEYS


def test_test_results_and_race_verdicts_are_collected(tmp_path):
    (tmp_path / "test_x.py").write_text("""
import pytest
def test_right(): pass
def test_wrong(): assert False
@pytest.mark.skip
def test_skipped(): pass
""")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path / "test_x.py")]
    run_stage(Stage("t", {"t": [*command, f"--junitxml={tmp_path / 't.xml'}"]}, 1, 60), 60, tmp_path)
    (record,) = on_gpu.collect(tmp_path, "t")
    assert (record["num_passed"], record["num_skipped"]) == (1, 1)
    assert [name.split("::")[-1] for name in record["failed"]] == ["test_wrong"]
    (tmp_path / "r.log").write_text("...\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n")
    (record,) = on_gpu.collect(tmp_path, "r")
    assert record == {"bench": "race_check", "verdict": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"}


def make_kernel(provider, p50_us, **settings):
    return {
        "bench": "kernel", "name": "n", "op": "op", "shape": "s", "provider": provider, "p50_us": p50_us,
        "timing": "CUDA-graph replays", "roofline_us": 1.0, "percent_of_roofline": 100 / p50_us, **settings,
    }  # fmt: skip


def make_stage_record(**settings):
    source = {"device": "X", "driver": "1", "torch": "2", "triton": "3", "git_sha": "abc", "git_dirty": False}
    outcome = Outcome("bench_op", "done", {"bench_op": "done"}, 60, 5, "")
    record = {"bench": "stage", "run": "now", "minutes": 5, "provenance": source}
    return {**record, **{name: getattr(outcome, name) for name in outcome.__slots__}, **settings}


def test_ours_is_compared_with_the_best_captured_provider():
    records = [
        make_kernel("reference", 1.5, timing="eager calls, not capturable"),
        make_kernel("sdpa", 4.0),
        make_kernel("slow", 9.0),
        make_kernel("triton", 2.0),
        make_stage_record(),
    ]
    assert "| op | s | 2 | 4 (sdpa) | 2 | 1 | 50 |" in summarize(records)
    assert "1.5 (reference, not captured)" in summarize([records[0], records[3], records[4]])


def test_the_summary_names_what_is_missing():
    records = [
        {"bench": "kernel", "name": "bench_op[s-triton]", "failure": "WrongResultError: off\nmore"},
        make_stage_record(status="failed", commands={"bench_op": "failed: exit status 1"}, detail="the end of the log"),
        make_stage_record(stage="decode", status="no time", detail="3 s left, 60 s needed"),
        make_stage_record(stage="tests", status="cut off", commands={"test_a": "done", "test_b": "no time"}),
    ]
    page = summarize(records)
    assert "`bench_op[s-triton]`: WrongResultError: off\n" in page
    assert "bench_op failed: bench_op (failed: exit status 1)" in page
    assert "the end of the log" in page
    assert "decode was skipped: 3 s left, 60 s needed" in page
    assert "tests was cut off, unfinished: test_b\n" in page
    assert "X, driver 1, torch 2, triton 3, commit abc, 5 minutes" in page


@pytest.mark.slow
def test_a_dry_run_goes_through_everything(tmp_path):
    command = [sys.executable, "-m", "specdec.bench.on_gpu", "--dry", "--minutes", "9", "--output", str(tmp_path)]
    # pytest-benchmark takes no times below a worker of xdist
    hidden = ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    stages_run = {record["stage"]: record["status"] for record in records if record["bench"] == "stage"}
    names = ["machine", "tests", "small_m", "benchmarks", "race_check", "decode"]
    assert stages_run == dict.fromkeys(names, "done")
    assert {record["bench"] for record in records} == {"stage", "machine", "tests", "small_m", "kernel", "decode"}
    for record in records:
        assert record["dry"] == "dry run on a CPU: nothing was timed on a GPU"
        assert record["provenance"].keys() >= PROVENANCE_KEYS
        assert record["provenance"]["device"] == "cpu"
        assert record.get("percent_of_roofline") is None
        assert "CPU wall time" in record.get("timing", "CPU wall time")
    page = (tmp_path / "summary.md").read_text()
    assert page in done.stdout
    assert "nothing was timed on a GPU" in page
