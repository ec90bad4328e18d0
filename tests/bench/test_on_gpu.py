"""The command: what it refuses, and a rehearsal of three calls: one is killed, one has only the archives."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from specdec.bench import on_gpu
from specdec.bench.campaign import call, rehearsal
from specdec.bench.campaign.stages import ROOT, Stage
from specdec.common.provenance import read_records


def test_bad_calls_are_refused(tmp_path, monkeypatch, capsys):
    for has_gpu, message in (
        (False, "expected an NVIDIA GPU, found none"),
        (True, "expected some of machine, captured"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(call, "provenance", lambda: {})
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(SystemExit):
            on_gpu.main(["--output", str(tmp_path / "out"), "--only", "machine", "attention"])
        assert message in capsys.readouterr().err
        assert ("TRITON_INTERPRET" in os.environ) is not has_gpu  # kernels are compiled for a GPU
    assert not list(tmp_path.rglob("*.tar.gz"))


CAMPAIGN = """
import sys
from specdec.bench import on_gpu
from specdec.bench.campaign import call
from specdec.bench.campaign.stages import Stage
def stages(folder, *, on_cpu):
    a = "import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == '-1'"
    b = f"import os, time; print(os.getpid(), flush=True); file = open({str(folder / 'b.jsonl')!r}, 'w')"
    b += "; print('{\\"bench\\": \\"test\\", \\"outcome\\": \\"passed\\"}\\\\n{\\"ben', file=file, flush=True)"
    b += "; time.sleep(600)"
    return [Stage(name, {name: [sys.executable, "-c", c]}, 1, 60) for name, c in (("a", a), ("b", b))]
call.stages = stages
sys.exit(on_gpu.main(["--cpu", "--output", sys.argv[1], *sys.argv[2:]]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_that_is_killed_has_told_what_it_knew(number, tmp_path):
    first = subprocess.Popen([sys.executable, "-c", CAMPAIGN, str(tmp_path)], stdout=subprocess.DEVNULL)
    while first.poll() is None and not any(file.read_text() for file in tmp_path.glob("work/b.jsonl")):
        time.sleep(0.05)
    first.send_signal(number)
    assert first.wait(20) != 0
    assert "| a     | 1 done" in (tmp_path / "summary.md").read_text()
    archive = tmp_path / "1.tar.gz"
    if number == signal.SIGKILL:  # the next call ends what was left running, and archives what was left lying
        archive.unlink()
        command = [sys.executable, "-c", CAMPAIGN, str(tmp_path), "--only", "a"]
        assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    child = (tmp_path / "work" / "b.log").read_text().split()[-1]
    deadline = time.monotonic() + 5
    status = Path(f"/proc/{child}/stat")
    while status.exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "copy", filter="data")
    (record,) = read_records(tmp_path / "copy" / "records.jsonl")  # without the line that it was writing
    assert (record["stage"], record["command"], record["outcome"]) == ("b", "b", "passed")
    page = (tmp_path / "copy" / "summary.md").read_text()
    assert "- b: b\n" in page  # for the next call
    assert ("killed" if number == signal.SIGKILL else "stopped") in page


def make_call(folder, monkeypatch, code, **settings):
    command = {"a": [sys.executable, "-c", f"open({str(folder / 'n')!r}, 'a').write('x'); {code}"]}
    monkeypatch.setattr(call, "stages", lambda _folder, *, on_cpu: [Stage("a", command, 1, 60)])
    return call.Call(folder / "out", folder / "archives", on_cpu=True, counts={}, **settings)


def test_what_failed_is_tried_in_the_next_call_and_then_given_up(tmp_path, monkeypatch):
    for number, (status, tries) in enumerate([(1, 1), (1, 2), (0, 2)], start=1):
        assert make_call(tmp_path, monkeypatch, "1 / 0").run(["a"], 30) == status
        assert len((tmp_path / "n").read_text()) == tries
        assert (tmp_path / "archives" / f"{number}.tar.gz").is_file()
    assert "ZeroDivisionError" in (tmp_path / "out" / "summary.md").read_text()
    fresh = make_call(tmp_path, monkeypatch, "pass")
    fresh.forget(["a"])
    assert fresh.run(["a"], 30) == 0
    assert len((tmp_path / "n").read_text()) == 3
    assert make_call(tmp_path, monkeypatch, "pass").run(["a"], 30) == 0
    assert len((tmp_path / "n").read_text()) == 3  # done


def test_a_machine_that_has_nothing_but_an_archive_goes_on(tmp_path, monkeypatch):
    assert make_call(tmp_path, monkeypatch, "pass").run(["a"], 30) == 0
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "archives" / "1.tar.gz").rename(tmp_path / "out" / "1.tar.gz")
    assert make_call(tmp_path, monkeypatch, "pass").run(["a"], 30) == 0
    assert (tmp_path / "n").read_text() == "x"
    assert (tmp_path / "archives" / "2.tar.gz").is_file()


def test_a_rehearsal_sees_what_is_missing(tmp_path):
    assert rehearsal.inspect(tmp_path, 2) == ["1.tar.gz: missing", "2.tar.gz: missing"]
    (tmp_path / "summary.md").write_text("")
    with tarfile.open(tmp_path / "1.tar.gz", "w:gz") as file:
        file.add(tmp_path / "summary.md", "summary.md")
    assert rehearsal.inspect(tmp_path, 1) == ["1.tar.gz: no records.jsonl", "1.tar.gz: no state.json"]


@pytest.mark.slow
def test_three_calls_with_one_killed_measure_everything(tmp_path, monkeypatch):
    """The rehearsal itself looks into the archives."""
    for name in ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER"):  # pytest-benchmark takes no times below a worker of xdist
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-m", "specdec.bench.on_gpu", "--dry", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the archives hold everything" in done.stdout
    for record in read_records(tmp_path / "dry" / "records.jsonl"):
        assert record["dry"] == call.DRY_NOTE
        assert record.get("percent_of_roofline") is None
        assert "CPU wall time" in record.get("timing", "CPU wall time")
    assert f"**{call.DRY_NOTE}**" in done.stdout
