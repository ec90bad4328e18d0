"""No drafting: the tree is the root alone, so every step is one plain decoding step.

Paper: none; the baseline that every speedup is measured against, in the same runtime.
Proposes: a tree of one node. Needs from the target: nothing. Cost: nothing.
"""

from typing import ClassVar

import torch

from specdec.draft_tree import DraftTree, TreeTemplate
from specdec.drafters.base import Drafter, Prompt
from specdec.kernels.verdict import Verdict
from specdec.models.target import PrefillOutput, Target, TargetOutput
from specdec.trees import TreeShape

__all__ = ["NoDrafter"]


class NoDrafter(Drafter):
    """Plain autoregressive decoding."""

    kind: ClassVar[str] = "none"
    shape = TreeShape.chain(0)

    def bind(self, target: Target) -> None:
        """Place the one-node tree on the target's device."""
        self._template = TreeTemplate(self.shape, target.device)

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:  # noqa: ARG002 - interface
        """Remember how many rows there are."""
        batch_size = prompt.lengths.shape[0]
        self._continuation = prompt.lengths.new_empty(batch_size, 0)
        self._nothing = torch.zeros_like(prompt.lengths)

    def draft(self, root: torch.Tensor, lengths: torch.Tensor) -> DraftTree:  # noqa: ARG002 - interface
        """The root alone."""
        return self._template.expand_chain(self._continuation, self._nothing, root)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Nothing to learn."""
