"""EAGLE's losses: what they compute, what they train, and that training sees what drafting sees."""

import pytest
import torch

from lib.drafter_checks import propose
from lib.eagle_checks import DRAFT_TOKENS, SWITCHES, TAPS, drafter_of, random_network, record_logits
from lib.families import build_model, random_prompts
from lib.objectives import read_by
from specdec.drafters.eagle3 import Eagle3
from specdec.drafting.candidates import Candidates
from specdec.models.target.target import Target
from specdec.training.objectives.eagle import EagleObjective, most_frequent_tokens
from specdec.trees.shape import TreeShape

VARIANTS = {"first": (1, {}), "third": (3, {}), **{name: (3, switches) for name, switches in SWITCHES.items()}}
THIRD = {"version": 3, "tap_layers": TAPS, "draft_tokens": DRAFT_TOKENS}


def make_batch(model, objective, texts, loss_mask=None):
    return read_by(model, texts, loss_mask, tap_layers=objective.tap_layers)


def random_texts(generator, rows=2, length=12):
    return torch.stack(random_prompts(generator, [length] * rows))


def objective_of(model, version, changes=None, **settings):
    """In eval mode, around a network with large random weights."""
    return EagleObjective(random_network(model, version, **(changes or {})), Target(model), **settings).eval()


@torch.no_grad()
@pytest.mark.parametrize(("version", "switches"), VARIANTS.values(), ids=VARIANTS)
def test_training_computes_what_drafting_computes(version, switches, generator):
    """Step i of an unrolled text is what a chain computes when its candidates happen to be the text."""
    model = build_model("llama")
    objective = objective_of(model, version)
    if version == 3:  # with a whole vocabulary, so that any text is a candidate
        objective = objective_of(model, version, {**switches, "draft_vocab_size": None}, num_unrolled=4)
    (text,) = random_prompts(generator, [12])
    steps = record_logits(objective.network, model)
    objective(make_batch(model, objective, text[None]))
    trained = [step.clone() for step in steps]  # one entry per place: all may be learnt
    assert [len(step) for step in trained] == ([10] if version == 1 else [10, 9, 8, 7])

    for last_pair in (0, 3, 6):
        root = last_pair + 1
        wanted = iter(text[root + 1 :].tolist())
        steps.clear()
        drafter = drafter_of(objective.network, TreeShape.chain(len(trained)))

        def follow_text(*_, wanted=wanted):
            return Candidates(torch.tensor([[[next(wanted)]]]))

        propose(drafter, model, text[:root], int(text[root]), follow_text)
        for step, logits in enumerate(steps):
            expected = trained[step][last_pair]
            assert (logits[0, 0] - expected).abs().max() < 1e-4 * expected.abs().max(), (last_pair, step)


@torch.no_grad()
def test_the_loss_of_the_first_version_is_the_papers(generator):
    model = build_model("llama")
    objective = objective_of(model, 1, classification_weight=0.25)
    mask = torch.rand(2, 12, generator=generator) < 0.5
    batch = make_batch(model, objective, random_texts(generator), mask)
    states = record_states(objective.network)
    parts = objective(batch)
    regression, classification = [], []
    for row in range(2):
        for place in range(2, 12):
            if not mask[row, place]:
                continue
            guess, truth = states[0][row, place - 2], batch.hidden[row, place - 1]
            error = (guess - truth).abs()
            regression.append(torch.where(error < 1, error**2 / 2, error - 0.5).mean())
            law = model.lm_head(truth).softmax(-1)
            classification.append(-(law * model.lm_head(guess).softmax(-1).log()).sum())
    torch.testing.assert_close(parts["regression"], torch.stack(regression).mean())
    torch.testing.assert_close(parts["classification"], torch.stack(classification).mean())
    torch.testing.assert_close(parts["loss"], parts["regression"] + 0.25 * parts["classification"])


@torch.no_grad()
def test_the_loss_of_the_third_version_is_the_papers(generator):
    model = build_model("llama")
    objective = objective_of(model, 3, num_unrolled=3, decay=0.7)
    mask = torch.rand(3, 14, generator=generator) < 0.8
    batch = make_batch(model, objective, random_texts(generator, 3, 14), mask)
    states = record_states(objective.network)
    parts = objective(batch)
    total, left_out = 0.0, 0
    for step in range(3):
        losses = []
        for row in range(3):
            for place in range(2 + step, 14):
                target_logits = batch.scores.logits[row, place - 1]
                if not mask[row, place]:
                    continue
                if target_logits.argmax() not in DRAFT_TOKENS:
                    left_out += 1
                    continue
                law = target_logits[DRAFT_TOKENS].softmax(-1)
                guess = objective.network.lm_head(objective.network.lm_states(states[step][row, place - 2 - step]))
                losses.append(-(law * guess.log_softmax(-1)).sum())
        assert losses
        expected = torch.stack(losses).mean()
        torch.testing.assert_close(parts[f"depth_{step + 1}"], expected)
        total = total + 0.7**step * expected
    assert left_out, "every place counted: the draft vocabulary was not seen"
    torch.testing.assert_close(parts["loss"], total)


def record_states(network) -> list[torch.Tensor]:
    """Keep what every run of the network returns."""
    runs = []
    network.register_forward_hook(lambda _, __, states: runs.append(states))
    return runs


@torch.no_grad()
def test_noise_is_for_training_alone(generator):
    model = build_model("llama")
    objective = objective_of(model, 1, noise=0.1)
    batch = make_batch(model, objective, random_texts(generator))
    plain = objective(batch)["loss"]
    assert objective(batch)["loss"] == plain
    read = []
    objective.network.read = lambda features: read.append(features) or features
    objective.train()
    assert objective(batch)["loss"] != plain
    noise = read[0] - batch.hidden[:, :-2]
    assert 0.09 < noise.abs().max() <= 0.1 + 1e-5
    assert abs(noise.mean()) < 0.01
    objective.noise = 0.0
    assert objective(batch)["loss"] == plain


@torch.no_grad()
def test_switches(generator):
    model = build_model("llama")
    texts = random_texts(generator)

    def parts_of(version, **settings):
        objective = objective_of(model, version, **settings)
        return objective(make_batch(model, objective, texts))

    first = parts_of(1, classification_weight=0.0)
    assert first["loss"] == first["regression"]
    assert first["classification"] > 0
    assert parts_of(3).keys() == {"loss", *(f"depth_{depth}" for depth in range(1, 8))}
    assert parts_of(3, num_unrolled=2).keys() == {"loss", "depth_1", "depth_2"}
    once = parts_of(3, num_unrolled=1, decay=0.5)
    assert once["loss"] == once["depth_1"]
    flat = parts_of(3, num_unrolled=2, decay=1.0)
    torch.testing.assert_close(flat["loss"], flat["depth_1"] + flat["depth_2"])


def test_new_networks():
    model = build_model("llama")
    target = Target(model)
    first = EagleObjective.new(target)
    assert first.network.fc.bias is not None
    assert first.tap_layers == ()
    assert EagleObjective.new(target, fc_bias=False).network.fc.bias is None
    assert EagleObjective.new(target, num_key_value_heads=4).network.config.layer.num_key_value_heads == 4
    third = EagleObjective.new(target, **THIRD)
    assert third.tap_layers == TAPS
    assert torch.equal(third.network.target_ids, DRAFT_TOKENS)
    assert torch.equal(third.network.lm_head.weight, model.lm_head.weight[DRAFT_TOKENS])
    random = EagleObjective.new(target, **THIRD, start_from_target=False)
    assert not torch.equal(random.network.lm_head.weight, model.lm_head.weight[DRAFT_TOKENS])
    assert third.network.embed_tokens is None
    own = EagleObjective.new(target, **THIRD, own_embedding=True)
    assert torch.equal(own.network.embed_tokens.weight, model.get_input_embeddings().weight)
    assert EagleObjective.new(target, version=3, tap_layers=(0, 2), shares_lm_head=True).network.lm_head is None
    whole = EagleObjective.new(target, version=3, tap_layers=(0, 2))
    assert not whole.network.has_own_vocabulary
    assert whole.network.fc.in_features == 128
    assert (first.recipe.clip_value, first.recipe.learning_rate) == (0.5, 3e-5)
    assert (third.recipe.clip_value, third.recipe.clip_norm, third.recipe.learning_rate) == (None, 0.5, 5e-5)
    assert isinstance(third.drafter(TreeShape.chain(2)), Eagle3)


def test_the_draft_vocabulary_is_what_occurs_most():
    counts = torch.tensor([0, 5, 2, 5, 9, 2, 2])
    assert most_frequent_tokens(counts, 4).tolist() == [1, 2, 3, 4]
    assert most_frequent_tokens(counts, 1).tolist() == [4]
