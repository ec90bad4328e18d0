"""DFlash's and DSpark's training: losses are those of drafting behind every anchor, which are drawn or spread."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from lib import dflash_cases, dspark_cases
from lib.drafter_checks import propose
from lib.families import VOCAB_SIZE, build_model
from lib.objectives import random_texts, read_by
from specdec.drafting.candidates import Candidates
from specdec.models.target.target import Target
from specdec.training.kinds import objective_class
from specdec.training.objectives.dflash import DFlashObjective
from specdec.training.objectives.dspark import DSparkObjective
from specdec.trees.shape import TreeShape

NETWORKS = {
    "dflash": (DFlashObjective, dflash_cases.make_network, {}),
    "dflash, causal": (DFlashObjective, dflash_cases.make_network, {"causal": True}),
    "dspark": (DSparkObjective, dspark_cases.random_network, {}),
    "dspark, rnn": (DSparkObjective, dspark_cases.random_network, dspark_cases.HEADS["rnn"]),
    "dspark, no heads": (DSparkObjective, dspark_cases.random_network, dspark_cases.HEADS["without bias"]),
    "dflash, windows": (DFlashObjective, dflash_cases.make_network, dflash_cases.CHANGES["windows of rows"]),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


class Forced:
    """Takes the tokens of a text, whatever the law, and keeps the logits."""

    def __init__(self, tokens):
        self.tokens, self.logits = tokens, []

    def __call__(self, logits, num_ranks):
        first = len(self.logits)
        self.logits += list(logits[0])
        return Candidates(self.tokens[None, first : len(self.logits), None].expand(-1, -1, num_ranks))


def make_objective(name, model, **switches):
    objective, make_network, changes = NETWORKS[name]
    # `read_by` has the last layer behind the final norm
    network = make_network(model, tap_layers=(0, 1), **changes)
    return objective(network, Target(model), **switches).eval()


def make_batch(model, objective, generator, lengths=(13, 10)):
    """Texts of which the first places and one in the middle are not to be learnt, and labels of their own."""
    tokens, mask = random_texts(generator, lengths)
    mask[0, 9] = False
    labels = torch.randint(1, VOCAB_SIZE, tokens.shape, generator=generator)
    return read_by(model, tokens, mask, labels=labels, tap_layers=objective.tap_layers)


def log_odds(objective, model, batch, row, anchor):
    """What the confidence head says of each row of one block, fed with the text's tokens."""
    network, tokens = objective.network, batch.tokens[row]
    if getattr(network, "confidence_head", None) is None:
        return None
    features = torch.cat([tap[row : row + 1, :anchor] for tap in batch.taps], -1)
    block = network.read_anchors(tokens[None, None, anchor], model.get_input_embeddings())
    states = network.see_blocks(network.read(features), block, torch.tensor([[anchor]]))
    told = torch.nn.functional.pad(tokens[anchor:], (0, network.config.block_size))[: network.config.block_size]
    return network.confidence(told, states[0, 0])


def drafted(objective, model, batch):
    """Of every learnt place behind every anchor: its distance, and its losses by name."""
    depth = objective.drafter_class.depth_limit(objective.network.config)[0]
    for row, tokens in enumerate(batch.tokens):
        for anchor in range(1, len(tokens) - 1):
            ahead = tokens[anchor + 1 : anchor + 1 + depth]
            choose = Forced(torch.nn.functional.pad(ahead, (0, depth - len(ahead)), value=1))
            propose(objective.drafter(TreeShape.chain(depth)), model, tokens[:anchor], tokens[anchor].item(), choose)
            odds = log_odds(objective, model, batch, row, anchor)
            for k in range(1, len(ahead) + 1):
                place = anchor + k
                if not batch.loss_mask[row, place]:
                    break  # nothing is learnt behind a gap
                logps = choose.logits[k - 1].double().log_softmax(-1)
                law = batch.scores.logits[row, place - 1].double().softmax(-1)
                distance = (logps.exp() - law).abs().sum()
                losses = {"cross_entropy": -logps[batch.labels[row, place]], "distance": distance}
                if odds is not None:
                    sure, accepted = odds[k - 1].double().sigmoid(), torch.minimum(logps.exp(), law).sum()
                    losses["confidence"] = -(accepted * sure.log() + (1 - accepted) * (1 - sure).log())
                yield k, losses


@every_network
@torch.no_grad()
def test_the_loss_is_that_of_drafting_behind_every_anchor(name, generator):
    """The equation term by term, of what the drafter's law is when the text's tokens are drafted."""
    model = build_model("llama")
    objective = make_objective(name, model, gamma=2.5, cross_entropy_weight=0.3, distance_weight=0.6)
    batch = make_batch(model, objective, generator)
    terms = list(drafted(objective, model, batch))
    weights = [math.exp(-(k - 1) / 2.5) for k, _ in terms]
    expected = {
        name: float(sum(weight * losses[name] for weight, (_, losses) in zip(weights, terms, strict=True)))
        / sum(weights)
        for name in terms[0][1]
    }
    factors = {"cross_entropy": 0.3, "distance": 0.6, "confidence": 1.0}
    expected["loss"] = sum(factors[name] * loss for name, loss in expected.items())
    for depth in {k for k, _ in terms}:
        entropies = [float(losses["cross_entropy"]) for k, losses in terms if k == depth]
        expected[f"depth_{depth}"] = sum(entropies) / len(entropies)
    assert {key: float(value) for key, value in objective(batch).items()} == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_anchors_are_drawn_in_training_and_spread_otherwise(generator):
    """Each place in front of a learnt one has its turn; an evaluation has the same ones, over the whole text."""
    model = build_model("llama")
    objective = make_objective("dflash", model, num_anchors=3)
    batch = make_batch(model, objective, generator, lengths=(30, 20))
    may = [{a for a in range(1, 29) if batch.loss_mask[row, a + 1]} for row in range(2)]

    def drawn():
        blocks = objective._blocks(batch)
        assert blocks.anchors.shape == (2, 3)
        assert blocks.learnt[..., 0].all()
        return [set(row.tolist()) for row in blocks.anchors]

    for found, places in zip(drawn(), may, strict=True):
        order = [sorted(places).index(place) for place in sorted(found)]
        gaps = [order[0] + 1, *(later - earlier for earlier, later in itertools.pairwise(order))]
        assert max(gaps) - min(gaps) <= 1, "evenly spread"
    assert drawn() == drawn()
    objective.train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        seen = [drawn() for _ in range(60)]
    assert [set().union(*(found[row] for found in seen)) for row in range(2)] == may


@every_network
@torch.no_grad()
def test_the_loss_of_fewer_anchors_is_that_of_all_on_average(name, generator):
    model = build_model("llama")
    objective = make_objective(name, model, num_anchors=4)
    batch = make_batch(model, objective, generator, lengths=(16, 16))
    # every block has as many places as any other
    batch = replace(batch, loss_mask=torch.arange(16).expand(2, -1) >= 2)
    objective.num_anchors = 16
    expected = objective(batch)["loss"].item()
    objective.num_anchors = 4
    with torch.random.fork_rng():
        torch.manual_seed(0)
        losses = torch.stack([objective.train()(batch)["loss"] for _ in range(150)])
    assert losses.std() > 0
    assert losses.mean().item() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7), (10, 5), (8, 4), (5, 4)])
def test_weights_fall_as_the_paper_has_them_for_each_block(block_size, gamma):
    model = build_model("llama")
    made = objective_class("dflash").new(Target(model), tap_layers=(0,), block_size=block_size, num_layers=1)
    assert made.gamma == gamma
    assert (made.recipe.learning_rate, made.recipe.epochs, made.recipe.warmup_ratio) == (6e-4, 6, 0.04)


def test_how_likely_a_draw_is_accepted_is_a_label(generator):
    """The confidence head learns it; no gradient of that reaches the bias, which that head does not read."""
    model = build_model("llama")
    grads = []
    for weight in (0.0, 1.0):
        objective = make_objective("dspark", model, confidence_weight=weight)
        objective(make_batch(model, objective, torch.Generator().manual_seed(0)))["loss"].backward()
        grads.append((objective.network.markov_head.markov_w2.weight.grad, objective.network.confidence_head.proj))
    torch.testing.assert_close(grads[1][0], grads[0][0])
    assert not grads[0][1].weight.grad.any()
    assert grads[1][1].weight.grad.any()


def test_dspark_weighs_its_losses_as_its_authors():
    model = build_model("llama")
    made = objective_class("dspark").new(Target(model), tap_layers=(0,), block_size=7, num_layers=1, markov_rank=4)
    weights = made.cross_entropy_weight, made.distance_weight, made.confidence_weight
    assert (weights, made.gamma) == ((0.1, 0.9, 1.0), 4)


def test_layers_may_begin_with_those_of_the_target():
    model = build_model("llama")
    sizes = {"tap_layers": (0,), "block_size": 4, "num_layers": 2}
    new = objective_class("dflash").new
    network = new(Target(model), start_layers=(2, 0), qk_norm=False, **sizes).network
    decoder = model.get_decoder()
    for own, theirs in zip([*network.layers, network.norm], [*decoder.layers[::-2], decoder.norm], strict=True):
        assert all(torch.equal(own.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    for changes, message in (
        ({"start_layers": (0, 3)}, r"start_layers: expected 2 layers below 3, got \(0, 3\)"),
        ({"start_layers": (0,)}, "start_layers: expected 2 layers below 3"),
        ({"start_layers": (0, 1), "intermediate_size": 8}, "start_layers: expected layers like .* for mlp.gate_proj"),
        ({"start_layers": (0, 1), "qk_norm": True}, "got others for self_attn.q_norm.weight, .* qk_norm=False"),
    ):
        with pytest.raises(ValueError, match=message):
            new(Target(model), **{"qk_norm": False, **sizes, **changes})
