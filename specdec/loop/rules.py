"""Acceptance rules: which of the proposed nodes are kept. One definition of each.

A rule turns the target's logits at every node into a `Verdict`. It never asks what kind of drafter proposed the tree,
only whether its tokens were drawn from laws that it knows.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from specdec.common.randomness import Stream, Uniforms
from specdec.drafting.base import Drafter
from specdec.drafting.candidates import Best, Choose, DraftLaw, Sampled
from specdec.drafting.draft_tree import DraftTree
from specdec.kernels.accept_greedy import accept_greedy
from specdec.kernels.accept_naive import accept_naive
from specdec.kernels.accept_rejection import accept_rejection
from specdec.kernels.accept_traversal import accept_traversal
from specdec.kernels.accept_typical import accept_typical
from specdec.kernels.common.launch import Backend
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.walk import draw, softmax_masses
from specdec.models.target.scores import Scores
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape
from specdec.trees.traversal import TraversalTables

__all__ = ["RULES", "AcceptanceRule", "Greedy", "Limits", "Naive", "Rejection", "Traversal", "Typical", "choose_rule"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Where emission ends, whatever the rule.

    Attributes:
        budget: [B] int32 tokens that each row may still emit; 0 for a finished row.
        stop_tokens: [E] int32 tokens after which a row ends, or None.
        backend: what runs the kernels; by default decided by the device.
    """

    budget: torch.Tensor
    stop_tokens: torch.Tensor | None
    backend: Backend | None = None

    def of(self, tree: DraftTree) -> dict[str, Any]:
        """As keywords of an acceptance op, with the largest depth of the tree."""
        limits = {"budget": self.budget, "stop_tokens": self.stop_tokens, "backend": self.backend}
        return {"max_depth": tree.max_depth, **limits}


class AcceptanceRule(ABC):
    """Decides which nodes of a tree the target accepts, and how the drafter picks its candidates meanwhile.

    Scores come processed: the softmax of their logits is the law that plain decoding would sample from.

    Attributes:
        name: by which users ask for the rule.
        lossless: whether the output is exactly what plain decoding with the target would give: the same tokens
            (greedy), or tokens of the same law (sampling).
        draws_drafts: whether it needs a drafter that draws its candidates from known laws.
        needs_logits: whether it reads logits; otherwise the best tokens are enough, and no logits need be written.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    draws_drafts: ClassVar[bool] = False
    needs_logits: ClassVar[bool] = True

    @property
    def samples(self) -> bool:
        """Whether it samples the target; False where the most probable token is wanted."""
        return True

    def chooser(self, law: DraftLaw, uniforms: Uniforms) -> Choose:
        """How drafters pick candidates under this rule: the best ones, unless it draws them."""
        return Best()

    def objection(self, drafter: Drafter) -> str | None:
        """Why the rule cannot judge what `drafter` proposes; None if it can."""
        if not self.draws_drafts:
            return None
        objection = self.objection_to_drawing(drafter)
        if objection is None and not _takes_first_ranks(drafter.shape):
            return (
                f"tree: expected children that take the ranks 0, 1, ... for acceptance={self.name!r}, "
                f"as candidates are tried in the order in which they were drawn; got {drafter.shape!r}"
            )
        return objection

    def objection_to_drawing(self, drafter: Drafter) -> str | None:
        """Why `drafter` cannot draw its candidates from known laws; None if it can."""
        if drafter.can_sample:
            return None
        return (
            f"acceptance: {self.name} needs a drafter that draws its candidates from a known law, "
            f"got {drafter.kind}; use acceptance='naive', which is lossless for any proposal"
        )

    def check(self, drafter: Drafter) -> None:
        """Raise ValueError if the rule cannot judge what `drafter` proposes."""
        objection = self.objection(drafter)
        if objection is not None:
            raise ValueError(objection)

    def prepared(self, shape: TreeShape | DynamicTree, device: torch.device) -> "AcceptanceRule":
        """The rule with what it needs of the drafter's tree on the device, which no step must copy there."""
        return self

    def first(self, scores: Scores, uniforms: Uniforms) -> torch.Tensor:
        """The first emitted token [B] int32, from the target's scores at the end of the prompt, one place."""
        if not self.samples:
            return scores.best[:, 0]
        masses = softmax_masses(scores.logits[:, 0], upcast=False)
        depth = masses.new_zeros(1, 1, dtype=torch.int32)
        return draw(masses, uniforms.at(depth)[:, 0]).int()

    @abstractmethod
    def verify(self, tree: DraftTree, scores: Scores, limits: Limits, uniforms: Uniforms) -> Verdict:
        """Accept nodes of `tree`; `scores` are the target's at every node."""


@dataclass(frozen=True, slots=True)
class Greedy(AcceptanceRule):
    """Keep the path on which every token is the target's most probable one. Lossless for greedy decoding."""

    name: ClassVar[str] = "greedy"
    needs_logits: ClassVar[bool] = False

    @property
    def samples(self) -> bool:
        """No."""
        return False

    def verify(self, tree: DraftTree, scores: Scores, limits: Limits, uniforms: Uniforms) -> Verdict:
        """Walk down from the root as long as a child carries the target's token."""
        return accept_greedy(tree.tokens, tree.parent, scores.best, **limits.of(tree))


@dataclass(frozen=True, slots=True)
class Naive(AcceptanceRule):
    """Draw the target's own token at every node and follow it. Lossless whatever was proposed, and however.

    The number that draws a token belongs to the token's place in the output, so that a seed gives the text of plain
    decoding. Nodes of one depth share it, and the tree never knows it: numbers are used on the accepted path alone.

    Attributes:
        drawn: the drafter draws its candidates, without replacement, as in the MCSD paper's ablation (MCNS); otherwise
            they are its most probable tokens, which any drafter has.
    """

    drawn: bool = False
    name: ClassVar[str] = "naive"

    def objection(self, drafter: Drafter) -> str | None:
        """As `AcceptanceRule.objection`."""
        return self.objection_to_drawing(drafter) if self.drawn else None

    def chooser(self, law: DraftLaw, uniforms: Uniforms) -> Choose:
        """The best candidates, or drawn ones."""
        return Sampled(law, replacement=False, uniforms=uniforms) if self.drawn else Best()

    def verify(self, tree: DraftTree, scores: Scores, limits: Limits, uniforms: Uniforms) -> Verdict:
        """Walk down from the root as long as a child carries the token drawn at its parent."""
        return accept_naive(tree.tokens, tree.parent, scores.logits, uniforms.at(tree.depth), **limits.of(tree))


@dataclass(frozen=True, slots=True)
class Rejection(AcceptanceRule):
    """Try siblings in turn, each against what is left of the target's law (MCSS; SpS on a chain). Lossless.

    Attributes:
        replacement: siblings are independent draws; otherwise each excludes those before it.
    """

    replacement: bool = False
    name: ClassVar[str] = "rejection"
    draws_drafts: ClassVar[bool] = True

    def chooser(self, law: DraftLaw, uniforms: Uniforms) -> Choose:
        """Draw from the drafter's law."""
        return Sampled(law, replacement=self.replacement, uniforms=uniforms)

    def verify(self, tree: DraftTree, scores: Scores, limits: Limits, uniforms: Uniforms) -> Verdict:
        """Recursive rejection from the root down."""
        drawn = _drawn(tree, scores, uniforms)
        return accept_rejection(*drawn, replacement=self.replacement, **limits.of(tree))


@dataclass(frozen=True, slots=True)
class Traversal(AcceptanceRule):
    """Judge whole drafted sequences from the leaves up; never accepts less than `Rejection` on a chain. Lossless.

    On a chain it is block verification.

    Attributes:
        tables: the tree as the op takes it; `prepared` makes them.
    """

    tables: TraversalTables | None = field(default=None, compare=False, repr=False)
    name: ClassVar[str] = "traversal"
    draws_drafts: ClassVar[bool] = True

    def objection(self, drafter: Drafter) -> str | None:
        """As `AcceptanceRule.objection`."""
        is_chain = drafter.shape.num_nodes == drafter.shape.max_depth + 1
        objection = AcceptanceRule.objection(self, drafter)
        if objection is None and drafter.shares_candidates and not is_chain:
            # a list that was refused below one parent is no longer a fresh draw below the next
            return (
                f"acceptance: traversal needs a chain, or candidates drawn for every parent anew, but {drafter.kind} "
                "offers one list to several parents; use acceptance='rejection'"
            )
        return objection

    def chooser(self, law: DraftLaw, uniforms: Uniforms) -> Choose:
        """Draw from the drafter's law, without replacement."""
        return Sampled(law, replacement=False, uniforms=uniforms)

    def prepared(self, shape: TreeShape | DynamicTree, device: torch.device) -> "Traversal":
        """As `AcceptanceRule.prepared`."""
        assert isinstance(shape, TreeShape)  # `objection` refuses trees that grow
        return replace(self, tables=TraversalTables.of(shape, device))

    def verify(self, tree: DraftTree, scores: Scores, limits: Limits, uniforms: Uniforms) -> Verdict:
        """Traversal verification."""
        if self.tables is None:
            raise ValueError(f"acceptance: {self.name} needs a tree of the same shape for all rows; see `prepared`")
        drawn = _drawn(tree, scores, uniforms)
        return accept_traversal(*drawn, self.tables.order, self.tables.steps, **limits.of(tree))


@dataclass(frozen=True, slots=True)
class Typical(AcceptanceRule):
    """Accept what the target finds probable enough: p(x) > min(threshold, alpha exp(-H(p))). LOSSY.

    Source: Medusa (arXiv:2401.10774) section 2.3.1; Hydra takes alpha = sqrt(threshold). Both take the most probable
    token as the next root, though Hydra's section 6.3 asks for the rule for the sake of diverse text. With drawn roots
    the text depends on the seed, and where nothing is accepted its law is the target's.

    Attributes:
        threshold: no more than this probability is ever asked for.
        alpha: factor of exp(-entropy).
        root: how the token behind the accepted path is taken: the most probable one, or drawn from the target's law.
    """

    threshold: float = 0.09
    alpha: float = 0.3
    root: Literal["greedy", "sampled"] = "greedy"
    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("threshold", "alpha"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a number over 0 and at most 1, got {getattr(self, name)}")
        if self.root not in ("greedy", "sampled"):
            raise ValueError(f"root: expected 'greedy' or 'sampled', got {self.root!r}")

    @property
    def samples(self) -> bool:
        """Whether roots are drawn."""
        return self.root == "sampled"

    def verify(self, tree: DraftTree, scores: Scores, limits: Limits, uniforms: Uniforms) -> Verdict:
        """The longest acceptable path, and the next root after it."""
        return accept_typical(
            tree.tokens,
            tree.parent,
            scores.logits,
            uniforms.draw(Stream.NEXT_ROOT, 1)[:, 0] if self.samples else None,
            threshold=self.threshold,
            alpha=self.alpha,
            **limits.of(tree),
        )


_Drawn: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

RULES: dict[str, type[AcceptanceRule]] = {one.name: one for one in (Greedy, Naive, Rejection, Traversal, Typical)}


def choose_rule(acceptance: str | AcceptanceRule, drafter: Drafter, *, do_sample: bool) -> AcceptanceRule:
    """The rule that `acceptance` means.

    Args:
        acceptance: a rule, the name of one, or "auto": greedy without sampling; with it, the first of traversal,
            rejection and naive that can judge the drafter. All are lossless; docs/sampling.md has what they accept.
        drafter: what proposes.
        do_sample: whether tokens are sampled.

    Raises:
        TypeError, ValueError: no such rule, or one that contradicts `do_sample` or cannot judge the drafter.
    """
    if isinstance(acceptance, str):
        if acceptance == "auto":
            rules = (Traversal(), Rejection(), Naive()) if do_sample else (Greedy(),)
            acceptance = next(rule.name for rule in rules if rule.objection(drafter) is None)
        if acceptance not in RULES:
            raise ValueError(f"acceptance: expected auto, {', '.join(RULES)} or a rule, got {acceptance!r}")
        rule = RULES[acceptance]()
    elif isinstance(acceptance, AcceptanceRule):
        rule = acceptance
    else:
        raise TypeError(f"acceptance: expected a name or an acceptance rule, got {type(acceptance).__name__}")
    if rule.samples and not do_sample:
        asked = rule.name if isinstance(acceptance, str) else repr(rule)
        raise ValueError(f"acceptance: {asked} samples, which contradicts do_sample=False")
    if isinstance(rule, Greedy) and do_sample:
        raise ValueError("acceptance: greedy never samples, which contradicts do_sample=True")
    rule.check(drafter)
    return rule


def _drawn(tree: DraftTree, scores: Scores, uniforms: Uniforms) -> _Drawn:
    """What the ops take that judge candidates by the laws which they were drawn from."""
    if tree.laws is None or tree.law_row is None:
        raise ValueError("acceptance: expected a tree with the laws that its tokens were drawn from, got one without")
    uniform, last = uniforms.draw(Stream.VERIFY, tree.tokens.shape[1]), uniforms.draw(Stream.NEXT_ROOT, 1)[:, 0]
    return tree.tokens, tree.parent, scores.logits, tree.laws, tree.law_row, uniform, last


def _takes_first_ranks(shape: TreeShape | DynamicTree) -> bool:
    """Whether the tree is static, and the children of every node take the ranks 0, 1, ..., without a gap."""
    return isinstance(shape, TreeShape) and all(
        node > rank and shape.parent[node - rank] == shape.parent[node]
        for node, rank in enumerate(shape.rank)
        if rank > 0
    )
