"""lstm_recurrence: time of a few LSTM steps, against the loop of PyTorch's operators, eager and compiled.

Question: does a step take as long as its recurrent weights take to read, whatever the number of branches?

    pytest bench/kernels/bench_lstm_recurrence.py --benchmark-only
"""

import functools

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases, compiled, eager
from specdec.bench.common.shapes import StepShape
from specdec.kernels.lstm_recurrence import lstm_recurrence
from specdec.kernels.reference import lstm_recurrence as reference

NUM_BRANCHES = 12  # of the widest pass over Falcon's published tree
NUM_STEPS = 2  # its block size


def make_steps(shape: StepShape, generator: torch.Generator) -> Call:
    """Branches of one pass over a tree, from the states at the ends of the blocks above them."""
    width = shape.model.hidden_size
    randn = functools.partial(torch.randn, generator=generator, device=generator.device, dtype=shape.dtype)
    weight, bias = randn(4 * width, width) * width**-0.5, randn(4 * width)
    given, state = randn(shape.batch, NUM_BRANCHES, NUM_STEPS, 4 * width), randn(shape.batch, 7, 2, width)
    source = torch.arange(NUM_BRANCHES, device=generator.device) % 7
    return Call(args=(given, weight, bias, state, source))


RECURRENCE = BenchOp.of(
    lstm_recurrence,
    reference.lstm_recurrence,
    make=make_steps,
    others={"compile": compiled(eager(reference.lstm_recurrence))},
    cost=lambda shape: cost.lstm_recurrence(
        num_rows=shape.batch * NUM_BRANCHES, num_steps=NUM_STEPS, **shape.sizes("width", "element_bytes")
    ),
    shapes=shapes.step_shapes(
        models=[shapes.LLAMA_2_7B, shapes.VICUNA_13B], batches=[1, 8], trees=shapes.TREES[2:3], contexts=[2048]
    ),
)
bench_lstm_recurrence = cases(RECURRENCE)
