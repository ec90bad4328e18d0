"""What every row of a batch holds so far, prompt and output, on the device, for drafters that look things up in it."""

import torch

from specdec.drafting.base import Prompt, Room
from specdec.kernels.common.verdict import Verdict
from specdec.models.common.cache import RowState

__all__ = ["RowTexts"]


class RowTexts:
    """The texts of a batch, always in the same tensors.

    A row's root is appended with every draft, and the accepted tokens behind it with every commit, so that a text ends
    with its root whenever something is looked up.

    Args:
        room: the sizes.
        max_depth: most tokens that a step accepts.
        device: where.
        front: columns of -1 in front of every text, for comparisons that reach back over its beginning.

    Attributes:
        tokens: [B, S] int32, -1 where there is no token; a text begins at column `front`.
        lengths: [B] int32 tokens of each row.
        columns: [S] int64, the numbers from 0.
    """

    def __init__(self, room: Room, max_depth: int, device: torch.device, *, front: int = 0) -> None:
        # room for a step's emitted tokens, of which the unused ones are -1
        width = front + room.max_length + max_depth + 2
        self.front = front
        self.tokens = torch.full((room.batch_size, width), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(room.batch_size, dtype=torch.int32, device=device)
        self.columns = torch.arange(width, device=device)

    def row_state(self) -> RowState:
        """As of `Drafter`."""
        return self.tokens, self.lengths

    def start(self, prompt: Prompt) -> None:
        """Begin with the prompts."""
        width = prompt.tokens.shape[1]
        inside = self.columns[:width] < prompt.lengths[:, None]
        self.tokens.fill_(-1)
        self.tokens[:, self.front : self.front + width] = torch.where(inside, prompt.tokens, -1)
        self.lengths.copy_(prompt.lengths)

    def append_root(self, root: torch.Tensor) -> None:
        """Write the [B] int32 last emitted tokens at the end."""
        self._append(root[:, None], torch.ones_like(root))

    def commit(self, verdict: Verdict) -> None:
        """Append the accepted tokens; the next root follows with the next draft."""
        self._append(verdict.emitted, verdict.num_accepted.clamp(min=0))
        # a finished row appends its root at every draft; take it back
        self.lengths -= (verdict.num_accepted < 0).int()

    def _append(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Write [B, P] tokens at the end of each row's text, of which the first `counts [B]` stay."""
        places = self.front + self.lengths[:, None] + self.columns[: tokens.shape[1]]
        self.tokens.scatter_(1, places.long(), tokens)
        self.lengths += counts
