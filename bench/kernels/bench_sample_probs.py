"""sample_probs: time of processing logits and of drawing from them, against top-k and sort in PyTorch.

Questions: what do the 16 passes of a search cost beside reading the logits? Is a race bound by its logits or by its
random numbers?

    pytest bench/kernels/bench_sample_probs.py --benchmark-only
"""

import functools
from typing import Any

import pytest
import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, Provider, compiled
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference import sample_probs as reference
from specdec.kernels.sample_probs import sample_race, warp_logits


def random_logits(shape: StepShape, generator: torch.Generator) -> torch.Tensor:
    """[B, N, V] fp32 with a standard deviation of three, as a language model's."""
    size = (shape.batch, shape.tree.num_nodes, shape.model.vocab_size)
    return 3 * torch.randn(size, generator=generator, device=generator.device)


def make_warp_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """The default top-k of transformers, with a usual temperature and top-p."""
    return Call(args=(random_logits(shape, generator),), kwargs={"temperature": 0.8, "top_k": 50, "top_p": 0.9})


def make_race_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """One draw for every node."""
    row_ids = torch.arange(shape.batch, dtype=torch.int32, device=generator.device)
    return Call(args=(random_logits(shape, generator), row_ids, torch.zeros_like(row_ids[:1])), kwargs={"seed": 1})


def topk_and_sort(logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The usual eager code, as in transformers."""
    scores = logits / temperature
    scores = scores.masked_fill(scores < scores.topk(top_k, dim=-1).values[..., -1:], float("-inf"))
    ordered, order = scores.sort(dim=-1)
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    return scores.masked_fill(dropped.scatter(-1, order, dropped), float("-inf"))


def finite(_: Call, processed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What to compare: which tokens were kept, and their logits."""
    kept = processed > float("-inf")
    return kept, processed.masked_fill(~kept, 0.0)


def op_cost(function: Any, shape: StepShape) -> cost.Cost:
    """Cost at a shape."""
    sizes = {"batch": shape.batch, "num_nodes": shape.tree.num_nodes, "vocab_size": shape.model.vocab_size}
    result: cost.Cost = function(**sizes, element_bytes=4)
    return result


WARP = BenchOp(
    name="sample_probs_warp",
    make=make_warp_inputs,
    definition=reference.warp_logits,
    providers={
        "reference": Provider(functools.partial(reference.warp_logits, upcast=False)),
        "sort": Provider(topk_and_sort),
        "compile": compiled(topk_and_sort),
        "triton": Provider(functools.partial(warp_logits, backend="triton"), needs_gpu=True),
    },
    cost=functools.partial(op_cost, cost.warp_logits),
    outputs=finite,
)
RACE = BenchOp(
    name="sample_probs_race",
    make=make_race_inputs,
    definition=reference.sample_race,
    providers={
        "reference": Provider(functools.partial(reference.sample_race, upcast=False)),
        "triton": Provider(functools.partial(sample_race, backend="triton"), needs_gpu=True),
    },
    cost=functools.partial(op_cost, cost.sample_race),
)
SHAPES = shapes.step_shapes(
    models=[shapes.LLAMA_2_7B, shapes.LLAMA_3_8B], batches=[1], trees=shapes.TREES[1:3], contexts=[2048]
)


@pytest.mark.parametrize("provider", WARP.providers)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_warp_logits(benchmark: Any, provider: str, shape: StepShape) -> None:
    """Time one provider of warp_logits at one shape."""
    WARP.run(benchmark, provider, shape)


@pytest.mark.parametrize("provider", RACE.providers)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_sample_race(benchmark: Any, provider: str, shape: StepShape) -> None:
    """Time one provider of sample_race at one shape."""
    RACE.run(benchmark, provider, shape)
