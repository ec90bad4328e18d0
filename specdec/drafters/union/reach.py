"""How often candidates like this one turned out right: what the reach of a node is made of.

A candidate belongs to a cell: which drafter proposes it, how deep it stands, and its grade, how sure its drafter is of
it (by the probability that it gives the token behind its parent). Of every cell the rows count how often the text went
on like that, of those candidates whose parents were right, whether they were scored or not: what a step emits tells
about all that were proposed. Counts fade, so that a row follows its own text; they begin with what earlier generations
have found, and that began with the drafters' own word. The op `specdec.kernels.learn_chances` does the counting.
"""

import torch

from specdec.drafting.draft_tree import DraftTree
from specdec.kernels.common.launch import Backend
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.learn_chances import learn_chances
from specdec.models.common.cache import RowState

__all__ = ["NUM_GRADES", "Evidence", "Pool", "ReachTables"]

_BOUNDS = (0.97, 0.9, 0.75, 0.5, 0.25, 0.1, 0.03)  # probabilities between the grades
_MIDDLES = (0.985, 0.935, 0.825, 0.62, 0.37, 0.17, 0.06, 0.015)
_DEPTHS = (1, 2, 3, 5)  # the first of each stretch of depths

NUM_GRADES = len(_MIDDLES)
_CELLS = len(_DEPTHS) * NUM_GRADES  # of one drafter

_DECAY = 0.9  # of a row's counts with every step that tries a cell
_STRENGTH = 4.0  # tries that the prior of a row counts for
_WORD = 8.0  # tries that the drafters' own word counts for
_MOST_TRIES = 2000.0  # of a cell that earlier generations are remembered for


class Evidence:
    """What all generations so far have found, of `num_members` drafters: [C, 2] counts right and tried, per cell."""

    def __init__(self, num_members: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_members * _CELLS, 2, device=device)
        self._word = torch.tensor(_MIDDLES, device=device).repeat(num_members * len(_DEPTHS))

    def prior(self) -> torch.Tensor:
        """[C] float32 chance of a candidate of each cell; it does not rise with the grade, as rows' chances do not."""
        right, tried = self.counts.unbind(1)
        by_grade = ((right + _WORD * self._word) / (tried + _WORD)).view(-1, NUM_GRADES)
        most_behind = by_grade.flip(1).cummax(1).values.flip(1)
        return ((by_grade.cummin(1).values + most_behind) / 2).flatten()

    def add(self, totals: torch.Tensor) -> None:
        """Remember what the rows of a generation have found, `totals [B, C, 2]`."""
        self.counts += totals.sum(0)
        self.counts *= (_MOST_TRIES / self.counts[:, 1:].clamp(min=_MOST_TRIES)).clamp(max=1.0)


class Pool:
    """The candidates of a step, those of one drafter behind those of another.

    Args:
        trees: of the drafters that proposed.
        members: their numbers.
        tables: says how likely they are.

    Attributes:
        tokens: [B, M] int32.
        parent: [B, M] int32 place in the pool, -1 for the root.
        cell: [B, M] int32, C for padding.
        chance: [B, M] float32, 0 for padding.
        member: [M] int32.
    """

    def __init__(self, trees: list[DraftTree], members: list[int], tables: "ReachTables") -> None:
        batch_size, device = trees[0].tokens.shape[0], trees[0].tokens.device

        def joined(parts: list[torch.Tensor]) -> torch.Tensor:
            """Of every tree all nodes but the root."""
            return torch.cat([part[:, 1:].expand(batch_size, -1) for part in parts], 1)

        sizes = [tree.tokens.shape[1] - 1 for tree in trees]
        self.member, first = tables.places(members, sizes, device)
        self.tokens = joined([tree.tokens for tree in trees])
        above, depth = joined([tree.parent for tree in trees]), joined([tree.depth for tree in trees])
        logps = joined([_logps(tree) for tree in trees])
        is_node = above >= 0
        self.parent = torch.where(above > 0, above + first, -1)
        self.cell = torch.where(is_node, tables.cells(self.member, depth, logps), tables.num_cells)
        self.chance = tables.chance.gather(1, self.cell.long())


class ReachTables:
    """What the rows of a generation count, always in the same tensors.

    Args:
        evidence: of earlier generations.
        num_members: drafters.
        batch_size: rows.
        max_depth: of the deepest tree.
        device: where.
        backend: what runs the kernel.

    Attributes:
        chance: [B, C + 1] float32; 0 for padding.
        agreed: [B, J] int32, accepted tokens that each drafter had proposed.
    """

    def __init__(
        self,
        evidence: Evidence,
        num_members: int,
        *,
        batch_size: int,
        max_depth: int,
        device: torch.device,
        backend: Backend,
    ) -> None:
        self._evidence, self._backend = evidence, backend
        self.num_cells = num_members * _CELLS
        self._counts = torch.zeros(batch_size, self.num_cells, 2, device=device)
        self._totals = torch.zeros_like(self._counts)
        self._prior = torch.zeros(self.num_cells, device=device)
        self.chance = torch.zeros(batch_size, self.num_cells + 1, device=device)
        self.agreed = torch.zeros(batch_size, num_members, dtype=torch.int32, device=device)
        depths = torch.arange(max_depth + 1, device=device)
        stretches = torch.tensor(_DEPTHS, device=device)
        self._stretch = (torch.searchsorted(stretches, depths, right=True) - 1).clamp(min=0).int() * NUM_GRADES
        self._bounds = -torch.tensor(_BOUNDS, device=device).log()
        self._places: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]] = {}

    def start(self) -> None:
        """Begin a generation."""
        self._counts.zero_()
        self._totals.zero_()
        self.agreed.zero_()
        self._prior.copy_(self._evidence.prior())
        self.chance[:, : self.num_cells].copy_(self._prior)

    def row_state(self) -> RowState:
        """As of `Drafter`."""
        return self._counts, self._totals, self.chance, self.agreed

    def settle(self) -> None:
        """Leave what was found so far to rows that come, and know what was found elsewhere."""
        self.keep()
        self._prior.copy_(self._evidence.prior())

    def keep(self) -> None:
        """Leave what this generation has found to later ones."""
        self._evidence.add(self._totals)
        self._totals.zero_()

    def learn(self, pool: Pool, verdict: Verdict) -> None:
        """Count which candidates the emitted tokens run through."""
        learn_chances(
            pool.tokens,
            pool.parent,
            pool.cell,
            pool.member,
            verdict.emitted,
            verdict.num_accepted,
            self._prior,
            self._counts,
            self._totals,
            self.chance,
            self.agreed,
            num_grades=NUM_GRADES,
            decay=_DECAY,
            strength=_STRENGTH,
            backend=self._backend,
        )

    def cells(self, member: torch.Tensor, depth: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
        """[B, M] int32 cells of candidates of `member [M]` at `depth [B, M]`, `logps [B, M]` behind their parents."""
        grade = torch.bucketize(-logps, self._bounds, out_int32=True)
        return self._stretch[depth.long()] + grade + member * _CELLS

    def places(self, members: list[int], sizes: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Per candidate of a pool its drafter, and what turns its place in a tree into one in the pool: [M] int32."""
        key = tuple(members), tuple(sizes)
        if key not in self._places:
            # node i of a tree is the candidate i - 1 places behind its first one
            firsts = [sum(sizes[:number]) - 1 for number in range(len(sizes))]
            tables = [
                torch.tensor([value for value, size in zip(values, sizes, strict=True) for _ in range(size)])
                for values in (members, firsts)
            ]
            self._places[key] = tables[0].int().to(device), tables[1].int().to(device)
        return self._places[key]


def _logps(tree: DraftTree) -> torch.Tensor:
    """[B or 1, N] how sure the drafter is of each node behind its parent; of one that does not say, by its rank."""
    if tree.logps is not None:
        return tree.logps
    parent = tree.parent
    rank = (parent[:, :, None] == parent[:, None, :]).tril(-1).sum(2)
    return -(2.0 + rank).log()
