"""Products of few rows with a weight on a CPU, with the factors in the order that takes less time.

Equation:   y = x W^T + u, computed so or as (W x^T)^T + u
Source:     which of the two is faster, by up to a factor of three, depends on the processor, the sizes, the number of
            rows and where the weights lie (docs/log.md, 2026-11-22 and 2026-11-23), so that both are tried
Shapes:     x [.., K], W [N, K], u [N]; y [.., N]
Numerics:   the order of sums differs from `F.linear`, as it does between numbers of rows there, and the first products
            of a size may differ from later ones; where `torch.use_deterministic_algorithms` asks for the same bits, and
            where processes decode together, it is `F.linear`
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn

from specdec.models.common.packing import SameForward, is_free

__all__ = ["few_rows_linear", "with_few_rows"]

MOST_ROWS = 64
"""Beyond, the order makes no great difference, and too many numbers of rows would be tried."""

_FILLED_UP = (1, 3)  # numbers of rows that a row is added to
_TRIES = 6  # of each order, in turns; the first ones, which prepare something, do not count
_WORTH_IT = 0.95  # of the usual order's time


def few_rows_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`; arguments as there. The first products of a size find out which order is the faster one."""
    num_rows = x.numel() // x.shape[-1]
    if not 1 <= num_rows <= MOST_ROWS or not _is_suited(x, weight) or not _may_round_otherwise():
        return F.linear(x, weight, bias)
    key = *weight.shape, num_rows, torch.get_num_threads(), x.dtype
    order = _ORDERS.get(key)
    if order is None:
        order = _ORDERS[key] = _Order()
    return order.product(x, weight, bias)


class _Order:
    """The order for products of one size: both in turns, timed, and then the one that took less time."""

    def __init__(self) -> None:
        self._seconds: list[float] = []  # of the usual order and the other one, in turns
        self._chosen: Callable[..., torch.Tensor] | None = None

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._chosen is not None:
            return self._chosen(x, weight, bias)
        product = _transposed if len(self._seconds) % 2 else F.linear
        begin = perf_counter()
        result = product(x, weight, bias)
        self._seconds.append(perf_counter() - begin)
        if len(self._seconds) >= 2 * _TRIES:
            is_worth_it = min(self._seconds[3::2]) < _WORTH_IT * min(self._seconds[2::2])
            self._chosen = _transposed if is_worth_it else F.linear
        return result


_ORDERS: dict[tuple[object, ...], _Order] = {}
"""By outputs, inputs, rows, threads and dtype; of this process."""


def _transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    # so filled up, products take up to a third less time; a single row would be taken for a vector, as `F.linear` does
    filled = torch.cat((rows, rows[:1])) if len(rows) in _FILLED_UP else rows
    product = torch.mm(weight, filled.t()).t()[: len(rows)].contiguous()
    product = product if bias is None else product.add_(bias)
    return product.view(*x.shape[:-1], -1)


def _may_round_otherwise() -> bool:
    """Whether nobody asks for the same bits, and no other process must come to the same ones."""
    is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return is_alone and not torch.are_deterministic_algorithms_enabled()


def _is_suited(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether MKL multiplies them, or oneDNN."""
    libraries = {torch.float32: torch.backends.mkl, torch.bfloat16: torch.backends.mkldnn}
    is_plain = x.device.type == weight.device.type == "cpu" and x.dtype == weight.dtype and weight.is_contiguous()
    return is_plain and x.dtype in libraries and libraries[x.dtype].is_available()


@contextmanager
def with_few_rows(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let plain linear layers multiply so for the duration of the block; those with a forward of someone else do not.

    Args:
        modules: any; what is no `nn.Linear` with float32 or bfloat16 weights on a CPU is left alone.
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
