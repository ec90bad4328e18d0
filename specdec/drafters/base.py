"""The seam between the decoding loop and whatever proposes tokens."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch

from specdec.candidates import Choose
from specdec.draft_tree import DraftTree
from specdec.dynamic_tree import DynamicTree
from specdec.kernels.verdict import Verdict
from specdec.models.target import PrefillOutput, Target, TargetOutput
from specdec.trees import TreeShape

__all__ = ["Drafter", "Prompt"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompts of one call, padding removed.

    Attributes:
        tokens: [B, T] int64, right-padded with token 0.
        lengths: [B] int32, at least 1.
        max_length: most tokens that any row will ever hold, prompt and new tokens together.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    max_length: int


class Drafter(ABC):
    """Proposes a draft tree per row. Owns its networks and state; never touches the target's cache.

    The loop calls `bind` once, then per generation `start`, and per step `draft` and `commit`.

    Attributes:
        kind: the name by which users ask for this drafter.
        shape: the largest tree it proposes. The loop reads its sizes alone; a drafter of static trees, which needs the
            topology, declares the attribute again as a `TreeShape`.
        shares_candidates: whether children of several parents may come from one list of candidates.
    """

    kind: ClassVar[str]
    shape: TreeShape | DynamicTree
    shares_candidates: ClassVar[bool] = True

    @property
    def can_sample(self) -> bool:
        """Whether its candidates can be drawn from laws that it hands on with the tree."""
        return False

    @abstractmethod
    def bind(self, target: Target) -> None:
        """Check that this drafter fits the target and move to its device.

        Raises:
            ValueError: another vocabulary or hidden size.
        """

    def session(self) -> AbstractContextManager[None]:
        """Held by the loop for a whole generation; a draft model is hooked in it."""
        return nullcontext()

    @abstractmethod
    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Begin a generation: the target has run the prompt and nothing was emitted yet."""

    @abstractmethod
    def draft(self, root: torch.Tensor, lengths: torch.Tensor, choose: Choose) -> DraftTree:
        """Propose.

        Args:
            root: [B] int32 last emitted token, at position `lengths`.
            lengths: [B] int32 committed tokens per row.
            choose: how logits become candidates; not for drafters without a network.
        """

    @abstractmethod
    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Learn which nodes were accepted, and the target's states at all nodes."""
