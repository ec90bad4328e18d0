"""swiglu: time per layer for the rows of one step, against eager PyTorch and torch.compile.

Question: what does it cost beyond its launch?

    pytest bench/kernels/bench_swiglu.py --benchmark-only
"""

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases, compiled, eager
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference.swiglu import swiglu as reference
from specdec.kernels.swiglu import swiglu


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """Gate and up of every node."""
    return Call((shape.normal(generator, shape.batch, shape.tree.num_nodes, 2 * shape.model.intermediate_size),))


OP = BenchOp.of(
    swiglu,
    reference,
    make=make_inputs,
    others={"compile": compiled(eager(reference))},
    cost=lambda shape: cost.swiglu(**shape.sizes("num_rows", "element_bytes"), width=shape.model.intermediate_size),
    shapes=shapes.step_shapes(
        models=[shapes.LLAMA_2_7B, shapes.LLAMA_3_8B], batches=[1, 8], trees=shapes.TREES[:3], contexts=[2048]
    ),
)
bench_swiglu = cases(OP)
