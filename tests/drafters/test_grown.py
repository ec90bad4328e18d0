"""specdec.drafting.grown: trees from one pass of parallel heads, against all paths through their candidates."""

import itertools

import pytest
import torch

import specdec
from lib import dflash2_cases, dflash_cases
from lib.families import build_model
from specdec.drafters.dflash import DFlash
from specdec.drafting.grown import grow_lattice, grow_product, shape_for_block
from specdec.kernels.common.topk import TopK
from specdec.models.common.lm_heads import best_of
from specdec.models.networks.blocks.dflash2 import DFlash2Network
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree, as_tree
from specdec.trees.shape import TreeShape

POSITIONS, RANKS = 3, 3
SHAPE = DynamicTree(num_nodes=9, depth=POSITIONS - 1, top_k=RANKS)


def best_totals(totals):
    """The largest totals of all paths, each under its tokens, and the number that a tree has room for."""
    return dict(sorted(totals.items(), key=lambda item: -item[1])[: SHAPE.num_nodes - 1])


def paths_of(tree, row):
    """The tokens on the path to every node, the root left out."""
    paths = {0: ()}
    for node, parent in enumerate(tree.parent[row].tolist()):
        if parent >= 0:
            paths[node] = (*paths[parent], tree.tokens[row, node].item())
    return sorted(path for path in paths.values() if path)


def test_a_product_gives_its_most_probable_paths(generator):
    logits = 2 * torch.randn(2, POSITIONS, 20, generator=generator)
    tokens = best_of(logits, RANKS)
    best = TopK(logits.gather(2, tokens), tokens.int(), logits.logsumexp(-1), torch.zeros(2, POSITIONS).bool())
    tree = grow_product(SHAPE, torch.tensor([5, 6], dtype=torch.int32), best, backend=None)
    laws = logits.double().log_softmax(-1)
    for row in range(2):
        totals = {}
        for depth in range(1, POSITIONS + 1):
            for path in itertools.product(*tokens[row, :depth].tolist()):
                totals[path] = sum(laws[row, k, token].item() for k, token in enumerate(path))
        assert paths_of(tree, row) == sorted(best_totals(totals))
    assert (tree.max_depth, tree.num_fixed, tree.laws) == (POSITIONS, 1, None)


def test_a_lattice_gives_its_most_probable_paths(generator):
    tokens = torch.stack([torch.randperm(20, generator=generator)[: POSITIONS * RANKS] for _ in range(2)])
    tokens = tokens.view(2, POSITIONS, RANKS)
    laws = (2 * torch.randn(2, POSITIONS, RANKS, RANKS, generator=generator)).log_softmax(-1)
    tree = grow_lattice(SHAPE, torch.tensor([5, 6], dtype=torch.int32), tokens, laws, backend=None)
    for row in range(2):
        totals = {}
        for depth in range(1, POSITIONS + 1):
            for ranks in itertools.product(range(RANKS), repeat=depth):
                path = tuple(tokens[row, k, rank].item() for k, rank in enumerate(ranks))
                pairs = zip((0, *ranks), ranks, strict=False)
                totals[path] = sum(laws[row, k, before, rank].item() for k, (before, rank) in enumerate(pairs))
        assert paths_of(tree, row) == sorted(best_totals(totals))


def test_a_block_of_one_position_has_no_pairs():
    laws = torch.tensor([[[[-0.1, -2.0]] * 2]])
    root, tokens = torch.tensor([7], dtype=torch.int32), torch.tensor([[[4, 5]]])
    tree = grow_lattice(DynamicTree(3, 0, 2), root, tokens, laws, backend=None)
    assert tree.tokens.tolist() == [[7, 4, 5]]


def test_jetspecs_tree_goes_by_its_name():
    assert as_tree("jetspec") == DynamicTree(num_nodes=128, depth=19, top_k=7)
    assert as_tree("jetspec").max_depth == 20


def test_a_tree_is_as_deep_as_the_block_at_most(tmp_path):
    model = build_model("llama")
    network = dflash_cases.make_network(model)
    drafter = DFlash(network, as_tree("jetspec"))
    assert drafter.shape == DynamicTree(num_nodes=128, depth=3, top_k=7)
    drafter.bind(Target(model))
    drafter.save_pretrained(tmp_path / "saved")
    loaded = specdec.load_drafter(tmp_path / "saved", model, tree="jetspec", num_nodes=30)
    assert loaded.shape == DynamicTree(num_nodes=30, depth=3, top_k=7)
    assert DFlash(network, DynamicTree(20, 5, 2)).shape == DynamicTree(15, 3, 2)  # 14 candidates of a beam


def test_more_candidates_than_the_op_takes_are_refused():
    with pytest.raises(ValueError, match="top_k: expected at most 16 with parallel heads, got 17"):
        shape_for_block(DynamicTree(top_k=17), 4)


@pytest.mark.parametrize("changes", [{}, {"selector_rank": 0}, {"conv_kernel_size": 0}], ids=str)
def test_a_network_of_dflash2_is_loaded_as_it_was_saved(changes, tmp_path):
    model = build_model("llama")
    network = dflash2_cases.make_network(model, **changes)
    drafter = DFlash(network, TreeShape.from_k_config((2, 2)))
    drafter.bind(Target(model))
    drafter.save_pretrained(tmp_path / "saved")
    loaded = specdec.load_drafter(tmp_path / "saved", model)
    assert type(loaded.network) is DFlash2Network
    assert loaded.network.config == network.config
    assert loaded.shares_candidates == (network.candidate_selector is None)
    ids = torch.tensor([[5, 9, 11]])
    plain = specdec.generate(model, None, ids, max_new_tokens=10)
    for tree in (None, "jetspec"):
        drafter = specdec.load_drafter(tmp_path / "saved", model, tree=tree)
        assert torch.equal(specdec.generate(model, drafter, ids, max_new_tokens=10), plain)


def test_a_selector_has_so_many_candidates():
    network = dflash2_cases.make_network(build_model("llama"))
    with pytest.raises(ValueError, match="tree: expected ranks below 4, the selector's candidates, got 4"):
        DFlash(network, TreeShape.from_k_config((5,)))
