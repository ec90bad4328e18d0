"""Where a text stands in a drafter's lists: at every place, the rank path that the tokens behind it take.

A drafter is led along a text that is known (greedy decoding being lossless, that of the target): its tree is a chain,
whose lists of candidates hold the text's own token alone, and a step keeps one token. So every place of the text is a
root once, and the drafter says of each depth below it how it would rank the text's token after those before it. What a
step with any tree would accept there follows by looking the path up in the tree: no tree has to be decoded with.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from specdec.common.randomness import Uniforms
from specdec.drafting.base import Drafter
from specdec.drafting.candidates import Candidates, Choose, DraftLaw
from specdec.drafting.draft_tree import DraftTree
from specdec.kernels.accept_greedy import accept_greedy
from specdec.kernels.common.verdict import Verdict
from specdec.loop.decoder import Decoder
from specdec.loop.rules import AcceptanceRule, Limits
from specdec.models.target.scores import Scores
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape

__all__ = ["NO_RANK", "rank_texts"]

NO_RANK = -1
"""Rank of a token that the drafter cannot propose."""


class _Guide(AcceptanceRule):
    """Leads a drafter along texts, a token a step, and notes the ranks of the tokens behind every root.

    Args:
        texts: [B, T] int64, the tokens to emit; -1 behind the end of a text.
        depth: of the chain.
        proposes: as `Drafter.proposes`.
    """

    name: ClassVar[str] = "guide"
    needs_logits: ClassVar[bool] = False

    def __init__(self, texts: torch.Tensor, depth: int, proposes: torch.Tensor | None) -> None:
        self._texts = torch.nn.functional.pad(texts, (0, depth + 1), value=-1)
        self._depth = depth
        self._proposes = proposes
        self._step = -1
        self._ranks: list[list[torch.Tensor]] = []

    @property
    def samples(self) -> bool:
        """No."""
        return False

    @property
    def ranks(self) -> torch.Tensor:
        """[B, steps, depth] int64, on the host: entry d - 1 of step t ranks token t + d behind those before it."""
        return torch.stack([torch.cat(step, 1)[:, : self._depth] for step in self._ranks], 1).cpu()

    def first(self, scores: Scores, uniforms: Uniforms) -> torch.Tensor:
        """The texts' first tokens."""
        return self._texts[:, 0].clamp(min=0).int()

    def chooser(self, law: DraftLaw, uniforms: Uniforms) -> Choose:
        """Begins a step."""
        self._step += 1
        self._ranks.append([])
        return self._lead

    def verify(self, tree: DraftTree, scores: Scores, limits: Limits, uniforms: Uniforms) -> Verdict:
        """Emits the next token of the text, and accepts nothing."""
        tokens = tree.tokens.clone()
        tokens[:, 1:] = -1
        wanted = self._texts[:, self._step + 1, None].clamp(min=0).int().expand_as(tokens)
        return accept_greedy(tokens, tree.parent, wanted.contiguous(), **limits.of(tree))

    def _lead(self, logits: torch.Tensor, num_ranks: int) -> Candidates:
        """The text's tokens as candidates of the next lists of this step; `logits [B, M, V]`."""
        num_lists, width = logits.shape[1:]
        begin = self._step + 1 + sum(ranks.shape[1] for ranks in self._ranks[-1])
        places = torch.arange(begin, begin + num_lists, device=logits.device).clamp(max=self._texts.shape[1] - 1)
        wanted = self._texts[:, places]  # [B, M]
        if self._proposes is not None:
            known = self._proposes == wanted[..., None]
            wanted = torch.where(known.any(-1), known.int().argmax(-1), NO_RANK)
        is_known = (wanted >= 0) & (wanted < width)
        tokens = wanted.where(is_known, 0)
        value = logits.gather(2, tokens[..., None])
        numbers = torch.arange(width, device=logits.device)
        ahead = (logits > value) | ((logits == value) & (numbers < tokens[..., None]))  # ties as `best_of` has them
        self._ranks[-1].append(ahead.sum(-1).where(is_known, NO_RANK))
        return Candidates(tokens[..., None])


def rank_texts(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[torch.Tensor],
    texts: Sequence[Sequence[int]],
    depth: int,
    *,
    batch_size: int = 16,
    on_progress: Callable[[int], None] | None = None,
) -> list[torch.Tensor]:
    """Rank paths of texts in a drafter's lists.

    Args:
        target: the target.
        drafter: what ranks; its own tree does not matter.
        prompts: 1-D int64 tensors.
        texts: tokens that follow each, as greedy decoding gave them.
        depth: of the paths.
        batch_size: texts that are read together.
        on_progress: called with the number of texts that are done.

    Returns:
        Per text [max(0, n - depth), depth] int64: row t is the path from its token t as root, `NO_RANK` where the
        drafter cannot propose the token (what follows is then ranked below that token all the same). Places whose path
        would leave the text are left out.

    Raises:
        ValueError: a drafter that ranks no candidates, or cannot draft a chain of that depth.
    """
    led = drafter.with_tree(TreeShape.chain(depth))
    found: list[torch.Tensor] = []
    for begin in range(0, len(prompts), batch_size):
        rows = [torch.tensor(text, dtype=torch.int64) for text in texts[begin : begin + batch_size]]
        longest = max(map(len, rows))
        if longest > depth:
            padded = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row)), value=-1) for row in rows])
            guide = _Guide(padded.to(target.device), depth, led.proposes)
            Decoder(target, led, acceptance=guide, capture=False).decode(prompts[begin : begin + batch_size], longest)
            ranks = guide.ranks
            found += [ranks[row, : max(0, len(text) - depth)] for row, text in enumerate(rows)]
        else:
            found += [torch.zeros(0, depth, dtype=torch.int64)] * len(rows)
        if on_progress is not None:
            on_progress(len(found))
    return found
