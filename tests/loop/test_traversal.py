"""Traversal verification: its law, by enumerating every draft of small trees, and how the kernel decides."""

import itertools

import pytest
import torch

from specdec.kernels.accept_traversal import accept_traversal
from specdec.kernels.common.walk import RESIDUAL_FLOOR
from specdec.kernels.reference.accept_traversal import traversal_weights
from specdec.trees.shape import TreeShape
from specdec.trees.traversal import TraversalTables

V = 3
SHAPES = {
    "one": TreeShape.chain(1),
    "chain": TreeShape.chain(3),
    "siblings": TreeShape.from_k_config((2,)),
    "all siblings": TreeShape.from_k_config((3,)),
    "binary": TreeShape.from_k_config((2, 2)),
    "uneven": TreeShape.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
}


class Laws:
    """A target and a drafter over `V` tokens whose laws depend on the whole context."""

    def __init__(self, seed, zeros=False):
        self.generator = torch.Generator().manual_seed(seed)
        self.zeros = zeros
        self.known = {}

    def __call__(self, who, context):
        if (who, context) not in self.known:
            logits = 1.5 * torch.randn(V, generator=self.generator)
            if self.zeros and who == "draft":
                logits[int(torch.randint(V, (), generator=self.generator))] = -torch.inf
            self.known[who, context] = logits
        return self.known[who, context]

    def prob(self, who, context, token):
        return self(who, context).softmax(-1)[token].item()


def all_drafts(shape, laws):
    """Every draft with its probability: tokens per node, the children of a node drawn without replacement."""
    drafts = [((-1,), 1.0)]  # the root's token is outside: contexts start below it
    inner = sorted(set(shape.parent) - {-1})
    for node in inner:
        children = [child for child, above in enumerate(shape.parent) if above == node]
        longer = []
        for tokens, mass in drafts:
            q = laws("draft", context_of(shape, tokens, node)).softmax(-1)
            for drawn in itertools.permutations(range(V), len(children)):
                probability, left = 1.0, 1.0
                for token in drawn:
                    probability *= q[token].item() / left if left > 1e-9 else float(q[token] == 0)
                    left -= q[token].item()
                if left < -1e-6 or probability <= 0:
                    continue
                extended = dict(enumerate(tokens)) if not isinstance(tokens, dict) else dict(tokens)
                extended.update(zip(children, drawn, strict=True))
                longer.append((extended, mass * probability))
        drafts = longer
    return drafts


def context_of(shape, tokens, node):
    get = tokens.get if isinstance(tokens, dict) else dict(enumerate(tokens)).get
    path = [above for above in range(1, node + 1) if shape.ancestors[node][above]]
    return tuple(get(above) for above in path)


def enumerated(shape, laws):
    """The probability of every draft, and the arguments of the op up to `draft_row`, one row per draft."""
    drafts = all_drafts(shape, laws)
    total = sum(mass for _, mass in drafts)
    assert total == pytest.approx(1.0, abs=1e-6)
    inner = sorted(set(shape.parent) - {-1})
    tokens = torch.tensor(
        [[0, *(draft[n] for n in range(1, shape.num_nodes))] for draft, _ in drafts], dtype=torch.int32
    )
    logits = torch.stack(
        [torch.stack([laws("target", context_of(shape, d, n)) for n in range(shape.num_nodes)]) for d, _ in drafts]
    )
    draft_logits = torch.stack(
        [torch.stack([laws("draft", context_of(shape, d, n)) for n in inner]) for d, _ in drafts]
    )
    draft_row = torch.tensor([inner.index(n) if n in inner else -1 for n in range(shape.num_nodes)], dtype=torch.int32)
    return drafts, (tokens, torch.tensor([shape.parent], dtype=torch.int32), logits, draft_logits, draft_row)


def branches(shape, drafts, call):
    """All that can happen to every draft: index, uniforms amid each cell, probability, and what is emitted."""
    weights, laws = traversal_weights(*call)
    order = TraversalTables.of(shape, torch.device("cpu")).order.tolist()
    for index, (draft, mass) in enumerate(drafts):
        uniform = [0.5] * shape.num_nodes
        for node in order:
            weight = weights[index, node].item()
            before = 0.0
            for token, share in enumerate(laws[index, node].tolist()):
                if mass * weight * share > 0:
                    emitted = (*context_of(shape, draft, node), token)
                    judged = [weight / 2 if n == node else uniform[n] for n in range(shape.num_nodes)]
                    yield index, judged, before + share / 2, mass * weight * share, emitted
                before += share
            mass *= 1 - weight
            uniform[node] = (1 + weight) / 2
        assert mass == pytest.approx(0, abs=1e-6), "the root is always accepted"


def assert_is_the_targets(emitted, laws, length):
    for sequence in itertools.product(range(V), repeat=length):
        true = 1.0
        for place, token in enumerate(sequence):
            true *= laws.prob("target", sequence[:place], token)
        assert emitted.get(sequence, 0.0) == pytest.approx(true, abs=2e-6)


@pytest.mark.parametrize("zeros", [False, True], ids=["full laws", "draft laws of two tokens"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_emitted_law_is_the_targets(shape, zeros):
    laws = Laws(seed=7, zeros=zeros)
    length, emitted = shape.max_depth + 1, {}
    for _, _, _, mass, start in branches(shape, *enumerated(shape, laws)):
        spread(emitted, start, mass, laws, length)
    assert_is_the_targets(emitted, laws, length)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("zeros", [False, True], ids=["full laws", "draft laws of two tokens"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_branch_is_decided_so(shape, zeros, backend, device):
    """What the op emits has the target's law, where all branches are run; otherwise it is what the branch says."""
    laws = Laws(seed=7, zeros=zeros)
    drafts, call = enumerated(shape, laws)
    listed = list(branches(shape, drafts, call))
    num_programs = 10**6 if device == "cuda" else 1300  # the interpreter takes milliseconds for each
    stride = 1 if backend == "reference" else -(-len(listed) * shape.num_nodes // num_programs)
    index, uniform, uniform_final, masses, starts = zip(*listed[::stride], strict=True)
    tables = TraversalTables.of(shape, torch.device(device))
    tokens, parent, logits, draft_logits, draft_row = (tensor.to(device) for tensor in call)
    rows, *uniforms = (torch.tensor(values, device=device) for values in (index, uniform, uniform_final))
    laws_of = (logits[rows], draft_logits[rows], draft_row)
    how = {"max_depth": shape.max_depth, "backend": backend}
    verdict = accept_traversal(tokens[rows], parent, *laws_of, *uniforms, tables.order, tables.steps, **how)
    length, emitted = shape.max_depth + 1, {}
    for got, mass, start in zip(verdict.emitted.tolist(), masses, starts, strict=True):
        own = tuple(token for token in got if token >= 0)
        if mass > 1e-6:  # fp32 uniforms cannot tell smaller cells apart
            assert own == start
        spread(emitted, own, mass, laws, length)
    if stride == 1:
        assert_is_the_targets(emitted, laws, length)


def spread(emitted, start, mass, laws, length):
    """Add the mass of a beginning to all its continuations by the target."""
    if mass <= 0:
        return
    for rest in itertools.product(range(V), repeat=length - len(start)):
        sequence, probability = start, mass
        for token in rest:
            probability *= laws.prob("target", sequence, token)
            sequence = (*sequence, token)
        emitted[sequence] = emitted.get(sequence, 0.0) + probability


def one_by_one(tokens, shape, logits, draft_logits, draft_row):
    """Algorithm 1 of the paper for one row, node by node in float64: weights [N] and laws [N, V]."""
    laws, draft_laws = logits.double().softmax(-1), draft_logits.double().softmax(-1)
    weight, law = [1.0] * shape.num_nodes, list(laws)

    def visit(node, w):
        p, q = laws[node], draft_laws[draft_row[node]]
        for child in shape.children[node]:
            token = tokens[child]
            if q[token] == 0:
                visit(child, 0.0)
                continue
            visit(child, min(1.0, (w * p[token] / q[token]).item()))
            residual = (w * p - q).clamp(min=0)
            mass = residual.sum().item()
            if mass > RESIDUAL_FLOOR:
                p = residual / mass
            w = mass / (mass + 1 - w) if mass + 1 - w > RESIDUAL_FLOOR else 1.0
            q = q.clone()
            q[token] = 0
            q = q / q.sum().clamp(min=1e-300)
        weight[node], law[node] = w, p

    visit(0, 1.0)
    return torch.tensor(weight, dtype=torch.float64), torch.stack(law)


@pytest.mark.parametrize("shape", [*SHAPES.values(), TreeShape.from_k_config((4, 2, 2)), TreeShape.chain(0)], ids=repr)
def test_depth_by_depth_is_node_by_node(generator, shape):
    batch, vocab = 6, 11
    inner = sorted(set(shape.parent) - {-1}) or [0]
    draft_logits = torch.randn(batch, len(inner), vocab, generator=generator)
    draft_logits[::2, :, 2:] = -torch.inf  # lists of more tokens than the law has
    logits = torch.randn(batch, shape.num_nodes, vocab, generator=generator)
    draft_row = torch.tensor([inner.index(n) if n in inner else -1 for n in range(shape.num_nodes)], dtype=torch.int32)
    tokens = torch.zeros(batch, shape.num_nodes, dtype=torch.int32)
    for node in inner:
        drawn = (draft_logits[:, inner.index(node)] - torch.rand(batch, vocab, generator=generator)).argsort(-1)
        below = list(shape.children[node])
        tokens[:, below] = drawn.flip(1)[:, : len(below)].int()
    parent = torch.tensor([shape.parent], dtype=torch.int32)
    weights, laws = traversal_weights(tokens, parent, logits, draft_logits, draft_row)
    for b in range(batch):
        weight, law = one_by_one(tokens[b], shape, logits[b], draft_logits[b], draft_row)
        torch.testing.assert_close(weights[b], weight, rtol=0, atol=1e-12)
        torch.testing.assert_close(laws[b], law, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "shape", [*SHAPES.values(), TreeShape.preset("medusa/mc_sim_7b_63"), TreeShape.chain(0)], ids=repr
)
def test_tables_have_every_node_after_what_it_needs(shape):
    tables = TraversalTables.of(shape, torch.device("cpu"))
    order = tables.order.tolist()
    assert sorted(order) == list(range(shape.num_nodes))
    assert order[-1] == 0
    for node, children in enumerate(shape.children):
        places = [order.index(child) for child in children]
        assert places == sorted(places)
        assert all(place < order.index(node) for place in places)
    step = {node: i for i, row in enumerate(tables.steps.tolist()) for node in row if node >= 0}
    assert sorted(step) == list(range(1, shape.num_nodes))
    for node in step:
        siblings = shape.children[shape.parent[node]]
        needed = node - 1 if node > siblings[0] else shape.parent[node]
        assert step[node] == step.get(needed, -1) + 1
