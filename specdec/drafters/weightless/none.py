"""No drafting: the tree is the root alone, so every step is one plain decoding step.

Paper: none; the baseline that every speedup is measured against, in the same runtime.
Proposes: a tree of one node. Needs from the target: nothing. Cost: nothing.
"""

from typing import Any, ClassVar

import torch

from specdec.drafting.base import Drafter, Prompt
from specdec.drafting.candidates import Choose
from specdec.drafting.draft_tree import DraftTree, TreeTemplate
from specdec.kernels.common.verdict import Verdict
from specdec.models.common.cache import RowState
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.dynamic import AnyTreeLike
from specdec.trees.shape import TreeShape

__all__ = ["NoDrafter"]


class NoDrafter(Drafter):
    """Plain autoregressive decoding."""

    kind: ClassVar[str] = "none"
    shape: TreeShape
    shape = TreeShape.chain(0)

    @classmethod
    def from_settings(cls, tree: AnyTreeLike | None, **settings: Any) -> "NoDrafter":
        """As `Drafter.from_settings`; there are no settings."""
        if tree is not None:
            raise ValueError("tree: expected None without a drafter, which proposes nothing")
        return cls(**settings)

    def bind(self, target: Target) -> None:
        """Place the one-node tree on the target's device."""
        self._template = TreeTemplate(self.shape, target.device)

    def row_state(self) -> RowState:
        """Nothing."""
        return ()

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Nothing to remember."""

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """The root alone."""
        table = self._template
        return DraftTree(root[:, None], table.parent, table.depth, table.ancestors, table.deepest, max_depth=0)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Nothing to learn."""
