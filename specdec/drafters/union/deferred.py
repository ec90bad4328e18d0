"""What a member that does not draft is told later, all at once: a step of its own would cost it more than its share.

Only where asking the device costs nothing. Elsewhere every step is told at once, as what is replayed cannot be kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.drafting.base import Drafter
from specdec.kernels.common.verdict import Verdict
from specdec.models.target.target import TargetOutput

__all__ = ["Deferred"]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that some member was not told of: its root [B], which was the last emitted token, and what came of it."""

    root: torch.Tensor
    verdict: Verdict
    output: TargetOutput


class Deferred:
    """Steps that members wait to be told of."""

    def __init__(self, num_members: int) -> None:
        self._steps: list[_Step] = []
        self._first = 0  # number of the oldest that is kept
        self._told = [0] * num_members

    def note(self, root: torch.Tensor, verdict: Verdict, output: TargetOutput, drafted: Sequence[int]) -> None:
        """Keep a step, which the members that `drafted` were told of."""
        self._steps.append(_Step(root, verdict, output))
        for number in drafted:
            self._told[number] = self._first + len(self._steps)
        oldest = min(self._told)
        del self._steps[: oldest - self._first]
        self._first = oldest

    def tell(self, number: int, member: Drafter) -> None:
        """Tell a member of all that it does not know, as if it were one step."""
        waiting = self._steps[self._told[number] - self._first :]
        if waiting:
            member.skip(waiting[0].root)
            member.commit(*_as_one(waiting))
        self._told[number] = self._first + len(self._steps)


def _as_one(steps: Sequence[_Step]) -> tuple[Verdict, TargetOutput]:
    """The steps as a single one, whose nodes are those of all of them."""
    if len(steps) == 1:
        return steps[0].verdict, steps[0].output
    root = steps[0].root
    paths: list[list[int]] = [[] for _ in range(root.shape[0])]
    texts: list[list[int]] = [[] for _ in range(root.shape[0])]
    before = 0
    for step in steps:
        verdict = step.verdict
        rows = zip(verdict.path.tolist(), verdict.emitted.tolist(), verdict.num_emitted.tolist(), strict=True)
        for path, text, (nodes, tokens, count) in zip(paths, texts, rows, strict=True):
            path += [before + node for node in nodes[:count]]
            text += tokens[:count]
        before += step.output.hidden.shape[1]
    width = max(1, *map(len, paths))

    def padded(rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32, device=root.device)

    counts = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32, device=root.device)
    output = TargetOutput(
        scores=steps[-1].output.scores,
        hidden=torch.cat([step.output.hidden for step in steps], 1),
        taps=tuple(torch.cat(parts, 1) for parts in zip(*(step.output.taps for step in steps), strict=True)),
    )
    return Verdict(padded(paths), counts, steps[-1].verdict.next_root, padded(texts)), output
