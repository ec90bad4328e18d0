"""Where all random numbers of decoding come from: one seed per row, and counters.

A number depends on its row's seed, the step and what it is for, and on nothing else. So a seed replays a text bit for
bit, a row's text does not depend on its companions, and the decisions of a GPU run can be replayed on a CPU. Where the
target's own tokens are drawn, the place of a token in the output stands for the step: then the text does not depend on
what was drafted either.
"""

import operator
from collections.abc import Sequence
from enum import IntEnum
from numbers import Integral
from typing import Any, TypeGuard

import torch

from specdec.kernels.common.launch import Backend
from specdec.kernels.philox_uniform import philox_exponential, philox_uniform

__all__ = ["Stream", "Uniforms", "row_seeds"]

_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive seeds over the 64-bit keys


class Stream(IntEnum):
    """What numbers are drawn for; the calls that draw candidates within a step count up from DRAFT."""

    VERIFY = 0
    NEXT_ROOT = 1
    DRAFT = 2
    POSITION = 2**31 - 1  # the last there is: no step makes so many calls


class Uniforms:
    """Random numbers for a batch.

    Args:
        seeds: [B] int64, one per row, on the device.
        num_output: [B] int32, how many tokens each row has emitted, kept up to date by the caller; none by default.
        num_positions: places in the output that `at` has numbers for, once `fill_positions` was called.
        backend: what draws them; by default decided by the device.
    """

    def __init__(
        self,
        seeds: torch.Tensor,
        *,
        num_output: torch.Tensor | None = None,
        num_positions: int = 0,
        backend: Backend | None = None,
    ) -> None:
        self.seeds = seeds
        self.backend = backend
        self.step = torch.zeros((), dtype=torch.int64, device=seeds.device)
        self.num_output = torch.zeros_like(seeds, dtype=torch.int32) if num_output is None else num_output
        self._by_position = torch.zeros(seeds.shape[0], num_positions, dtype=torch.float32, device=seeds.device)

    @property
    def row_state(self) -> tuple[torch.Tensor, ...]:
        """What belongs to single rows, with the rows along the first axis."""
        return self.seeds, self._by_position

    def fill_positions(self, num_positions: int | None = None, *, is_greedy: torch.Tensor | None = None) -> None:
        """Draw what `at` returns, from the seeds as they are now, in place: captured steps read it.

        Args:
            num_positions: as many places as the rows will ask for; by default all there are.
            is_greedy: [B] bool, rows whose numbers are 0: of equally probable tokens that draws the lowest.
        """
        most = self._by_position.shape[1]
        step, count = torch.zeros_like(self.step), most if num_positions is None else min(num_positions, most)
        numbers = philox_uniform(self.seeds, step, stream=int(Stream.POSITION), count=count, backend=self.backend)
        if is_greedy is not None:
            numbers.masked_fill_(is_greedy[:, None], 0.0)
        self._by_position[:, :count].copy_(numbers)

    def at(self, depth: torch.Tensor) -> torch.Tensor:
        """The numbers that decide the tokens behind nodes of a tree, whatever the tree and the step.

        Behind a node of depth d the row's output number `num_output + d` is decided, counted from 0. Its number is a
        function of this and of the row's seed alone. Places beyond the table, which are never emitted, take its last.

        Args:
            depth: [B or 1, N] int32, that of padding nodes too.

        Returns:
            [B, N] float32 in [0, 1).
        """
        num_positions = self._by_position.shape[1]
        if num_positions == 0:
            raise ValueError("num_positions: expected 1 or more to draw tokens by their places in the output, got 0")
        position = (self.num_output[:, None] + depth).clamp(0, num_positions - 1)
        return self._by_position.gather(1, position.long())

    def draw(self, stream: int, count: int) -> torch.Tensor:
        """[B, count] float32 in [0, 1) of the current step; the same call gives the same numbers."""
        return philox_uniform(self.seeds, self.step, stream=int(stream), count=count, backend=self.backend)

    def exponential(self, stream: int, count: int) -> torch.Tensor:
        """[B, count] float32 exponential variates of rate 1 of the current step."""
        return philox_exponential(self.seeds, self.step, stream=int(stream), count=count, backend=self.backend)


def row_seeds(seed: int | Sequence[int] | torch.Generator | None, batch_size: int) -> torch.Tensor:
    """One seed per row.

    Args:
        seed: one per row; one for all, from which row b gets its own by its index; a generator, from which one for all
            is drawn; or None to draw it from PyTorch's global generator (`torch.manual_seed`).
        batch_size: rows.

    Returns:
        [B] int64.

    Raises:
        TypeError: no integers.
        ValueError: a negative seed, or not one seed per row.
    """
    if seed is None or isinstance(seed, torch.Generator):
        device = "cpu" if seed is None else seed.device
        seed = int(torch.randint(2**63 - 1, (), generator=seed, device=device))
    if _is_int(seed):
        seeds = [operator.index(seed) + row * _GOLDEN for row in range(batch_size)]
    elif isinstance(seed, Sequence) and all(map(_is_int, seed)):
        seeds = [operator.index(one) for one in seed]
    else:
        raise TypeError(f"seed: expected an int or one int per row, got {seed!r}")
    if len(seeds) != batch_size:
        raise ValueError(f"seed: expected one per row, {batch_size}, got {len(seeds)}")
    if min(seeds) < 0:
        raise ValueError(f"seed: expected 0 or more, got {min(seeds)}")
    return torch.tensor([(value + 2**63) % 2**64 - 2**63 for value in seeds])


def _is_int(value: Any) -> TypeGuard[int]:
    """Whether it is an integer of Python or NumPy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
