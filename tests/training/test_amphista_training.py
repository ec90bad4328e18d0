"""Amphista's training: the loss is the paper's, on what drafting computes, and reaches the network alone."""

from dataclasses import replace

import pytest
import torch

from lib.amphista_cases import CONFIG, VARIANTS, drafted_logits, random_network
from lib.families import build_model, random_prompts
from specdec.loop.decoder import Decoder
from specdec.models.target.target import Target
from specdec.training.objectives.amphista import AmphistaObjective
from specdec.training.objectives.base import TrainingBatch
from specdec.trees.shape import TreeShape


@torch.no_grad()
def training_batch(model, generator, lengths=(14, 9), first_learnt=3):
    prompts = random_prompts(generator, list(lengths))
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        mask[row, first_learnt : len(prompt)] = True
    hidden = model.get_decoder()(tokens).last_hidden_state
    return TrainingBatch(tokens, tokens, mask, hidden, model(tokens).logits)


def objective_around(network, model, **weights):
    return AmphistaObjective(network, Target(model), **weights)


@torch.no_grad()
@pytest.mark.parametrize("name", ["amphista", "alpha", "one adaptation layer", "no sampled token"])
def test_training_sees_what_drafting_computes(name, generator):
    model, network = build_model("llama"), random_network(VARIANTS[name])
    batch = training_batch(model, generator)
    states = objective_around(network, model)._states(batch)
    for row, length in enumerate((14, 9)):
        for t in range(length - 1):
            got = network.logits(states[row, t][None], slice(None))[0]
            text, root = batch.tokens[row, : t + 1], int(batch.tokens[row, t + 1])
            torch.testing.assert_close(got, drafted_logits(network, model, text, root), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_the_loss_is_the_papers(generator):
    model, network = build_model("llama"), random_network(CONFIG)
    batch = training_batch(model, generator)
    labels = batch.labels.roll(1, 1)  # what is read and what is learnt need not be the same
    batch = replace(batch, labels=labels)
    alignment, lm = [], []
    for k in range(1, 5):
        terms = []
        for row, length in enumerate((14, 9)):
            for t in range(length):
                place = t + 1 + k
                if not 3 <= place < length:
                    continue
                root = int(batch.tokens[row, t + 1])
                log_q = drafted_logits(network, model, batch.tokens[row, : t + 1], root)[k - 1].log_softmax(-1)
                p = batch.logits[row, place - 1].softmax(-1)  # the target's, of the token at `place`
                terms.append((-(p * log_q).sum(), -log_q[labels[row, place]]))
        alignment.append(sum(a for a, _ in terms) / len(terms))
        lm.append(sum(b for _, b in terms) / len(terms))
    result = objective_around(network, model, alignment_weight=0.7, lm_weight=0.2)(batch)
    expected = {"alignment": sum(alignment) / 4, "lm": sum(lm) / 4}
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-4)
    total = 0.7 * expected["alignment"] + 0.2 * expected["lm"]
    torch.testing.assert_close(result["loss"], total, rtol=1e-4, atol=1e-4)
    assert {f"accuracy_{k}" for k in range(1, 5)} <= set(result)
    assert all(value.ndim == 0 for value in result.values())


@pytest.mark.parametrize("name", ["amphista", "alpha", "low rank", "no staged adaptation", "no auto-embedding"])
def test_the_loss_falls_and_gradients_reach_the_network_alone(name, generator):
    model = build_model("llama")
    batch = training_batch(model, generator)
    variant = VARIANTS[name]
    settings = {
        field: getattr(variant, field)
        for field in ("num_heads", "adaptation_layers", "auto_embedding", "block_layers", "head_rank")
    }
    objective = AmphistaObjective.new(Target(model), **settings)
    assert {n.removeprefix("network.") for n, _ in objective.named_parameters()} == set(objective.network.state_dict())
    optimiser = torch.optim.AdamW(objective.parameters(), lr=1e-2, betas=objective.recipe.betas)
    before = {n: p.detach().clone() for n, p in objective.named_parameters()}
    losses = []
    for _ in range(30):
        loss = objective(batch)["loss"]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
    for parameter_name, parameter in objective.named_parameters():
        assert parameter.grad.abs().max() > 0, parameter_name
        assert not torch.equal(parameter, before[parameter_name]), parameter_name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_trained_drafter_is_accepted(generator):
    """Heads that have learnt what the target says of a text propose just that when it says it again."""
    model = build_model("llama")
    prompt = random_prompts(generator, [4])[0]
    said = Decoder(model).decode([prompt], 24).tokens[0]
    text = torch.cat((prompt, torch.tensor(said)))[None]
    with torch.no_grad():
        hidden = model.model(text).last_hidden_state
        batch = TrainingBatch(text, text, torch.ones_like(text, dtype=torch.bool), hidden, model(text).logits)
    torch.manual_seed(0)
    objective = AmphistaObjective.new(Target(model), alignment_weight=0.0)
    optimiser = torch.optim.AdamW(objective.parameters(), lr=3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        objective(batch)["loss"].backward()
        optimiser.step()
    drafter = objective.drafter(TreeShape.chain(4))
    result = Decoder(model, drafter).decode([prompt], 21)
    assert result.tokens[0] == said[:21]
    assert result.stats.num_emitted == [[5, 5, 5, 5]]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_texts_too_short_for_the_heads_cost_nothing(length, generator):
    model = build_model("llama")
    objective = AmphistaObjective.new(Target(model))
    result = objective(training_batch(model, generator, lengths=(length,), first_learnt=5))
    assert float(result["loss"].detach()) == 0
    result["loss"].backward()


def test_the_target_may_be_in_another_dtype(generator):
    model = build_model("llama").bfloat16()
    objective = AmphistaObjective.new(Target(model))
    assert objective.network.lm_head.dtype == torch.float32
    loss = objective(training_batch(model, generator))["loss"]
    loss.backward()
    assert torch.isfinite(loss)


def test_bad_settings_of_training():
    target = Target(build_model("llama"))
    with pytest.raises(TypeError, match="rank_of_heads"):
        AmphistaObjective.new(target, rank_of_heads=3)
    with pytest.raises(ValueError, match="alignment_weight: expected at least 0, got -1"):
        AmphistaObjective.new(target, alignment_weight=-1.0)
    with pytest.raises(ValueError, match="lm_weight: expected at least 0, got nan"):
        AmphistaObjective.new(target, lm_weight=float("nan"))
    with pytest.raises(ValueError, match="expected one above 0, got 0 and 0"):
        AmphistaObjective.new(target, alignment_weight=0.0, lm_weight=0.0)
