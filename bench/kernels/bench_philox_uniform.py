"""philox_uniform and philox_exponential: time of the random numbers of a step, against the same integers in PyTorch.

Questions: is a draw for one verdict more than its launch? Is a race's draw bound by its bytes, its integers or its
logarithms in fp64?

    pytest bench/kernels/bench_philox_uniform.py --benchmark-only
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, Provider, compiled
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


def op_cost(count: Callable[[StepShape], int], shape: StepShape, *, exponential: bool) -> cost.Cost:
    """Cost at a shape."""
    return cost.philox_uniform(batch=shape.batch, count=count(shape), exponential=exponential)


UNIFORM = BenchOp(
    name="philox_uniform",
    make=functools.partial(make_inputs, one_per_node),
    definition=reference.philox_uniform,
    providers={
        "reference": Provider(reference.philox_uniform),
        "compile": compiled(reference.philox_uniform),
        "triton": Provider(functools.partial(philox_uniform, backend="triton"), needs_gpu=True),
    },
    cost=functools.partial(op_cost, one_per_node, exponential=False),
)
EXPONENTIAL = BenchOp(
    name="philox_exponential",
    make=functools.partial(make_inputs, one_per_child_token),
    definition=reference.philox_exponential,
    providers={
        "reference": Provider(reference.philox_exponential),
        "compile": compiled(reference.philox_exponential),
        "triton": Provider(functools.partial(philox_exponential, backend="triton"), needs_gpu=True),
    },
    cost=functools.partial(op_cost, one_per_child_token, exponential=True),
)
VERDICT_SHAPES = shapes.step_shapes(models=[shapes.LLAMA_2_7B], batches=[1, 8], trees=shapes.TREES, contexts=[2048])
RACE_SHAPES = shapes.step_shapes(
    models=[shapes.LLAMA_2_7B, shapes.LLAMA_3_8B], batches=[1], trees=shapes.TREES[1:3], contexts=[2048]
)


@pytest.mark.parametrize("provider", UNIFORM.providers)
@pytest.mark.parametrize("shape", VERDICT_SHAPES, ids=str)
def bench_philox_uniform(benchmark: Any, provider: str, shape: StepShape) -> None:
    """Time one provider of philox_uniform at one shape."""
    UNIFORM.run(benchmark, provider, shape)


@pytest.mark.parametrize("provider", EXPONENTIAL.providers)
@pytest.mark.parametrize("shape", RACE_SHAPES, ids=str)
def bench_philox_exponential(benchmark: Any, provider: str, shape: StepShape) -> None:
    """Time one provider of philox_exponential at one shape."""
    EXPONENTIAL.run(benchmark, provider, shape)
