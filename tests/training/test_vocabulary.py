"""Laws over candidates in place of the whole vocabulary, and losses at some places of a text."""

from dataclasses import replace

import pytest
import torch

from lib.families import VOCAB_SIZE, build_model
from lib.objectives import OBJECTIVES, new_objective, random_texts, read_by
from specdec.models.target.target import Target
from specdec.training.objectives.recipe import Run
from specdec.training.objectives.vocabulary import Vocabulary, draw_candidates
from specdec.training.step import TrainingStep, some_places

every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def test_candidates_hold_what_is_asked_for_and_stand_for_the_rest():
    always = torch.tensor([5, 900, 5, 17])
    vocabulary = draw_candidates(always, 40, 1000)
    assert len(vocabulary.tokens) == 40 == len(vocabulary.tokens.unique())
    assert set(always.tolist()) <= set(vocabulary.tokens.tolist())
    torch.testing.assert_close(vocabulary.log_weights.exp().sum(), torch.tensor(1000.0))
    assert torch.equal(vocabulary.tokens[vocabulary.labels(always)], always)
    assert (vocabulary.log_weights[vocabulary.labels(always)] == 0).all()


def test_a_quarter_is_drawn_however_much_is_asked_for():
    vocabulary = draw_candidates(torch.arange(50), 40, 1000)
    assert len(vocabulary.tokens) == 60
    assert draw_candidates(torch.arange(50), 60, 64).tokens is None, "as many as there are: the whole vocabulary"


def test_the_normaliser_over_candidates_is_right_on_average():
    generator = torch.Generator().manual_seed(3)
    states, weight = torch.randn(4, 8, generator=generator), torch.randn(600, 8, generator=generator)
    always = (states @ weight.T).topk(20).indices.flatten()
    torch.manual_seed(0)
    sums = [draw_candidates(always, 200, 600).logits(states, weight).exp().sum(-1) for _ in range(300)]
    torch.testing.assert_close(torch.stack(sums).mean(0), (states @ weight.T).exp().sum(-1), rtol=0.01, atol=0)


def test_the_first_choice_knows_no_weights():
    vocabulary = Vocabulary.of(torch.tensor([7, 3]), 10, torch.tensor([0.0, 5.0]))
    logits = vocabulary.logits(torch.eye(2), torch.eye(10, 2).index_fill(0, torch.tensor([7]), 1.0))
    assert vocabulary.first_choice(logits).tolist() == [7, 7]


@every_objective
@torch.no_grad()
def test_all_tokens_as_candidates_change_nothing(name, generator):
    model = build_model("llama")
    objective = new_objective(name, model).eval()
    batch = read_by(model, *random_texts(generator), tap_layers=objective.tap_layers)
    order = torch.randperm(VOCAB_SIZE, generator=generator)
    changed = replace(batch, vocabulary=Vocabulary.of(order, VOCAB_SIZE))
    torch.testing.assert_close(objective(changed)["loss"], objective(batch)["loss"])
    asked = torch.cat((batch.tokens.flatten(), batch.best.flatten()))
    half = replace(batch, vocabulary=draw_candidates(asked, VOCAB_SIZE // 2, VOCAB_SIZE))
    own = ("eagle3", "eagle3, each", "eagle3, own_embedding", "peagle, own vocabulary")
    if name not in own:  # whose draft vocabulary is small already
        assert objective(half)["loss"] != objective(batch)["loss"]


@every_objective
def test_a_step_of_some_places_and_candidates_trains_and_an_evaluation_has_all(name, generator):
    model = build_model("llama")
    tokens, mask = random_texts(generator)
    objective = new_objective(name, model)
    labels = "target" if name == "medusa" else "text"
    # of seven places none may have a label that a small vocabulary of its own has
    num_places = 16 if name == "peagle, own vocabulary" else 7
    run = Run(num_places=num_places, num_candidates=24)
    torch.manual_seed(0)
    step = TrainingStep(objective, Target(model), labels, run, torch.arange(8))
    step(tokens, mask)["loss"].backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in objective.parameters())
    assert all(parameter.grad is None for parameter in model.parameters()), "the target is frozen"
    whole = TrainingStep(objective, Target(model), labels, Run(), torch.arange(8))
    whole(tokens, mask)["loss"].backward()
    assert all(parameter.grad is None for parameter in model.parameters()), "the target is frozen"
    torch.testing.assert_close(step.eval()(tokens, mask)["loss"], whole.eval()(tokens, mask)["loss"])


def test_some_places_are_learnable_ones_and_change():
    mask = torch.zeros(3, 40, dtype=torch.bool)
    mask[0, 10:], mask[1, 5:7] = True, True
    chosen = [some_places(mask, 4) for _ in range(20)]
    assert all((places & ~mask).sum() == 0 for places in chosen)
    assert all(places.sum(1).tolist() == [4, 2, 0] for places in chosen)
    assert torch.stack(chosen).any(0)[0].sum() > 20
