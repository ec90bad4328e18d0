"""Suffix decoding: a tree of what followed the end of the text wherever it occurred before, the most frequent first.

Paper: Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975).
Proposes: of each row the tree of the likeliest continuations, of up to `num_draft_tokens` nodes; none without a match.
It looks them up in the row's own prompt and output, in texts given to it, and in earlier answers.
Needs from the target: nothing. Cost: comparisons of all tokens at hand with the end of the text, no network.
Deviations: occurrences are found by comparison instead of in a suffix tree, at most `num_occurrences` of the longest
matches in a row's own text and as many in all others; one tree over all lengths of matches instead of the best length's
chain or tree, with a bound per path instead of one per match; see docs/drafters/suffix.md.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from specdec.drafters.weightless.continuations import find_occurrences, rank_paths
from specdec.drafters.weightless.texts import RowTexts
from specdec.drafting.base import Drafter, Prompt, Room
from specdec.drafting.candidates import Choose, wants_logps
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.logps import logps_of_paths
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.tree_rerank import tree_rerank
from specdec.models.common.cache import RowState
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.dynamic import AnyTreeLike, DynamicTree, as_tree

__all__ = ["Suffix"]

_LEAST_ANSWER = 8
"""Tokens of an answer that is kept for others; what a step that is only captured emits is shorter."""


class Suffix(Drafter):
    """Proposes how texts went on after what the text at hand ends with.

    Args:
        num_draft_tokens: most nodes of a tree.
        max_depth: most tokens of a path.
        max_match: longest end of the text that is compared.
        min_probability: paths with less than this estimated probability are not proposed.
        num_occurrences: occurrences that are looked at, in the row's own text and in all others.
        corpus: texts to look things up in, a sequence of token ids each.
        shared: keep the answers of earlier calls, not their prompts, for later ones; what is drafted, and so the speed,
            then depends on them, and greedy text does not.
        max_corpus_tokens: room for corpus and kept answers together, of which the oldest answers go first.

    Raises:
        TypeError: a corpus of something else than sequences of ints.
        ValueError: a setting out of range, or a corpus that is empty or larger than its room.
    """

    kind: ClassVar[str] = "suffix"
    shape: DynamicTree

    def __init__(
        self,
        *,
        num_draft_tokens: int = 31,
        max_depth: int = 24,
        max_match: int = 16,
        min_probability: float = 0.1,
        num_occurrences: int = 32,
        corpus: Sequence[Sequence[int]] | None = None,
        shared: bool = False,
        max_corpus_tokens: int = 65536,
    ) -> None:
        least = {"num_draft_tokens": num_draft_tokens, "max_depth": max_depth, "max_match": max_match}
        for name, value in (
            least | {"num_occurrences": num_occurrences, "max_corpus_tokens": max_corpus_tokens}
        ).items():
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability: expected 0 to 1, got {min_probability}")
        self.max_match = max_match
        self.min_probability = min_probability
        self.num_occurrences = num_occurrences
        self.shared = shared
        width = min(num_draft_tokens, num_occurrences * (2 if shared or corpus is not None else 1))
        most = width + (max_depth - 1) * width**2
        self.shape = DynamicTree(num_nodes=min(num_draft_tokens, most) + 1, depth=max_depth - 1, top_k=width)
        has_others = shared or corpus is not None
        self._others = _OtherTexts(corpus, max_match, max_corpus_tokens, keeps=shared) if has_others else None

    @classmethod
    def from_settings(cls, tree: AnyTreeLike | None, **settings: Any) -> "Suffix":
        """As `Drafter.from_settings`; of a dynamic tree it takes the nodes and the depth."""
        if tree is not None:
            shape = as_tree(tree)
            if not isinstance(shape, DynamicTree):
                raise ValueError(f"tree: expected a DynamicTree, as the trees of suffix grow, got {shape!r}")
            settings = {"num_draft_tokens": shape.num_nodes - 1, "max_depth": shape.max_depth, **settings}
        return cls(**settings)

    def bind(self, target: Target) -> None:
        """Bring the other texts to the target's device.

        Raises:
            ValueError: they have tokens that the target does not.
        """
        self._backend = target.backend
        if self._others is not None:
            self._others.bind(target)

    def allocate(self, room: Room, device: torch.device) -> None:
        """The texts that are searched, one slot per token."""
        self._texts = RowTexts(room, self.max_new, device, front=self.max_match)
        self._prompt_lengths = torch.zeros_like(self._texts.lengths)
        self._back = torch.arange(self.max_match, device=device)

    def row_state(self) -> RowState:
        """As `Drafter`."""
        return *self._texts.row_state(), self._prompt_lengths

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Take the prompt as the text to search."""
        if self._others is not None and output.first == 0:
            self._others.begin(self._texts, self._prompt_lengths)
            self._prompt_lengths.copy_(prompt.lengths)
        self._texts.start(prompt)

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """Look the end of the text, root included, up in all texts."""
        texts = self._texts
        texts.append_root(root)
        back = texts.lengths[:, None] - 1 - self._back
        found_end = texts.tokens.gather(1, (back + texts.front).clamp(min=0).long())
        end = torch.where(back >= 0, found_end, -2)
        is_before_end = texts.columns[: texts.tokens.shape[1] - texts.front] < texts.lengths[:, None] - 1
        sizes = {"num_occurrences": self.num_occurrences, "depth": self.shape.max_depth}
        found = find_occurrences(texts.tokens, is_before_end, end, **sizes)
        if self._others is not None:
            others = self._others
            found = found.with_others(find_occurrences(others.tokens, others.is_followed, end, **sizes))
        paths = rank_paths(
            found,
            longest=self.max_match,
            num_paths=min(self.shape.num_nodes - 1, found.tokens.shape[1] * found.tokens.shape[2]),
            min_probability=self.min_probability,
        )
        logps = paths.reach.log()
        tree = tree_rerank(
            paths.tokens[:, :, None],
            logps[:, :, None],
            paths.parent,
            root,
            num_nodes=self.shape.num_nodes,
            max_depth=self.shape.max_depth,
            backend=self._backend,
        )
        # an estimate: a path and its sibling may have their reach from matches of other lengths, and sum to more than 1
        return DraftTree.of(tree, self.shape.max_depth, logps_of_paths(tree, logps) if wants_logps(choose) else None)

    def skip(self, root: torch.Tensor) -> None:
        """As `Drafter`."""
        self._texts.append_root(root)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Append the accepted tokens."""
        self._texts.commit(verdict)


class _OtherTexts:
    """Texts that all rows look things up in: a corpus that stays, and kept answers in a ring behind it.

    Args:
        corpus: token ids of each text, or None.
        front: columns in front that match nothing.
        max_tokens: most tokens of all.
        keeps: whether answers are kept.

    Attributes:
        tokens: [1, front + S] int32, -1 behind every text and where nothing is.
        is_followed: [1, S] bool, places with a token behind them.
    """

    def __init__(self, corpus: Sequence[Sequence[int]] | None, front: int, max_tokens: int, *, keeps: bool) -> None:
        flat = _flat(corpus)
        if len(flat) > max_tokens:
            raise ValueError(
                f"corpus: expected at most max_corpus_tokens={max_tokens} tokens, with one behind every text, "
                f"got {len(flat)}"
            )
        tokens = torch.full((1, front + (max_tokens if keeps else len(flat))), -1, dtype=torch.int32)
        tokens[0, front : front + len(flat)] = torch.tensor(flat, dtype=torch.int32)
        self.tokens = tokens
        self._front = front
        self._first = self._next = len(flat)  # where the ring begins, and where the next answer goes
        self._keeps = keeps
        self._running: tuple[RowTexts, torch.Tensor] | None = None
        self._mark()

    def bind(self, target: Target) -> None:
        """Move to the target's device."""
        highest = int(self.tokens.max())
        if highest >= target.vocab_size:
            raise ValueError(f"corpus: expected tokens below {target.vocab_size}, got {highest}")
        if self.tokens.device != target.device:
            self.tokens = self.tokens.to(target.device)
            self._mark()

    def begin(self, texts: RowTexts, prompt_lengths: torch.Tensor) -> None:
        """Keep the answers of the generation that began last, as another begins in these texts behind [B] prompts."""
        if not self._keeps:
            return
        if self._running is not None:
            before, first = self._running
            for row, (start, end) in enumerate(zip(first.tolist(), before.lengths.tolist(), strict=True)):
                if end - start >= _LEAST_ANSWER:
                    self._keep(before.tokens[row, before.front + start : before.front + end])
            self.is_followed[:, :-1] = self.tokens[:, self._front + 1 :] >= 0
        self._running = texts, prompt_lengths

    def _keep(self, answer: torch.Tensor) -> None:
        """Write an [n] int32 answer over the oldest ones."""
        room = self.tokens.shape[1] - self._front - self._first
        size = min(answer.shape[0], room - 1)
        if size < 1:
            return
        if self._next + size + 1 > self._first + room:
            self._next = self._first
        place = self._front + self._next
        self.tokens[0, place : place + size] = answer[:size]
        self.tokens[0, place + size] = -1
        self._next += size + 1

    def _mark(self) -> None:
        followed = self.tokens[:, self._front + 1 :] >= 0
        self.is_followed = torch.nn.functional.pad(followed, (0, 1))


def _flat(corpus: Sequence[Sequence[int]] | None) -> list[int]:
    """The texts one after the other, -1 behind each."""
    if corpus is None:
        return []
    flat: list[int] = []
    for number, text in enumerate(corpus):
        ids = text.tolist() if isinstance(text, torch.Tensor) else text
        if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(isinstance(one, int) for one in ids):
            raise TypeError(f"corpus: expected a sequence of token ids per text, got {text!r:.60} as text {number}")
        if min(ids, default=0) < 0:
            raise ValueError(f"corpus: expected token ids of 0 or more, got {min(ids)} in text {number}")
        flat += [*ids, -1]
    if not flat:
        raise ValueError("corpus: expected at least one text, got none")
    return flat
