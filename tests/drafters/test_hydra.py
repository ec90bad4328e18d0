"""Hydra and Hydra++: drafting against the paper's equations written out, checkpoints, training."""

import math
from dataclasses import replace

import pytest
import torch

from lib.drafter_checks import Nudged, propose
from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model, random_prompts
from lib.hydra_equations import CONFIGS, LAYER, literal_head, literal_state, literal_tokens, random_network
from lib.tensors import assert_near
from specdec.drafters.hydra import Hydra
from specdec.drafting.candidates import Candidates
from specdec.loop.decoder import Decoder
from specdec.models.networks.hydra import HydraConfig, HydraNetwork
from specdec.models.networks.layer import DraftLayerConfig, Rotary
from specdec.models.target.scores import Scores
from specdec.models.target.target import Target
from specdec.training.objectives.base import TrainingBatch
from specdec.training.objectives.hydra import HydraObjective, HydraPlusPlusObjective
from specdec.trees.shape import TreeShape

SHAPES = {
    "chain": TreeShape.chain(3),
    "k_config": TreeShape.from_k_config((3, 2, 2)),
    "leaves at every depth": TreeShape.from_paths([[0], [1], [3], [0, 0], [0, 2], [3, 0], [0, 0, 0], [3, 0, 1]]),
}


class Scripted:
    """Proposes given tokens in turn, whatever the logits are, and keeps the logits."""

    def __init__(self, tokens=()):
        self.tokens, self.logits = iter(tokens), []

    def __call__(self, logits, num_ranks):
        self.logits.append(logits)
        best = logits.topk(num_ranks, dim=-1).indices
        return (
            Candidates(best, logits) if (forced := next(self.tokens, None)) is None else Candidates(best * 0 + forced)
        )


# Drafting


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_node_is_what_the_equations_say(kind, generator):
    model, shape = build_model("llama"), SHAPES["leaves at every depth"]
    prompts = random_prompts(generator, [1, 4, 13])
    plain = Decoder(model).decode(prompts, 10).tokens
    network = random_network(CONFIGS[kind])
    nudged = Nudged(Hydra(network, shape), plain, prompts)
    assert Decoder(model, nudged).decode(prompts, 10).stats.tau > 1.3
    for draft in [draft for drafts in nudged.drafts for draft in drafts]:
        assert draft.tokens == literal_tokens(network, model, draft.text, draft.root, shape)


@torch.no_grad()
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_kernel_agrees_with_what_training_computes(kind, monkeypatch, generator):
    network = random_network(CONFIGS[kind])
    parts = [torch.randn(2, 3, HIDDEN_SIZE, generator=generator) for _ in range(4)]
    with torch.enable_grad():
        trained = network.states(2, parts)
    assert_near(network.states(2, parts), trained)
    monkeypatch.setenv("SPECDEC_BACKEND", "triton")
    assert_near(network.states(2, parts), trained)


def test_positions_stay_exact_in_half_precision():
    # rounded to bfloat16, the second frequency would be off by half a turn at position 3000
    positions, like = torch.tensor([[3000]]), torch.zeros(1)
    rotary = Rotary(replace(LAYER, head_dim=32))
    expected = rotary(like, positions)
    for moved in (rotary.to(torch.bfloat16), rotary.half().float()):
        torch.testing.assert_close(moved(like, positions), expected, rtol=0, atol=0)


def test_kind_and_default_tree_follow_from_the_network():
    assert Hydra.kind == "hydra"
    for name, config in CONFIGS.items():
        drafter = Hydra(HydraNetwork(config), TreeShape.chain(2))
        assert drafter.kind == ("hydra++" if name == "hydra++" else "hydra")
        assert Hydra.default_tree(config).num_nodes_per_depth == (1, 10, 28, 23)
    assert Hydra.default_tree(replace(config, num_heads=5)) == TreeShape.preset("hydra/mc_sim_7b_63")


# Configuration and files


def test_presets_take_the_sizes_of_the_target():
    config = build_model("llama").config
    assert HydraConfig.for_target(config) == HydraConfig(HIDDEN_SIZE, VOCAB_SIZE)
    plus_plus = HydraConfig.plus_plus(config, num_heads=2)
    assert plus_plus.prefix == DraftLayerConfig.like(config)
    assert (plus_plus.num_heads, plus_plus.num_layers, plus_plus.dropout) == (2, 4, 0.2)
    assert not HydraConfig.plus_plus(config, prefix_attention=False).prefix_attention
    blocks = HydraNetwork(replace(CONFIGS["shared tail"], shared_tail=False)).heads[0].blocks
    assert (len(blocks), len(HydraNetwork(CONFIGS["shared tail"]).heads[0].blocks)) == (4, 2)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("num_layers", 0, "num_layers: expected at least 1, got 0"),
        ("num_heads", 16, "num_heads: expected at most 15, got 16"),
        ("dropout", 1.0, "dropout: expected 0 up to, not including, 1, got 1.0"),
        ("prefix", replace(LAYER, hidden_size=8), "prefix: expected a layer of hidden size 64, got 8"),
    ],
)
def test_impossible_sizes_are_refused(field, value, match):
    with pytest.raises(ValueError, match=match):
        replace(CONFIGS["hydra"], **{field: value})


# Training


def make_batch(model, generator, batch_size=3, length=11):
    """Random text, with labels and places to learn that are not simply the text."""
    tokens = torch.randint(1, VOCAB_SIZE, (batch_size, length), generator=generator)
    labels = torch.randint(1, VOCAB_SIZE, (batch_size, length), generator=generator)
    mask = torch.rand(batch_size, length, generator=generator) < 0.7
    with torch.no_grad():
        output = model(tokens, output_hidden_states=True)
    return TrainingBatch(tokens, labels, mask, Scores.of(output.logits), output.hidden_states[-1])


OBJECTIVES = {"hydra": HydraObjective, "hydra++": HydraPlusPlusObjective}


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.5, 2.0)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_is_the_papers(kind, weights, generator):
    model, network = build_model("llama"), random_network(CONFIGS[kind])
    batch = make_batch(model, generator)
    embed, tensors = model.get_input_embeddings().weight.detach(), network.state_dict()
    expected = {"lm": 0.0, "teacher": 0.0}
    for head in range(3):
        losses = []
        for row, tokens in enumerate(batch.tokens):
            for place in range(head + 2, len(tokens)):
                if batch.loss_mask[row, place]:
                    last = place - head - 2  # the last token that the target has read
                    state = literal_state(network, model, tokens[: last + 1])
                    logits = literal_head(tensors, network.config, head, state, embed[tokens[last + 1 : place]])
                    law = batch.scores.logits[row, place - 1].softmax(0)
                    minus_log = -logits.log_softmax(0)
                    losses.append((minus_log[batch.labels[row, place]], law @ minus_log))
        for name, loss in zip(expected, torch.tensor(losses).mean(0), strict=True):
            expected[name] += loss
    objective = HydraObjective(network, Target(model), lm_weight=weights[0], teacher_weight=weights[1]).eval()
    got = objective(batch)
    assert set(got) == {"loss"} | {name for name, weight in zip(expected, weights, strict=True) if weight}
    total = sum(weight * loss for weight, loss in zip(weights, expected.values(), strict=True))
    torch.testing.assert_close(got["loss"], total, rtol=1e-4, atol=1e-4)
    for name in set(got) - {"loss"}:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", CONFIGS)
def test_training_sees_the_logits_that_drafting_computes(kind, monkeypatch, generator):
    model, network = build_model("llama"), random_network(CONFIGS[kind])
    batch = make_batch(model, generator, batch_size=1)
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    objective = HydraObjective(network, Target(model)).eval()
    trained, logits_of = [], objective.logits
    monkeypatch.setattr(objective, "logits", lambda *args: trained.append(logits_of(*args)) or trained[-1])
    objective(batch)
    tokens = batch.tokens[0]
    for last in (0, 4, len(tokens) - 5):
        drafted = Scripted(tokens[last + 2 :].tolist())
        propose(Hydra(network, TreeShape.chain(3)), model, tokens[: last + 1], int(tokens[last + 1]), choose=drafted)
        for logits, of_head in zip(drafted.logits, trained, strict=True):
            torch.testing.assert_close(logits[0, 0], of_head[last], rtol=1e-4, atol=1e-4)


def test_an_untrained_network_starts_from_the_targets_lm_head():
    for family in ("llama", "llama3"):
        model = build_model(family)
        heads = HydraObjective.new(Target(model), num_heads=2, num_layers=3).network.heads
        for head in heads:
            assert torch.equal(head.lm_head.weight, model.get_output_embeddings().weight)
            assert not head.lm_head.bias.any()
            assert not any(block.linear.weight.any() for block in head.blocks)


def test_defaults_are_those_of_each_method():
    target = Target(build_model("llama"))
    hydra, plus_plus = HydraObjective.new(target), HydraPlusPlusObjective.new(target)
    assert (hydra.lm_weight, hydra.teacher_weight, hydra.recipe.epochs) == (1.0, 0.0, 1)
    assert (plus_plus.lm_weight, plus_plus.teacher_weight, plus_plus.recipe.epochs) == (0.0, 1.0, 10)
    assert (hydra.network.config.num_layers, hydra.network.config.prefix_attention) == (1, False)
    assert plus_plus.network.config == HydraConfig.plus_plus(target.model.config)
    assert hydra.recipe.learning_rate == plus_plus.recipe.learning_rate == 1e-3
    ablation = HydraPlusPlusObjective.new(target, prefix_attention=False, lm_weight=1.0, teacher_weight=0.0)
    assert ablation.drafter().kind == "hydra"
    assert ablation.lm_weight == 1.0


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_noise_and_dropout_are_for_training_alone(kind, monkeypatch, generator):
    model = build_model("llama")
    objective = OBJECTIVES[kind].new(Target(model), noise_alpha=75.0, dropout=0.0)
    batch = make_batch(model, generator)
    read, encode = [], objective.network.encode
    monkeypatch.setattr(objective.network, "encode", lambda hidden, *rest: read.append(hidden) or encode(hidden, *rest))
    first, second = objective(batch)["loss"], objective(batch)["loss"]
    assert first != second
    bound = 75 / math.sqrt(batch.hidden[0].numel())
    noise = read[0] - batch.hidden
    assert 0.99 * bound < noise.abs().max() < 1.001 * bound
    assert abs(float(noise.mean())) < 0.1 * bound
    objective.eval()
    assert objective(batch)["loss"] == objective(batch)["loss"]
    assert torch.equal(read[-1], batch.hidden)
    dropping = OBJECTIVES[kind].new(Target(model), dropout=0.5)
    assert dropping(batch)["loss"] != dropping(batch)["loss"]
    dropping.eval()
    assert dropping(batch)["loss"] == dropping(batch)["loss"]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_texts_too_short_for_a_head_count_for_the_others(length, generator):
    model, network = build_model("llama"), random_network(CONFIGS["hydra++"])
    batch = make_batch(model, generator, length=length)
    objective = HydraPlusPlusObjective(network, Target(model))
    loss = objective(replace(batch, loss_mask=torch.ones_like(batch.loss_mask)))["loss"]
    loss.backward()
    assert torch.isfinite(loss)
    assert (loss > 0) == (length > 2)
    assert objective(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)))["loss"] == 0


def test_settings_that_do_not_exist_or_make_no_sense_are_refused():
    target = Target(build_model("llama"))
    for settings, error, match in (
        ({"num_head": 3}, TypeError, "num_head"),
        ({"lm_weight": 0.0}, ValueError, "teacher_weight: expected more than 0 when lm_weight is 0, got 0"),
        ({"noise_alpha": -1.0}, ValueError, "noise_alpha: expected at least 0, got -1.0"),
    ):
        with pytest.raises(error, match=match):
            HydraObjective.new(target, **settings)
