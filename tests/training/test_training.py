"""Training runs: what is learnt, what stops a run, and what a stopped run goes on from."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

import specdec
from lib.families import VOCAB_SIZE, build_model
from lib.objectives import read_by, samples
from specdec.models.target.target import Target
from specdec.training.data import Sample, Texts, collate
from specdec.training.kinds import TRAINABLE_KINDS
from specdec.training.objectives.draft_model import DraftModelObjective
from specdec.training.objectives.medusa import MedusaObjective
from specdec.training.objectives.recipe import Recipe, Run, learning_rate_factor
from specdec.training.runs import trainer
from specdec.training.runs.probe import TauProbe
from specdec.training.runs.trainer import NonFiniteLossError, last_checkpoint
from specdec.training.train import train_drafter

pytest.importorskip("accelerate")

SMALL = Run(steps=6, batch_size=4, learning_rate=1e-2, eval_every=2, log_every=1)
NO_PROBE = TauProbe(num_prompts=0)
TAPS = {
    "eagle3": {"tap_layers": (0, 1, 2), "draft_vocab_size": 32},
    "peagle": {"tap_layers": (0, 1, 2)},
    "dflash": {"tap_layers": (0, 1), "num_layers": 1, "block_size": 4},
    "dspark": {"tap_layers": (0, 1), "num_layers": 1, "block_size": 4},
}


@pytest.fixture(scope="module")
def target():
    return Target(build_model("llama"))


def batch_of(target, texts, labels=None):
    batch = collate(texts)
    return read_by(target.model, batch["input_ids"], batch["loss_mask"], labels=labels)


def train(target, folder, *, run=SMALL, kind="medusa", data=None, **kwargs):
    data = samples() if data is None else data
    texts = Texts(data, kwargs.pop("held_out", 0.2), max_length=kwargs.pop("max_length", None))
    kwargs = {"settings": {"num_heads": 2}, "probe": NO_PROBE, **kwargs}
    return train_drafter(kind, target, texts, folder / "out", run=run, work_dir=folder / "work", **kwargs)


def weights(folder):
    return (folder / "out" / "model.safetensors").read_bytes()


# What the target says


@pytest.mark.parametrize("family", ["llama", "opt", "qwen2"])
def test_a_target_reads_whole_texts_as_its_model_does(family, generator):
    model = build_model(family)
    target = Target(model, tap_layers=(2, 0))
    tokens = torch.randint(1, VOCAB_SIZE, (2, 9), generator=generator)
    with torch.no_grad():
        expected = model(tokens, output_hidden_states=True)
    output = target.read(tokens)
    assert not output.hidden.requires_grad
    with torch.no_grad():
        assert torch.equal(output.logits, expected.logits)
    torch.testing.assert_close(model.get_output_embeddings()(output.hidden), expected.logits)
    assert torch.equal(output.taps[1], expected.hidden_states[1])
    assert not model.model._forward_hooks


# Objectives


def test_medusas_loss_is_the_papers(target):
    texts = [*samples(2, 12, prompt=3), *samples(1, 7, seed=1)]
    objective = MedusaObjective.new(target, num_heads=3, decay=0.7)
    with torch.no_grad():
        for parameter in objective.network.parameters():
            parameter.normal_(std=0.2)
    labels = torch.randint(VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(2))
    batch = batch_of(target, texts, labels=labels)
    result = objective(batch)
    expected = 0.0
    for head in range(3):
        losses = []
        for row, text in enumerate(texts):
            for t in range(len(text.tokens)):
                place = t + head + 2  # the target's own guess is t + 1
                if place < len(text.tokens) and text.loss_mask[place]:
                    logits = objective.network(batch.hidden[row, t][None])[0, head]
                    losses.append(-logits.log_softmax(-1)[labels[row, place]])
        mean = sum(losses) / len(losses)
        torch.testing.assert_close(result[f"head_{head + 1}"], mean.detach(), atol=1e-4, rtol=1e-4)
        expected += 0.7 ** (head + 1) * mean
    torch.testing.assert_close(result["loss"], expected, atol=1e-4, rtol=1e-4)


def test_draft_models_learn_labels_and_the_targets_law(target):
    texts = [*samples(2, 9, prompt=4), *samples(1, 8, seed=1)]
    batch = batch_of(target, texts)
    objective = DraftModelObjective.new(
        target, lm_weight=0.5, teacher_weight=2.0, hidden_size=32, num_attention_heads=2
    )
    result = objective(batch)
    guesses = objective.network(batch.tokens).logits.log_softmax(-1)
    places = [(b, t) for b, text in enumerate(texts) for t in range(1, len(text.tokens)) if text.loss_mask[t]]
    lm = -sum(guesses[b, t - 1, batch.tokens[b, t]] for b, t in places) / len(places)
    law = batch.scores.logits.softmax(-1)
    teacher = -sum(law[b, t - 1] @ guesses[b, t - 1] for b, t in places) / len(places)
    torch.testing.assert_close(result["loss"], 0.5 * lm + 2 * teacher)
    torch.testing.assert_close(result["teacher"], teacher.detach())
    with pytest.raises(TypeError, match="sizes: LlamaConfig has no such field"):
        DraftModelObjective.new(target, sizes=3)


def test_a_trained_draft_model_is_fine_tuned_and_a_new_one_trained_from_scratch(target, tmp_path):
    """Multi-candidate decoding, section 5: draft models are tuned as Vicuna was, at a fiftieth of the rate."""
    new = DraftModelObjective.new(target, hidden_size=32, num_attention_heads=2)
    new.network.save_pretrained(tmp_path)
    tuned = DraftModelObjective.new(target, model=str(tmp_path))
    assert torch.equal(tuned.network.lm_head.weight, new.network.lm_head.weight)
    assert (new.recipe.learning_rate, new.recipe.weight_decay) == (1e-3, 0.1)
    assert (tuned.recipe.learning_rate, tuned.recipe.weight_decay) == (2e-5, 0.0)
    assert (tuned.recipe.epochs, tuned.recipe.batch_size, tuned.recipe.warmup_ratio) == (3, 128, 0.03)
    with pytest.raises(TypeError, match="hidden_size: expected no sizes beside model"):
        DraftModelObjective.new(target, model=str(tmp_path), hidden_size=32)


@pytest.mark.parametrize("kind", TRAINABLE_KINDS)
def test_every_kind_trains_measures_tau_and_loads(kind, target, tmp_path):
    settings = TAPS.get(kind, {})
    probe = TauProbe(num_prompts=2, prompt_tokens=4, new_tokens=6)
    frozen = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    run = replace(SMALL, steps=2, eval_every=1)
    report = train(target, tmp_path, kind=kind, settings=settings, probe=probe, run=run, tree=(2, 1))
    assert report["tau"] >= 1.0
    assert 0 <= report["acceptance_1"] <= 1
    assert math.isfinite(report["held_out_loss"])
    drafter = specdec.load_drafter(tmp_path / "out", target)
    assert (drafter.kind, drafter.shape) == (kind, specdec.TreeShape.from_k_config((2, 1)))
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in target.model.state_dict().items())
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (record["kind"], record["report"]) == (kind, report)
    assert "<polyline" in (tmp_path / "out" / "curves.svg").read_text()
    assert not (tmp_path / "work").exists()


def test_the_draft_vocabulary_is_made_of_the_most_frequent_tokens(target, tmp_path):
    frequent = [Sample(torch.tensor([5, 9, 70, 5, 9, 70, 5, 9, 70, 11]), torch.ones(10, dtype=torch.bool))] * 6
    settings = {"tap_layers": (0, 1, 2), "draft_vocab_size": 4}
    train(target, tmp_path, kind="eagle3", settings=settings, data=frequent, run=replace(SMALL, steps=1), tree=(2, 1))
    network = specdec.load_drafter(tmp_path / "out", target).network
    assert network.t2d.nonzero().flatten().tolist() == [5, 9, 11, 70]


# Runs


def test_labels_of_the_target_are_its_own_choice(target, tmp_path, monkeypatch):
    seen = []
    forward = MedusaObjective.forward
    monkeypatch.setattr(MedusaObjective, "forward", lambda self, batch: seen.append(batch) or forward(self, batch))
    for labels in ("text", "target"):
        seen.clear()
        train(target, tmp_path / labels, labels=labels, run=replace(SMALL, steps=2))
        for batch in seen:
            wanted = target.read(batch.tokens).logits.argmax(-1)[:, :-1] if labels == "target" else batch.tokens[:, 1:]
            assert torch.equal(batch.labels[:, 1:], wanted)
        assert [batch.progress for batch in seen] == [0.0, 0.5, 1.0]


def test_measuring_tau_changes_nothing(target, tmp_path):
    train(target, tmp_path / "without")
    train(target, tmp_path / "with", probe=TauProbe(num_prompts=2, prompt_tokens=4, new_tokens=4))
    assert weights(tmp_path / "with") == weights(tmp_path / "without")


def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(target, tmp_path, monkeypatch):
    whole = train(target, tmp_path / "whole")
    step = trainer.RecipeTrainer.training_step

    def killed_at_5(self, *args, **kwargs):
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.RecipeTrainer, "training_step", killed_at_5)
        with pytest.raises(KeyboardInterrupt):
            train(target, tmp_path / "killed")
    assert not (tmp_path / "killed" / "out").exists()
    assert last_checkpoint(tmp_path / "killed" / "work").name == "checkpoint-4"
    with pytest.raises(ValueError, match="work_dir: expected one without a run, .* resume goes on"):
        train(target, tmp_path / "killed")
    with pytest.raises(ValueError, match="resume: expected the run that .* holds, got another labels .*, recipe.lear"):
        train(target, tmp_path / "killed", resume=True, labels="target", run=replace(SMALL, learning_rate=1.0))

    # a checkpoint that the crash left unfinished is passed over
    unfinished = tmp_path / "killed" / "work" / "checkpoint-6"
    shutil.copytree(tmp_path / "killed" / "work" / "checkpoint-4", unfinished)
    (unfinished / "complete").unlink()
    (unfinished / "model.safetensors").write_bytes(b"half")
    resumed = train(target, tmp_path / "killed", resume=True)
    assert resumed == pytest.approx(whole, rel=1e-6)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    curves = [(tmp_path / run / "out" / "curves.svg").read_text() for run in ("killed", "whole")]
    assert curves[0] == curves[1], "the curve of a resumed run is whole"


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(where, target, tmp_path, monkeypatch):
    forward = MedusaObjective.forward
    calls = []

    def spoilt(self, batch):
        calls.append(self.training)
        result = forward(self, batch)
        if calls.count(True) == 4:
            factor = torch.tensor(float("nan"))
            # infinite slope at zero: the loss stays finite, its gradient does not
            extra = (result["loss"] * 0).sqrt() if where == "gradient" else factor
            result = {**result, "loss": result["loss"] + extra}
        return result

    monkeypatch.setattr(MedusaObjective, "forward", spoilt)
    with pytest.raises(NonFiniteLossError, match=rf"{where}: expected .* step 4; the last good checkpoint is .*-2"):
        train(target, tmp_path)
    assert not (tmp_path / "out").exists()
    state = torch.load(last_checkpoint(tmp_path / "work") / "optimizer.pt", weights_only=True)
    assert all(torch.isfinite(entry["exp_avg"]).all() for entry in state["state"].values())


def test_a_full_disk_stops_the_run_with_the_old_results_in_place(target, tmp_path, monkeypatch):
    train(target, tmp_path)
    before = weights(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("specdec.drafting.folder.save_file", full)
        with pytest.raises(OSError, match="No space left"):
            train(target, tmp_path, run=replace(SMALL, seed=1))
    assert weights(tmp_path) == before
    assert last_checkpoint(tmp_path / "work").name == "checkpoint-6"
    train(target, tmp_path, run=replace(SMALL, seed=1), resume=True)
    assert weights(tmp_path) != before

    with monkeypatch.context() as patch:
        patch.setattr("transformers.trainer.Trainer._save_optimizer_and_scheduler", full)
        with pytest.raises(OSError, match="stopped by .*No space left.* no checkpoint was written yet"):
            train(target, tmp_path / "new")


def test_a_folder_of_the_users_is_refused_before_the_training_begins(target, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"output: expected a new or empty folder, .* which holds notes.txt"):
        train_drafter("medusa", target, tmp_path / "no such texts.jsonl", tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "precious"


def test_recipes_reach_the_optimiser(target, tmp_path, monkeypatch):
    linear = {"schedule": "linear", "warmup_ratio": 0.5, "final_lr_ratio": 0.2}
    recipe = Recipe(learning_rate=0.5, betas=(0.7, 0.8), weight_decay=0.3, clip_value=1e-4, **linear)
    monkeypatch.setattr(MedusaObjective, "recipe", recipe)
    groups, gradients = [], []

    def spy(self, args, state, control, **kwargs):
        groups.append([dict(group) for group in kwargs["optimizer"].param_groups])
        gradients.extend(p.grad.abs().max() for p in kwargs["model"].parameters())

    monkeypatch.setattr(trainer._Guard, "on_optimizer_step", spy, raising=False)
    train(target, tmp_path, run=replace(SMALL, learning_rate=None, steps=4, accumulate=2))
    assert [step[0]["lr"] for step in groups] == pytest.approx([0.0, 0.25, 0.5, 0.3])
    assert {group["betas"] for step in groups for group in step} == {(0.7, 0.8)}
    assert {group["weight_decay"] for step in groups for group in step} == {0.3, 0.0}
    assert max(gradients) == pytest.approx(1e-4)


def test_schedules():
    recipe = Recipe(learning_rate=1.0, warmup_ratio=0.2, final_lr_ratio=0.1)
    cosine = [learning_rate_factor(recipe, 10, step) for step in range(11)]
    assert cosine[:3] == [0.0, 0.5, 1.0]
    assert cosine[6] == pytest.approx(0.55)
    assert cosine[10] == pytest.approx(0.1)
    assert learning_rate_factor(replace(recipe, schedule="constant"), 10, 9) == 1.0
    with pytest.raises(ValueError, match="schedule: expected one of cosine, linear, constant, got 'stairs'"):
        learning_rate_factor(replace(recipe, schedule="stairs"), 10, 9)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"kind": "hydro"}, ValueError, "drafter: expected a kind that can be trained .*, got 'hydro'"),
        (
            {"settings": {"num_hats": 2}},
            TypeError,
            "settings: medusa does not take these: .*num_hats.*; it has decay, .*num_heads",
        ),
        ({"labels": "luck"}, ValueError, "labels: expected 'text' or 'target', got 'luck'"),
        ({"data": []}, ValueError, "data: expected at least 2 usable texts"),
        ({"held_out": 1.5}, ValueError, "held_out: expected a part of the texts between 0 and 1"),
        ({"held_out": []}, ValueError, "data: expected texts to train on and to hold out, got 12 and 0"),
        ({"max_length": 9999}, ValueError, "max_length: expected 1 to 256, the target's context"),
    ],
)
def test_bad_arguments_are_named(arguments, error, match, target, tmp_path):
    with pytest.raises(error, match=match):
        train(target, tmp_path, **arguments)


def test_runs_reject_bad_numbers():
    with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
        Run(steps=0)
    with pytest.raises(ValueError, match="learning_rate: expected more than 0, got -1"):
        Run(learning_rate=-1.0)


def test_half_precision_targets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="target: expected float32 or bfloat16 weights"):
        train(build_model("llama").half(), tmp_path)


def test_a_bfloat16_target_trains_in_mixed_precision(tmp_path):
    target = Target(build_model("llama").bfloat16())
    report = train(target, tmp_path, kind="eagle", settings={}, probe=TauProbe(2, 4, 4), tree=(2, 1))
    assert math.isfinite(report["held_out_loss"])
    drafter = specdec.load_drafter(tmp_path / "out", target)
    assert {parameter.dtype for parameter in drafter.network.parameters()} == {torch.bfloat16}
