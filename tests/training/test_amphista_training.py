"""Amphista's training: the loss is the paper's, on what drafting computes, and reaches the network alone."""

from dataclasses import replace

import pytest
import torch

from lib.amphista_cases import CONFIG, VARIANTS, drafted_logits, random_network
from lib.families import build_model, random_prompts
from lib.objectives import random_texts, read_by
from specdec.loop.decoder import Decoder
from specdec.models.target.target import Target
from specdec.training.objectives.amphista import AmphistaObjective
from specdec.trees.shape import TreeShape


def objective_around(network, model, **weights):
    return AmphistaObjective(network, Target(model), **weights)


@torch.no_grad()
@pytest.mark.parametrize("name", ["amphista", "alpha", "one adaptation layer", "no sampled token"])
def test_training_sees_what_drafting_computes(name, generator):
    model, network = build_model("llama"), random_network(VARIANTS[name])
    batch = read_by(model, *random_texts(generator))
    everywhere = torch.ones_like(batch.loss_mask)
    states = objective_around(network, model)._states(batch, everywhere).unflatten(0, everywhere.shape)
    for row, length in enumerate((14, 9)):
        for t in range(length - 1):
            got = network.lm_heads(slice(None)).logits(states[row, t][None])[0]
            text, root = batch.tokens[row, : t + 1], int(batch.tokens[row, t + 1])
            torch.testing.assert_close(got, drafted_logits(network, model, text, root), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_the_loss_is_the_papers(generator):
    model, network = build_model("llama"), random_network(CONFIG)
    batch = read_by(model, *random_texts(generator))
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
                p = batch.scores.logits[row, place - 1].softmax(-1)  # the target's, of the token at `place`
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


def test_a_trained_drafter_is_accepted(generator):
    """Heads that have learnt what the target says of a text propose just that when it says it again."""
    model = build_model("llama")
    prompt = random_prompts(generator, [4])[0]
    written = Decoder(model).decode([prompt], 24).tokens[0]
    text = torch.cat((prompt, torch.tensor(written)))[None]
    batch = read_by(model, text)
    torch.manual_seed(0)
    objective = AmphistaObjective.new(Target(model), alignment_weight=0.0)
    optimiser = torch.optim.AdamW(objective.parameters(), lr=3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        objective(batch)["loss"].backward()
        optimiser.step()
    drafter = objective.drafter(TreeShape.chain(4))
    result = Decoder(model, drafter).decode([prompt], 21)
    assert result.tokens[0] == written[:21]
    assert result.stats.num_emitted == [[5, 5, 5, 5]]
