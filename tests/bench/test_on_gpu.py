"""The measurement of a whole machine: value first within a budget, nothing lost when a part fails or is cut off."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from specdec.bench import on_gpu
from specdec.bench.on_gpu import Stage, plan, run_stages, summarize


def make_stage(name, code="pass", *, least_s=1.0, most_s=60.0, **settings):
    return Stage(name, {name: [sys.executable, "-c", code]}, least_s, most_s, **settings)


def outcomes(found, seconds, folder):
    return {outcome["stage"]: outcome for outcome in run_stages(found, seconds, folder)}


def is_gone(process):
    status = Path(f"/proc/{process}/stat")
    deadline = time.monotonic() + 5
    while (is_there := status.exists() and status.read_text().split()[2] != "Z") and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_there


@pytest.mark.parametrize(
    ("sizes", "seconds", "limits"),
    [
        ([(30, 60)] * 4, 130, {"a": 40, "b": 40, "c": 40, "d": 40}),
        ([(30, 60)] * 4, 119, {"a": 59, "b": 59, "c": 59}),
        ([(30, 60)] * 4, 29, {}),
        ([(30, 60), (60, 60), (10, 60)], 50, {"a": 40, "c": 20}),  # a short stage may follow a dropped one
        ([(10, 25), (20, 100)], 35, {"a": 15, "b": 25}),
        ([(10, 25), (20, 100)], 300, {"a": 25, "b": 100}),
    ],
)
def test_a_stage_gets_what_the_others_leave_and_the_last_are_dropped_first(sizes, seconds, limits):
    found = [make_stage(name, least_s=least, most_s=most) for name, (least, most) in zip("abcd", sizes, strict=False)]
    assert list(plan(found, seconds).items()) == list(limits.items())


def test_time_that_a_stage_leaves_goes_to_the_next(tmp_path):
    found = [make_stage(name, least_s=least) for name, least in (("a", 50), ("b", 50), ("c", 500))]
    result = outcomes(found, 60, tmp_path)
    assert [outcome["status"] for outcome in result.values()] == ["done", "done", "no time"]
    assert "500 s needed" in result["c"]["detail"]


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
    assert [r["status"] for r in result.values()] == ["failed", "failed", "cut off", "failed", "unavailable", "done"]
    assert result["raises"]["detail"].split()[-3:] == ["so", "far", "broken"]
    assert "no-such-program" in result["missing"]["detail"]
    assert result["unavailable"]["detail"] == "no such tool"
    assert result["hangs"]["wall_s"] < 20


def test_what_ignores_an_interrupt_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "_GRACE_S", 1.0)
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    start = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {stubborn!r}])"
    stage = make_stage("a", f"{start}; print(c.pid, flush=True); {stubborn}", most_s=2)
    assert outcomes([stage], 60, tmp_path)["a"]["status"] == "cut off"
    assert is_gone((tmp_path / "a.log").read_text().split()[-1])


def test_commands_of_a_stage_run_side_by_side_and_end_alone(tmp_path):
    nap = "import time; time.sleep({}); raise SystemExit({})"
    commands = {str(i): [sys.executable, "-c", nap.format(1, i)] for i in range(4)}
    outcome = outcomes([Stage("tests", commands, 1, 60, jobs=4)], 60, tmp_path)["tests"]
    assert outcome["wall_s"] < 4
    statuses = {"0": "done", **{str(i): f"failed: exit status {i}" for i in (1, 2, 3)}}
    assert (outcome["status"], outcome["commands"]) == ("failed", statuses)
    commands = {name: [sys.executable, "-c", nap.format(60, 0)] for name in "ab"}
    outcome = outcomes([Stage("tests", commands, 1, 1)], 60, tmp_path)["tests"]
    assert (outcome["status"], outcome["commands"]) == ("cut off", {"a": "cut off", "b": "no time"})


CAMPAIGN = """
from specdec.bench import on_gpu
def stages(folder, *, dry):
    a = "import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == '-1'"
    b = f"import os, time; print(os.getpid(), flush=True); file = open({str(folder / 'b.jsonl')!r}, 'w')"
    b += "; print('{\\"bench\\": \\"test\\"}\\\\n{\\"bench', file=file, flush=True); time.sleep(600)"
    return [on_gpu.Stage(name, {name: [on_gpu.sys.executable, "-c", c]}, 1, 60) for name, c in (("a", a), ("b", b))]
on_gpu.stages = stages
on_gpu.main(["--dry", "--output", on_gpu.sys.argv[1]])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_has_told_what_it_knew(number, tmp_path):
    run = subprocess.Popen([sys.executable, "-c", CAMPAIGN, str(tmp_path)], stdout=subprocess.DEVNULL)
    while run.poll() is None and not any(file.read_text() for file in tmp_path.glob("*/b.jsonl")):
        time.sleep(0.05)
    run.send_signal(number)
    assert run.wait(20) != 0
    log = next(tmp_path.glob("*/b.log"))
    child = log.read_text().split()[-1]
    if number == signal.SIGKILL:
        os.kill(int(child), number)
    assert is_gone(child)
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [(record["stage"], record["status"]) for record in records] == [("a", "done")]
    assert "| a     | done    | " in (tmp_path / "summary.md").read_text()
    assert on_gpu.collect(log.parent, "b") == [{"bench": "test"}]  # without the line that it was writing


def test_every_benchmark_and_test_file_is_in_a_stage(tmp_path, monkeypatch):
    found = {stage.name: stage for stage in on_gpu.stages(tmp_path, dry=False)}
    benchmarks = {path.stem for path in (on_gpu._ROOT / "bench" / "kernels").glob("bench_*.py")}
    assert benchmarks == {name for name in found if name.startswith("bench_")}
    assert {f"bench_{name}" for name in on_gpu._MOST_TELLING} <= benchmarks
    tests = on_gpu._ROOT / "tests"
    on_device = [*(tests / "kernels").glob("test_*.py"), *tests.rglob("test_*_gpu.py")]
    assert set(found["tests"].commands) == {path.stem for path in on_device} > {"test_captured_gpu"}
    assert list(found)[:5] == ["machine", "tests", "small_m", "bench_tree_attention", "decode_7b"]
    assert list(found)[-2:] == ["decode", "decode_all"]
    assert all(stage.jobs == 1 for name, stage in found.items() if name != "tests")
    for tool, why in ((None, "compute-sanitizer is not on the PATH"), ("/usr/bin/compute-sanitizer", None)):
        monkeypatch.setattr(on_gpu.shutil, "which", lambda _, tool=tool: tool)
        stage = next(stage for stage in on_gpu.stages(tmp_path, dry=False) if stage.name == "race_check")
        assert stage.unavailable == why
        assert stage.commands["race_check"][:3] == ["compute-sanitizer", "--tool", "racecheck"]


def test_bad_calls_are_refused(tmp_path, monkeypatch, capsys):
    for has_gpu, message in ((False, "expected an NVIDIA GPU, found none"), (True, "expected some of machine, tests")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(SystemExit):
            on_gpu.main(["--output", str(tmp_path / "out"), "--only", "machine", "attention"])
        assert message in capsys.readouterr().err
        assert ("TRITON_INTERPRET" in os.environ) is not has_gpu  # kernels are compiled for a GPU
    assert not (tmp_path / "out").exists()


def test_test_results_and_race_verdicts_are_collected(tmp_path):
    wrong, skipped = "def test_wrong(): assert False", "@__import__('pytest').mark.skip\ndef test_skipped(): pass"
    (tmp_path / "test_x.py").write_text(f"def test_right(): pass\n{wrong}\n{skipped}\n")
    command = on_gpu._pytest(tmp_path / "test_x.py", f"--junitxml={tmp_path / 't.xml'}")
    assert outcomes([Stage("t", {"t": command}, 1, 60)], 60, tmp_path)["t"]["status"] == "failed"
    (record,) = on_gpu.collect(tmp_path, "t")
    assert (record["num_passed"], record["num_skipped"]) == (1, 1)
    assert [name.split("::")[-1] for name in record["failed"]] == ["test_wrong"]
    (tmp_path / "t.xml").write_text("<testsuites><testcase")
    assert on_gpu.collect(tmp_path, "t") == []
    (tmp_path / "r.log").write_text("...\n========= RACECHECK SUMMARY: 0 hazards displayed\n")
    assert on_gpu.collect(tmp_path, "r") == [
        {"bench": "race_check", "verdict": "RACECHECK SUMMARY: 0 hazards displayed"}
    ]


def make_kernel(provider, p50_us, timing="CUDA-graph replays"):
    record = {"bench": "kernel", "name": "n", "op": "op", "shape": "s", "provider": provider, "p50_us": p50_us}
    return {**record, "timing": timing, "roofline_us": 1.0, "percent_of_roofline": 100 / p50_us}


def make_stage_record(stage="bench_op", status="done", detail="", commands=None):
    source = {"device": "X", "driver": "1", "torch": "2", "triton": "3", "git_sha": "abc", "git_dirty": False}
    record = {"bench": "stage", "run": "now", "minutes": 5, "provenance": source, "wall_s": 5, "limit_s": 60}
    return {**record, "stage": stage, "status": status, "detail": detail, "commands": commands or {}}


def test_ours_is_compared_with_the_best_captured_provider():
    eager, ours = make_kernel("reference", 1.5, timing="eager calls, not capturable"), make_kernel("triton", 2.0)
    others = [make_kernel("sdpa", 4.0), make_kernel("slow", 9.0), make_stage_record()]
    assert "| op | s | 2 | 4 (sdpa) | 2 | 1 | 50 |" in " ".join(summarize([eager, ours, *others]).split())
    assert "1.5 (reference, not captured)" in summarize([eager, ours, others[-1]])


def test_the_summary_names_what_is_missing():
    records = [
        {"bench": "kernel", "name": "bench_op[s-triton]", "failure": "WrongResultError: off\nmore"},
        make_stage_record(status="failed", commands={"bench_op": "failed: exit status 1"}, detail="the end of the log"),
        make_stage_record(stage="decode", status="no time", detail="3 s left, 60 s needed"),
        make_stage_record(stage="tests", status="cut off", commands={"test_a": "done", "test_b": "no time"}),
    ]
    page = summarize(records)
    assert "`bench_op[s-triton]`: WrongResultError: off\n" in page
    assert "bench_op: failed: bench_op (failed: exit status 1)\n\n```\nthe end of the log\n```" in page
    assert "decode: no time: 3 s left, 60 s needed\n" in page
    assert "tests: cut off: test_b (no time)\n" in page
    assert "X, driver 1, torch 2, triton 3, commit abc, 5 minutes" in page


@pytest.mark.slow
def test_a_dry_run_goes_through_everything(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "specdec.bench.on_gpu", "--dry", "--minutes", "9", "--output", str(tmp_path)]
    for name in ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER"):  # pytest-benchmark takes no times below a worker of xdist
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run(command, cwd=on_gpu._ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    stages_run = {record["stage"]: record["status"] for record in records if record["bench"] == "stage"}
    assert stages_run == dict.fromkeys(["machine", "tests", "small_m", "benchmarks", "race_check", "decode"], "done")
    assert {record["bench"] for record in records} == {"stage", "machine", "tests", "small_m", "kernel", "decode"}
    for record in records:
        assert (record["dry"], record["provenance"]["device"]) == (on_gpu.DRY_NOTE, "cpu")
        assert record["provenance"].keys() >= {"git_sha", "torch", "triton", "argv", "utc"}
        assert record.get("percent_of_roofline") is None
        assert "CPU wall time" in record.get("timing", "CPU wall time")
    assert (tmp_path / "summary.md").read_text() in done.stdout
    assert "**dry run on a CPU: nothing was timed on a GPU**" in done.stdout
