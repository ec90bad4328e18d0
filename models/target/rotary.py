"""Cosines and sines of all positions, where the model's rotary embedding depends on the position and nothing else.

They are made once, by the model's own module and in the model's dtype, so that every value is the one that the module
would give in a pass, bit by bit, whatever scaling is in it. `rope_kv_write` looks them up itself; without them a pass
makes its own rows with some ten small kernels.
"""

from typing import Any

import torch
from torch import nn

from specdec.models.common.packing import is_bare
from specdec.models.target.families import FAMILIES

__all__ = ["RotaryTable"]

_ROTARY = {family.rotary for family in FAMILIES.values() if family.rotary is not None}
# whose cosines depend on the position alone
_STATIC = ("default", "linear", "llama3", "yarn")
_CHUNK = 8192  # positions that are computed at once, in fp32


class RotaryTable:
    """The table of one rotary embedding.

    Attributes:
        rows: [P, D] in the model's dtype: D / 2 cosines, then D / 2 sines, of every position.
    """

    def __init__(self, module: Any, num_positions: int, dtype: torch.dtype) -> None:
        self._made_from = _settings(module)
        self._num_positions = num_positions
        self.rows = _rows(module, num_positions, dtype)

    @classmethod
    def of(
        cls, module: Any, *, num_positions: int, dtype: torch.dtype, known: "RotaryTable | None" = None
    ) -> "RotaryTable | None":
        """The table of a rotary embedding; None if there can be none.

        Args:
            module: the embedding.
            num_positions: the model's context.
            dtype: of the model.
            known: an earlier table, which is given back if it is still right.
        """
        is_static = type(module) in _ROTARY and module.rope_type in _STATIC and is_bare(module)
        if not is_static:
            return None
        if known is not None and known.is_of(module, num_positions, dtype):
            return known
        return cls(module, num_positions, dtype)

    def is_of(self, module: Any, num_positions: int, dtype: torch.dtype) -> bool:
        """Whether a new table would be this one."""
        ours, theirs = self._made_from, _settings(module)
        return (
            ours[0] is theirs[0]
            and ours[1:] == theirs[1:]
            and self._num_positions == num_positions
            and self.rows.dtype == dtype
        )


def _settings(module: Any) -> tuple[torch.Tensor, int, int, float]:
    """What the cosines follow from: the frequencies, where they lie, how often they were changed, and the factor."""
    frequencies: torch.Tensor = module.inv_freq
    version = 0 if frequencies.is_inference() else frequencies._version
    return frequencies, frequencies.data_ptr(), version, float(module.attention_scaling)


@torch.no_grad()
def _rows(module: nn.Module, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    frequencies: torch.Tensor = module.inv_freq  # type: ignore[assignment]
    like = torch.empty(0, dtype=dtype, device=frequencies.device)
    rows = torch.empty(num_positions, 2 * frequencies.shape[0], dtype=dtype, device=frequencies.device)
    for first in range(0, num_positions, _CHUNK):
        end = min(first + _CHUNK, num_positions)
        positions = torch.arange(first, end, device=frequencies.device)[None]
        parts = (part[0].chunk(2, -1)[0] for part in module(like, position_ids=positions))
        rows[first:end] = torch.cat(tuple(parts), -1)
    return rows
