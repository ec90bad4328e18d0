"""accept_greedy: time of the accept decision on the device, against the usual comparison of all paths in PyTorch.

Question: does the decision stay under 4 us, without a synchronisation?

    pytest bench/kernels/bench_accept_greedy.py --benchmark-only
"""

import functools
from typing import Any

import pytest
import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, Provider
from specdec.bench.common.shapes import StepShape
from specdec.kernels.accept_greedy import accept_greedy
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.reference.accept_greedy import accept_greedy as accept_greedy_reference


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """Every node has its own token; the target agrees with the deepest path in even rows, with no child in odd ones."""
    device = generator.device
    first = torch.randint(
        shape.model.vocab_size, (shape.batch, 1), generator=generator, device=device, dtype=torch.int32
    )
    nodes = torch.arange(shape.tree.num_nodes, dtype=torch.int32, device=device)
    tokens = (first + nodes) % shape.model.vocab_size
    target_tokens = torch.full_like(tokens, -2)
    path = torch.tensor(shape.tree.path(), device=device)
    target_tokens[::2, path[:-1]] = tokens[::2, path[1:]]
    return Call(args=(tokens, shape.tree.parent(device), target_tokens), kwargs={"max_depth": shape.tree.max_depth})


def compare_paths(
    tokens: torch.Tensor, parent: torch.Tensor, target_tokens: torch.Tensor, *, max_depth: int
) -> Verdict:
    """The usual eager code: agreement of every node with its parent, followed along all root paths at once."""
    batch = tokens.shape[0]
    above = parent.clamp(min=0).long().expand(batch, -1)
    agrees = (tokens == target_tokens.gather(1, above)) & (parent >= 0)
    # ancestor climbs from the parent to the root; a node is reached if all on its way up agree
    reached, ancestor = agrees, above
    depth = (parent >= 0).int().expand(batch, -1)
    for _ in range(1, max_depth):
        has_parent = ancestor > 0
        reached = reached & (agrees.gather(1, ancestor) | ~has_parent)
        depth = depth + has_parent.int()
        ancestor = above.gather(1, ancestor)
    num_accepted, last = torch.where(reached, depth, 0).max(dim=1)

    nodes = [last]
    for _ in range(max_depth):
        nodes.append(above.gather(1, nodes[-1][:, None])[:, 0])
    climb = torch.stack(nodes, dim=1)  # [B, max_depth + 1], from the last node up, then the root again and again
    steps = torch.arange(max_depth + 1, device=tokens.device)
    on_path = steps <= num_accepted[:, None]
    path = climb.gather(1, (num_accepted[:, None] - steps).clamp(min=0).long())
    emitted = target_tokens.gather(1, path)
    return Verdict(
        path=torch.where(on_path, path, -1).int(),
        num_accepted=num_accepted.int(),
        next_root=target_tokens.gather(1, last[:, None])[:, 0],
        emitted=torch.where(on_path, emitted, -1),
    )


OP = BenchOp(
    name="accept_greedy",
    make=make_inputs,
    definition=accept_greedy_reference,
    providers={
        "reference": Provider(accept_greedy_reference, capturable=False),
        "compare_paths": Provider(compare_paths),
        "triton": Provider(functools.partial(accept_greedy, backend="triton"), needs_gpu=True),
    },
    cost=lambda shape: cost.accept_greedy(
        batch=shape.batch, num_nodes=shape.tree.num_nodes, max_depth=shape.tree.max_depth
    ),
)
SHAPES = shapes.step_shapes(models=[shapes.LLAMA_2_7B], trees=shapes.TREES[1:], contexts=[2048])


@pytest.mark.parametrize("provider", OP.providers)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_accept_greedy(benchmark: Any, provider: str, shape: StepShape) -> None:
    """Time one provider at one shape."""
    OP.run(benchmark, provider, shape)
