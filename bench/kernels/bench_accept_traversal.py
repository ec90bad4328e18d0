"""accept_traversal: time of judging whole paths on the device, against the definition in PyTorch.

Questions: does a step of 64 nodes over 128256 tokens stay under 100 us? What do many siblings cost, each of which is a
launch of its own, beside many depths?

    pytest bench/kernels/bench_accept_traversal.py --benchmark-only
"""

import torch

from specdec.bench.common import cost
from specdec.bench.common.harness import Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.bench.kernels import bench_accept_rejection
from specdec.bench.kernels.bench_accept_rejection import usual_and_rejecting
from specdec.kernels.accept_traversal import accept_traversal
from specdec.kernels.reference.accept_traversal import accept_traversal as reference
from specdec.trees.shape import TreeShape
from specdec.trees.traversal import TraversalTables


def make_inputs(rejecting: bool, shape: StepShape, generator: torch.Generator) -> Call:
    """Those of accept_rejection; the tree's siblings are ranked in node order."""
    call = bench_accept_rejection.make_inputs(rejecting, shape, generator)
    parents = shape.tree.parents()
    rank = [sum(above == parents[node] for above in parents[:node]) if node else -1 for node in range(len(parents))]
    tables = TraversalTables.of(TreeShape(tuple(parents), tuple(rank)), generator.device)
    return Call(args=(*call.args, tables.order, tables.steps), kwargs={"max_depth": shape.tree.max_depth})


OPS = usual_and_rejecting(accept_traversal, reference, make_inputs, cost.accept_traversal)
bench_accept_traversal = cases(OPS)
