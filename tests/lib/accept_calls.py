"""Random calls of the acceptance rules."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from lib.laws import draw_tokens, random_logits, random_parents, traversal_tables
from lib.tensors import float32, int32, rand, randint, randn
from specdec.kernels import accept_greedy, accept_naive, accept_rejection, accept_traversal, accept_typical
from specdec.kernels.reference.accept_greedy import accept_greedy as greedy_reference
from specdec.kernels.reference.accept_naive import accept_naive as naive_reference
from specdec.kernels.reference.accept_rejection import accept_rejection as rejection_reference
from specdec.kernels.reference.accept_traversal import accept_traversal as traversal_reference
from specdec.kernels.reference.accept_typical import accept_typical as typical_reference

TYPICAL = {"threshold": 0.3, "alpha": 0.5}


def greedy_call(generator, *, batch=2, num_nodes=9, vocab=3, shared=False):
    """Few tokens, so that many nodes agree."""
    parent = random_parents(generator, num_nodes, rows=1 if shared else batch)
    tokens, target_tokens = (randint(generator, 0, vocab, batch, num_nodes) for _ in range(2))
    return tokens, parent, target_tokens


def naive_call(generator, *, batch=3, num_nodes=7, vocab=40, shared=True, dtype=torch.float32, common=4):
    tokens = randint(generator, 0, min(vocab, common), batch, num_nodes)
    parent = random_parents(generator, num_nodes, rows=1 if shared else batch)
    logits = random_logits(generator, batch, num_nodes, vocab, common=common, dtype=dtype)
    return tokens, parent, logits, rand(generator, batch, num_nodes)


def typical_call(generator, *, sampled=True, **sizes):
    tokens, parent, logits, uniform = naive_call(generator, **{"num_nodes": 9, "common": 3} | sizes)
    return tokens, parent, logits, uniform[:, 0].contiguous() if sampled else None


def drafted(generator, parent, logits, draft_logits, draft_row, *, replacement=False, exponent=0.5):
    """Children drawn from their parents' laws; larger uniforms than there are, so that more is refused."""
    batch, num_nodes = logits.shape[:2]
    tokens = draw_tokens(generator, parent, draft_logits, draft_row, replacement)
    uniform, uniform_final = rand(generator, batch, num_nodes) ** exponent, rand(generator, batch)
    return tokens, parent, logits, draft_logits, int32(draft_row), uniform, uniform_final


def two_leaves(logits, draft_logits, uniform, uniform_final=0.5, *, tokens=(9, 0, 1)):
    """A root with two children, by lists: its logits of the target and of the draft, and what is drawn."""
    target = float32(logits).expand(1, 3, -1)
    laws = target, float32(draft_logits)[None, None], int32([0, -1, -1])
    return int32([tokens]), int32([[-1, 0, 0]]), *laws, float32([uniform]), float32([uniform_final])


def near(draft_logits, generator, distance=1.0):
    """Logits of a target near the draft: at every place in a tree some tests pass and some do not."""
    return (draft_logits.float() + randn(generator, *draft_logits.shape, scale=distance)).to(draft_logits.dtype)


def rejection_call(generator, *, batch=3, num_nodes=9, vocab=40, replacement=False, shared=True, dtype=torch.float32):
    """Some nodes have no draft law."""
    parent = random_parents(generator, num_nodes, rows=1 if shared else batch)
    draft_row = [-1 if n % 5 == 3 else n for n in range(num_nodes)]
    draft_logits = random_logits(generator, batch, num_nodes, vocab, dtype=dtype)
    logits = near(draft_logits, generator)
    return drafted(generator, parent, logits, draft_logits, draft_row, replacement=replacement)


def random_tree(generator, num_nodes):
    """Parents of a tree whose nodes have about two children each, in any order that puts parents first."""
    return [-1, *(int(torch.randint(max(0, j // 2 - 2), j, (), generator=generator)) for j in range(1, num_nodes))]


def traversal_of(generator, parent, *laws, **options):
    """The call of a tree that is given by its parents."""
    return *drafted(generator, int32([parent]), *laws, **options), *traversal_tables(parent)


def traversal_call(generator, *, batch=3, num_nodes=9, vocab=40, dtype=torch.float32, parent=None, distance=1.0):
    """Every node has a draft law of its own, in reverse."""
    parent = parent or random_tree(generator, num_nodes)
    draft_logits = random_logits(generator, batch, len(parent), vocab, dtype=dtype)
    logits = near(draft_logits, generator, distance)
    return traversal_of(generator, parent, logits, draft_logits.flip(1), [*reversed(range(len(parent)))])


@dataclass(frozen=True)
class Rule:
    """An acceptance rule: its kernel, its definition, its random calls and what they need beside."""

    kernel: Callable
    reference: Callable
    call: Callable
    options: dict = field(default_factory=dict)

    def both(self, *call, **limits):
        """The kernel's verdict and the reference's."""
        options = self.options | limits
        return self.kernel(*call, **options, backend="triton"), self.reference(*call, **options)


def rejection(replacement):
    call = partial(rejection_call, replacement=replacement)
    return Rule(accept_rejection, rejection_reference, call, {"replacement": replacement})


RULES = {
    "greedy": Rule(accept_greedy, greedy_reference, greedy_call),
    "naive": Rule(accept_naive, naive_reference, naive_call),
    "rejection without replacement": rejection(False),
    "rejection with replacement": rejection(True),
    "traversal": Rule(accept_traversal, traversal_reference, traversal_call),
    "typical": Rule(accept_typical, typical_reference, typical_call, TYPICAL),
}
