"""Acceptance rules: which of the proposed nodes are kept. One definition of the rule, one of the statistics.

The rule of this release is greedy. A rule turns the target's logits at every node into a `Verdict`; it never looks at
the drafter. `AcceptanceStats` counts what the verdicts did, in the terms of docs/glossary.md.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from specdec.draft_tree import DraftTree
from specdec.kernels.accept_greedy import accept_greedy
from specdec.kernels.launch import Backend
from specdec.kernels.verdict import Verdict

__all__ = ["AcceptanceRule", "AcceptanceStats", "Greedy"]


class AcceptanceRule(Protocol):
    """Decides which nodes of a tree the target accepts."""

    @property
    def lossless(self) -> bool:
        """Whether the output is exactly what plain decoding with the target would give."""
        ...

    def first(self, logits: torch.Tensor) -> torch.Tensor:
        """The first emitted token [B] int32, from the prompt's logits [B, V]."""
        ...

    def verify(
        self, tree: DraftTree, logits: torch.Tensor, budget: torch.Tensor, stop_tokens: torch.Tensor | None
    ) -> Verdict:
        """Accept nodes.

        Args:
            tree: the proposal.
            logits: [B, N, V] the target's logits at every node.
            budget: [B] int32 tokens that each row may still emit; 0 for a finished row.
            stop_tokens: [E] int32 tokens after which a row ends, or None.
        """
        ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """Keep the path on which every token is the target's most probable one. Lossless for greedy decoding.

    Attributes:
        backend: what runs the kernel; by default decided by the device.
    """

    backend: Backend | None = None
    lossless: bool = field(default=True, init=False)

    def first(self, logits: torch.Tensor) -> torch.Tensor:
        """The most probable token of each row; the lowest id wins a tie."""
        return logits.argmax(-1).int()

    def verify(
        self, tree: DraftTree, logits: torch.Tensor, budget: torch.Tensor, stop_tokens: torch.Tensor | None
    ) -> Verdict:
        """Walk down from the root as long as a child carries the target's token."""
        return accept_greedy(
            tree.tokens,
            tree.parent,
            logits.argmax(-1).int(),
            max_depth=tree.max_depth,
            budget=budget,
            stop_tokens=stop_tokens,
            backend=self.backend,
        )


@dataclass(slots=True)
class AcceptanceStats:
    """What a generation's steps accepted. Prefill's first token is not a step's and is not counted.

    Attributes:
        num_emitted: per row, tokens emitted by each of its steps (accepted draft tokens and the next root).
        reach: per row, depth of the deepest proposed node at each of its steps.
        lossless: whether the acceptance rule is.
        times_ms: wall time per phase: prefill, draft, score, verify, commit. On a GPU these are times of the device.
        num_target_passes: scoring passes over the batch; prefill is not counted.
    """

    num_emitted: list[list[int]]
    reach: list[list[int]]
    lossless: bool
    times_ms: dict[str, float]
    num_target_passes: int

    @property
    def tau(self) -> float:
        """Acceptance length: mean tokens emitted per step and row, next root included; NaN without a step."""
        counts = [count for row in self.num_emitted for count in row]
        return sum(counts) / len(counts) if counts else float("nan")

    @property
    def acceptance_at_depth(self) -> list[float]:
        """Entry d - 1: how often a node at depth d was accepted, given that one at depth d - 1 was.

        A row's last step ends because the row does, so it counts as evidence up to the depth it accepted only.
        """
        tries: dict[int, int] = {}
        successes: dict[int, int] = {}
        for emitted_row, reach_row in zip(self.num_emitted, self.reach, strict=True):
            for step, (emitted, reach) in enumerate(zip(emitted_row, reach_row, strict=True)):
                accepted = emitted - 1
                tried = accepted if step == len(emitted_row) - 1 else min(accepted + 1, reach)
                for depth in range(1, tried + 1):
                    tries[depth] = tries.get(depth, 0) + 1
                    successes[depth] = successes.get(depth, 0) + (depth <= accepted)
        return [successes[depth] / tries[depth] for depth in range(1, max(tries, default=0) + 1)]

    @property
    def histogram(self) -> dict[int, int]:
        """How many steps emitted how many tokens."""
        counts = [count for row in self.num_emitted for count in row]
        return {count: counts.count(count) for count in sorted(set(counts))}
