"""plan_splits: time of planning a ragged batch on the device, once per step, against the search in PyTorch ops.

Question: does the plan stay under 3 us, without a synchronisation?

    pytest bench/kernels/bench_plan_splits.py --benchmark-only
"""

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.kernels.plan_splits import plan_splits
from specdec.kernels.reference.plan_splits import plan_splits as reference

BLOCK = 64  # slots of one key tile
BUDGET = 264  # two programs for each of the 132 multiprocessors of an H200
SEARCH_STEPS = 16  # of a search without a loop on the device: prefixes of up to 64 * 2^16 tokens


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """Prefixes of all lengths up to the context."""
    lengths = torch.randint(
        shape.context, (shape.batch,), generator=generator, device=generator.device, dtype=torch.int32
    )
    return Call(
        args=(lengths,),
        kwargs={"num_tree_nodes": shape.tree.num_nodes, "block": BLOCK, "budget": BUDGET, "max_work": BUDGET},
    )


def search_in_torch(
    lengths: torch.Tensor, *, num_tree_nodes: int, block: int, budget: int, max_work: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same plan as a chain of ops on the device."""
    tiles = (lengths + block - 1) // block + (num_tree_nodes + block - 1) // block
    low, high = torch.ones_like(lengths[0]), tiles.amax()
    for _ in range(SEARCH_STEPS):
        size = (low + high) // 2
        fits = ((tiles + size - 1) // size).sum() <= budget
        low, high = torch.where(fits | (low >= high), low, size + 1), torch.where(fits, size, high)
    pieces = (tiles + low - 1) // low
    offsets = torch.cat([torch.zeros_like(pieces[:1]), pieces.cumsum(0).to(torch.int32)])
    entry = torch.arange(max_work, dtype=torch.int32, device=lengths.device)
    row = torch.searchsorted(offsets, entry, right=True, out_int32=True) - 1
    live = row < lengths.shape[0]
    owner = torch.where(live, row, 0)
    i, count, total = entry - offsets[owner], pieces[owner], tiles[owner]
    work = torch.stack([owner, i * total // count, (i + 1) * total // count], dim=1)
    nothing = torch.zeros_like(work)
    nothing[:, 0] = -1
    return torch.where(live[:, None], work, nothing), offsets


OP = BenchOp.of(
    plan_splits,
    reference,
    make=make_inputs,
    others={"search_in_torch": search_in_torch},
    waits=True,
    cost=lambda shape: cost.plan_splits(batch=shape.batch, max_work=BUDGET),
    shapes=shapes.step_shapes(models=[shapes.LLAMA_2_7B], trees=shapes.TREES[2:3], contexts=[2048, 8192]),
)
bench_plan_splits = cases(OP)
