"""EAGLE: one decoder layer continues the target's states, and its guesses are fed to it again, depth by depth.

Paper: Li et al. 2024, "EAGLE" (arXiv:2401.15077); "EAGLE-2" (arXiv:2406.16858); Li et al. 2025, "EAGLE-3"
(arXiv:2503.01840). EAGLE-1 and EAGLE-2 differ in the tree, EAGLE-3 in the network; any network drafts any tree.
Proposes: a static tree, every parent with a list of its own (`TreeShape`: EAGLE-1), or the best nodes of a beam search
(`DynamicTree`: EAGLE-2 and EAGLE-3).
Needs from the target: its embedding, its LM head (version 1), and per token the state that enters that head (version 1)
or the outputs of three decoder layers (version 3).
Cost of one draft: one pass over the newly committed tokens, then one per depth that is extended. The layer has 12 to 15
d^2 weights and the projection 2 to 3; the LM head is read in every pass. The deepest nodes are never fed.
Deviations: a dynamic tree takes the most probable tokens whatever rule chooses candidates: it is not a sample from any
law, so it hands out none, and only acceptance that treats a candidate as certain is right for it. Log-probabilities are
summed in fp32, so that ties, which the authors' code resolves to wrong parents, are rare and harmless.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from specdec.drafting.base import Prompt, Room
from specdec.drafting.candidates import Candidates, Choose, choose_from
from specdec.drafting.draft_tree import DraftTree, TreeTemplate
from specdec.drafting.network import NetworkDrafter
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.words import pack_words
from specdec.kernels.tree_rerank import MAX_POOL, beam_step, tree_rerank
from specdec.models.common.cache import KVCache
from specdec.models.common.lm_heads import LMHeads
from specdec.models.networks.eagle import EagleConfig, EagleNetwork, default_tap_layers
from specdec.models.networks.layer import CachedAttention
from specdec.models.networks.prefix import FeaturePrefix
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.dynamic import DynamicTree
from specdec.trees.levels import plan_levels
from specdec.trees.shape import MAX_NODES, TreeShape

__all__ = ["Eagle"]


class Eagle(NetworkDrafter):
    """Drafting with an EAGLE network, of any version, and a static or dynamic tree; version 3's `kind` is `"eagle3"`.

    Args:
        network: the trained network.
        shape: the tree to propose.
        tap_layers: decoder layers (0-based) of the target whose outputs version 3 reads, whatever the network's
            configuration says; where neither does, those of the published rule.

    Raises:
        ValueError: a tree without draft tokens, or of more ranks than there are tokens to propose, or beyond the
            limits of dynamic trees; tap layers that the network cannot read.
    """

    kind: ClassVar[str] = "eagle"
    network_class = EagleNetwork
    shares_candidates = False
    grows_trees = True
    network: EagleNetwork

    def __init__(
        self, network: EagleNetwork, shape: TreeShape | DynamicTree, *, tap_layers: Sequence[int] | None = None
    ) -> None:
        config = network.config
        if shape.max_depth < 1:
            raise ValueError("tree: expected at least one draft token, got the root alone")
        if shape.max_rank >= config.num_draft_tokens:
            name = "top_k" if isinstance(shape, DynamicTree) else "tree"
            raise ValueError(
                f"{name}: expected ranks below {config.num_draft_tokens}, the tokens that the network can propose, "
                f"got {shape.max_rank}"
            )
        if isinstance(shape, DynamicTree) and shape.num_candidates > MAX_POOL:
            raise ValueError(f"depth: expected at most {MAX_POOL} candidates in all, got {shape.num_candidates}")
        if isinstance(shape, DynamicTree) and shape.depth * shape.top_k > MAX_NODES:
            raise ValueError(f"depth: expected depth * top_k up to {MAX_NODES}, got {shape.depth * shape.top_k}")
        if tap_layers is not None and config.version != 3:
            raise ValueError(f"tap_layers: expected None with version 1, got {tuple(tap_layers)}")
        if tap_layers is not None and len(tap_layers) * config.hidden_size != config.feature_size:
            expected = config.feature_size // config.hidden_size
            raise ValueError(f"tap_layers: expected {expected} layers for this network, got {tuple(tap_layers)}")
        super().__init__(network, shape)
        self.tap_layers = config.tap_layers if tap_layers is None else tuple(tap_layers)
        if config.version == 3:
            self.kind = "eagle3"  # type: ignore[misc]  # one class has two names

    @property
    def can_sample(self) -> bool:
        """Whether the tree is static: a dynamic one takes the most probable tokens and is no sample."""
        return isinstance(self.shape, TreeShape)

    @property
    def saved_config(self) -> EagleConfig:
        """With the tap layers, which published files need not name."""
        return replace(self.network.config, tap_layers=self.tap_layers)

    @classmethod
    def default_tree(cls, config: EagleConfig) -> TreeShape | DynamicTree:
        """EAGLE-1's published tree; for version 3 a dynamic tree, as its authors use it."""
        return TreeShape.preset("eagle/mc_sim_7b_63") if config.version == 1 else DynamicTree()

    def bind(self, target: Target) -> None:
        """Check the sizes, move the network to the target's device and dtype, and lay out the passes."""
        super().bind(target)
        self._target = target
        self._taps: list[int] = []
        self._heads = self.lm_heads
        if self.network.lm_head is not None:
            self._heads = LMHeads.of(self.network.lm_head, backend=target.backend)
        if self.network.embed_tokens is not None:
            self.embed = self.network.embed_tokens
        if self.network.config.version == 3:
            layers = default_tap_layers(target.num_layers) if self.tap_layers is None else self.tap_layers
            self._taps = target.tap(layers)
        self._target_ids = self.network.target_ids
        self._num_ranks = self.shape.max_rank + 1
        if isinstance(self.shape, TreeShape):
            self._template = TreeTemplate(self.shape, target.device, rows="parent", backend=target.backend)
            self._levels = plan_levels(self.shape, target.device)
            self._num_slots = sum(level.parent.shape[0] for level in self._levels)
        else:
            self._num_slots = self.shape.depth * self.shape.top_k
            self._own_bits = pack_words(torch.eye(self._num_slots, dtype=torch.bool)).to(target.device)
            self._pass_depth = torch.arange(self.shape.depth, dtype=torch.int32, device=target.device)

    def allocate(self, room: Room, device: torch.device) -> None:
        """Keys and values of the layer, for the text and for the nodes that are extended."""
        layer, max_new = self.network.config.layer, self.shape.max_depth + 1
        cache = KVCache(
            num_layers=1,
            batch_size=room.batch_size,
            capacity=room.max_length + max(max_new, self._num_slots),
            num_kv_heads=layer.num_key_value_heads,
            head_dim=layer.head_dim,
            dtype=self._target.dtype,
            device=device,
            backend=self._target.backend,
        )
        self._prefix = FeaturePrefix(cache, max_new=max_new, feature_size=self.network.config.feature_size)

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Read the prompt."""
        pairs = self._prefix.start(prompt.tokens, prompt.lengths, self._features(output))
        if pairs is not None:
            self._run(self.network.read(pairs.features), pairs.tokens, pairs.positions, pairs.attend)

    def draft(self, root: torch.Tensor, lengths: torch.Tensor, choose: Choose) -> DraftTree:
        """One pass over the tokens that are new, then one per depth over nodes that are extended."""
        pairs = self._prefix.read(root)
        states = self._run(self.network.read(pairs.features), pairs.tokens, pairs.positions, pairs.attend)
        self._prefix.advance()
        first = pairs.last(states)[:, None]
        if isinstance(self.shape, DynamicTree):
            return self._draft_dynamic(self.shape, first, root)
        return self._template.expand(self._draft_static(first, choose), root, lengths)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Keep the accepted tokens, and what the target thought of them, to be read with the next draft."""
        self._prefix.commit(verdict, self._features(output))

    def _draft_static(self, states: torch.Tensor, choose: Choose) -> Candidates:
        """Lists of candidates of all nodes with children; `states [B, 1, C]` follows the root."""
        candidates = [self._choose(states, choose)]
        for level in self._levels:
            tokens = candidates[-1].tokens.flatten(1)[:, level.candidate]
            states = self._extend(states[:, level.parent], tokens, level.depth, level.ancestors, level.first_slot)
            candidates.append(self._choose(states, choose))
        return Candidates.cat(candidates)

    def _draft_dynamic(self, shape: DynamicTree, states: torch.Tensor, root: torch.Tensor) -> DraftTree:
        """Beam search from `states [B, 1, C]`, which follows the root; then the best nodes of all passes."""
        batch_size, width = root.shape[0], shape.top_k
        beam_logps = states.new_zeros(batch_size, 1, dtype=torch.float32)
        parent = torch.full_like(root[:, None], -1)
        ancestors = self._own_bits.new_zeros(batch_size, 1, self._own_bits.shape[1])
        tokens, logps, parents = [], [], []
        first_index = 0
        for depth in range(shape.max_depth):
            best = self._heads.best(self.network.speak(states), width)
            tokens.append(self._target_ids[best.tokens])
            beam = beam_step(
                tokens[-1],
                best.values,
                beam_logps,
                width=width,
                first_index=first_index,
                logsumexp=best.logsumexp,
                backend=self._target.backend,
            )
            logps.append(beam.candidate_logps)
            parents.append(parent)
            if depth == shape.depth:
                break
            first_index += tokens[-1].shape[1] * width
            slots = slice(depth * width, (depth + 1) * width)
            ancestors = _rows(ancestors, beam.row) | self._own_bits[slots]
            states = self._extend(
                _rows(states, beam.row),
                beam.tokens,
                self._pass_depth[depth].expand(1, width),
                ancestors[:, :, : (slots.stop + 31) // 32],
                slots.start,
            )
            parent, beam_logps = beam.index, beam.logps
        tree = tree_rerank(
            torch.cat(tokens, 1),
            torch.cat(logps, 1),
            torch.cat(parents, 1),
            root,
            num_nodes=shape.num_nodes,
            max_depth=shape.max_depth,
            backend=self._target.backend,
        )
        return DraftTree(
            tree.tokens, tree.parent, tree.depth, tree.ancestors, reach=tree.reach, max_depth=shape.max_depth
        )

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
        return self._run(states, tokens, visible.positions, CachedAttention(self._prefix.cache, visible))

    def _run(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: CachedAttention
    ) -> torch.Tensor:
        return self.network(states, self.embed(tokens), positions, attend)

    def _choose(self, states: torch.Tensor, choose: Choose) -> Candidates:
        """Candidates after each of `states [B, n, C]`, as tokens of the target."""
        chosen = choose_from(choose, self._heads, self.network.speak(states), self._num_ranks)
        if not self.network.has_own_vocabulary:
            return chosen
        laws = None
        if chosen.laws is not None:
            laws = chosen.laws.new_full((*chosen.laws.shape[:2], self._target.vocab_size), -torch.inf)
            laws.index_copy_(2, self._target_ids, chosen.laws)
        return Candidates(self._target_ids[chosen.tokens], laws)

    def _features(self, output: PrefillOutput | TargetOutput) -> torch.Tensor:
        """What the network reads of the target: [B, T, F]."""
        if self.network.config.version == 1:
            return output.hidden
        return torch.cat([output.taps[place] for place in self._taps], -1)


def _rows(values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Of `values [B, M, X]` the rows `row [B, W]`: [B, W, X]."""
    return values.gather(1, row.long()[:, :, None].expand(-1, -1, values.shape[2]))
