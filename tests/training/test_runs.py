"""One run is one result: killed and resumed, in several processes, in as many passes as memory asks for."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from lib.families import build_model
from lib.training_worker import PROBE, train
from specdec.training.data import Sample
from specdec.training.objectives.medusa import MedusaObjective
from specdec.training.objectives.recipe import Recipe, Run
from specdec.training.runs import trainer
from specdec.training.runs.batches import Passes, Reading, Share, TextOrder
from specdec.training.runs.probe import TauProbe, probe_prompts
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


def test_two_processes_share_a_target(tmp_path):
    """Each has half of every layer; the losses and tau are those of the whole target."""
    output = finish(start_two(tmp_path / "two", sharded=True, accumulate=2))
    assert (tmp_path / "two" / "out").exists(), output
    train(tmp_path / "one", probe=PROBE)
    same_weights(weights(tmp_path / "one"), weights(tmp_path / "two"), atol=1e-5, rtol=1e-4)
    one, two = (json.loads((tmp_path / name / "out" / "training.json").read_text()) for name in ("one", "two"))
    assert two["report"] == pytest.approx(one["report"], rel=1e-4)
    assert two["target"] == one["target"]


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


# What is shown and kept


def test_losses_and_evaluations_are_on_standard_error(tmp_path, capsys):
    probe = TauProbe(num_prompts=2, prompt_tokens=8, new_tokens=4)
    train(tmp_path, probe=probe)
    lines = capsys.readouterr().err.splitlines()
    number = r"\d+\.\d+"
    loss = rf"loss {number} \(head_1 {number}, head_2 {number}\), [\d,]+ tokens/s, 0:00:\d\d left"
    assert re.fullmatch(f"step 1 of 6: {loss}", lines[0])
    evaluation = rf"held out {number} \(head_1 {number}, head_2 {number}\), tau {number}, accepted by depth [ .0-9]+"
    assert [line for line in lines if re.fullmatch(f"step [246] of 6: {evaluation}", line)] == lines[1:3] + lines[-1:]


def test_a_terminal_has_a_bar_and_the_evaluations_above_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    train(tmp_path)
    shown = capsys.readouterr().err
    assert "step 4 of 6: held out" in shown
    assert "step 1 of 6" not in shown
    assert "━" in shown


def test_the_record_knows_data_target_and_history(whole, tmp_path):
    record = json.loads((whole[0] / "out" / "training.json").read_text())
    assert (record["report"], record["kind"]) == (whole[1], "medusa")
    assert [entry["step"] for entry in record["history"] if "eval_loss" in entry] == [2, 4, 6]
    assert [entry["step"] for entry in record["history"] if "head_1" in entry] == [1, 2, 3, 4, 5, 6]
    assert record["minutes"] > 0
    assert len(record["target"]["fingerprint"]) == 32
    assert len(record["data"]["texts_sha256"]) == 64
    assert record["made"]["specdec"]
    assert {"git_sha", "device", "num_processes"} < record["made"].keys()


def test_resume_refuses_other_texts_of_the_same_size_and_takes_them_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    rows = torch.arange(40 * 12).reshape(40, 12) % 90 + 3
    paths = {name: tmp_path / name for name in ("texts.pt", "others.pt", "elsewhere/moved.pt")}
    torch.save(rows, paths["texts.pt"])
    shutil.copy(paths["texts.pt"], paths["elsewhere/moved.pt"])
    torch.save(rows.flip(1), paths["others.pt"])
    step = trainer.RecipeTrainer.training_step

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.RecipeTrainer, "training_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, data=paths["texts.pt"])
    with pytest.raises(ValueError, match=r"another data.sha256 \(.* there, .* here\), data.texts_sha256"):
        train(tmp_path, data=paths["others.pt"], resume=True)
    with pytest.raises(ValueError, match=r"another .*run.seed \(0 there, 1 here\)"):
        train(tmp_path, data=paths["texts.pt"], resume=True, seed=1)
    with pytest.raises(ValueError, match="another target.fingerprint"):
        train(tmp_path, data=paths["texts.pt"], resume=True, model=build_model("llama", seed=1))
    train(tmp_path, data=paths["elsewhere/moved.pt"], resume=True)


def test_an_interruption_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.RecipeTrainer, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    assert "training: interrupted after step 0; no checkpoint was written yet" in capsys.readouterr().err


def test_trackers_get_what_the_terminal_shows(tmp_path, monkeypatch):
    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            seen.append(kwargs["logs"])

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Tracker)
    monkeypatch.setitem(trainer._PACKAGES, "wandb", ("torch",))
    train(tmp_path, report_to=("wandb",))
    assert sum("head_1" in logs for logs in seen) == 6
    assert sum("eval_loss" in logs for logs in seen) == 3


@pytest.mark.parametrize(("name", "value"), [("report_to", ("wandb",)), ("optimizer", "adamw_8bit")])
def test_missing_packages_are_named_before_anything_is_read(name, value, tmp_path, monkeypatch):
    asked = value if isinstance(value, str) else value[0]
    monkeypatch.setitem(trainer._PACKAGES, asked, ("no_such_package",))
    with pytest.raises(RuntimeError, match=rf"{asked} needs the package no_such_package: pip install .*\[{asked[:5]}"):
        train(tmp_path, data=tmp_path / "no such texts.jsonl", **{name: value})


@pytest.mark.parametrize(("name", "value"), [("report_to", ("paper",)), ("optimizer", "sgd")])
def test_unknown_trackers_and_optimisers_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected (some|one) of .*, got"):
        Run(**{name: value})


# The prompts that tau is measured on


def prompt_of(length, total=20):
    return Sample(torch.arange(total), torch.arange(total) >= length)


def test_prompts_are_whole_and_keep_their_beginning():
    held_out = [prompt_of(12), prompt_of(5), prompt_of(0), prompt_of(7), prompt_of(15)]
    lengths = [len(prompt) for prompt in probe_prompts(held_out, 99, TauProbe(num_prompts=9, prompt_tokens=8))]
    assert lengths == [5, 8, 7, 8, 8], "what fits, then the beginnings of the rest"
    short = probe_prompts(held_out, 99, TauProbe(num_prompts=2, prompt_tokens=8))
    assert [prompt.tolist() for prompt in short] == [list(range(5)), list(range(8))]
    assert [len(prompt) for prompt in probe_prompts(held_out, 10, TauProbe(num_prompts=9, new_tokens=6))] == [4] * 5
    with pytest.raises(ValueError, match="new_tokens: expected fewer than 10, the target's context, got 10"):
        probe_prompts(held_out, 10, TauProbe(new_tokens=10))
    with pytest.raises(ValueError, match="prompt_tokens: expected at least 1, got 0"):
        TauProbe(prompt_tokens=0)
