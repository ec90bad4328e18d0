"""Jobs through Ray: the file of one process, whatever becomes of the workers."""

import functools
import os
import signal
import time
from pathlib import Path

import pytest

from lib import batches
from lib.batches import answer, command, lines_of, prompts_file
from specdec.bundled.load import tiny_drafter
from specdec.jobs.batch import BatchSettings
from specdec.jobs.prompts import Prompt

pytest.importorskip("ray", reason="Ray is not installed")
cluster = pytest.importorskip("specdec.jobs.cluster")
workers = pytest.importorskip("specdec.jobs.workers")


def worker_processes(mark):
    """Those that were started, by whomever, with a mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and b"MapWorker" in (folder / "cmdline").read_bytes():
                found += [int(folder.name)] if mark.encode() in (folder / "environ").read_bytes() else []
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="workers are found in /proc")
def test_a_worker_that_is_killed_costs_its_block_and_the_file_is_that_of_one_process(tmp_path):
    data, output, whole = prompts_file(tmp_path, 60), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    options = ["--drafter", "medusa", "--tree", "4,2", "--max-new-tokens", 40, "--max-rows", 3]
    mark = f"SPECDEC_TEST={tmp_path}"
    environment = batches.ENVIRONMENT | dict([mark.split("=", 1)])
    options += ["--ray", "local", "--ray-workers", 2]
    process = command("--data", data, "--output", output, *options, env=environment)
    try:
        part, end = tmp_path / "out.jsonl.part-0", time.monotonic() + 180
        while time.monotonic() < end and process.poll() is None and not (part.exists() and part.stat().st_size):
            time.sleep(0.02)
        before = worker_processes(mark)
        os.kill(before[0], signal.SIGKILL)
        assert len(lines_of(part)) < 60, "it was killed in the middle"
        summary, told = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert len(before) == 2
    assert '"written": 60, "present": 0, "failed": 0' in summary
    answer(data, whole, BatchSettings(max_new_tokens=40), drafter=tiny_drafter("medusa"), tree=(4, 2))
    assert output.read_bytes() == whole.read_bytes()


# what workers can unpickle: they do not see this file
WITHOUT_MEMORY = functools.partial(exec, "import torch; raise torch.OutOfMemoryError('out of memory: tried 2 GiB')")
KILLED = functools.partial(exec, "import os; os.kill(os.getpid(), 9)")  # as the kernel does where no memory is left


@pytest.mark.parametrize(
    ("open_writer", "match"),
    [
        (WITHOUT_MEMORY, "ray: a worker failed: .*OutOfMemoryError: out of memory: tried 2 GiB"),
        (KILLED, "ray: a worker failed: .*workers were lost again and again; is there memory for"),
    ],
)
def test_a_worker_without_memory_ends_the_job_with_its_reason(open_writer, match, monkeypatch):
    monkeypatch.setattr(workers, "MOST_RESTARTS", 1)
    with (
        pytest.raises(RuntimeError, match=match),
        workers.RayWriter(open_writer, num_texts=2, num_workers=1, address="local") as writer,
    ):
        writer.write([Prompt(0, (1, 2))], lambda _: None)


def test_more_workers_than_there_are_cpus_are_refused():
    with pytest.raises(ValueError, match="--ray-workers: expected at most .*, as the cluster has CPUs, got 9999"):
        workers.RayWriter(WITHOUT_MEMORY, num_texts=2, num_workers=9999, address="local")


def test_an_address_that_does_not_answer_is_told_in_time(monkeypatch):
    assert cluster.CONNECT_SECONDS == 20
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 4)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"--ray: expected the address .*'127.0.0.1:1', which does not answer"):
        cluster.connect("127.0.0.1:1")
    assert time.monotonic() - began < 30, "Ray itself goes on for longer"
    with pytest.raises(ConnectionError, match="--ray: expected the address .*'http://x', which (refuses|does not)"):
        cluster.connect("http://x")


def test_torchrun_and_ray_are_not_both(tmp_path, monkeypatch):
    monkeypatch.setitem(batches.ENVIRONMENT, "WORLD_SIZE", "2")
    process = command("--data", prompts_file(tmp_path, 2), "--output", tmp_path / "out.jsonl", "--ray", "local")
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--ray: expected one process, whose workers Ray starts, got several of torchrun's" in told
