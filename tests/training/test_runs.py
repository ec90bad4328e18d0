"""One run is one result: killed and resumed, in several processes, in as many passes as memory asks for."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lib.training_worker import train
from specdec.training.objectives.medusa import MedusaObjective
from specdec.training.objectives.recipe import Recipe, Run
from specdec.training.runs import trainer
from specdec.training.runs.batches import Passes, Reading, Share, TextOrder
from specdec.training.runs.trainer import last_checkpoint

pytest.importorskip("accelerate")

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240  # of a busy machine


@pytest.fixture(autouse=True)
def one_thread():
    """Sums over several threads may differ from those of another process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run in one process and its report."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    report = train(folder)
    torch.set_num_threads(threads)
    return folder, report


def start(folder, death="nowhere", environment=None, **run):
    """A process that trains."""
    command = [sys.executable, "-m", "lib.training_worker", str(folder), death, json.dumps(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    return subprocess.Popen(
        command, cwd=ROOT / "tests", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def start_two(folder, **run):
    """Two processes that train together, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        start(
            folder,
            environment={name: str(value) for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()},
            **run,
        )
        for rank in range(2)
    ]


def finish(processes):
    """What the processes printed, once they have ended."""
    try:
        return [process.communicate(timeout=TIMEOUT_S)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()


def weights(folder):
    return load_file(folder / "out" / "model.safetensors")


def same_weights(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, **tolerance)


# Interruptions


def test_a_run_killed_in_a_step_or_a_checkpoint_goes_on_to_the_same_weights(whole, tmp_path):
    processes = {where: start(tmp_path / where, where) for where in ("step", "checkpoint")}
    output = finish(processes.values())
    for where, kept in (("step", "checkpoint-4"), ("checkpoint", "checkpoint-2")):
        folder = tmp_path / where
        assert processes[where].returncode == -signal.SIGKILL, output
        assert not (folder / "out").exists()
        assert last_checkpoint(folder / "work").name == kept
        report = train(folder, resume=True)
        same_weights(weights(whole[0]), weights(folder), atol=0, rtol=0)
        assert report == whole[1]
        assert not (folder / "work").exists()


# Several processes


def test_two_processes_train_as_one(whole, tmp_path):
    """Texts of unequal lengths; the last batch of an epoch leaves one process without a text."""
    output = finish(start_two(tmp_path, steps=6))
    assert (tmp_path / "out").exists(), output
    same_weights(weights(whole[0]), weights(tmp_path), atol=1e-5, rtol=1e-4)
    one, two = (json.loads((folder / "out" / "training.json").read_text()) for folder in (whole[0], tmp_path))
    assert two["report"] == pytest.approx(one["report"], rel=1e-4)
    assert two["made"]["num_processes"] == 2
    for ours, theirs in zip(one["history"], two["history"], strict=True):
        assert {**theirs, "minutes": 0} == pytest.approx({**ours, "minutes": 0}, rel=1e-3)
    assert output[0].count("step 6 of 6: held out") == 1
    assert "step" not in output[1]


# Memory


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_batch_in_parts_is_the_batch(accumulate, whole, tmp_path):
    train(tmp_path, accumulate=accumulate)
    same_weights(weights(whole[0]), weights(tmp_path), atol=1e-5, rtol=1e-4)


def test_out_of_memory_runs_the_batch_in_smaller_parts(whole, tmp_path, monkeypatch, capsys):
    forward, rows = MedusaObjective.forward, []

    def limited(self, batch):
        rows.append(batch.tokens.shape[0])
        result = forward(self, batch)
        if rows[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return result

    monkeypatch.setattr(MedusaObjective, "forward", limited)
    report = train(tmp_path)
    assert rows[:3] == [4, 2, 1]
    assert set(rows[3:]) == {1}, "what was learnt of the memory is kept"
    same_weights(weights(whole[0]), weights(tmp_path), atol=1e-5, rtol=1e-4)
    assert report == pytest.approx(whole[1], rel=1e-4)
    assert "out of memory in process 0; goes on with at most" in capsys.readouterr().err

    monkeypatch.setattr(MedusaObjective, "forward", lambda self, batch: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(torch.OutOfMemoryError, match="memory does not suffice for one text of .* tokens"):
        train(tmp_path / "never")


def test_other_errors_are_not_taken_for_a_lack_of_memory(tmp_path, monkeypatch):
    def broken(self, batch):
        raise RuntimeError("something else")

    monkeypatch.setattr(MedusaObjective, "forward", broken)
    with pytest.raises(RuntimeError, match="something else"):
        train(tmp_path)


def test_passes_are_bounded_in_tokens_unless_somebody_says_otherwise():
    reading = Reading(collate=dict, num_tokens=len)
    share = reading.share(["a" * 2048] * 32, 0, 1)
    recipe = Recipe(learning_rate=1.0, batch_size=32)

    def sizes(run):
        return [len(items) for items, _ in trainer._passes(recipe, run, reading, 1).split(share)]

    assert sizes(Run()) == [4] * 8
    assert sizes(Run(accumulate=4)) == [8] * 4


def test_passes_pad_to_their_own_longest_text():
    passes = Passes(len, texts=3, tokens=10)
    share = Share(["aaa", "aaa", "aaa", "a" * 12, "a", "a", "a", "a"], [1.0] * 8, total=8.0, num_tokens=0)
    assert [(items, weight * 8) for items, weight in passes.split(share)] == [
        (["aaa"] * 3, 3),
        (["a" * 12], 1),
        (["a"] * 3, 3),
        (["a"], 1),
    ]


# Order


def test_every_epoch_has_every_text_once_in_an_order_of_its_own():
    batches = list(TextOrder(10, 4, num_steps=7, seed=3))
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2, 4]
    epochs = [[index for batch in batches[first : first + 3] for index in batch] for first in (0, 3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert batches == list(TextOrder(10, 4, num_steps=7, seed=3)) != list(TextOrder(10, 4, num_steps=7, seed=4))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_shares_of_all_processes_are_the_batch(num_ranks):
    reading = Reading(collate=dict, num_tokens=len, num_learnt=lambda item: 10 * len(item))
    items = ["a", "bb"]
    shares = [reading.share(items, rank, num_ranks) for rank in range(num_ranks)]
    assert [share.items for share in shares] == [["a"], ["bb"], ["a"]][:num_ranks]
    assert [share.weights for share in shares] == [[10.0], [20.0], [0.0]][:num_ranks]
    assert {(share.total, share.num_tokens) for share in shares} == {(30.0, 3)}
    assert reading.share(items, 0, num_ranks, most_learnt=15).total == 25.0
