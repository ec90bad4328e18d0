"""Falcon against its paper's equations, against its own fresh start, and its files. Training: test_falcon_training."""

import pytest
import torch

from lib.drafter_checks import propose
from lib.falcon_equations import Literal, make_network
from lib.families import HIDDEN_SIZE, build_model, random_prompts
from lib.published_files import falcon_file
from specdec.drafters.falcon import Falcon
from specdec.drafting.draft_tree import TreeTemplate
from specdec.models.networks.falcon import FalconConfig
from specdec.models.published import falcon
from specdec.trees.shape import TreeShape

_LEAVES = "0 1 3 00 01 10 12 000 010 120 0000 0001 1200 00010 00012 12000 000120 120001"
SHAPES = {
    "chain": TreeShape.chain(4),
    "chain of no multiple of k": TreeShape.chain(5),
    "k_config": TreeShape.from_k_config((2, 2, 2, 1)),
    "leaves at every depth": TreeShape.from_paths([[int(rank) for rank in path] for path in _LEAVES.split()]),
}
FAMILY_SHAPE = SHAPES["leaves at every depth"]


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("block_size", "recurrent"), [(2, True), (2, False), (3, True), (4, True), (1, True)])
def test_a_draft_follows_the_equations_one_pair_at_a_time(block_size, recurrent, shape, generator):
    model = build_model("llama")
    network = make_network(model, block_size=block_size, recurrent=recurrent)
    for length in (1, 2, 3, 7):
        text, root = random_prompts(generator, [length])[0], 5
        tree = propose(Falcon(network, shape), model, text, root)
        assert tree.tokens[0, 1:].tolist() == Literal(network, model, text, root).tokens(shape)


@torch.no_grad()
def test_the_published_tree_gets_the_ranks_of_its_paths():
    model = build_model("llama")
    network = make_network(model)
    shape = TreeShape.preset("falcon/kmask2_8layer_tree")
    drafter, text, root = Falcon(network, shape), torch.tensor([3, 8, 1]), 5
    tree = propose(drafter, model, text, root)
    assert [blocks.parent.shape[0] for blocks in drafter._passes] == [7, 11, 12]
    assert tree.tokens[0, 1:].tolist() == Literal(network, model, text, root).tokens(shape)


def test_a_template_takes_the_lists_it_is_given():
    shape, cpu = TreeShape.from_k_config((2, 1)), torch.device("cpu")
    template = TreeTemplate(shape, cpu, rows=(-1, 2, 2, 0, 1))
    assert template.num_rows == 3
    assert template.row.tolist() == [-1, 2, 2, 0, 1]
    assert template.law_row.tolist() == [2, 0, 1, -1, -1]
    for rows in ((-1, 0, 0, 0), (0, 0, 0, 0, 0), (-1, 0, 0, -1, 0)):
        with pytest.raises(ValueError, match="rows: expected -1 and then the list of each of 4 nodes"):
            TreeTemplate(shape, cpu, rows=rows)
    with pytest.raises(ValueError, match="rows: expected one list for all children of a node"):
        TreeTemplate(shape, cpu, rows=(-1, 0, 1, 2, 2))


# Configurations and files


@torch.no_grad()
def test_a_published_file_loads_and_drafts_as_its_authors_compute(generator):
    model = build_model("llama")
    tensors, config = falcon_file(model)
    assert falcon.recognises(set(tensors), config)
    network = falcon.read(tensors, config).eval()
    assert network.config.block_size == 3
    assert not network.config.recurrent
    assert network.config.layer.rope_parameters["rope_theta"] == 10000
    # one step of the LSTM from nothing, as the authors' batch-first mistake makes it: no recurrent weights in it
    joined = torch.randn(1, 5, 2 * HIDDEN_SIZE, generator=generator)
    x = joined[0]
    for layer in (0, 1):
        w = tensors[f"lstm.weight_ih_l{layer}"]
        gates = x @ w.T + tensors[f"lstm.bias_ih_l{layer}"] + tensors[f"lstm.bias_hh_l{layer}"]
        i, _, g, o = gates.split(HIDDEN_SIZE, -1)
        x = o.sigmoid() * (i.sigmoid() * g.tanh()).tanh()
    embedded, features = joined[:, None].chunk(2, -1)
    torch.testing.assert_close(network.fuse(features, embedded, ())[0][0, 0], x)
    text, root = random_prompts(generator, [6])[0], 9
    tree = propose(Falcon(network, FAMILY_SHAPE), model, text, root)
    assert tree.tokens[0, 1:].tolist() == Literal(network, model, text, root).tokens(FAMILY_SHAPE)


def test_a_published_file_of_other_tensors_is_refused_by_name():
    tensors, config = falcon_file(None)

    def load(changes=(), dropped=(), **config_changes):
        kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
        return falcon.read(kept | dict(changes), config | config_changes)

    with pytest.raises(ValueError, match=r"missing tensors \['lstm.weight_hh_l1'\]"):
        load(dropped=["lstm.weight_hh_l1"])
    with pytest.raises(ValueError, match=r"unexpected tensors \['fc.weight'\]"):
        load({"fc.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"lstm.weight_ih_l0: expected shape \[256, 128\], got \[256, 64\]"):
        load({"lstm.weight_ih_l0": torch.zeros(256, 64)})
    with pytest.raises(ValueError, match=r"embed_tokens.weight: expected shape \[96, 64\], got \[95, 64\]"):
        load({"embed_tokens.weight": torch.zeros(95, 64)})
    with pytest.raises(ValueError, match=r"unexpected tensors \['lstm.bias_hh_l0', "):
        load(bias=False)
    with pytest.raises(ValueError, match="config.json: expected k_mask beside the tensors"):
        falcon.read(tensors, {name: value for name, value in config.items() if name != "k_mask"})
    load(dropped=["embed_tokens.weight"])
    load(dropped=[name for name in tensors if name.startswith("lstm.bias")], bias=False)
    with_bias = {
        f"layers.0.self_attn.{n}_proj.bias": torch.ones(size) for n, size in zip("qkv", (64, 16, 16), strict=True)
    }
    assert load(with_bias).config.layer.attention_bias
    assert not falcon.recognises({"fc.weight", "layers.0.self_attn.q_proj.weight"}, {})


@torch.no_grad()
@pytest.mark.parametrize("recurrent", [True, False])
def test_training_and_drafting_run_the_same_lstm(recurrent, generator):
    network = make_network(build_model("llama"), recurrent=recurrent)
    features, embedded = torch.randn(2, 3, 1, 7, HIDDEN_SIZE, generator=generator)
    start = network.zero_state(3, features)
    fused, _ = network.fuse(features, embedded, start)
    seen = []
    network.decode = lambda fused, positions, attend: seen.append(fused)
    network(features[:, 0], embedded[:, 0], None, None)
    torch.testing.assert_close(seen[0], fused[:, 0])
    # in two parts, the second going on where the first ended in each row
    counts = torch.tensor([7, 0, 3])
    part, between = network.fuse(features, embedded, start, counts=counts)
    rest, _ = network.fuse(features, embedded, between, first=counts)
    for row, count in enumerate(counts):
        torch.testing.assert_close(part[row, :, :count], fused[row, :, :count])
        torch.testing.assert_close(rest[row, :, count:], fused[row, :, count:])
    # branches go on from the states of others
    source = torch.tensor([2, 0])
    apart = [state.transpose(0, 1).contiguous() for state in between]
    branches, _ = network.fuse(
        features[:1].expand(-1, 2, -1, -1), embedded[:1].expand(-1, 2, -1, -1), apart, source=source
    )
    for branch, row in enumerate(source):
        alone, _ = network.fuse(features[:1], embedded[:1], [state[row : row + 1] for state in between])
        torch.testing.assert_close(branches[:, branch], alone[:, 0])
    changed = network.fuse(features + (torch.arange(7) == 0)[:, None], embedded, start)[0]
    assert torch.equal(changed[:, :, 1:], fused[:, :, 1:]) != recurrent


# Bad input


def test_trees_of_too_many_blocks_are_refused():
    model = build_model("llama")
    network = make_network(model, block_size=4)
    with pytest.raises(ValueError, match="blocks of 4 tokens that fit into 512 places, got 161 blocks, 643 places"):
        Falcon(network, TreeShape.from_k_config((2, 2, 2, 20, 1)))


@pytest.mark.parametrize(("block_size", "depth"), [(1, 6), (2, 6), (3, 6), (4, 6), (5, 5), (9, 6)])
def test_the_default_tree_is_64_nodes_of_the_published_one(block_size, depth):
    published = TreeShape.preset("falcon/kmask2_8layer_tree")
    config = FalconConfig.for_target(build_model("llama").config, block_size=block_size)
    shape = Falcon.default_tree(config)
    assert (shape.num_nodes, shape.max_depth) == (64, depth)
    assert set(shape.rank_paths) < set(published.rank_paths)
    small = FalconConfig.for_target(build_model("llama").config, block_size=block_size, vocab_size=5)
    assert Falcon.default_tree(small).max_rank == 4
