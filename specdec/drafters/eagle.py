"""EAGLE: one decoder layer continues the target's states, and its guesses are fed to it again, depth by depth.

Paper: Li et al. 2024, "EAGLE" (arXiv:2401.15077); "EAGLE-2" (arXiv:2406.16858), which differs in the tree alone; any
network drafts any tree. EAGLE-3, another network, is in eagle3.py.
Proposes: a static tree, every parent with a list of its own (`TreeShape`: EAGLE-1), or the best nodes of a beam search
(`DynamicTree`: EAGLE-2 and EAGLE-3).
Needs from the target: its embedding, its LM head, and per token the state that enters that head.
Cost of one draft: one pass over the newly committed tokens, then one per depth that is extended. The layer has 12 to 15
d^2 weights and the projection 2 to 3; the LM head is read in every pass. The deepest nodes are never fed.
Deviations: a dynamic tree takes the most probable tokens whatever rule chooses candidates: it is not a sample from any
law, so it hands out none, and only acceptance that treats a candidate as certain is right for it. Log-probabilities are
summed in fp32, so that ties, which the authors' code resolves to wrong parents, are rare and harmless.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch

from specdec.drafting.base import Prompt, Room
from specdec.drafting.beam import check_pool, grow_by_beam, rows_of
from specdec.drafting.candidates import Candidates, Choose, choose_from, wants_logps
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.network import NetworkDrafter
from specdec.kernels.common.dynamic_tree import Beam
from specdec.kernels.common.topk import TopK
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.words import pack_words
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.eagle import EagleNetwork
from specdec.models.networks.eagle3 import Eagle3Network
from specdec.models.networks.layer import CachedAttention
from specdec.models.networks.mtp import MtpNetwork
from specdec.models.networks.prefix import Pairs
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.dynamic import DynamicTree
from specdec.trees.levels import plan_levels
from specdec.trees.shape import MAX_NODES, TreeShape

__all__ = ["Eagle"]


class Eagle(NetworkDrafter):
    """Drafting with an EAGLE network and a static or dynamic tree.

    Args:
        network: the trained network.
        shape: the tree to propose.

    Raises:
        ValueError: a tree without draft tokens, or of more ranks than there are tokens to propose, or beyond the
            limits of dynamic trees.
    """

    kind: ClassVar[str] = "eagle"
    network_class: ClassVar[type[DraftNetwork]] = EagleNetwork
    shares_candidates = False
    grows_trees = True
    network: EagleNetwork | Eagle3Network | MtpNetwork

    def __init__(self, network: EagleNetwork | Eagle3Network | MtpNetwork, shape: TreeShape | DynamicTree) -> None:
        super().__init__(network, shape)
        if isinstance(shape, DynamicTree):
            self._check_grown(shape)

    def _check_grown(self, shape: DynamicTree) -> None:
        """Raise ValueError for a tree that is too large to grow."""
        check_pool(shape)
        if shape.depth * shape.top_k > MAX_NODES:
            raise ValueError(f"depth: expected depth * top_k up to {MAX_NODES}, got {shape.depth * shape.top_k}")

    @classmethod
    def default_tree(cls, config: Any) -> TreeShape | DynamicTree:
        """EAGLE-1's published tree."""
        return TreeShape.preset("eagle/mc_sim_7b_63")

    def bind(self, target: Target) -> None:
        """Check the sizes, move the network to the target's device and dtype, and lay out the passes."""
        super().bind(target)
        self._heads = self.lm_heads
        self._lay_out(target)

    def _lay_out(self, target: Target) -> None:
        """Make the tables of the passes behind the committed text, and count the slots that they write."""
        if isinstance(self.shape, TreeShape):
            self._levels = plan_levels(self.shape, target.device)
            self._num_slots = sum(level.parent.shape[0] for level in self._levels)
        else:
            self._num_slots = self.shape.depth * self.shape.top_k
            self._own_bits = pack_words(torch.eye(self._num_slots, dtype=torch.bool)).to(target.device)
            depths = torch.arange(self.shape.depth, dtype=torch.int32, device=target.device)
            self._pass_depth = depths[:, None, None].repeat(1, 1, self.shape.top_k)

    def allocate(self, room: Room, device: torch.device) -> None:
        """Keys and values of the layers, for the text and for the nodes that are extended."""
        config = self.network.config
        self._prefix = self.new_prefix(
            room,
            device,
            config.layer,
            num_layers=config.num_layers,
            feature_size=config.feature_size,
            num_slots=self._num_slots,
        )

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Read the prompt."""
        pairs = self._prefix.start(prompt.tokens, prompt.lengths, self._features(output), first=output.first)
        if pairs is not None:
            self._follow(pairs)

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """One pass over the tokens that are new, then one per depth over nodes that are extended."""
        pairs = self._prefix.read(root)
        states = self._follow(pairs)
        self._prefix.advance()
        first = pairs.last(states)[:, None]
        if isinstance(self.shape, DynamicTree):
            return self._draft_dynamic(self.shape, first, root, with_logps=wants_logps(choose))
        return self._template.expand(self._draft_static(first, choose), root)

    def skip(self, root: torch.Tensor) -> None:
        """As `Drafter`."""
        self._prefix.skip(root)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Keep the accepted tokens, and what the target thought of them, to be read with the next draft."""
        self._prefix.commit(verdict, self._features(output))

    def _follow(self, pairs: Pairs) -> torch.Tensor:
        """Read pairs of the committed text; returns the states that follow them: [B, T, C]."""
        return self._run(self.network.read(pairs.features), pairs.tokens, pairs.attend)

    def _draft_static(self, states: torch.Tensor, choose: Choose) -> Candidates:
        """Lists of candidates of all nodes with children; `states [B, 1, C]` follows the root."""
        candidates = [self._choose(states, choose)]
        for level in self._levels:
            tokens = candidates[-1].tokens.flatten(1)[:, level.candidate]
            states = self._extend(states[:, level.parent], tokens, level.depth, level.ancestors, level.first_slot)
            candidates.append(self._choose(states, choose))
        return Candidates.cat(candidates)

    def _draft_dynamic(
        self, shape: DynamicTree, states: torch.Tensor, root: torch.Tensor, *, with_logps: bool
    ) -> DraftTree:
        """Beam search from `states [B, 1, C]`, which follows the root; then the best nodes of all passes."""
        ancestors = self._own_bits.new_zeros(root.shape[0], 1, self._own_bits.shape[1])
        remembered = states, ancestors
        first, backend = self._best(states), self._target.backend
        return grow_by_beam(shape, root, first, remembered, self._extend_beam, backend=backend, with_logps=with_logps)

    def _extend_beam(
        self, depth: int, beam: Beam, remembered: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[TopK, tuple[torch.Tensor, torch.Tensor]]:
        """Feed a beam; of each of its paths the state [B, n, C] and the words [B, n, W] of what it sees are kept."""
        states, ancestors = remembered
        width = beam.tokens.shape[1]
        slots = slice(depth * width, (depth + 1) * width)
        ancestors = rows_of(ancestors, beam.row) | self._own_bits[slots]
        states = self._extend(
            rows_of(states, beam.row),
            beam.tokens,
            self._pass_depth[depth],
            ancestors[:, :, : (slots.stop + 31) // 32],
            slots.start,
        )
        return self._best(states), (states, ancestors)

    def _best(self, states: torch.Tensor) -> TopK:
        """The best tokens, the target's, after each of `states [B, n, C]`, with their logits."""
        best = self._heads.best(self.network.lm_states(states), self._num_ranks)
        return replace(best, tokens=self._as_target(best.tokens))

    def _extend(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        depth: torch.Tensor,
        ancestors: torch.Tensor,
        first_slot: int,
    ) -> torch.Tensor:
        """Feed nodes `tokens [B, n]`, each with its parent's state; returns [B, n, C]."""
        visible = self._prefix.visible(depth, ancestors, first_node=first_slot)
        return self._run(states, tokens, self._prefix.attention(visible))

    def _run(self, states: torch.Tensor, tokens: torch.Tensor, attend: CachedAttention) -> torch.Tensor:
        return self.network(states, self.embed(tokens), attend.positions, attend)

    def _choose(self, states: torch.Tensor, choose: Choose) -> Candidates:
        """Candidates after each of `states [B, n, C]`, as tokens of the target."""
        return choose_from(choose, self._heads, self.network.lm_states(states), self._num_ranks)

    def _as_target(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens that the network proposes as int64 tokens of the target."""
        return tokens.long()

    def _features(self, output: PrefillOutput | TargetOutput) -> torch.Tensor:
        """What the network reads of the target: [B, T, F]."""
        return output.hidden
