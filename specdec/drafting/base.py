"""The seam between the decoding loop and whatever proposes tokens."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from specdec.drafting.candidates import Choose
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.planning import Planner
from specdec.kernels.common.verdict import Verdict
from specdec.models.common.cache import RowState
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.dynamic import AnyTreeLike, DynamicTree
from specdec.trees.shape import TreeShape

__all__ = ["Drafter", "Prompt", "Room", "to_device"]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host's on the device; nobody waits for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


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

    @classmethod
    def padded(cls, rows: Sequence[torch.Tensor], num_rows: int, max_length: int, device: torch.device) -> "Prompt":
        """Right-pad 1-D int64 prompts; rows beyond them get a prompt of the one token 0."""
        lengths = [int(row.shape[0]) for row in rows] + [1] * (num_rows - len(rows))
        tokens = torch.zeros(num_rows, max(lengths), dtype=torch.int64)
        for place, row in zip(tokens, rows, strict=False):
            place[: row.shape[0]] = row
        return cls(to_device(tokens, device), to_device(torch.tensor(lengths, dtype=torch.int32), device), max_length)


@dataclass(frozen=True, slots=True)
class Room:
    """The sizes that memory is laid out for; generations of these sizes or less can share it, one after the other.

    Attributes:
        batch_size: rows.
        max_length: most tokens of a row, prompt and new ones together.
        max_prompt: most tokens of a prompt.
        max_new_tokens: most tokens that a row may emit.
        may_ask: whether the shapes of a step may depend on data: where asking the device costs nothing, and nothing is
            recorded.
    """

    batch_size: int
    max_length: int
    max_prompt: int
    max_new_tokens: int
    may_ask: bool = False


class Drafter(ABC):
    """Proposes a draft tree per row. Owns its networks and state; never touches the target's cache.

    The loop calls `bind` once, `allocate` for the memory of one or more generations, then per generation `start`, and
    per step `draft` and `commit`; a union calls `skip` in the place of `draft` of members that do not propose. What
    these remember they write into the tensors that `allocate` made, in place: a captured step is replayed on addresses,
    and never sees what an attribute is bound to later. The loop captures with a shallow copy of the drafter, so that
    `allocate` must bind new tensors, and not touch old ones.

    Attributes:
        kind: the name by which users ask for this drafter.
        shape: the largest tree it proposes. The loop reads its sizes alone; a drafter of static trees, which needs the
            topology, declares the attribute again as a `TreeShape`.
        shares_candidates: whether children of several parents may come from one list of candidates.
        reads_rejected: whether `commit` reads what the target says at nodes that were not accepted.
    """

    kind: ClassVar[str]
    shape: TreeShape | DynamicTree
    shares_candidates: bool = True
    reads_rejected: ClassVar[bool] = False
    _max_new: int | None = None

    @classmethod
    def from_settings(cls, tree: AnyTreeLike | None, **settings: Any) -> "Drafter":
        """Make a drafter that is its settings alone, of a kind that needs no weights.

        Args:
            tree: what the user asked for; None for what the settings say.
            settings: the kind's.

        Raises:
            ValueError: the kind does not propose such a tree.
        """
        if tree is not None:
            raise ValueError(f"tree: expected None with {cls.kind}, whose settings say what it proposes, got {tree!r}")
        return cls(**settings)

    @property
    def max_new(self) -> int:
        """Most committed tokens, roots included, that may come between two drafts; by default one step's."""
        return self.shape.max_depth + 1 if self._max_new is None else self._max_new

    @property
    def most_new(self) -> int | None:
        """The most that `max_new` may be; None for any number."""
        return None

    def holding(self, max_new: int) -> "Drafter":
        """A shallow copy for whose drafts so many tokens may come in between; to be bound anew.

        Raises:
            ValueError: fewer than its own tree may have accepted.
        """
        if max_new <= self.shape.max_depth:
            raise ValueError(f"max_new: expected at least {self.shape.max_depth + 1}, got {max_new}")
        own = copy.copy(self)
        own._max_new = max_new
        return own

    @property
    def num_ways(self) -> int:
        """Ways to go through a step that it knows."""
        return 1

    def num_nodes_of(self, way: int) -> int:
        """Most nodes, root included, that the target scores per row in this way."""
        return self.shape.num_nodes

    @property
    def forecast(self) -> torch.Tensor | None:
        """[K] int32, what a planner is told after every step; None with one way."""
        return None

    def planner(self, *, is_moved: bool = False) -> Planner:
        """What chooses the ways of a generation that begins; of the copy that has its memory.

        Args:
            is_moved: whether rows that were decoded elsewhere go on in this memory.
        """
        return Planner()

    def take(self, way: int) -> None:
        """Go through the next step in this way, below `num_ways`."""

    @property
    def can_sample(self) -> bool:
        """Whether its candidates can be drawn from laws that it hands on with the tree."""
        return False

    @property
    def proposes(self) -> torch.Tensor | None:
        """[D] int64, the target's token behind each of its logits; None where a logit's place is the token."""
        return None

    def with_tree(self, tree: TreeShape) -> "Drafter":
        """The same drafter with another tree, sharing its network; to be bound anew.

        Raises:
            ValueError: a drafter that has no tree to change, or cannot draft this one.
        """
        raise ValueError(f"drafter: expected one whose tree can be changed, got {self.kind}")

    @abstractmethod
    def bind(self, target: Target) -> None:
        """Check that this drafter fits the target and move to its device.

        Raises:
            ValueError: another vocabulary or hidden size.
        """

    def session(self) -> AbstractContextManager[None]:
        """Held by the loop for a whole generation; a draft model is hooked in it."""
        return nullcontext()

    def allocate(self, room: Room, device: torch.device) -> None:
        """Make the tensors that hold the state of generations of these sizes.

        Args:
            room: the sizes.
            device: the target's, or "meta" to learn how much memory it takes.
        """

    def copy_for(self, room: Room, device: torch.device) -> "Drafter":
        """A shallow copy of a bound drafter, with a state of its own; arguments as of `allocate`."""
        own = copy.copy(self)
        own.allocate(room, device)
        return own

    def row_state(self) -> RowState:
        """What `allocate` made that belongs to single rows, so that rows can be moved (`specdec.loop.rows`).

        Between two steps, after `settle`, it is all that the drafter knows of a row.

        Returns:
            Tensors with the rows along their first axis, and caches; always in the same order.

        Raises:
            NotImplementedError: a drafter whose rows cannot be moved.
        """
        raise NotImplementedError(f"drafter: expected one whose rows can be moved (`row_state`), got {self.kind}")

    def settle(self) -> None:
        """Take in whatever still waits outside of `row_state`; called between two steps, before rows are moved."""

    @abstractmethod
    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Begin a generation: the target has run the prompt, or a chunk of it, and nothing was emitted yet.

        Long prompts are run in chunks, so that nobody holds the states of all their tokens. This is called with every
        chunk in its order, the first with `output.first == 0`, before the next one is run; and has read the whole
        prompt after the last one.

        Args:
            prompt: all of it, with the batch size of `allocate` and no more tokens than were announced there.
            output: what the target says about the tokens of the chunk.
        """

    @abstractmethod
    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """Propose.

        Args:
            root: [B] int32 last emitted token, which follows the committed text.
            choose: how logits become candidates, and whether the tree says how probable its nodes are; drafters
                without a network read the latter alone.
        """

    def skip(self, root: torch.Tensor) -> None:
        """Go through a step without a proposal; in the place of `draft`, with `commit` behind it as ever.

        The next draft is that which would have come without skipped steps, if no more than `max_new` tokens were
        committed since the last one.

        Args:
            root: [B] int32 last emitted token.
        """

    @abstractmethod
    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Learn which nodes were accepted, and the target's states at all nodes.

        The tree may be another's that holds this drafter's nodes, deeper and in another order, or none of them.
        """
