"""What holds for the loss of every kind: it falls, trains the network alone, and reads nothing that it should not."""

import math
from dataclasses import replace

import pytest
import torch

from lib.eagle_checks import DRAFT_TOKENS, TAPS
from lib.families import VOCAB_SIZE, build_model
from lib.objectives import OBJECTIVES, new_objective, random_texts, read_by, said
from specdec.drafters.kinds import DRAFTER_KINDS, KINDS_WITHOUT_WEIGHTS
from specdec.models.target.target import Target
from specdec.training.kinds import TRAINABLE_KINDS, objective_class, training_settings

every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def batch_of(model, objective, generator, **lengths):
    return read_by(model, *random_texts(generator, **lengths), tap_layers=objective.tap_layers)


def lengths_of(name):
    """Lengths of texts with nothing to learn; no text that is read from a file is shorter than 8 tokens."""
    return (2, 6) if name.startswith(("falcon", "parallelspec")) else (1, 2, 6)  # those read pairs


def test_every_kind_with_weights_can_be_trained_and_is_tested_here():
    assert set(TRAINABLE_KINDS) == set(DRAFTER_KINDS) - set(KINDS_WITHOUT_WEIGHTS)
    assert set(TRAINABLE_KINDS) == {kind for kind, _ in OBJECTIVES.values()}


@every_objective
def test_the_loss_falls_and_gradients_reach_the_network_alone(name, generator):
    model = build_model("llama")
    objective = new_objective(name, model)
    network = objective.network
    assert set(objective.parameters()) == set(network.parameters())
    before = {key: parameter.detach().clone() for key, parameter in network.named_parameters()}
    batch = batch_of(model, objective, generator, lengths=(24, 17))
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    losses = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(40):
            optimizer.zero_grad()
            loss = objective(batch)["loss"]
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
    assert losses[-1] < 0.75 * losses[0], losses[::10]  # soft labels leave their entropy
    assert all(parameter.grad is None for parameter in model.parameters())
    for key, parameter in network.named_parameters():
        # an LSTM that starts anew at every token never uses its recurrent weights
        is_used = name != "falcon, not recurrent" or "weight_hh" not in key
        # each mask has its own
        rows = parameter.grad.flatten(1).abs().sum(1) if "mask" in key else parameter.grad.abs().sum()
        assert (rows > 0).all() == is_used, key
        assert torch.equal(parameter, before[key]) != is_used or not is_used, key


@pytest.mark.parametrize(("name", "length"), [(name, length) for name in OBJECTIVES for length in lengths_of(name)])
def test_texts_without_a_place_to_learn_cost_nothing(name, length, generator):
    model = build_model("llama")
    objective = new_objective(name, model)
    # the target itself has guessed the second token, unless the drafter reads no states
    shortest = 2 if name in ("draft_model", "parallelspec, medusa") else 3
    batch = batch_of(model, objective, generator, lengths=(length, length))
    loss = objective(replace(batch, loss_mask=torch.full_like(batch.loss_mask, length < shortest)))["loss"]
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in objective.parameters() if parameter.grad is not None)


@every_objective
@torch.no_grad()
def test_padding_and_places_that_are_not_learnt_do_not_matter(name, generator):
    model = build_model("llama")
    objective = new_objective(name, model).eval()
    batch = batch_of(model, objective, generator)
    before = objective(batch)["loss"]
    assert objective(batch)["loss"] == before, "what is random is for training alone"
    parts = (batch.tokens, batch.labels, batch.hidden, batch.scores.logits)
    tokens, labels, hidden, logits = (part.clone() for part in parts)
    tokens[1, 9:], labels[1, 9:], labels[0, :3] = 5, 6, 7
    hidden[1, 9:], logits[1, 9:] = 3.0, 1.0
    taps = tuple(tap.clone() for tap in batch.taps)
    for tap in taps:
        tap[1, 9:] = 2.0
    changed = replace(batch, tokens=tokens, labels=labels, hidden=hidden, taps=taps, **said(logits))
    torch.testing.assert_close(objective(changed)["loss"], before)
    labels[0, 5:] = labels[0, 5:].flip(0)
    logits[0, 4:] = logits[0, 4:].flip(0)
    changed = replace(changed, **said(logits))
    assert not torch.isclose(objective(changed)["loss"], before, rtol=1e-4)


@every_objective
def test_networks_are_trained_in_float32_whatever_the_target_is(name, generator):
    model = build_model("llama").bfloat16()
    objective = new_objective(name, model)
    assert {parameter.dtype for parameter in objective.parameters()} == {torch.float32}
    loss = objective(batch_of(model, objective, generator))["loss"]
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)


THIRD = {"version": 3, "tap_layers": TAPS, "draft_tokens": DRAFT_TOKENS}
BLOCK = {"tap_layers": (0, 1), "block_size": 4}
DECAY, WIDTH = (
    "decay: expected more than 0 and at most 1, got",
    "drafter: expected hidden_size 64 as the target's, got 32",
)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("draft_model", {"lm_weight": -1.0}, "lm_weight: expected at least 0, got -1.0"),
        ("draft_model", {"lm_weight": 0.0}, "lm_weight, teacher_weight: expected one above 0, got 0 and 0"),
        ("medusa", {"decay": 1.5}, f"{DECAY} 1.5"),
        ("eagle", {"noise": -1.0}, "noise: expected at least 0, got -1.0"),
        ("eagle", {"classification_weight": -0.1}, "classification_weight: expected at least 0"),
        ("eagle", {"num_unrolled": 0}, "num_unrolled: expected at least 1, got 0"),
        ("eagle", {"decay": 1.5}, f"{DECAY} 1.5"),
        ("eagle", {"num_unrolled": 2}, r"num_unrolled: expected nothing but 7 with version 1, .* got 2"),
        ("eagle", {**THIRD, "noise": 0.0}, "noise: expected nothing but 0.1 with version 3"),
        ("eagle", {"version": 3}, "tap_layers: expected the setting with a target of 3 layers"),
        ("eagle", {"hidden_size": 32}, WIDTH),
        ("eagle", {**THIRD, "draft_tokens": None, "draft_vocab_size": 8}, "draft_tokens: expected the ids of 8"),
        ("eagle", {**THIRD, "draft_tokens": [1, 2, 2]}, r"draft_tokens: expected 3 distinct ids .* \(2 distinct\)"),
        ("eagle", {**THIRD, "draft_tokens": [1, VOCAB_SIZE]}, "draft_tokens: expected 2 distinct ids below 96"),
        ("eagle", {**THIRD, "draft_tokens": [1, 2], "draft_vocab_size": 3}, "draft_tokens: expected 3 .* got 2"),
        ("eagle", {**THIRD, "draft_tokens": range(VOCAB_SIZE)}, "draft_tokens: expected None without a draft voc"),
        ("eagle", {"draft_tokens": [1, 2]}, "version: expected 3 with tap_layers or a draft vocabulary"),
        ("amphista", {"alignment_weight": -1.0}, "alignment_weight: expected at least 0, got -1"),
        ("amphista", {"lm_weight": math.nan}, "lm_weight: expected at least 0, got nan"),
        ("amphista", {"alignment_weight": 0.0, "lm_weight": 0.0}, "expected one above 0, got 0 and 0"),
        ("parallelspec", {"decay": 0.0}, f"{DECAY} 0.0"),
        ("parallelspec", {"decay": 1.5}, f"{DECAY} 1.5"),
        ("parallelspec", {"classification_weight": -1.0}, "classification_weight: expected at least 0, got -1.0"),
        ("parallelspec", {"noise": -0.1}, "noise: expected at least 0, got -0.1"),
        ("parallelspec", {"num_groups": 0}, "num_groups: expected at least 1, got 0"),
        (
            "parallelspec",
            {"variant": "medusa", "soft_labels": True},
            "soft_labels: expected nothing but False with the",
        ),
        (
            "parallelspec",
            {"variant": "medusa", "noise": 0.0},
            "noise: expected nothing but 0.1 with the medusa variant",
        ),
        (
            "parallelspec",
            {"variant": "medusa", "mask_feature": "trained"},
            "mask_feature: expected 'last' in the medusa",
        ),
        ("parallelspec", {"hidden_size": 32}, WIDTH),
        ("falcon", {"block_size": 0}, "block_size: expected 1 to 32, got 0"),
        ("falcon", {"vocab_size": 0}, "vocab_size: expected at least 1, got 0"),
        ("falcon", {"lstm_dropout": 1.0}, "lstm_dropout: expected at least 0 and below 1, got 1.0"),
        ("falcon", {"glance_ratio": 1.5}, "glance_ratio: expected 0 to 1, got 1.5"),
        ("falcon", {"soft_weight": -1.0}, "soft_weight: expected 0 to 1, got -1.0"),
        ("falcon", {"noise": -0.1}, "noise: expected at least 0, got -0.1"),
        ("falcon", {"distillation_weight": math.nan}, "distillation_weight: expected at least 0, got nan"),
        ("mtp", {"num_layers": 2}, "num_layers: expected 1 to train, .* got 2"),
        ("mtp", {"num_unrolled": 0}, "num_unrolled: expected at least 1, got 0"),
        ("mtp", {"decay": 0.0}, "decay: expected more than 0"),
        ("mtp", {"teacher_weight": 1.5}, "teacher_weight: expected 0 to 1, got 1.5"),
        ("mtp", {"family": {"model_type": "glm4_moe"}}, "family: expected None for a new network"),
        ("mtp", {"hidden_size": 32}, WIDTH),
        ("dflash", {**BLOCK, "gamma": 0.0}, "gamma: expected more than 0, got 0.0"),
        ("dflash", {**BLOCK, "num_anchors": 0}, "num_anchors: expected at least 1, got 0"),
        ("dflash", {**BLOCK, "distance_weight": -1.0}, "distance_weight: expected at least 0, got -1.0"),
        ("dflash", {**BLOCK, "cross_entropy_weight": 0.0}, "expected one above 0, got 0 and 0"),
        ("dflash", {**BLOCK, "draft_vocab_size": 8, "shares_lm_head": False}, "draft_vocab_size: expected None, .* 8"),
        ("dflash", {**BLOCK, "hidden_size": 32}, WIDTH),
        ("peagle", {"tap_layers": TAPS, "keep_ratio": 0.0}, "keep_ratio: expected more than 0 and at most 1, got 0.0"),
        ("peagle", {"tap_layers": TAPS, "least_share": 1.5}, "least_share: expected more than 0 and at most 1, got"),
        ("dspark", {**BLOCK, "confidence_weight": -1.0}, "confidence_weight: expected at least 0, got -1.0"),
    ],
)
def test_bad_settings_are_named(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        objective_class(kind).new(Target(build_model("llama")), **settings)


@pytest.mark.parametrize("kind", TRAINABLE_KINDS)
def test_settings_that_do_not_exist_are_named(kind):
    settings = {**training_settings(kind), **dict(OBJECTIVES.values())[kind]}
    with pytest.raises(TypeError, match="no_such_setting"):
        objective_class(kind).new(Target(build_model("llama")), **settings, no_such_setting=1)
