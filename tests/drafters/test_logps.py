"""How probable drafters say that their nodes are: behind the parent, by the law that the tokens come from."""

import math
from dataclasses import dataclass, field

import pytest
import torch

from lib import dspark_cases
from lib.drafter_cases import DYNAMIC
from lib.drafter_cases import make_drafter as random_drafter
from lib.drafter_checks import propose, start_texts
from lib.families import build_model, random_prompts
from lib.guard import GuardedEngine
from lib.law_drafters import DRAFTERS, LEARNING, VOCAB_SIZE, build_target, make_drafter
from lib.recorder import references_as_kernels
from specdec.drafters.dspark import DSpark
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.drafters.weightless.suffix import Suffix
from specdec.drafting.candidates import Best, Candidates, choose_from
from specdec.drafting.draft_tree import TreeTemplate
from specdec.drafting.grown import grow_lattice, grow_product
from specdec.kernels.common.topk import TopK
from specdec.loop.decoder import Decoder
from specdec.loop.rules import Greedy
from specdec.models.common.lm_heads import LMHeads, best_of
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

SILENT = ("none", "lookahead", *sorted(LEARNING))  # which know of no probability, or ask their members for it
ASKED = Best(with_logps=True)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Asking(Greedy):
    """Greedy acceptance that asks drafters how probable nodes are, or not, and keeps the trees."""

    asks: bool = True
    trees: list = field(default_factory=list, compare=False)

    def chooser(self, law, uniforms):
        return Best(with_logps=self.asks)

    def verify(self, tree, scores, limits, uniforms):
        self.trees.append(tree)
        return super().verify(tree, scores, limits, uniforms)


def decode(make, model, prompts, *, asks, max_new_tokens=12):
    rule = Asking(asks=asks)
    Decoder(model, make(), acceptance=rule).decode(prompts, max_new_tokens)
    return rule.trees


def children_of(tree, row):
    """The children of every node that has some, as a list of nodes each."""
    found = {}
    for node, parent in enumerate(tree.parent.expand_as(tree.tokens)[row].tolist()):
        if parent >= 0:
            found.setdefault(parent, []).append(node)
    return found


def path_of(tree, row, node):
    """The tokens behind the root on the way to a node, and the sum of their log-probabilities."""
    parents, tokens, total = tree.parent.expand_as(tree.tokens)[row].tolist(), [], 0.0
    while node:
        tokens.append(int(tree.tokens[row, node]))
        total += float(tree.logps[row, node])
        node = parents[node]
    return tokens[::-1], total


def check_logps(tree, *, is_law=True):
    assert tree.logps.dtype == torch.float32
    assert tree.logps.shape == tree.tokens.shape
    assert not tree.logps[:, 0].any()
    for row in range(tree.tokens.shape[0]):
        for nodes in children_of(tree, row).values():
            logps = tree.logps[row, nodes]
            assert logps.isfinite().all()
            assert (logps <= 1e-5).all()
            assert not is_law or logps.exp().sum() <= 1 + 1e-4


def compare(make, model, prompts, *, is_law=True):
    plain, asked = (decode(make, model, prompts, asks=asks) for asks in (False, True))
    assert len(plain) == len(asked) > 2
    for tree, same in zip(plain, asked, strict=True):
        assert tree.logps is None
        assert torch.equal(tree.tokens, same.tokens)
        assert torch.equal(tree.parent, same.parent)
        check_logps(same, is_law=is_law)


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if kind not in SILENT])
def test_asking_changes_no_tree(kind):
    prompts = [torch.tensor([1, 2, 3, 1, 2]), torch.tensor([4])]
    compare(lambda: make_drafter(kind), build_target(), prompts, is_law=kind != "suffix")


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "dspark"])
@pytest.mark.parametrize("shape", DYNAMIC.values(), ids=DYNAMIC)
def test_nor_one_that_grows_from_a_beam(kind, shape, generator):
    compare(lambda: random_drafter(kind, shape), build_model("llama"), random_prompts(generator, [1, 6]))


@pytest.mark.parametrize("kind", SILENT)
def test_kinds_without_a_law_say_nothing(kind):
    for tree in decode(lambda: make_drafter(kind), build_target(), [torch.tensor([1, 2, 1])], asks=True):
        assert tree.logps is None


def best_with_laws(logits, num_ranks):
    """What `Best` takes, from laws that go with the tree."""
    return Candidates(best_of(logits, num_ranks), logits.float())


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if make_drafter(kind).can_sample])
def test_static_trees_say_what_their_laws_do(kind, generator):
    text = torch.randint(VOCAB_SIZE, (6,), generator=generator)
    tree = propose(make_drafter(kind), build_target(), text, 3, ASKED)
    lawful = propose(make_drafter(kind), build_target(), text, 3, best_with_laws)
    assert torch.equal(tree.tokens, lawful.tokens)
    laws = lawful.laws.log_softmax(-1)[0, lawful.law_row.long()]
    expected = laws[tree.parent[0, 1:].long(), tree.tokens[0, 1:].long()]
    torch.testing.assert_close(tree.logps[0, 1:], expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 1e-3, "laws that differ nowhere"


def test_a_draft_model_says_what_its_own_forward_does():
    text, root = torch.tensor([5, 1, 4, 2]), 6
    tree = propose(make_drafter("draft_tree"), build_target(), text, root, ASKED)
    model = build_target(seed=1, vocab_size=VOCAB_SIZE + 1)
    for node in range(1, tree.tokens.shape[1]):
        path, total = path_of(tree, 0, node)
        with torch.no_grad():
            logits = model(torch.tensor([[*text.tolist(), root, *path[:-1]]])).logits[0, len(text) :, :VOCAB_SIZE]
        law = logits.log_softmax(-1)
        assert total == pytest.approx(sum(float(law[k, token]) for k, token in enumerate(path)), abs=1e-4)


def test_medusa_says_what_its_heads_do():
    drafter, model, text = make_drafter("medusa"), build_target(), torch.tensor([5, 1, 4, 2])
    tree = propose(drafter, model, text, 6, ASKED)
    with torch.no_grad():
        state = model.model(text[None]).last_hidden_state[:, -1]
        laws = drafter.network(state, 2, lm_head=model.lm_head).log_softmax(-1)[0]
    for node in range(1, tree.tokens.shape[1]):
        law = laws[int(tree.depth[0, node]) - 1]
        assert float(tree.logps[0, node]) == pytest.approx(float(law[tree.tokens[0, node]]), abs=1e-4)


class Forced:
    """Takes the tokens of a path, whatever their logits, and keeps the laws."""

    def __init__(self, path, proposes):
        self.path, self.laws = path, []
        self.places = path if proposes is None else [proposes.tolist().index(token) for token in path]

    def __call__(self, logits, num_ranks):
        first = len(self.laws)
        self.laws += logits[0].float().log_softmax(-1)
        return Candidates(torch.tensor(self.places[first : len(self.laws)])[None, :, None])

    def total(self):
        return sum(float(law[token]) for law, token in zip(self.laws, self.places, strict=True))


def grown_dspark():
    """Without a bias, so that its tree is that of a product."""
    network = dspark_cases.random_network(build_target(), **dspark_cases.HEADS["without bias"])
    return DSpark(network, DynamicTree(6, depth=2, top_k=3))


GROWN = {
    "dspark, product": (build_target, grown_dspark),
    **{kind: (build_target, lambda kind=kind: make_drafter(kind)) for kind in DRAFTERS if kind.endswith("grown")},
    **{
        kind: (lambda: build_model("llama"), lambda kind=kind: random_drafter(kind, DYNAMIC["dynamic"]))
        for kind in ("eagle", "eagle3", "mtp", "dspark")
    },
}


@pytest.mark.parametrize(("build", "make"), GROWN.values(), ids=GROWN)
def test_a_grown_path_is_as_probable_as_a_chain_of_its_tokens(build, make):
    text, drafter = torch.tensor([4, 3, 0, 2]), make()
    tree = propose(drafter, build(), text, 6, ASKED)
    check_logps(tree)
    drafter.confidence = None  # of DSpark: which nodes grow, not how probable they are
    nodes = sorted(node for nodes in children_of(tree, 0).values() for node in nodes)
    assert int(tree.depth[0, nodes].max()) > 1
    for node in nodes:
        path, total = path_of(tree, 0, node)
        chain = drafter.with_tree(TreeShape.chain(len(path)))
        forced = Forced(path, chain.proposes)
        assert propose(chain, build(), text, 6, forced).tokens[0].tolist() == [6, *path]
        assert total == pytest.approx(forced.total(), abs=2e-4)


def test_padding_of_a_grown_tree_is_anything_but_not_in_the_way():
    best = TopK(
        torch.tensor([[[2.0, 1.0], [1.0, -torch.inf]]]),
        torch.tensor([[[4, 5], [6, 7]]], dtype=torch.int32),
        torch.tensor([[3.0, 1.5]]),
        torch.zeros(1, 2, dtype=torch.bool),
    )
    root = torch.tensor([9], dtype=torch.int32)
    tree = grow_product(DynamicTree(7, depth=1, top_k=2), root, best, backend=None, with_logps=True)
    assert tree.tokens.tolist() == [[9, 4, 6, 5, 6, 9, 9]]
    assert tree.logps.tolist() == [[0, -1, -0.5, -2, -0.5, 0, 0]]
    cut = tree.cut()
    assert cut.tokens.shape[1] == 5
    assert cut.logps.tolist() == [[0, -1, -0.5, -2, -0.5]]


def test_a_lattice_worked_out_by_hand():
    tokens = torch.tensor([[[4, 5], [6, 7]]])
    logps = torch.tensor([[[[-0.5, -1.5], [-9.0, -9.0]], [[-2.0, -0.25], [-0.125, -3.0]]]])
    root = torch.tensor([9], dtype=torch.int32)
    tree = grow_lattice(DynamicTree(7, depth=1, top_k=2), root, tokens, logps, backend=None, with_logps=True)
    assert tree.tokens.tolist() == [[9, 4, 7, 5, 6, 6, 7]]
    assert tree.parent.tolist() == [[-1, 0, 1, 0, 3, 1, 3]]
    assert tree.logps.tolist() == [[0, -0.5, -0.25, -1.5, -0.125, -2.0, -3.0]]


def test_prompt_lookup_is_surer_of_longer_matches():
    drafter = PromptLookup(max_ngram=3, num_draft_tokens=3)
    start_texts(drafter, Target(build_model("llama")), [[1, 2, 3, 4, 1], [2, 5, 6], [1, 2, 3], [1, 2, 3, 8, 1, 2]])
    tree = drafter.draft(torch.tensor([2, 2, 7, 3], dtype=torch.int32), ASKED)
    assert tree.tokens[0].tolist() == [2, 3, 4, 1]  # behind (1, 2)
    assert tree.tokens[1].tolist() == [2, 5, 6, 2]  # behind (2,)
    assert tree.deepest.tolist() == [3, 3, 0, 3]
    assert tree.logps[:, 0].tolist() == [0, 0, 0, 0]
    assert tree.logps[0, 1:].exp().tolist() == pytest.approx([2 / 3, 3 / 4, 4 / 5])
    assert tree.logps[1, 1:].exp().tolist() == pytest.approx([1 / 2, 2 / 3, 3 / 4])
    assert tree.logps[3, 1:].exp().tolist() == pytest.approx([3 / 4, 4 / 5, 5 / 6])
    assert tree.logps.isfinite().all()


def test_suffix_worked_out_by_hand():
    drafter = Suffix(num_draft_tokens=3, max_depth=2, max_match=1, min_probability=0.0)
    start_texts(drafter, Target(build_model("llama")), [[5, 7, 8, 5, 7, 9]])
    tree = drafter.draft(torch.tensor([5], dtype=torch.int32), ASKED)
    # both times that 5 occurred 7 followed: 2 / (2 + 1); then 8 and 9 once each: 1 / (2 + 1 / 2)
    assert sorted(tree.tokens[0].tolist()) == [5, 7, 8, 9]
    expected = {5: 0.0, 7: math.log(2 / 3), 8: math.log(0.4), 9: math.log(0.4)}
    for token, logp in zip(tree.tokens[0].tolist(), tree.logps[0].tolist(), strict=True):
        assert logp == pytest.approx(expected[token], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_are_those_that_nobody_asked_about(dtype, generator):
    logits = (4 * torch.randn(2, 3, 50, generator=generator)).to(dtype)  # with many ties in half precision
    chosen = ASKED(logits, 7)
    assert torch.equal(chosen.tokens, Best()(logits, 7).tokens)
    assert chosen.logps.dtype == torch.float32
    torch.testing.assert_close(chosen.logps, logits.float().log_softmax(-1).gather(2, chosen.tokens))
    states, weight = torch.randn(2, 3, 8, generator=generator), torch.randn(3, 50, 8, generator=generator)
    heads = LMHeads(weight.to(dtype), backend=None)
    from_heads, expected = choose_from(ASKED, heads, states.to(dtype), 7), ASKED(heads.logits(states.to(dtype)), 7)
    assert torch.equal(from_heads.tokens.long(), expected.tokens)
    torch.testing.assert_close(from_heads.logps, expected.logps)


def test_lists_are_joined_and_renamed_with_what_is_known_of_them():
    ids = torch.tensor([2, 5, 6])
    first = ASKED(torch.tensor([[[0.0, 1.0, 2.0]]]), 2)
    second = ASKED(torch.tensor([[[3.0, 0.0, 1.0]]]), 2)
    both = Candidates.cat([first, second]).among(ids, 7)
    assert both.tokens.tolist() == [[[6, 5], [2, 6]]]
    assert torch.equal(both.logps, torch.cat((first.logps, second.logps), 1))
    template = TreeTemplate(TreeShape.from_paths([[0], [1], [1, 0]]), CPU)
    tree = template.expand(both, torch.tensor([3], dtype=torch.int32))
    assert tree.tokens.tolist() == [[3, 6, 5, 2]]
    assert tree.logps[0].tolist() == [0.0, *first.logps[0, 0].tolist(), float(second.logps[0, 0, 0])]


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if kind not in SILENT])
def test_asking_does_not_need_the_host(kind, monkeypatch):
    references_as_kernels(monkeypatch)
    target = Target(build_target(), backend="triton")
    decoder = Decoder(target, make_drafter(kind), acceptance=Asking(), capture=GuardedEngine())
    assert decoder.warmup(batch_size=2, max_length=40, num_stop_tokens=1)
    assert decoder.captured.graphs.num_checked > 20
