"""A union: several drafters propose, and their trees become one, sized step by step by what it is worth.

Paper: none; a design of this library, docs/drafters/union.md. Trees of the largest reach are those of Sequoia
(arXiv:2402.12374); here reach is calibrated, and weighed against measured costs, at every step.
Proposes: of each row the nodes of the largest reach among those that its members propose, equal paths merged, up to
`num_nodes`; in some steps those of some members alone, or nothing.
Needs from the target: what its members need. Cost: that of the members that draft, and two small launches.
"""

import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import ClassVar

import torch

from specdec.drafters.union.costs import WayCosts
from specdec.drafters.union.deferred import Deferred
from specdec.drafters.union.planner import FIXED_POINT, NUM_COUNTS, Choices, WayPlanner
from specdec.drafters.union.reach import Evidence, Pool, ReachTables
from specdec.drafting.base import Drafter, Prompt, Room
from specdec.drafting.candidates import Best, Choose
from specdec.drafting.draft_tree import DraftTree, TreeTemplate
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.tree_merge import MAX_POOL, tree_merge
from specdec.models.common.cache import RowState
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

__all__ = ["NUM_NODES", "Union"]

NUM_NODES = 64
"""Nodes of the largest tree, root included, unless told otherwise."""

_BACKLOG = {"cpu": 256}
"""Tokens that may wait for a member that does not draft, beside those of the steps under way."""

_LEAST_BACKLOG = 64
"""The same where a draft always reads as many places as there may be."""


class Union(Drafter):
    """Proposes what its members propose, as one tree.

    Args:
        members: drafters for one target, with trees of their own.
        names: of the members, for reports; by default their kinds.
        num_nodes: nodes of the largest tree, root included; no more than the members propose together.
        costs: what steps cost, as `specdec.tuning.measure` finds it. Without, all members propose in every step, and
            trees are as large as they may be.

    Raises:
        TypeError: something else than a drafter.
        ValueError: no member, one that is given twice, proposes nothing, is a union itself or cannot share a tree; a
            budget below the members' number; more candidates than the op takes.
    """

    kind: ClassVar[str] = "union"
    shape: DynamicTree

    def __init__(
        self,
        members: Sequence[Drafter],
        *,
        names: Sequence[str] | None = None,
        num_nodes: int = NUM_NODES,
        costs: WayCosts | None = None,
    ) -> None:
        _check(members)
        self.names = tuple(one.kind for one in members) if names is None else tuple(names)
        if len(set(self.names)) < len(self.names) or len(set(map(id, members))) < len(members):
            raise ValueError(f"members: expected each drafter once, got {', '.join(self.names)}")
        if num_nodes < len(members) + 1:
            raise ValueError(
                f"num_nodes: expected at least {len(members) + 1}, the root and a node of each of {len(members)} "
                f"members, got {num_nodes}"
            )
        num_candidates = sum(one.shape.num_nodes - 1 for one in members)
        if num_candidates > MAX_POOL:
            raise ValueError(f"members: expected at most {MAX_POOL} candidates of all trees, got {num_candidates}")
        max_depth = max(one.shape.max_depth for one in members)
        budget = min(num_nodes, num_candidates + 1)
        self.shape = DynamicTree(num_nodes=budget, depth=max_depth - 1, top_k=budget - 1)
        self.members = list(members)
        self.choices = Choices(self.names, budget, costs, most_emitted=max_depth + 1)
        self._evidence: Evidence | None = None
        self._planners: dict[tuple[int, bool], WayPlanner] = {}
        self._way = 0
        self._planner: WayPlanner | None = None
        self._pool: Pool | None = None
        self._gains: torch.Tensor | None = None

    def __copy__(self) -> "Union":
        own = object.__new__(type(self))
        vars(own).update(vars(self))
        own.members = [copy.copy(one) for one in self.members]
        return own

    @property
    def costs(self) -> WayCosts | None:
        """What steps cost; None where nothing was measured."""
        return self.choices.costs

    def with_costs(self, costs: WayCosts | None) -> "Union":
        """The same members by other costs; to be bound anew."""
        own = copy.copy(self)
        choices = self.choices
        own.choices = Choices(choices.names, choices.budget, costs, choices.most_emitted)
        own._planners = {}
        return own

    @property
    def num_ways(self) -> int:
        """As `Drafter`: sets of members by sizes, and plain decoding."""
        return len(self.choices.ways)

    def num_nodes_of(self, way: int) -> int:
        """As `Drafter`."""
        return self.choices.ways[way].num_nodes

    def take(self, way: int) -> None:
        """As `Drafter`."""
        self._way = way

    @property
    def forecast(self) -> torch.Tensor | None:
        """As `Drafter`; `WayPlanner.observe` says what it holds. Where asking is free the planner is told at once."""
        return None if self._may_ask else self._forecast

    def planner(self, *, is_moved: bool = False) -> WayPlanner:
        """As `Drafter`; what it has learnt stays for later generations of as many rows."""
        key = self._rows, self._may_ask
        if key not in self._planners:
            self._planners[key] = WayPlanner(
                self.choices,
                self._rows,
                backlog=self._held,
                may_ask=self._may_ask,
                clock=time.perf_counter if self._may_ask and self.costs and self.costs.is_corrected else None,
            )
        self._planner = self._planners[key]
        self._planner.begin(self.finish, is_moved=is_moved)
        return self._planner

    def bind(self, target: Target) -> None:
        """As `Drafter`: every member is bound."""
        # of two steps the host may not have heard yet
        held = 2 * self.choices.most_emitted + _BACKLOG.get(target.device.type, _LEAST_BACKLOG)
        self._held = min([held, *(one.most_new for one in self.members if one.most_new is not None)])
        self.members = [member.holding(self._held) for member in self.members]
        for member in self.members:
            member.bind(target)
        self._backend = target.backend
        self._root_alone = TreeTemplate(TreeShape.chain(0), target.device)
        if self._evidence is None or self._evidence.counts.device != target.device:
            self._evidence = Evidence(len(self.members), target.device)
        self._groups = {
            way.parts: torch.tensor(way.parts, dtype=torch.int32, device=target.device)
            for way in self.choices.ways
            if way.parts
        }
        self._ladder = torch.tensor(self.choices.sizes, device=target.device) - 1

    def session(self) -> AbstractContextManager[None]:
        """As `Drafter`: all of the members'."""

        @contextmanager
        def all_sessions() -> Iterator[None]:
            with ExitStack() as stack:
                for member in self.members:
                    stack.enter_context(member.session())
                yield

        return all_sessions()

    def allocate(self, room: Room, device: torch.device) -> None:
        """The members' memory, and what is counted of their proposals."""
        assert self._evidence is not None
        self.members = [member.copy_for(room, device) for member in self.members]
        self._rows = room.batch_size
        self._may_ask = room.may_ask
        self._tables = ReachTables(
            self._evidence,
            len(self.members),
            batch_size=room.batch_size,
            max_depth=self.shape.max_depth,
            device=device,
            backend=self._backend,
        )
        self._nothing = torch.zeros(self.choices.num_parts, room.batch_size, len(self.choices.sizes), device=device)
        num_numbers = NUM_COUNTS + self.choices.num_parts * len(self.choices.sizes)
        self._forecast = torch.zeros(num_numbers, dtype=torch.int32, device=device)
        self._deferred = Deferred(len(self.members)) if room.may_ask else None
        self._root: torch.Tensor | None = None
        self._planner = self._pool = self._gains = None

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Start every member."""
        if output.first == 0:
            self._tables.start()
            self._forecast.zero_()
            self._deferred = None if self._deferred is None else Deferred(len(self.members))
            self._pool = self._gains = None
        for member in self.members:
            member.start(prompt, output)

    def row_state(self) -> RowState:
        """As `Drafter`: the members', and what the rows have counted."""
        return *(part for member in self.members for part in member.row_state()), *self._tables.row_state()

    def settle(self) -> None:
        """As `Drafter`: members are told what they do not know yet, and what was found stays for the rows to come."""
        for number, member in enumerate(self.members):
            if self._deferred is not None:
                self._deferred.tell(number, member)
            member.settle()
        self._tables.settle()

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """Let the members of the way propose, and merge what they say."""
        way = self.choices.ways[self._way]
        self._drafting = [number for number in range(len(self.members)) if way.group >> number & 1]
        trees = []
        for number, member in enumerate(self.members):
            if number in self._drafting:
                if self._deferred is not None:
                    self._deferred.tell(number, member)
                trees.append(member.draft(root, Best(with_logps=True)))
            elif self._deferred is None:
                member.skip(root)
        is_known_to_all = self._deferred is None or len(trees) == len(self.members)
        self._root = None if is_known_to_all else root.clone()
        if not trees:
            return self._plain(root)
        if self._may_ask and not any(bool(tree.deepest.any()) for tree in trees):
            self._gains = self._nothing[: len(way.parts)]
            if self._planner is not None:
                self._planner.cut([0.0] * len(self.choices.sizes))
            return self._plain(root)
        pool = self._pool = Pool(trees, self._drafting, self._tables)
        merged = tree_merge(
            pool.tokens,
            pool.parent,
            pool.chance,
            pool.member,
            root,
            self._groups[way.parts],
            num_nodes=way.num_nodes,
            num_gains=self.choices.budget,
            max_depth=self.shape.max_depth,
            backend=self._backend,
        )
        self._gains = merged.gains.index_select(2, self._ladder)
        tree = DraftTree.of(merged, self.shape.max_depth)
        if self._may_ask and self._planner is not None:
            tree = tree.first(self._planner.cut(self._gains[0].sum(0).tolist()))
        return tree

    def _plain(self, root: torch.Tensor) -> DraftTree:
        """The root alone."""
        table = self._root_alone
        nodes = root[:, None], table.parent, table.depth, table.ancestors
        return DraftTree(*nodes, table.deepest, max_depth=self.shape.max_depth, num_fixed=1)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Let every member know what was accepted, and learn whose candidates were right."""
        for number, member in enumerate(self.members):
            if self._deferred is None or number in self._drafting:
                member.commit(verdict, output)
        if self._deferred is not None and self._root is not None:
            self._deferred.note(self._root, verdict, output, self._drafting)
        pool, gains, self._pool, self._gains = self._pool, self._gains, None, None
        if pool is not None:
            self._tables.learn(pool, verdict)
        if not self._may_ask:
            self._tell(verdict, gains)
        elif self._planner is not None:
            self._planner.observe(_told(verdict, gains))

    def _tell(self, verdict: Verdict, gains: torch.Tensor | None) -> None:
        """Leave on the device what the planner is to know; of plain decoding that is nothing."""
        if gains is None:
            return
        accepted = verdict.num_accepted
        is_running = accepted >= 0
        expected = torch.einsum("gbl,b->gl", gains, is_running.to(gains.dtype)) * FIXED_POINT
        counts = torch.stack((is_running.sum(), accepted.amax() + 1, accepted.clamp(min=0).sum()))
        self._forecast[: NUM_COUNTS + expected.numel()].copy_(torch.cat((counts, expected.flatten())))

    def finish(self) -> list[int]:
        """End a generation whose text was wanted: leave what was found to later ones.

        Returns:
            Per member, accepted tokens that it had proposed.
        """
        self._tables.keep()
        return self._tables.agreed.sum(0).tolist()


def _told(verdict: Verdict, gains: torch.Tensor | None) -> list[float]:
    """The same numbers as `Union._tell` leaves, without a tensor."""
    if gains is None:
        return []
    accepted = verdict.num_accepted.tolist()
    running = [count >= 0 for count in accepted]
    numbers = [float(sum(running)), 1.0 + max(accepted), float(sum(count for count in accepted if count > 0))]
    for of_part in gains.tolist():
        columns = zip(*of_part, strict=True)
        numbers += [FIXED_POINT * sum(itertools.compress(column, running)) for column in columns]
    return numbers


def _check(members: Sequence[Drafter]) -> None:
    """Raise TypeError or ValueError for what cannot be a member of a union."""
    if not members:
        raise ValueError("members: expected at least one drafter, got none")
    for one in members:
        if not isinstance(one, Drafter):
            raise TypeError(f"members: expected drafters, got {one!r}")
        if one.num_ways > 1:
            raise ValueError("members: expected drafters that are no unions themselves, got one that is")
        if one.shape.num_nodes == 1:
            raise ValueError(f"members: expected drafters that propose tokens, got {one.kind} with the root alone")
        if one.reads_rejected:
            raise ValueError(
                f"members: expected drafters that read accepted tokens alone, got {one.kind}, which also reads what "
                "the target says at rejected ones"
            )
