"""draft_heads and draft_heads_concat: time of the residual blocks, against a loop of linear layers and torch.compile.

Question: do all heads of a step take as long as their weights take to read, and no longer?

    pytest bench/kernels/bench_draft_heads.py --benchmark-only
"""

import functools

import torch
import torch.nn.functional as F

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases, compiled, eager
from specdec.bench.common.shapes import StepShape
from specdec.kernels.draft_heads import draft_heads, draft_heads_concat
from specdec.kernels.reference import draft_heads as reference

NUM_HEADS = 4  # of the published Medusa and Hydra checkpoints
NUM_PARTS = 3  # Hydra's second head: the state and two embeddings


def make_heads(shape: StepShape, generator: torch.Generator) -> Call:
    """One state per request and NUM_HEADS blocks."""
    width = shape.model.hidden_size
    randn = functools.partial(torch.randn, generator=generator, device=generator.device, dtype=shape.dtype)
    weight = randn(NUM_HEADS, width, width) * width**-0.5
    return Call(args=(randn(shape.batch, width), weight, randn(NUM_HEADS, width)))


def make_concat(shape: StepShape, generator: torch.Generator) -> Call:
    """A row per request and node of the tree's widest depth, as Hydra's head sees them."""
    width, num_rows = shape.model.hidden_size, concat_rows(shape)
    randn = functools.partial(torch.randn, generator=generator, device=generator.device, dtype=shape.dtype)
    parts = [randn(num_rows, width) for _ in range(NUM_PARTS)]
    weight, residual_weight = (randn(width, NUM_PARTS * width) * (NUM_PARTS * width) ** -0.5 for _ in range(2))
    return Call(args=(parts, weight, randn(width), residual_weight, randn(width)))


def concat_rows(shape: StepShape) -> int:
    """Rows of a step's widest depth."""
    return shape.batch * max(len(level) for level in shape.tree.levels())


def loop_of_linears(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What Medusa's code does: head by head, three calls each."""
    return torch.stack([x + F.silu(F.linear(x, w, b)) for w, b in zip(weight, bias, strict=True)])


SHAPES = shapes.step_shapes(
    models=[shapes.LLAMA_2_7B, shapes.VICUNA_13B], batches=[1, 8], trees=shapes.TREES[2:3], contexts=[2048]
)
HEADS = BenchOp.of(
    draft_heads,
    reference.draft_heads,
    make=make_heads,
    others={"loop": loop_of_linears, "compile": compiled(eager(reference.draft_heads))},
    cost=lambda shape: cost.draft_heads(num_heads=NUM_HEADS, **shape.sizes("batch", "width", "element_bytes")),
    shapes=SHAPES,
)
CONCAT = BenchOp.of(
    draft_heads_concat,
    reference.draft_heads_concat,
    make=make_concat,
    others={"compile": compiled(eager(reference.draft_heads_concat))},
    cost=lambda shape: cost.draft_heads_concat(
        num_parts=NUM_PARTS, num_rows=concat_rows(shape), **shape.sizes("width", "element_bytes")
    ),
    shapes=SHAPES,
)
bench_draft_heads = cases(HEADS)
bench_draft_heads_concat = cases(CONCAT)
