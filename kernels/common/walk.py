"""What the acceptance launchers and their references share, in PyTorch alone.

Every acceptance rule says which path of a tree it accepts and which token follows the path. Where the emission ends is
the same for all: at the first stop token, or with the last token of the row's budget. `cut_verdict` is that rule for
the references, `softmax_masses` and `draw` are their law and their draw from it; for the kernels the same three are in
`specdec.kernels.common.primitives`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from specdec.kernels.common.check import FLOAT_DTYPES, check_num_nodes, check_parent, check_tensor
from specdec.kernels.common.verdict import Verdict

__all__ = ["RESIDUAL_FLOOR", "check_draft_laws", "check_logits", "check_walk", "cut_verdict", "draw", "empty_verdict"]
__all__ += ["softmax_masses", "verdict_fields"]

RESIDUAL_FLOOR = 1e-6
"""Mass, as a share of the target's, below which a residual is rounding error in fp32: the target's law replaces it."""


def check_walk(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    *,
    max_depth: int,
    budget: torch.Tensor | None,
    stop_tokens: torch.Tensor | None,
) -> None:
    """Check the arguments that all acceptance launchers have, which are those of `accept_greedy`, as are the errors."""
    check_tensor("tokens", tokens, shape=(None, None), dtype=torch.int32)
    batch, num_nodes = tokens.shape
    device = tokens.device
    check_num_nodes("tokens", num_nodes)
    check_tensor("parent", parent, shape=(None, num_nodes), dtype=torch.int32, device=device)
    if parent.shape[0] not in (1, batch):
        raise ValueError(f"parent: expected {batch} rows or 1, got shape {list(parent.shape)}")
    check_parent(parent)
    if max_depth < 0:
        raise ValueError(f"max_depth: expected 0 or more, got {max_depth}")
    if budget is not None:
        check_tensor("budget", budget, shape=(batch,), dtype=torch.int32, device=device)
    if stop_tokens is not None:
        check_tensor("stop_tokens", stop_tokens, shape=(None,), dtype=torch.int32, device=device)


def check_logits(
    name: str, logits: torch.Tensor, shape: Sequence[int | None], device: torch.device | None = None
) -> None:
    """`check_tensor` for logits of a dtype of `FLOAT_DTYPES` and a vocabulary of at least one token."""
    check_tensor(name, logits, shape=shape, dtype=FLOAT_DTYPES, device=device)
    if logits.shape[-1] == 0:
        raise ValueError(f"{name}: expected a vocabulary of at least one token, got shape {list(logits.shape)}")


def check_draft_laws(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_row: torch.Tensor,
    uniform: torch.Tensor,
    uniform_final: torch.Tensor,
    **limits: Any,
) -> None:
    """Check the arguments of a rule for drawn trees, which are those of `accept_rejection`, as are the errors."""
    check_walk(tokens, parent, **limits)
    (batch, num_nodes), device = tokens.shape, tokens.device
    check_logits("logits", logits, (batch, num_nodes, None), device)
    check_logits("draft_logits", draft_logits, (batch, None, logits.shape[-1]), device)
    if draft_logits.shape[1] == 0:
        raise ValueError(f"draft_logits: expected at least one law, got shape {list(draft_logits.shape)}")
    check_tensor("draft_row", draft_row, shape=(num_nodes,), dtype=torch.int32, device=device)
    check_tensor("uniform", uniform, shape=(batch, num_nodes), dtype=torch.float32, device=device)
    check_tensor("uniform_final", uniform_final, shape=(batch,), dtype=torch.float32, device=device)


def empty_verdict(tokens: torch.Tensor, max_depth: int) -> Verdict:
    """Allocate a verdict for a kernel to fill, for the batch and on the device of tokens [B, N] int32."""
    batch = tokens.shape[0]
    return Verdict(
        path=tokens.new_empty(batch, max_depth + 1),
        num_accepted=tokens.new_empty(batch),
        next_root=tokens.new_empty(batch),
        emitted=tokens.new_empty(batch, max_depth + 1),
    )


def verdict_fields(verdict: Verdict) -> tuple[torch.Tensor, ...]:
    """The tensors of a verdict, as kernels take them."""
    return verdict.path, verdict.num_accepted, verdict.next_root, verdict.emitted


def cut_verdict(
    tokens: torch.Tensor,
    paths: Sequence[Sequence[int]],
    last_tokens: Sequence[int],
    *,
    max_depth: int,
    budget: torch.Tensor | None,
    stop_tokens: torch.Tensor | None,
) -> Verdict:
    """Turn accepted paths into a verdict, on the host.

    Args:
        tokens: [B, N] int32, tokens of the nodes.
        paths: per row the nodes that the rule accepted, from the root (node 0) down; of no matter for a finished row.
        last_tokens: per row the token that follows the path.
        max_depth: largest depth of any node.
        budget: [B] int32, tokens that each row may still emit, or None.
        stop_tokens: [E] int32 or None.

    Returns:
        The verdict, cut behind the first stop token and at the budget.
    """
    batch = tokens.shape[0]
    budgets = [max_depth + 1] * batch if budget is None else budget.tolist()
    stops = set() if stop_tokens is None else set(stop_tokens.tolist())

    kept_paths, counts, next_roots, emissions = [], [], [], []
    for row, path, last, limit in zip(tokens.tolist(), paths, last_tokens, budgets, strict=True):
        emitted = [*(row[node] for node in path[1:]), last][: min(len(path), max(limit, 0))]
        stop = next((d for d, token in enumerate(emitted) if token in stops), len(emitted))
        emitted = emitted[: stop + 1]
        padding = [-1] * (max_depth + 1 - len(emitted))
        counts.append(len(emitted) - 1)
        next_roots.append(emitted[-1] if emitted else row[0])
        kept_paths.append([*path[: len(emitted)], *padding])
        emissions.append(emitted + padding)

    return Verdict(
        path=tokens.new_tensor(kept_paths).view(batch, max_depth + 1),
        num_accepted=tokens.new_tensor(counts),
        next_root=tokens.new_tensor(next_roots),
        emitted=tokens.new_tensor(emissions).view(batch, max_depth + 1),
    )


def softmax_masses(logits: torch.Tensor, *, upcast: bool = True) -> torch.Tensor:
    """The law softmax(logits), not normalised: its largest mass is 1.

    Args:
        logits: [..., V] of any float dtype; NaN counts as -inf.
        upcast: compute in float64, otherwise in float32.

    Returns:
        [..., V] masses; all 0 in a row without a finite logit.
    """
    x = logits.to(torch.float64 if upcast else torch.float32)
    x = x.masked_fill(x.isnan(), float("-inf"))
    largest = x.amax(-1, keepdim=True)
    return (x - largest.masked_fill(largest == float("-inf"), 0.0)).exp()


def draw(masses: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one index per row by the inverse of the distribution function.

    Args:
        masses: [..., V], 0 or more.
        uniform: [...] in [0, 1).

    Returns:
        [...] int64, the first index whose running sum exceeds `uniform` times the total. An index without mass is
        never drawn, unless no index has any: then 0.
    """
    running = masses.double().cumsum(-1)  # in fp32 the order of a scan, which is the batch's, would show
    reached = (running > uniform.to(masses.dtype)[..., None] * running[..., -1:]) & (masses > 0)
    # rounding may leave the running sum at the goal itself: then the last index with mass
    last = masses.shape[-1] - 1 - (masses > 0).flip(-1).int().argmax(-1)
    index = torch.where(reached.any(-1), reached.int().argmax(-1), last)
    return torch.where((masses > 0).any(-1), index, 0)
