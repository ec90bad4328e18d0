"""accept_greedy: time of the accept decision on the device, against the usual comparison of all paths in PyTorch.

Question: does the decision stay under 4 us, without a synchronisation?

    pytest bench/kernels/bench_accept_greedy.py --benchmark-only
"""

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.kernels.accept_greedy import accept_greedy
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.reference.accept_greedy import accept_greedy as reference


def distinct_tokens(shape: StepShape, generator: torch.Generator) -> torch.Tensor:
    """[B, N] int32, another token for every node of a tree."""
    nodes = torch.arange(shape.tree.num_nodes, dtype=torch.int32, device=generator.device)
    return (shape.random_tokens(generator, shape.batch, 1) + nodes) % shape.model.vocab_size


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """Every node has its own token; the target agrees with the deepest path in even rows, with no child in odd ones."""
    device, tokens = generator.device, distinct_tokens(shape, generator)
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
    path = path_to(last, num_accepted, above, max_depth)
    next_root = target_tokens.gather(1, last[:, None])[:, 0]
    return verdict_of(path, num_accepted, next_root, target_tokens.gather(1, path))


def path_to(last: torch.Tensor, num_accepted: torch.Tensor, above: torch.Tensor, max_depth: int) -> torch.Tensor:
    """[B, max_depth + 1] nodes from the root to the last one [B], then any; `above` [B, N] has parents."""
    nodes = [last]
    for _ in range(max_depth):
        nodes.append(above.gather(1, nodes[-1][:, None])[:, 0])
    climb = torch.stack(nodes, dim=1)  # from the last node up, then the root again and again
    steps = torch.arange(max_depth + 1, device=last.device)
    return climb.gather(1, (num_accepted[:, None] - steps).clamp(min=0).long())


def verdict_of(
    path: torch.Tensor, num_accepted: torch.Tensor, next_root: torch.Tensor, emitted: torch.Tensor
) -> Verdict:
    """The verdict, padded behind the path's last node."""
    on_path = torch.arange(path.shape[1], device=path.device) <= num_accepted[:, None]
    padded = torch.where(on_path, path, -1).int()
    return Verdict(padded, num_accepted.int(), next_root, torch.where(on_path, emitted, -1))


OP = BenchOp.of(
    accept_greedy,
    reference,
    make=make_inputs,
    others={"compare_paths": compare_paths},
    waits=True,
    cost=lambda shape: cost.accept_greedy(**shape.sizes("batch", "num_nodes", "max_depth")),
    shapes=shapes.step_shapes(models=[shapes.LLAMA_2_7B], trees=shapes.TREES[1:], contexts=[2048]),
)
bench_accept_greedy = cases(OP)
