"""The outcome of verifying one draft tree per row: what every acceptance kernel returns."""

from dataclasses import dataclass

import torch

__all__ = ["Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which nodes were accepted and which tokens a step emits.

    Attributes:
        path: [B, max_depth + 1] int32, accepted nodes from the root (node 0) down, -1 padded.
        num_accepted: [B] int32, accepted draft tokens (the root does not count); -1 for a finished row, which emits
            nothing.
        next_root: [B] int32, the last emitted token, not yet in the cache; for a finished row its root stays.
        emitted: [B, max_depth + 1] int32, tokens emitted by this step, next root included, -1 padded.
    """

    path: torch.Tensor
    num_accepted: torch.Tensor
    next_root: torch.Tensor
    emitted: torch.Tensor

    @property
    def num_emitted(self) -> torch.Tensor:
        """[B] int32, tokens emitted by this step: the accepted draft tokens and the next root; 0 if finished."""
        return self.num_accepted + 1

    def at_last_node(self, states: torch.Tensor) -> torch.Tensor:
        """Of `states [B, N, ...]` of all nodes those at each row's last accepted one, the root if there is none.

        Returns:
            [B, ...].
        """
        rows = torch.arange(states.shape[0], device=states.device)
        return states[rows, self.path[rows, self.num_accepted.clamp(min=0)].clamp(min=0)]
