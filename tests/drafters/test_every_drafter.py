"""What holds for the drafter of every kind with a network; whether it drafts what its paper says is in its own file.

That no step waits for the device: tests/loop/test_step_guard.py. That sampled text has the target's law:
tests/loop/test_sampling_law.py.
"""

from dataclasses import asdict

import pytest
import torch

import specdec
from lib.drafter_cases import DYNAMIC, KINDS, SHAPES, VARIANTS, drafter_around, make_drafter
from lib.drafter_checks import check_drafter, propose
from lib.families import VOCAB_SIZE, build_model, random_prompts
from specdec.drafters.eagle import Eagle
from specdec.drafting.candidates import Candidates
from specdec.models.networks.base import load_strictly
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape

EAGLE_TREES = {**DYNAMIC, "published": TreeShape.preset("eagle/mc_sim_7b_63")}
CASES = [
    *((kind, SHAPES[shape]) for kind in KINDS for shape in SHAPES),
    *((kind, tree) for kind in ("eagle", "eagle3") for tree in EAGLE_TREES.values()),
    *(("dspark", tree) for tree in DYNAMIC.values()),
    *((kind, TreeShape.from_k_config((2, 2, 2, 1, 1))) for kind in VARIANTS if kind.startswith("falcon")),
]


def tree_for(name):
    """Wide and deep, but not deeper than one head."""
    return TreeShape.chain(1) if "one head" in name else SHAPES["k_config"]


@pytest.mark.parametrize(("kind", "shape"), CASES, ids=str)
def test_rows_of_a_ragged_batch_draft_as_if_fresh_and_alone(kind, shape, generator):
    prompts = random_prompts(generator, [1, 4, 13])
    check_drafter(lambda: make_drafter(kind, shape), build_model("llama"), prompts, max_new_tokens=24, min_tau=1.2)


@pytest.mark.parametrize("name", VARIANTS)
def test_so_do_those_of_every_variant(name, generator):
    prompts = random_prompts(generator, [1, 6])
    shape = tree_for(name)
    check_drafter(lambda: make_drafter(name, shape), build_model("llama"), prompts, max_new_tokens=12, min_tau=1.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["opt", "llama3", "mistral_window", "qwen3"])
def test_so_do_those_of_other_families(family, kind, generator):
    shape = DYNAMIC["dynamic"] if kind == "eagle3" else SHAPES["leaves at every depth"]
    prompts = random_prompts(generator, [7, 2])
    model = build_model(family)
    check_drafter(lambda: make_drafter(kind, shape, family), model, prompts, max_new_tokens=16, min_tau=1.1)


def worst(logits, num_ranks):
    """Stands for a rule that samples: other tokens than the best, and laws."""
    return Candidates(logits.argsort(dim=-1, stable=True)[..., :num_ranks], logits.float() / 2)


@pytest.mark.parametrize("kind", [*KINDS, "falcon, blocks of 3", "eagle3, shares_lm_head"])
def test_laws_belong_to_the_nodes_whose_children_they_gave(kind, generator):
    shape, (text,) = SHAPES["leaves at every depth"], random_prompts(generator, [5])
    drafter = make_drafter(kind, shape)
    assert drafter.can_sample
    tree = propose(drafter, build_model("llama"), text, 7, worst)
    assert tree.laws.shape == (1, int(tree.law_row.max()) + 1, VOCAB_SIZE), "a list that no node takes a token from"
    inner = [node for node in range(shape.num_nodes) if shape.children[node]]
    lists = shape.max_depth if drafter.shares_candidates and not kind.startswith("falcon") else len(inner)
    assert kind.startswith("falcon") or tree.laws.shape[1] == lists
    for node in range(shape.num_nodes):
        assert (tree.law_row[node] >= 0) == (node in inner)
        for child in shape.children[node]:
            law = tree.laws[0, tree.law_row[node]]
            order = law.masked_fill(~law.isfinite(), torch.inf).argsort(dim=-1, stable=True)
            assert tree.tokens[0, child] == order[shape.rank[child]]


@pytest.mark.parametrize("name", [*KINDS, *VARIANTS])
def test_what_a_folder_holds_comes_back(name, tmp_path):
    model = build_model("llama")
    drafter = make_drafter(name, tree_for(name))
    drafter.bind(Target(model))
    drafter.save_pretrained(tmp_path / "drafter")
    again = specdec.load_drafter(tmp_path / "drafter", model)
    assert (type(again), again.kind, again.shape) == (type(drafter), drafter.kind, drafter.shape)
    assert again.network.config == drafter.network.config
    assert asdict(again.network.config) == asdict(drafter.network.config)
    state = drafter.network.state_dict()
    assert again.network.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.network.state_dict().items())
    assert again.with_tree(TreeShape.chain(1)).network is again.network


def test_a_file_of_another_variant_names_what_differs():
    model = build_model("llama")
    tensors = VARIANTS["amphista, low rank"](model).state_dict()
    with pytest.raises(ValueError, match=r"unexpected tensors \['lm_head_down'\]"):
        load_strictly(KINDS["amphista"](model), tensors)


DEPTHS = {
    **dict.fromkeys(("hydra", "hydra++"), "1 to 3, one level per head"),
    **dict.fromkeys(("parallelspec", "parallelspec, medusa", "peagle"), "1 to 4, the masks and one"),
    **dict.fromkeys(("dflash", "dspark"), "1 to 4, the tokens that a block drafts"),
    "medusa": "at most 3, one level per head",
    "amphista": "at most 4, one level per head",
}


@pytest.mark.parametrize("kind", KINDS)
def test_trees_that_do_not_fit_are_refused(kind):
    network = KINDS[kind](build_model("llama"))
    num_tokens = 32 if kind in ("eagle3", "peagle") else VOCAB_SIZE
    with pytest.raises(ValueError, match=f"tree: expected ranks below {num_tokens},.* got {num_tokens}"):
        drafter_around(network, TreeShape.from_paths([[num_tokens]]))
    if kind in DEPTHS:
        with pytest.raises(ValueError, match=f"tree: expected a depth of {DEPTHS[kind]}, got 5"):
            drafter_around(network, TreeShape.chain(5))
    if kind in ("medusa", "amphista"):
        assert drafter_around(network, TreeShape.none()).shape.num_nodes == 1
    else:
        with pytest.raises(ValueError, match="tree: expected (a depth of 1 to .* got 0|at least one draft token)"):
            drafter_around(network, TreeShape.none())


@pytest.mark.parametrize("kind", KINDS)
def test_another_target_is_refused(kind):
    target = Target(build_model("llama"))
    for name, size in (("vocab_size", 97), ("hidden_size", 32)):
        other = build_model("llama")
        expected = getattr(other.config, name)
        setattr(other.config, name, size)
        with pytest.raises(ValueError, match=f"drafter: expected {name} {expected} as the target's, got {size}"):
            drafter_around(KINDS[kind](other), SHAPES["chain"]).bind(target)


def test_trees_that_cannot_be_changed():
    with pytest.raises(ValueError, match="drafter: expected one whose tree can be changed, got lookahead"):
        specdec.load_drafter("lookahead", build_model("llama")).with_tree(TreeShape.chain(1))
    assert issubclass(Eagle, type(make_drafter("eagle", SHAPES["chain"]).with_tree(TreeShape.chain(1))))
