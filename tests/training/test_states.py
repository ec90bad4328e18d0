"""What the target says, kept in a folder: the same losses as with the target, and nothing lost or mixed up."""

import json

import pytest
import torch

from lib.families import build_model
from lib.objectives import OBJECTIVES, new_objective, samples
from specdec.models.target.target import Target
from specdec.training.data import Sample, collate
from specdec.training.objectives.recipe import Run
from specdec.training.states import StateStore
from specdec.training.step import TrainingStep
from specdec.training.train import train_drafter

FILES = ("hidden.bin", "best.bin", "hidden.index")


def texts():
    """Texts of several lengths."""
    return [*samples(count=3, length=12, prompt=4), *samples(count=2, length=9, seed=1)]


def step_of(name, model):
    return TrainingStep(new_objective(name, model), Target(model), "target", Run(), torch.arange(4)).eval()


@pytest.mark.parametrize("name", OBJECTIVES)
@torch.no_grad()
def test_losses_from_kept_states_are_those_of_the_target(name, tmp_path):
    model = build_model("llama")
    step = step_of(name, model)
    store = StateStore(tmp_path, Target(model), step.objective.tap_layers)
    store.read(texts())
    expected = step(**collate(texts()))
    for part, value in step(**store.collate(texts())).items():
        torch.testing.assert_close(value, expected[part], rtol=2e-3, atol=2e-4)


def test_a_text_is_read_once_however_often_it_is_asked_for(tmp_path, monkeypatch):
    model = build_model("llama")
    StateStore(tmp_path, Target(model)).read(texts()[:2])
    store, read = StateStore(tmp_path, Target(model)), []
    monkeypatch.setattr(store.target, "read", lambda tokens, read=store.target.read: read_by(tokens, read))

    def read_by(tokens, own):
        read.extend(tokens.tolist())
        return own(tokens)

    store.read([*texts(), *texts()])
    assert len(read) == 3
    store.read(texts())
    assert len(read) == 3


def test_the_same_tokens_with_another_mask_are_another_text(tmp_path):
    model = build_model("llama")
    store, text = StateStore(tmp_path, Target(model)), samples(count=1, length=12)[0]
    other = Sample(text.tokens, torch.arange(12) > 8)
    store.read([other, text])
    best = [store.collate([sample])["best"][0] for sample in (text, other)]
    assert torch.equal(best[0][9:], best[1][9:])
    assert best[0][1:9].any()
    assert not best[1][:9].any()


def test_what_a_crash_cut_off_is_read_again(tmp_path):
    model = build_model("llama")
    whole, broken = StateStore(tmp_path / "whole", Target(model)), tmp_path / "broken"
    whole.read(texts())
    StateStore(broken, Target(model)).read(texts()[:2])
    for name in FILES:
        with (broken / name).open("ab") as file:
            file.write(b'["half a line')
    store = StateStore(broken, Target(model))
    store.read(texts())
    for name, tensor in whole.collate(texts()).items():
        assert torch.equal(tensor, store.collate(texts())[name])


def test_layers_that_a_later_drafter_asks_for_are_added(tmp_path):
    model = build_model("llama")
    StateStore(tmp_path, Target(model)).read(texts())
    size = (tmp_path / "hidden.bin").stat().st_size
    store = StateStore(tmp_path, Target(model), (0, 1))
    store.read(texts())
    assert (tmp_path / "hidden.bin").stat().st_size == size
    assert store.collate(texts())["taps"].shape == (2, 5, 12, model.config.hidden_size)


def test_another_targets_folder_is_refused(tmp_path):
    StateStore(tmp_path, Target(build_model("llama"))).read(texts())
    model = build_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight.neg_()
    with pytest.raises(ValueError, match="states: expected a folder of this target's states"):
        StateStore(tmp_path, Target(model))


def test_training_with_kept_states_gives_what_training_with_the_target_gives(tmp_path):
    model = build_model("llama")
    run = Run(steps=4, batch_size=4, learning_rate=1e-3)
    losses = [
        train_drafter("medusa", model, samples(), tmp_path / name, run=run, states=states)["held_out_loss"]
        for name, states in (("read", None), ("kept", tmp_path / "states"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert json.loads((tmp_path / "states" / "store.json").read_text())["format"] == 1
