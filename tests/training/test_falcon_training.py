"""Falcon's training: its loss by the paper's equations, glances, noise, and what the settings do."""

from collections import Counter

import pytest
import torch

from lib.drafter_checks import propose
from lib.falcon_equations import Literal, make_network
from lib.families import VOCAB_SIZE, build_model, random_prompts
from lib.objectives import random_texts, read_by
from lib.tensors import assert_near
from specdec.drafters.falcon import Falcon
from specdec.drafting.candidates import Best
from specdec.models.networks.falcon import FalconNetwork
from specdec.models.networks.layer import MaskedAttention
from specdec.models.target.target import Target
from specdec.training.objectives.falcon import FalconObjective, glance_at, relaxed_mask
from specdec.trees.shape import TreeShape


def make_batch(model, generator, lengths=(12, 9), progress=0.0):
    return read_by(model, *random_texts(generator, lengths, first_learnt=2), progress=progress)


def record_inputs(network):
    """Keep the features and tokens' embeddings of every pass."""
    passes, forward = [], network.forward

    def recording(features, embedded, positions, attend):
        passes.append((features.detach().clone(), embedded.detach().clone(), torch.is_grad_enabled()))
        return forward(features, embedded, positions, attend)

    network.forward = recording
    return passes


@torch.no_grad()
@pytest.mark.parametrize("block_size", [2, 3])
def test_the_training_pass_computes_what_a_draft_computes_at_the_same_places(block_size, generator):
    model = build_model("llama")
    network = make_network(model, block_size=block_size)
    objective = FalconObjective(network, Target(model)).eval()
    text = random_prompts(generator, [12])[0]
    for length in range(block_size, 12, block_size):
        batch = make_batch(model, generator, lengths=(length + block_size + 1,))
        tokens = torch.cat((text[: length + 1], batch.tokens[0, length + 1 :]))[None]
        output = model(tokens, output_hidden_states=True)
        everywhere = torch.ones(1, length, dtype=torch.bool)
        taught = objective._guess(output.hidden_states[-1][:, :-1], tokens[:, 1:], everywhere)
        seen = []

        def choose(logits, num_ranks, seen=seen):
            seen.append(logits)
            return Best()(logits, num_ranks)

        propose(Falcon(network, TreeShape.chain(block_size)), model, text[:length], text[length].item(), choose)
        assert_near(seen[0][0], model.lm_head(taught[-block_size:]))


@torch.no_grad()
@pytest.mark.parametrize("block_size", [2, 4])
def test_the_loss_is_the_papers(block_size, generator):
    model = build_model("llama")
    network = make_network(model, block_size=block_size)
    objective = FalconObjective(network, Target(model)).eval()
    batch = make_batch(model, generator)
    parts = objective(batch)
    terms = []
    for row, length in enumerate((12, 9)):
        literal = Literal(network, model, batch.tokens[row, : length - 1], batch.tokens[row, length - 1].item())
        terms += literal.losses([], batch.hidden[row], first=max(0, 2 - block_size - 1))  # the question is not learnt
    regression, soft, hard = torch.tensor(terms).mean(0)
    for name, expected in (("regression", regression), ("soft", soft), ("hard", hard)):
        torch.testing.assert_close(parts[name], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts["loss"], regression + 0.1 * (0.9 * soft + 0.1 * hard), rtol=1e-4, atol=1e-5)
    other = FalconObjective(network, Target(model), distillation_weight=0.5, soft_weight=0.2).eval()(batch)["loss"]
    torch.testing.assert_close(other, regression + 0.5 * (0.2 * soft + 0.8 * hard), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_size", [2, 3])
@pytest.mark.parametrize("progress", [0.0, 0.5])
def test_a_glance_shows_answers_at_a_part_of_the_wrong_places(block_size, progress, generator):
    model = build_model("llama")
    network = make_network(model, block_size=block_size, lstm_dropout=0.0)
    objective = FalconObjective(network, Target(model), noise=0.0).train()
    batch = make_batch(model, generator, lengths=(40, 30), progress=progress)
    passes = record_inputs(network)
    objective(batch)
    (features, embedded, first_grad), (shown_features, shown_embedded, second_grad) = passes
    assert (first_grad, second_grad) == (False, True)
    changed = (features != shown_features).any(-1)
    assert torch.equal(features, batch.hidden[:, :-1])
    with torch.no_grad():
        mask = relaxed_mask(39, block_size, torch.device("cpu"))
        guessed = network(features, embedded, torch.arange(39)[None], MaskedAttention(mask))
        said = batch.scores.logits.argmax(-1)
        for row, length in enumerate((40, 30)):
            places = range(length - 1 - block_size)
            wrong = sum(int(model.lm_head(guessed[row, t]).argmax() != said[row, t + block_size]) for t in places)
            where = changed[row].nonzero()[:, 0].tolist()
            number = int(0.4 * (1 - progress) * wrong)
            assert number > 3, "too few to tell"
            assert len(where) == number
            assert all(t in places for t in where)
            for t in where:
                assert torch.equal(shown_features[row, t], batch.hidden[row, t + block_size])
                assert torch.equal(shown_embedded[row, t], model.get_input_embeddings()(said[row, t + block_size]))
            rest = [t for t in range(39) if t not in where]
            assert torch.equal(shown_embedded[row, rest], embedded[row, rest])


def test_a_glance_is_left_out_at_the_end_in_eval_mode_and_on_request(generator):
    model = build_model("llama")
    network = make_network(model)

    def inputs(mode, batch, **settings):
        objective = FalconObjective(network, Target(model), noise=0.0, **settings).train(mode)
        passes = record_inputs(network)
        objective(batch)
        del network.forward
        return passes

    late, early = make_batch(model, generator, progress=1.0), make_batch(model, generator)
    for passes, batch, number in (
        (inputs(True, late), late, 2),
        (inputs(True, early, glance_ratio=0.0), early, 1),
        (inputs(False, early), early, 1),
    ):
        assert len(passes) == number
        assert torch.equal(passes[-1][0], batch.hidden[:, :-1])


def test_noise_is_uniform_and_for_training_alone(generator):
    model = build_model("llama")
    network = make_network(model)
    objective = FalconObjective(network, Target(model), glance_ratio=0.0).train()
    batch = make_batch(model, generator, lengths=(60, 60))
    passes = record_inputs(network)
    objective(batch)
    noise = passes[0][0] - batch.hidden[:, :-1]
    assert 0.099 < noise.abs().max() <= 0.1001
    assert abs(noise.var() - 0.2**2 / 12) < 1e-4
    objective.eval()(batch)
    assert torch.equal(passes[1][0], batch.hidden[:, :-1])


@pytest.mark.parametrize("block_size", [2, 3, 4])
def test_shown_places_lead_blocks_of_which_something_is_learnt(block_size):
    places = torch.rand(60, 50, generator=torch.Generator().manual_seed(0)) < 0.9
    counts = torch.arange(60) // 4
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shown = glance_at(places, counts, block_size)
    for row, (where, learnt) in enumerate(zip(shown.tolist(), places.tolist(), strict=True)):
        for start in range(0, 50, block_size):
            run = sum(where[start : start + block_size])
            assert run < block_size
            assert all(where[start : start + run]), "they are the first ones of the block"
            assert all(learnt[start : start + run + (run > 0)]), "and the place behind them is learnt"
        assert sum(where) <= counts[row]
    assert shown[:40].sum() == counts[:40].sum(), "where there are blocks enough, all are shown"


def test_all_blocks_and_lengths_are_equally_likely():
    places = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]).bool().expand(6000, -1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shown = glance_at(places, torch.full((6000,), 2), 4)
        everything = glance_at(places, torch.full((6000,), 100), 4)
        alone = glance_at(places, torch.full((6000,), 9), 1)
    # the first block begins with a prompt; in the others one, two or three places may be shown, two at most in all
    found = Counter(tuple(row.nonzero()[:, 0].tolist()) for row in shown)
    assert set(found) == {(4, 5), (8, 9), (4, 8)}
    assert found[4, 8] == pytest.approx(6000 / 3, rel=0.1)
    assert found[4, 5] == pytest.approx(6000 / 3, rel=0.1)
    lengths = Counter(row[4:8].sum().item() for row in everything)
    assert sorted(lengths) == [1, 2, 3]
    assert min(lengths.values()) > 0.9 * 6000 / 3
    assert not everything[:, :4].any()
    assert not alone.any(), "a block of one place has nothing to show it"


def test_where_half_is_wrong_a_fifth_of_the_places_learns_from_a_block_mate():
    """250 places of which half are wrong: 50 are shown, and 50 others learn from one of them."""
    places = torch.ones(200, 250, dtype=torch.bool)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shown = glance_at(places, torch.full((200,), 50), 2)
    taught = shown[:, 0::2] & ~shown[:, 1::2]
    assert shown.sum(1).tolist() == [50] * 200
    assert taught.sum(1).tolist() == [50] * 200


@torch.no_grad()
@pytest.mark.parametrize("block_size", [2, 3])
def test_what_was_shown_is_read_and_not_asked_for(block_size, generator):
    """The loss in training by the equations: pairs that were shown are those of their answers, and leave the mean."""
    model = build_model("llama")
    network = make_network(model, block_size=block_size, lstm_dropout=0.0)
    objective = FalconObjective(network, Target(model), noise=0.0).train()
    batch = make_batch(model, generator, lengths=(17, 12))
    passes = record_inputs(network)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        parts = objective(batch)
    del network.forward
    shown = (passes[0][0] != passes[1][0]).any(-1)
    assert shown.sum(1).min() > 0
    terms = []
    for row, length in enumerate((17, 12)):
        tokens, hidden = batch.tokens[row], batch.hidden[row]
        literal = Literal(network, model, tokens[: length - 1], tokens[length - 1].item())
        where = [pair for pair in range(length - 1) if shown[row, pair]]
        terms += literal.losses(where, hidden, first=max(0, 2 - block_size - 1))
    regression, soft, hard = torch.tensor(terms).mean(0)
    for name, expected in (("regression", regression), ("soft", soft), ("hard", hard)):
        torch.testing.assert_close(parts[name], expected, rtol=1e-4, atol=1e-5)
    pairs = sum(length - 1 - block_size for length in (17, 12))
    assert parts["glanced"] == pytest.approx(shown.sum().item() / pairs)


@torch.no_grad()
def test_training_begins_with_tokens_as_loud_as_states(generator):
    model = build_model("llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = FalconObjective.new(Target(model), lstm_bias=False).network
    features = torch.randn(2, 50, network.config.hidden_size, generator=generator)
    embedded = model.get_input_embeddings()(torch.randint(1, VOCAB_SIZE, (2, 50), generator=generator))
    token, state = network.lstm.weight_ih_l0.chunk(2, 1)
    assert (embedded @ token.T).std().item() == pytest.approx((features @ state.T).std().item(), rel=0.2)
    plain = FalconNetwork(network.config)
    said, before = (n.lstm(torch.cat((embedded, features), -1))[0].std() for n in (network, plain))
    assert said > 2 * before


def test_dropout_is_for_training_alone(generator):
    model = build_model("llama")
    objective = FalconObjective(make_network(model, lstm_dropout=0.5), Target(model), glance_ratio=0.0, noise=0.0)
    batch = make_batch(model, generator)
    assert objective.train()(batch)["loss"] != objective(batch)["loss"]
    assert objective.eval()(batch)["loss"] == objective(batch)["loss"]
