"""Medusa: independent heads on the target's last state, each guessing one token further ahead.

Paper: Cai et al. 2024, "Medusa" (arXiv:2401.10774), section 2.1; the baseline of Hydra, Amphista and ParallelSpec.
Proposes: a static tree; all nodes of a depth take their tokens from the same head's top-k list.
Needs from the target: the state that enters the LM head, at the last accepted node.
Cost of one draft: one pass through K heads, (d^2 + d V) K weights; nothing sequential, no cache.
Deviations: none for Medusa-1 checkpoints (heads with own LM heads).
"""

from typing import ClassVar

import torch

from specdec.candidates import Choose
from specdec.draft_tree import DraftTree, TreeTemplate
from specdec.drafters.base import Drafter, Prompt
from specdec.kernels.verdict import Verdict
from specdec.models.medusa import MedusaHeads
from specdec.models.target import PrefillOutput, Target, TargetOutput
from specdec.trees import TreeShape

__all__ = ["Medusa"]


class Medusa(Drafter):
    """Static-tree drafting with Medusa heads.

    Args:
        heads: the trained heads.
        shape: the tree to propose; at most as deep as there are heads.

    Raises:
        ValueError: the tree is deeper than there are heads, or takes ranks beyond the vocabulary.
    """

    kind: ClassVar[str] = "medusa"

    def __init__(self, heads: MedusaHeads, shape: TreeShape) -> None:
        if shape.max_depth > heads.config.num_heads:
            raise ValueError(
                f"tree: expected a depth of at most {heads.config.num_heads}, one level per head, got {shape.max_depth}"
            )
        if shape.max_rank >= heads.config.vocab_size:
            raise ValueError(f"tree: expected ranks below {heads.config.vocab_size}, got {shape.max_rank}")
        self.heads = heads
        self.shape = shape

    def bind(self, target: Target) -> None:
        """Check the sizes and move the heads to the target's device and dtype."""
        self.heads.config.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
        self.heads.to(device=target.device, dtype=target.dtype).eval()
        self._template = TreeTemplate(self.shape, target.device, rows="depth", backend=target.backend)
        self._num_ranks = self.shape.max_rank + 1

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Begin from the state of the last prompt token."""
        self._hidden = output.last_hidden(prompt.lengths)
        self._rows = torch.arange(prompt.lengths.shape[0], device=prompt.lengths.device)

    def draft(self, root: torch.Tensor, lengths: torch.Tensor, choose: Choose) -> DraftTree:
        """Candidates of every head, laid out as the tree."""
        logits = self.heads(self._hidden, num_heads=self.shape.max_depth)
        return self._template.expand(choose(logits, self._num_ranks), root, lengths)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Keep the state at the last accepted node; the next root is the token after it."""
        last = verdict.num_accepted.clamp(min=0).long()
        node = verdict.path.gather(1, last[:, None])[:, 0].clamp(min=0).long()
        self._hidden = output.hidden[self._rows, node]
