"""Products of few rows with a weight on a CPU, with the factors in the order that takes less time.

Equation:   y = x W^T + u, computed so or as (W x^T)^T + u
Source:     MKL's product with the weight transposed takes its time per row, up to some 16 rows; with the rows
            transposed it takes the same for 2 as for 16 (docs/log.md, 2026-11-22, has the figures)
Shapes:     x [.., K], W [N, K], u [N]; y [.., N]
Numerics:   the order of sums differs from `F.linear`, as it does between numbers of rows there
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from specdec.models.common.packing import SameForward, is_free

__all__ = ["few_rows_linear", "with_few_rows"]

MANY_ROWS = 12
"""From here on the rows are transposed, whatever the weight."""

SOME_ROWS = 6
"""From here on they are, with a weight that no core's cache holds."""

CACHED_BYTES = 2 * 2**20
"""Bytes of a weight that a core's cache still holds."""


def few_rows_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`; arguments as there."""
    num_rows = x.numel() // x.shape[-1]
    if num_rows < (MANY_ROWS if weight.nbytes <= CACHED_BYTES else SOME_ROWS) or not _is_suited(x, weight):
        return F.linear(x, weight, bias)
    product = torch.mm(weight, x.reshape(num_rows, -1).t()).t().contiguous()
    product = product if bias is None else product.add_(bias)
    return product.view(*x.shape[:-1], -1)


def _is_suited(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether MKL multiplies them."""
    is_plain = x.device.type == weight.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return is_plain and weight.is_contiguous() and torch.backends.mkl.is_available()


@contextmanager
def with_few_rows(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let plain linear layers multiply so for the duration of the block; those with a forward of someone else do not.

    Args:
        modules: any; what is no `nn.Linear` with float32 weights on a CPU is left alone.
    """
    # within another such block they have it already
    linears = (one for one in modules if type(one) is nn.Linear and is_free(one) and "forward" not in vars(one))
    changed = [one for one in linears if type(one.weight.data) is torch.Tensor and _is_suited(one.weight, one.weight)]
    try:
        for module in changed:
            vars(module)["forward"] = SameForward(_forward, module)
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return few_rows_linear(x, module.weight, module.bias)
