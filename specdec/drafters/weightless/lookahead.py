"""Lookahead decoding: the target guesses its own future in spare places of every pass, and verifies earlier guesses.

Paper: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (arXiv:2402.02057).
Proposes: up to `guesses` n-grams that began with the root in earlier Jacobi iterations, as one tree.
Needs from the target: its logits at the window, nodes of the same pass that are scored but can never be accepted.
Cost of one draft: no network and no pass; but the target scores (level - 1) (window + guesses) nodes in every step.
Deviations: a whole guess can be accepted (the published code stops one token short); guesses with equal beginnings
share nodes; the window starts full; what was not seen for 1024 steps is forgotten. More in docs/drafters/lookahead.md.
"""

from typing import ClassVar

import torch

from specdec.drafting.base import Drafter, Prompt, Room
from specdec.drafting.candidates import Choose
from specdec.drafting.draft_tree import DraftTree
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.words import pack_words
from specdec.models.common.cache import RowState
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.shape import MAX_NODES, TreeShape

__all__ = ["Lookahead", "NgramPool"]

KEPT_STEPS = 1024
"""Steps whose n-grams the pool holds; each step brings `window` of them."""

_GOLDEN = 2654435769  # 2^32 / golden ratio: multiples of it, modulo 2^32, are spread evenly


class Lookahead(Drafter):
    """Jacobi iteration in a window beside the text, and a pool of the n-grams that it went through.

    Column c of the window starts c places after the root and holds `level - 1` successive tokens; the target's choice
    after the last of them completes an n-gram. Then every column drops its first token, as the text moves on.

    Args:
        level: length of an n-gram, the root included (N of the paper); one pass may emit as many tokens.
        window: columns (W).
        guesses: n-grams that are kept per first token, and verified in one pass (G).

    Attributes:
        paths: rank path of every node in the order of its trees, which is not that of `shape`.
        num_cells: nodes of the window, the root included; they come first.

    Raises:
        ValueError: a level below 2, no window or guess, or more than 512 nodes.
    """

    kind: ClassVar[str] = "lookahead"
    reads_rejected: ClassVar[bool] = True  # the nodes of its window, which is no part of the text
    shape: TreeShape

    def __init__(self, *, level: int = 5, window: int = 7, guesses: int = 7) -> None:
        for name, value, least in (("level", level, 2), ("window", window, 1), ("guesses", guesses, 1)):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        num_nodes = (level - 1) * (window + guesses)
        if num_nodes > MAX_NODES:
            raise ValueError(
                f"level, window, guesses: expected (level - 1) * (window + guesses) of at most {MAX_NODES}, "
                f"got {num_nodes}"
            )
        self.level = level
        self.window = window
        self.guesses = guesses
        cell_paths = [_cell_path(column, row, guesses) for column in range(window) for row in range(level - 1)]
        guess_paths = [(guess,) + (0,) * depth for guess in range(guesses) for depth in range(level - 1)]
        # the window's causal mask is a tree too; its nodes are scored, and are padding to the acceptance rule
        self.shape = TreeShape.from_paths(cell_paths[1:] + guess_paths)
        # the window's nodes come before the guesses', of which those at the end are often unknown
        self.paths = cell_paths + guess_paths
        self.num_cells = len(cell_paths)

    def bind(self, target: Target) -> None:
        """Place the tree on the target's device."""

        def table(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=target.device)

        places = torch.arange(self.shape.num_nodes, dtype=torch.int32, device=target.device)
        shape_node = {path: node for node, path in enumerate(self.shape.rank_paths)}
        order = [shape_node[path] for path in self.paths]
        ancestors = torch.from_numpy(self.shape.ancestors[order][:, order])
        self._depth = table([len(path) for path in self.paths])[None].int()
        self._cell_words = pack_words(ancestors[: self.num_cells]).to(target.device)[None]
        self._words = pack_words(torch.eye(self.shape.num_nodes, dtype=torch.bool)).to(target.device)  # [N, W]
        self._last_cells = places[: self.num_cells].view(self.window, -1)[:, -1].long()  # [window]
        self._guess_nodes = places[self.num_cells :].view(self.guesses, -1)  # [guesses, level - 1]
        self._guess_index = torch.arange(self.guesses, device=target.device)
        self._is_self = torch.eye(self.guesses, dtype=torch.bool, device=target.device)

    def allocate(self, room: Room, device: torch.device) -> None:
        """The window, and a pool for as many steps as there may be."""
        self._window = torch.zeros(room.batch_size, self.window, self.level - 1, dtype=torch.int32, device=device)
        capacity = max(self.window * min(room.max_new_tokens, KEPT_STEPS), self.guesses)
        self._pool = NgramPool(room.batch_size, capacity=capacity, level=self.level, device=device)
        self._num_steps = torch.zeros(room.batch_size, dtype=torch.int64, device=device)

    def row_state(self) -> RowState:
        """As `Drafter`."""
        return self._window, self._num_steps, *self._pool.row_state()

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Fill the window with tokens from all over the prompt; the pool is empty."""
        # cells differ in where they look, a row and its length decide the rest: alone or in a batch, every time
        spread = (torch.arange(1, self.num_cells + 1, device=prompt.tokens.device) * _GOLDEN) % 2**32
        places = (spread * prompt.lengths[:, None].long()) >> 32
        self._window.copy_(prompt.tokens.gather(1, places).view_as(self._window))
        self._pool.clear()
        self._num_steps.zero_()

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """The pool's n-grams that begin with the root, and the window as nodes without a parent."""
        self._window[:, 0, 0] = root
        guesses, is_known = self._pool.newest(root, self.guesses)
        parents, ancestors = self._branches(guesses, is_known)
        no_parents = torch.full_like(self._window, -1).flatten(1)
        cell_words = self._cell_words.expand(root.shape[0], -1, -1)
        return DraftTree(
            tokens=torch.cat((self._window.flatten(1), guesses.flatten(1)), 1),
            parent=torch.cat((no_parents, parents.flatten(1)), 1),
            depth=self._depth,
            ancestors=torch.cat((cell_words, ancestors.flatten(1, 2)), 1),
            deepest=is_known[:, 0].int() * (self.level - 1),
            max_depth=self.level - 1,
            num_fixed=self.num_cells,
        )

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Complete the window's n-grams, put them into the pool and move on by one place."""
        completed = output.scores.best[:, self._last_cells]  # [B, window]
        ngrams = torch.cat((self._window, completed[:, :, None]), 2)
        # what still holds the prompt's tokens behind its first one is nothing that the target has said
        has_outputs_only = self._num_steps >= self.level - 2
        self._pool.add(torch.where(has_outputs_only[:, None, None], ngrams, -1))
        self._window.copy_(ngrams[:, :, 1:])
        self._num_steps += 1

    def _branches(self, guesses: torch.Tensor, is_known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Parents [B, G, level - 1] and ancestor words [B, G, level - 1, W] of the guesses' nodes.

        Siblings must differ: acceptance follows the first one that fits. So a beginning that several guesses share
        counts in the first of them, from which the others branch off; its repetitions, and unknown guesses, get no
        parent.
        """
        same = is_known[:, :, None] & is_known[:, None, :] | self._is_self  # [B, G, G]: equal up to this depth
        above = torch.zeros_like(guesses[:, :, 0])
        words = self._words[above]  # the root's
        parents, ancestors = [], []
        for depth in range(self.level - 1):
            token = guesses[:, :, depth]
            same = same & (token[:, :, None] == token[:, None, :])
            first = torch.where(same, self._guess_index, self.guesses - 1).amin(2)  # [B, G]
            is_first = is_known & (first == self._guess_index)
            parents.append(torch.where(is_first, above, -1))
            above = self._guess_nodes[:, depth][first]
            words = words + self._words[above]  # no bit twice
            ancestors.append(words)
        return torch.stack(parents, 2), torch.stack(ancestors, 2)


class NgramPool:
    """The n-grams of each row in the order in which they were last seen.

    A ring of fixed size: what was seen again moves to the end, and the oldest ones make room. Among n-grams with one
    first token, the newest `n` are what a least-recently-used list of `n` places holds.

    Args:
        batch_size: rows.
        capacity: places per row; at least as many as are ever added or asked for at once.
        level: length of an n-gram.
        device: where they are kept.
    """

    def __init__(self, batch_size: int, *, capacity: int, level: int, device: torch.device) -> None:
        self.capacity = capacity
        self.level = level
        self._ngrams = torch.full((batch_size, capacity, level), -1, dtype=torch.int32, device=device)
        self._places = torch.arange(capacity, device=device)
        self._oldest = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)  # the place that is written next

    def row_state(self) -> RowState:
        """As of `Drafter`."""
        return self._ngrams, self._oldest

    def clear(self) -> None:
        """Forget all n-grams."""
        self._ngrams.fill_(-1)
        self._oldest.zero_()

    def add(self, ngrams: torch.Tensor) -> None:
        """Add [B, n, level] int32 n-grams, the newest last; one whose first token is -1 is none."""
        num_new = ngrams.shape[1]
        places = (self._oldest + self._places[:num_new]) % self.capacity
        self._ngrams.scatter_(1, places[:, :, None].expand_as(ngrams), ngrams)
        self._oldest.add_(num_new).remainder_(self.capacity)
        # what a newer place holds too goes from the older one
        age = self._age()
        is_old = age[:, :, None] < age.gather(1, places)[:, None, :]
        for token in range(self.level):
            is_old = is_old & (self._ngrams[:, :, None, token] == ngrams[:, None, :, token])
        self._ngrams[:, :, 0].masked_fill_(is_old.any(2), -1)

    def newest(self, first: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What followed the tokens `first [B]` in the newest n-grams that begin with them.

        Returns:
            [B, num, level - 1] int32, newest first, 0 where there is none; [B, num] bool, which ones there are.
        """
        is_match = self._ngrams[:, :, 0] == first[:, None]
        age, places = torch.where(is_match, self._age(), -1).topk(num, dim=1)
        is_known = age >= 0
        found = self._ngrams[:, :, 1:].gather(1, places[:, :, None].expand(-1, -1, self.level - 1))
        return torch.where(is_known[:, :, None], found, 0), is_known

    def _age(self) -> torch.Tensor:
        """[B, capacity] int64 rank of every place by the time at which it was written; 0 for the oldest."""
        return (self._places - self._oldest) % self.capacity


def _cell_path(column: int, row: int, guesses: int) -> tuple[int, ...]:
    """Rank path of a cell of the window: along the columns' first tokens, then down the column."""
    along = () if column == 0 else (guesses + 1,) + (1,) * (column - 1)
    down = () if row == 0 else (guesses if column == 0 else 0,) + (0,) * (row - 1)
    return along + down
