"""ParallelSpec: one small layer guesses the next K + 1 tokens in a single pass, with K [MASK] tokens as prompts.

Paper: Xiao et al. 2024, "ParallelSpec: Parallel Drafter for Efficient Speculative Decoding" (arXiv:2410.05589).
Proposes: a static tree; all nodes of a depth take their tokens from one list, that of the root's state or of a mask's.
Needs from the target: its embedding and LM head; the eagle variant also the state after every committed token.
Cost of one draft: one pass of one layer over the newly committed tokens and the masks, and d rows of the LM head for a
tree of depth d; nothing sequential.
Deviations: Algorithm 1 as printed does not keep the target's distribution where siblings are drawn without replacement,
so another acceptance rule stands in its place. No code was published and the paper leaves much open: what was chosen is
in docs/drafters/parallelspec.md.
"""

from typing import ClassVar

import torch

from specdec.drafting.base import Prompt, Room
from specdec.drafting.candidates import Choose, choose_from
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.network import NetworkDrafter
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.words import pack_words
from specdec.models.common.passes import TreePass
from specdec.models.networks.parallelspec import ParallelSpecConfig, ParallelSpecNetwork
from specdec.models.networks.prefix import FeaturePrefix, Pairs
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.shape import TreeShape

__all__ = ["ParallelSpec", "pass_tables"]


class ParallelSpec(NetworkDrafter):
    """Static-tree drafting with a parallel drafter, of either variant.

    Args:
        network: the trained network.
        shape: the tree to propose; at most K + 1 deep.

    Raises:
        ValueError: the tree is empty or deeper than K + 1.
    """

    kind: ClassVar[str] = "parallelspec"
    shape: TreeShape
    network_class = ParallelSpecNetwork
    network: ParallelSpecNetwork

    def __init__(self, network: ParallelSpecNetwork, shape: TreeShape) -> None:
        super().__init__(network, shape)
        # a mask sees those before it and never those after, so that masks beyond the tree change nothing
        self._num_masks = shape.max_depth - 1

    @classmethod
    def depth_limit(cls, config: ParallelSpecConfig) -> tuple[int, str]:
        """As `NetworkDrafter`."""
        return config.num_masks + 1, "the masks and one"

    @classmethod
    def default_tree(cls, config: ParallelSpecConfig) -> TreeShape:
        """The tree of the framework that the variant replaces the drafter of, cut off at depth K + 1."""
        paths = TreeShape.preset(f"{config.variant}/mc_sim_7b_63").rank_paths[1:]
        return TreeShape.from_paths([path for path in paths if len(path) <= config.num_masks + 1])

    def bind(self, target: Target) -> None:
        """Check the sizes and move the network to the target's device and dtype."""
        super().bind(target)
        self._passes = MaskPasses(self._num_masks, target.device)

    def allocate(self, room: Room, device: torch.device) -> None:
        """Keys and values of the layer, for the text and the masks behind it."""
        # the masks come behind all that may be pending
        num_slots = self.max_new + self._num_masks
        feature_size = None if self.network.config.variant == "eagle" else 0
        self._prefix = self.new_prefix(
            room, device, self.network.config.layer, feature_size=feature_size, num_slots=num_slots
        )

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Read the prompt."""
        if self.network.config.variant == "eagle":
            pairs = self._prefix.start(prompt.tokens, prompt.lengths, output.hidden, first=output.first)
        else:
            # pairs without a feature; one token in front gives the first token of the text a pair, and position 0
            tokens = torch.nn.functional.pad(prompt.tokens, (1, 0))
            batch_size, num_new = output.hidden.shape[:2]
            first = 0 if output.first == 0 else output.first + 1
            nothing = output.hidden.new_empty(batch_size, output.first + num_new + 1 - first, 0)
            pairs = self._prefix.start(tokens, prompt.lengths + 1, nothing, first=first)
        if pairs is not None:
            self.network(self.network.read(self.embed(pairs.tokens), pairs.features), pairs.positions, pairs.attend)

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """One pass over the tokens that are new and the masks behind each row's last one."""
        network, pairs = self.network, self._prefix.read(root)
        visible = self._passes.behind(self._prefix, pairs)
        inputs = torch.cat(
            (
                network.read(self.embed(pairs.tokens), pairs.features),
                network.read_masks(pairs.last(pairs.features), self._num_masks),
            ),
            1,
        )
        attend = self._prefix.attention(visible)
        states = network(inputs, attend.positions, attend)
        self._prefix.advance()
        width = pairs.tokens.shape[1]
        states = torch.cat((pairs.last(states[:, :width])[:, None], states[:, width:]), 1)
        return self._template.expand(choose_from(choose, self.lm_heads, states, self._num_ranks), root)

    def skip(self, root: torch.Tensor) -> None:
        """As `Drafter`."""
        self._prefix.skip(root)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Keep the accepted tokens, and their states, to be read with the next draft."""
        hidden = output.hidden
        self._prefix.commit(verdict, hidden if self.network.config.variant == "eagle" else hidden[:, :, :0])


class MaskPasses:
    """How passes over real tokens and masks behind them run, by the places for real tokens.

    Args:
        num_masks: masks behind the places.
        device: where the tables go.
    """

    def __init__(self, num_masks: int, device: torch.device) -> None:
        self._num_masks, self._device = num_masks, device
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def behind(self, prefix: FeaturePrefix, pairs: Pairs) -> TreePass:
        """A pass behind the committed text over the places of `pairs`, and the masks."""
        width = pairs.tokens.shape[1]
        if width not in self._tables:
            depth, ancestors = pass_tables(width, self._num_masks)
            self._tables[width] = depth.to(self._device), ancestors.to(self._device)
        depth, ancestors = self._tables[width]
        return prefix.visible(depth[pairs.counts], ancestors[pairs.counts])


def pass_tables(max_new: int, num_masks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths and ancestors in a pass of places for real tokens and then the masks, by the count of real ones.

    Args:
        max_new: places for real tokens.
        num_masks: masks behind them.

    Returns:
        [max_new + 1, N] int32 depth, counted from the first real token, and [max_new + 1, N, W] int32 ancestor words.
        A row that has finished has no real token; its masks go where those of one token would.
    """
    num_nodes = max_new + num_masks
    depth = torch.arange(num_nodes, dtype=torch.int32).repeat(max_new + 1, 1)
    seen = torch.ones(max_new + 1, num_nodes, num_nodes).tril().bool()
    for count in range(max_new + 1):
        depth[count, max_new:] += max(count, 1) - max_new
        seen[count, max_new:, count:max_new] = False  # places that the row leaves empty
    return depth, pack_words(seen)
