"""tree_grow: time of growing the best tree of a block of candidates.

Question: does a tree of 64 nodes take under 20 us, for products and for lattices?

    pytest bench/kernels/bench_tree_grow.py --benchmark-only
"""

import functools

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference.tree_grow import tree_grow as reference
from specdec.kernels.tree_grow import tree_grow

DEPTH, NUM_RANKS = 15, 8  # a block of 16 tokens, its first known


def make_block(shape: StepShape, generator: torch.Generator, *, lattice: bool) -> Call:
    """Candidates of a block, as probable as if their logits were normal with deviation 2."""
    randn = functools.partial(torch.randn, generator=generator, device=generator.device)
    tokens = shape.random_tokens(generator, shape.batch, DEPTH, NUM_RANKS)
    logps = (2 * randn(shape.batch, DEPTH, NUM_RANKS)).log_softmax(-1).sort(-1, descending=True).values
    edges = (2 * randn(shape.batch, DEPTH - 1, NUM_RANKS, NUM_RANKS)).log_softmax(-1)
    root = shape.random_tokens(generator, shape.batch)
    return Call(
        args=(tokens, logps, root),
        kwargs={"num_nodes": shape.tree.num_nodes, "edges": edges if lattice else None},
    )


def _op(name: str, *, lattice: bool) -> BenchOp:
    return BenchOp.of(
        tree_grow,
        reference,
        name=name,
        make=functools.partial(make_block, lattice=lattice),
        others={},  # top-k of every level in PyTorch keeps another order of the nodes
        waits=True,
        cost=lambda shape: cost.tree_grow(
            batch=shape.batch, depth=DEPTH, num_ranks=NUM_RANKS, num_nodes=shape.tree.num_nodes, lattice=lattice
        ),
        shapes=shapes.step_shapes(models=[shapes.LLAMA_2_7B], trees=shapes.TREES[1:], contexts=[2048]),
    )


PRODUCT = _op("tree_grow", lattice=False)
LATTICE = _op("tree_grow_lattice", lattice=True)
bench_tree_grow = cases(PRODUCT)
bench_tree_grow_lattice = cases(LATTICE)
