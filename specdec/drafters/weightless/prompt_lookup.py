"""Prompt lookup: the continuation of the last occurrence of the current n-gram in the text so far.

Paper: none; Saxena 2023, "prompt lookup decoding" (PLD), the n-gram baseline of the papers (3-gram, 10 tokens).
Proposes: a chain of up to `num_draft_tokens`, as many as the match offers; nothing when there is no match.
Needs from the target: nothing. Cost: one comparison of the text with its own end, no network.
Deviations: the published code takes the leftmost match and only one with a full continuation; ours takes the most
recent match, which predicts better, and accepts a shorter continuation.
"""

from typing import Any, ClassVar

import torch

from specdec.drafters.weightless.texts import RowTexts
from specdec.drafting.base import Drafter, Prompt, Room
from specdec.drafting.candidates import Choose, wants_logps
from specdec.drafting.draft_tree import DraftTree, TreeTemplate
from specdec.kernels.common.verdict import Verdict
from specdec.models.common.cache import RowState
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.dynamic import AnyTreeLike, DynamicTree, as_tree
from specdec.trees.shape import TreeShape

__all__ = ["PromptLookup"]


class PromptLookup(Drafter):
    """Proposes what followed the longest, most recent n-gram that equals the end of the text.

    Args:
        max_ngram: longest n-gram to look for; shorter ones are tried when it is not found.
        num_draft_tokens: longest continuation to propose.

    Raises:
        ValueError: an argument below 1, or a chain of more than 511 tokens.
    """

    kind: ClassVar[str] = "prompt_lookup"
    shape: TreeShape

    def __init__(self, *, max_ngram: int = 3, num_draft_tokens: int = 10) -> None:
        for name, value in (("max_ngram", max_ngram), ("num_draft_tokens", num_draft_tokens)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.max_ngram = max_ngram
        self.shape = TreeShape.chain(num_draft_tokens)

    @classmethod
    def from_settings(cls, tree: AnyTreeLike | None, **settings: Any) -> "PromptLookup":
        """As `Drafter.from_settings`; a chain's length is `num_draft_tokens`."""
        if tree is not None:
            shape = as_tree(tree)
            if isinstance(shape, DynamicTree) or shape != TreeShape.chain(shape.max_depth):
                raise ValueError(f"tree: expected a chain, which is all that prompt_lookup proposes, got {shape!r}")
            settings = {"num_draft_tokens": shape.max_depth, **settings}
        return cls(**settings)

    def with_tree(self, tree: TreeShape) -> "PromptLookup":
        """As `Drafter`; of the tree its depth."""
        return PromptLookup(max_ngram=self.max_ngram, num_draft_tokens=tree.max_depth)

    def bind(self, target: Target) -> None:
        """Place the chain on the target's device."""
        self._template = TreeTemplate(self.shape, target.device)

    def allocate(self, room: Room, device: torch.device) -> None:
        """The texts that are searched."""
        self._texts = RowTexts(room, self.max_new, device)

    def row_state(self) -> RowState:
        """As `Drafter`."""
        return self._texts.row_state()

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Take the prompt as the text to search."""
        self._texts.start(prompt)

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """Look the end of the text, root included, up in the text before it."""
        self._texts.append_root(root)
        text, lengths, columns = self._texts.tokens, self._texts.lengths, self._texts.columns
        matched = columns < lengths[:, None] - 1  # [B, S]: the last `size` tokens of the text also end here
        found = torch.full_like(lengths, -1)
        longest = torch.zeros_like(lengths) if wants_logps(choose) else None  # tokens of the match
        for size in range(1, self.max_ngram + 1):
            # one token longer: compare the token `size - 1` places before each column with that before the end
            last = text.gather(1, (lengths[:, None] - size).clamp(min=0).long())
            inside = (columns >= size - 1) & (lengths[:, None] >= size)
            matched = matched & inside & (torch.roll(text, size - 1, 1) == last)
            position = torch.where(matched, columns, -1).amax(1).int()
            found = torch.where(position >= 0, position, found)
            if longest is not None:
                longest += position >= 0
        start = (found + 1).clamp(min=0)
        places = start[:, None] + columns[: self.shape.max_depth]
        continuation = text.gather(1, places.clamp(max=text.shape[1] - 1).long())
        available = (lengths - start).clamp(max=self.shape.max_depth)
        num_tokens = torch.where(found >= 0, available, 0).int()
        logps = None if longest is None else self._logps(longest)
        return self._template.expand_chain(continuation.clamp(min=0), num_tokens, root, logps)

    def _logps(self, longest: torch.Tensor) -> torch.Tensor:
        """[B, max_depth] float32, nats, of what follows matches of `longest [B]` tokens.

        The token at distance k behind a match of L goes on with probability (L + k - 1) / (L + k): that of a suffix
        tree which saw it once, see specdec/drafters/weightless/continuations.py.
        """
        matched = longest.clamp(min=1)[:, None] + self._texts.columns[: self.shape.max_depth]
        return -(1 / matched.float()).log1p()

    def skip(self, root: torch.Tensor) -> None:
        """As `Drafter`."""
        self._texts.append_root(root)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Append the accepted tokens."""
        self._texts.commit(verdict)
