"""learn_chances: time of learning from a step which candidates of four drafters were right.

Question: is it more than the cost of a few launches?

    pytest bench/kernels/bench_learn_chances.py --benchmark-only
"""

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.bench.kernels.bench_tree_merge import NUM_DRAFTERS, make_candidates
from specdec.kernels.learn_chances import learn_chances
from specdec.kernels.reference.learn_chances import learn_chances as reference

NUM_CELLS, NUM_GRADES = 256, 8


def make_step(shape: StepShape, generator: torch.Generator) -> Call:
    """A step whose tokens are the first drafter's path to its last node."""
    device, batch = generator.device, shape.batch
    tokens, parent, member = make_candidates(shape, generator)
    cell = torch.randint(NUM_CELLS, tokens.shape, generator=generator, device=device, dtype=torch.int32)
    path = torch.tensor(shape.tree.path()[1:], device=device) - 1
    emitted = torch.cat([tokens[:, path], shape.random_tokens(generator, batch, 1)], dim=1)
    accepted = torch.full((batch,), len(path), dtype=torch.int32, device=device)
    prior = torch.rand(NUM_CELLS, generator=generator, device=device)
    counts, totals = (torch.ones(batch, NUM_CELLS, 2, device=device) for _ in range(2))
    table = counts, totals, torch.zeros(batch, NUM_CELLS + 1, device=device), emitted.new_zeros(batch, NUM_DRAFTERS)
    return Call(
        args=(tokens, parent, cell, member, emitted, accepted, prior, *table),
        kwargs={"num_grades": NUM_GRADES, "decay": 0.98, "strength": 4.0},
    )


def step_cost(shape: StepShape) -> cost.Cost:
    """Cost at a shape."""
    return cost.learn_chances(
        batch=shape.batch,
        num_candidates=NUM_DRAFTERS * (shape.tree.num_nodes - 1),
        num_emitted=shape.tree.max_depth + 1,
        num_cells=NUM_CELLS,
        num_drafters=NUM_DRAFTERS,
    )


OP = BenchOp.of(
    learn_chances,
    reference,
    make=make_step,
    others={},  # every level of a path is a gather of its own in PyTorch
    waits=True,
    cost=step_cost,
    outputs=lambda call, _: call.args[7:],
    shapes=shapes.step_shapes(models=[shapes.LLAMA_2_7B], trees=shapes.TREES[1:], contexts=[2048]),
)
bench_learn_chances = cases(OP)
