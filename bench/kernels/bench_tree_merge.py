"""tree_merge: time of merging what four drafters propose, each a tree of the step's size.

Question: do 252 candidates take under 20 us, gains of four groups included?

    pytest bench/kernels/bench_tree_merge.py --benchmark-only
"""

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference.tree_merge import tree_merge as reference
from specdec.kernels.tree_merge import tree_merge

NUM_DRAFTERS, NUM_GROUPS = 4, 4
NUM_TOKENS = 8  # few, so that drafters agree now and then


def make_candidates(shape: StepShape, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and parents of the drafters' trees, one behind the other, and whose they are."""
    device, of_tree = generator.device, shape.tree.num_nodes - 1
    above = torch.tensor(shape.tree.parents()[1:], dtype=torch.int32, device=device) - 1
    member = torch.arange(NUM_DRAFTERS, dtype=torch.int32, device=device).repeat_interleave(of_tree)
    parent = torch.where(above.repeat(NUM_DRAFTERS) < 0, -1, above.repeat(NUM_DRAFTERS) + member * of_tree)
    sizes = shape.batch, len(member)
    tokens = torch.randint(NUM_TOKENS, sizes, generator=generator, device=device, dtype=torch.int32)
    return tokens, parent.expand(sizes).contiguous(), member


def make_pool(shape: StepShape, generator: torch.Generator) -> Call:
    """The pool of four drafters; all of them together, and groups without one of them."""
    tokens, parent, member = make_candidates(shape, generator)
    chance = torch.rand(tokens.shape, generator=generator, device=generator.device)
    groups = torch.tensor([0b1111, 0b0111, 0b0011, 0b0001], dtype=torch.int32, device=generator.device)
    num_nodes, max_depth = shape.tree.num_nodes, shape.tree.max_depth
    return Call(
        args=(tokens, parent, chance, member, shape.random_tokens(generator, shape.batch), groups),
        kwargs={"num_nodes": num_nodes, "num_gains": num_nodes, "max_depth": max_depth},
    )


def pool_cost(shape: StepShape) -> cost.Cost:
    """Cost at a shape."""
    num_nodes = shape.tree.num_nodes
    return cost.tree_merge(
        batch=shape.batch,
        num_candidates=NUM_DRAFTERS * (num_nodes - 1),
        num_groups=NUM_GROUPS,
        num_nodes=num_nodes,
        num_gains=num_nodes,
    )


OP = BenchOp.of(
    tree_merge,
    reference,
    make=make_pool,
    others={},  # PyTorch finds equal rows by sorting them (`unique`), in an order that depends on their number
    waits=True,
    cost=pool_cost,
    shapes=shapes.step_shapes(models=[shapes.LLAMA_2_7B], trees=shapes.TREES[1:], contexts=[2048]),
)
bench_tree_merge = cases(OP)
