"""philox_uniform and philox_exponential: time of the random numbers of a step, against the same integers in PyTorch.

Questions: is a draw for one verdict more than its launch? Is a race's draw bound by its bytes, its integers or its
logarithms in fp64?

    pytest bench/kernels/bench_philox_uniform.py --benchmark-only
"""

import functools
from collections.abc import Callable

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases, compiled
from specdec.bench.common.shapes import StepShape
from specdec.kernels.philox_uniform import philox_exponential, philox_uniform
from specdec.kernels.reference import philox_uniform as reference


def one_per_node(shape: StepShape) -> int:
    """What a verdict takes: a number for each node."""
    return shape.tree.num_nodes


def one_per_child_token(shape: StepShape) -> int:
    """What a draft without replacement takes: a race over the vocabulary for each node that has children."""
    return len({*shape.tree.parents()} - {-1}) * shape.model.vocab_size


def make_inputs(count: Callable[[StepShape], int], shape: StepShape, generator: torch.Generator) -> Call:
    """Seeds of all 64 bits."""
    device = generator.device
    seeds = torch.randint(-(2**63), 2**63 - 1, (shape.batch,), generator=generator, device=device)
    return Call(args=(seeds, torch.full((), 3, device=device)), kwargs={"stream": 2, "count": count(shape)})


UNIFORM = BenchOp.of(
    philox_uniform,
    reference.philox_uniform,
    make=functools.partial(make_inputs, one_per_node),
    others={"compile": compiled(reference.philox_uniform)},
    cost=lambda shape: cost.philox_uniform(batch=shape.batch, count=one_per_node(shape)),
    shapes=shapes.step_shapes(models=[shapes.LLAMA_2_7B], batches=[1, 8], trees=shapes.TREES, contexts=[2048]),
)
EXPONENTIAL = BenchOp.of(
    philox_exponential,
    reference.philox_exponential,
    make=functools.partial(make_inputs, one_per_child_token),
    others={"compile": compiled(reference.philox_exponential)},
    cost=lambda shape: cost.philox_uniform(batch=shape.batch, count=one_per_child_token(shape), exponential=True),
    shapes=shapes.step_shapes(
        models=[shapes.LLAMA_2_7B, shapes.LLAMA_3_8B], batches=[1], trees=shapes.TREES[1:3], contexts=[2048]
    ),
)
bench_philox_uniform = cases(UNIFORM)
bench_philox_exponential = cases(EXPONENTIAL)
