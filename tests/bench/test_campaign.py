"""The parts of the campaign: what comes next, processes with limits, the summary, archives to go on from."""

import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

from specdec.bench.campaign import running, stages
from specdec.bench.campaign.results import collect, newest, pack, unpack
from specdec.bench.campaign.running import CUT_OFF, DONE, end_leftovers, run_stage
from specdec.bench.campaign.stages import ROOT, Stage
from specdec.bench.campaign.state import RUNNING, State, next_stage, open_commands
from specdec.bench.campaign.summary import summarize
from specdec.bench.common.journal import AGAIN, LEFT
from specdec.common.provenance import append_record, read_records


def make_stage(name, code="pass", *, least_s=1.0, most_s=60.0, **settings):
    return Stage(name, {name: [sys.executable, "-c", code]}, least_s, most_s, **settings)


def run(stage, folder, limit_s=60.0, on_tick=lambda seconds: None):
    return run_stage(stage, list(stage.commands), limit_s, folder, on_tick)


def is_gone(process):
    status = Path(f"/proc/{process}/stat")
    deadline = time.monotonic() + 5
    while (is_there := status.exists() and status.read_text().split()[2] != "Z") and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_there


# What comes next


def order_of(found, state, left_s, banned=()):
    """Run everything that fits, all of it within its limit; the names and limits in order."""
    seen = {}
    while True:
        chosen = next_stage(found, state, left_s, lambda name: name not in banned and name not in seen)
        if chosen is None:
            return [*seen.items()]
        _, names, limit_s = chosen
        seen.update(dict.fromkeys(names, limit_s))
        state.note(dict.fromkeys(names, DONE))


def test_stages_run_in_order_within_their_time_and_the_last_wait_for_the_next_call():
    found = [make_stage("a", most_s=50), make_stage("b", least_s=30), make_stage("c", least_s=200)]
    assert order_of(found, State(), 100) == [("a", 50), ("b", 60)]
    assert order_of(found, State(), 20) == [("a", 20)]
    assert order_of(found, State(commands={"a": DONE}), 199) == [("b", 60)]


def test_what_used_up_its_time_or_failed_comes_after_the_others():
    found = [make_stage("a"), make_stage("b"), make_stage("c"), make_stage("d"), make_stage("e", unavailable="no tool")]
    state = State({}, {"a": CUT_OFF, "b": "failed: x", "c": CUT_OFF}, {"b": 1}, {"a": 60.0, "c": 20.0})
    state.calls = []
    assert order_of(found, state, 500) == [("c", 40), ("d", 60), ("a", 500), ("b", 500)]
    given_up = State([], {"b": "failed: x"}, {"b": 2})
    assert "b" not in dict(order_of(found, given_up, 500))
    assert open_commands(found[1], given_up) == []
    assert dict(order_of(found, State(), 500, banned=("a",))).keys() == {"b", "c", "d"}


def test_a_killed_call_is_seen_by_the_next(tmp_path):
    path = tmp_path / "state.json"
    assert State.read(path) == State()
    state = State([{"end": RUNNING}], {"a": RUNNING, "b": DONE}, {}, {"a": 3.0})
    state.write(path)
    found = State.read(path)
    assert (found.calls, found.commands, found.used_s) == ([{"end": "killed"}], {"a": CUT_OFF, "b": DONE}, {"a": 3.0})
    found.note({"a": "failed: y", "b": "failed: z"})
    found.note({"a": "failed: y"})
    assert found.failures == {"a": 2, "b": 1}
    found.forget([make_stage("a")])
    assert (found.commands, found.failures, found.used_s) == ({"b": "failed: z"}, {"b": 1}, {})


# Processes


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('so far'); raise SystemExit('broken')", "failed: exit status 1"),
        ("import os; os.abort()", "failed: exit status -6"),
        ("raise SystemExit(5)", DONE),  # pytest had nothing left to run
        (f"raise SystemExit({LEFT})", CUT_OFF),
        ("pass", DONE),
    ],
)
def test_how_a_command_ended(tmp_path, code, expected):
    assert run(make_stage("a", code), tmp_path).commands == {"a": expected}
    assert run(make_stage("a", code), tmp_path).commands == {"a": expected}
    assert (tmp_path / "a.log").read_text().count("$ ") == 2  # a log keeps what earlier calls said


def test_a_missing_program_is_a_failure(tmp_path):
    found = run(Stage("missing", {"missing": ["no-such-program"]}, 1, 60), tmp_path)
    assert found.commands["missing"].startswith("failed: could not be started: No such file")


def test_a_lost_device_is_gone_on_with_in_a_new_process(tmp_path, monkeypatch):
    code = (
        f"import sys; n = open({str(tmp_path / 'n')!r}, 'a+'); n.write('x'); sys.exit({AGAIN} if n.tell() < 3 else 0)"
    )
    assert run(make_stage("a", code), tmp_path).commands == {"a": "failed: lost the device 2 times, then exit status 0"}
    found = run(make_stage("b", f"raise SystemExit({AGAIN})"), tmp_path)
    assert found.commands == {"b": "failed: lost the device 8 times"}


def test_a_command_is_told_its_minutes(tmp_path):
    stage = Stage("a", {"a": [sys.executable, "-c", "import sys; print(sys.argv[1])", stages.MINUTES]}, 1, 60)
    run(stage, tmp_path, limit_s=90)
    assert float((tmp_path / "a.log").read_text().split()[-1]) == pytest.approx(1.5, abs=0.1)


def test_what_ignores_an_interrupt_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_GRACE_S", 1.0)
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    start = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {stubborn!r}])"
    found = run(make_stage("a", f"{start}; print(c.pid, flush=True); {stubborn}"), tmp_path, limit_s=2)
    assert found.commands == {"a": CUT_OFF}
    assert is_gone((tmp_path / "a.log").read_text().split()[-1])


def test_commands_of_a_stage_run_side_by_side_and_end_alone(tmp_path):
    nap = "import time; time.sleep({}); raise SystemExit({})"
    commands = {str(i): [sys.executable, "-c", nap.format(1, i)] for i in range(4)}
    found = run(Stage("tests", commands, 1, 60, jobs=4), tmp_path)
    assert found.wall_s < 4
    assert found.commands == {"0": DONE, **{str(i): f"failed: exit status {i}" for i in (1, 2, 3)}}
    told = Stage("a", {"a": [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]}, 1, 60, jobs=64)
    run(told, tmp_path)
    assert (tmp_path / "a.log").read_text().split()[-1] == str(max(1, os.cpu_count() // 64))  # or all take every core
    commands = {name: [sys.executable, "-c", nap.format(60, 0)] for name in "ab"}
    assert run(Stage("tests", commands, 1, 60), tmp_path, limit_s=1).commands == {"a": CUT_OFF, "b": CUT_OFF}


def test_a_stage_that_is_stopped_leaves_nothing_running(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_TICK_S", 0.1)
    begin = time.monotonic()

    def stop(seconds):
        if (log := tmp_path / "a.log").is_file() and log.read_text().split()[-1].isdigit():
            raise SystemExit("stopped")

    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    found = run(make_stage("a", code), tmp_path, on_tick=stop)
    assert found.stopped
    assert found.commands == {"a": CUT_OFF}
    assert time.monotonic() - begin < 30
    assert is_gone((tmp_path / "a.log").read_text().split()[-1])


def test_what_a_killed_call_left_running_is_ended_and_nothing_else(tmp_path):
    code = "import time; time.sleep(600)"
    thread = threading.Thread(target=run, args=(make_stage("a", code), tmp_path), daemon=True)
    thread.start()
    file = tmp_path / "processes.json"
    while not (file.is_file() and any(json.loads(file.read_text()).values())):
        time.sleep(0.02)
    (left,) = json.loads(file.read_text())
    told = json.loads(file.read_text()) | {str(os.getpid()): "of another boot 1"}
    file.write_text(json.dumps(told))
    end_leftovers(tmp_path)  # ends the one, and not this process
    thread.join(10)
    assert is_gone(left)
    assert not file.exists()
    end_leftovers(tmp_path)


# Results


def test_results_are_collected_by_stage_and_command(tmp_path):
    append_record(tmp_path / "a.jsonl", {"begun": "x"})
    append_record(tmp_path / "a.jsonl", {"cell": "x", "bench": "test"})
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"cell": "y", "be')  # killed in writing it
    (tmp_path / "racecheck.log").write_text("...\n========= RACECHECK SUMMARY: 0 hazards displayed\n")
    (tmp_path / "memcheck.log").write_text("$ x\n========= ERROR SUMMARY: 2 errors\n")
    found = collect([make_stage(name) for name in ("a", "racecheck", "memcheck")], tmp_path)
    assert [(record["stage"], record["command"], record["bench"]) for record in found] == [
        ("a", "a", "test"),
        ("racecheck", "racecheck", "sanitizer"),
        ("memcheck", "memcheck", "sanitizer"),
    ]
    assert found[2]["verdict"] == "ERROR SUMMARY: 2 errors"


def test_an_archive_fits_and_can_be_gone_on_from(tmp_path):
    output, target = tmp_path / "output", tmp_path / "archives" / "7.tar.gz"
    (output / "work" / "pictures").mkdir(parents=True)
    for name in ("state.json", "records.jsonl", "summary.md", "work/a.jsonl", "work/pictures/x.svg"):
        (output / name).write_text(f"content of {name}")
    noise = os.urandom(200_000).hex()
    (output / "work" / "a.log").write_text(f"first line\n{noise}\nlast line\n")
    pack(output, target, limit_bytes=100_000)
    assert target.stat().st_size <= 100_000
    assert newest(tmp_path / "archives") == target
    unpack(target, tmp_path / "copy")
    assert (tmp_path / "copy" / "work" / "a.jsonl").read_text() == "content of work/a.jsonl"
    log = (tmp_path / "copy" / "work" / "a.log").read_text()
    assert log.startswith("[the first ")
    assert log.endswith("last line\n")
    assert (tmp_path / "copy" / "work" / "pictures" / "x.svg").exists()
    pack(output, target)
    with tarfile.open(target) as file:
        assert file.getmember("work/a.log").size > 250_000
    (output / "work" / "pictures" / "x.svg").write_text(noise)
    pack(output, target, limit_bytes=100_000)
    with tarfile.open(target) as file:  # what tells anything, and nothing else
        assert {*file.getnames()} == {"state.json", "records.jsonl", "summary.md", "work/a.jsonl"}
    assert newest(tmp_path) is None


# The summary


ABOUT = {"device": "X", "driver": "1", "torch": "2", "triton": "3", "git_sha": "abc", "git_dirty": False}
CALL = {"device": "X", "utc": "now", "git_sha": "abc", "minutes": 9, "end": "done"}


def page_of(records, tmp_path, *, found=(), state=None, counts=None):
    known = [{"stage": "a", "command": "a", "provenance": ABOUT, **record} for record in records]
    return summarize([*found] or [make_stage("a")], state or State([CALL]), known, ABOUT, tmp_path, counts or {})


def make_kernel(provider, p50_us, timing="CUDA-graph replays"):
    record = {"bench": "kernel", "name": "n", "op": "op", "shape": "s", "provider": provider, "p50_us": p50_us}
    return {**record, "timing": timing, "roofline_us": 1.0, "percent_of_roofline": 100 / p50_us}


def test_ours_is_compared_with_the_best_captured_provider(tmp_path):
    eager, ours = make_kernel("reference", 1.5, timing="eager calls, not capturable"), make_kernel("triton", 2.0)
    others = [make_kernel("sdpa", 4.0), make_kernel("slow", 9.0)]
    assert "| op | s | 2 | 4 (sdpa) | 2 | 1 | 50 |" in " ".join(page_of([eager, ours, *others], tmp_path).split())
    assert "1.5 (reference, not captured)" in page_of([eager, ours], tmp_path)


def test_failures_come_first_with_their_reasons(tmp_path):
    (tmp_path / "dies.log").write_text("$ command\nSegmentation fault in a kernel\n")
    found = [make_stage(name) for name in ("a", "dies", "cut", "fine")] + [make_stage("e", unavailable="no such tool")]
    ends = {"a": "failed: exit status 1", "dies": "failed: exit status -11", "cut": CUT_OFF, "fine": DONE}
    state = State([CALL], ends, {"a": 2, "dies": 1}, {"cut": 30.4})
    records = [
        {"bench": "test", "cell": "t.py::test_x", "outcome": "failed", "failure": "E  assert 1 == 2"},
        {"bench": "test", "cell": "t.py::test_y", "outcome": "passed"},
        {"bench": "lost", "cell": "t.py::test_z"},
    ]
    page = page_of(records, tmp_path, found=found, state=state)
    assert page.index("## Failures") < page.index("## Left") < page.index("## Tests")
    failures, left = page.split("## ")[1:3]
    assert "**a, a**: failed: exit status 1" in failures
    assert "`t.py::test_x`\n\n```\nE  assert 1 == 2\n```" in failures
    assert "`t.py::test_z` of a began and never ended" in failures
    assert "Segmentation fault in a kernel" in failures
    assert "- cut: cut\n" in left
    assert "- dies: dies\n" in left
    assert "- a: " not in left  # failed twice
    assert "e cannot run here: no such tool" in left
    assert "| cut | 1 cut off | 30 of 60 s |" in " ".join(page.split())
    assert "X, driver 1, torch 2, triton 3, commit abc\n" in page


def test_steps_stand_beside_what_was_counted_of_them(tmp_path):
    step = {"bench": "machine", "measured": "x", "model": "m", "arm": "medusa", "context": "2048", "batch": 1}
    records = [{**step, "step_ms": 5.0, "floor_ms": 4.0}, {**step, "batch": 8, "step_ms": 9.0, "floor_ms": 4.0}]
    page = page_of(records, tmp_path, counts={("m", "medusa", "2048"): (400, 5.5)})
    assert "| m | medusa | 400 | 5 | 5.5 | 4 | 2.5 |" in " ".join(page.split())
    assert "counted" not in page_of(records, tmp_path)


def test_devices_are_not_mixed(tmp_path):
    other = {**ABOUT, "device": "Y"}
    page = page_of([make_kernel("triton", 2.0), {**make_kernel("triton", 3.0), "provenance": other}], tmp_path)
    assert "## Kernels, X\n" in page
    assert "## Kernels, Y\n" in page


# Stages


def test_every_benchmark_and_test_file_is_in_a_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "can_draw", lambda: True)
    found = {stage.name: stage for stage in stages.stages(tmp_path, on_cpu=False)}
    commands = {name: command for stage in found.values() for name, command in stage.commands.items()}
    assert len(commands) == sum(len(stage.commands) for stage in found.values())  # a file of results each
    parts = " ".join(part for command in commands.values() for part in command)
    benchmarks = [*(ROOT / "bench" / "kernels").glob("bench_*.py")]
    tests = [*(ROOT / "tests" / "kernels").glob("test_*.py"), *(ROOT / "tests").rglob("test_*_gpu.py")]
    missing = [file.name for file in (*benchmarks, *tests) if str(file) not in parts and file.name != "test_on_gpu.py"]
    assert not missing
    first = ["machine", "captured", "tests", "precompile", "decode_7b", "decode_8b", "kernels_first"]
    assert list(found)[: len(first)] == first
    assert "bench_tree_attention.py" in found["kernels_first"].commands["kernels_first"][-2]
    untimed = ("captured", "tests", "precompile", "captured_rest")
    assert all(stage.jobs == 1 for name, stage in found.items() if name not in untimed)
    assert all(stage.least_s <= stage.most_s for stage in found.values())
    usual = found["decode_7b"].commands["decode_7b"]
    assert usual[usual.index("--max-new-tokens") + 1] == "384"
    assert usual[usual.index("--pictures") + 1] == str(tmp_path / "pictures")
    monkeypatch.setattr(stages, "can_draw", lambda: False)
    without = {stage.name: stage for stage in stages.stages(tmp_path, on_cpu=False)}["decode_7b"].commands["decode_7b"]
    assert "--pictures" not in without
    for tool, why in ((None, "compute-sanitizer is not on the PATH"), ("/usr/bin/compute-sanitizer", None)):
        monkeypatch.setattr(stages.shutil, "which", lambda _, tool=tool: tool)
        by_name = {stage.name: stage for stage in stages.stages(tmp_path, on_cpu=False)}
        for name in ("racecheck", "memcheck", "synccheck"):
            assert by_name[name].unavailable == why
            assert by_name[name].commands[name][2:5] == ["compute-sanitizer", "--tool", name]


@pytest.mark.compile
@pytest.mark.slow
def test_a_step_is_compiled_once_without_a_gpu(tmp_path):
    command = [sys.executable, "-m", "specdec.bench.compiled.precompile", "--model", "tiny", "--drafter", "none"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    compiled = []
    for _ in range(2):
        done = subprocess.run(
            [*command, "--output", tmp_path / "x.jsonl"], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        compiled.append(sorted((tmp_path / "cache").rglob("*.cubin")))
    assert compiled[0] == compiled[1]
    records = read_records(tmp_path / "x.jsonl")
    assert [record["num_kernels"] for record in records] == [len(compiled[0])] * 2
    names = {file.stem for file in compiled[0]}
    assert any("attention" in name for name in names)
    assert any("rms_norm" in name for name in names)
