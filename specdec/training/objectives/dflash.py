"""Loss of a block that is guessed in one pass: DFlash, and what DSpark shares with it.

Paper: DFlash (arXiv:2602.06036), its section on training: anchors are drawn at random in what is learnt of a text, the
blocks behind all of them go through the network at once, and each sees what the target says before its anchor.
Equation:   L = sum_n w_n l_n / sum_n w_n over the drafted places n of all blocks;  w = exp(-(k - 1) / gamma) for the
            k-th place behind an anchor;  l = a CE(q, label) + d |q - p|_1, of the network's law q and the target's p
            DFlash: a = 1, d = 0
Places:     a block drafts the places behind its anchor, as far as all up to there are learnt. The first token of a text
            is no anchor: what is drafted for stands behind a prompt
Choices beyond the paper: docs/drafters/dflash.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from specdec.common.checks import check_at_least
from specdec.drafters.dflash import DFlash
from specdec.models.networks.dflash import DFlashNetwork
from specdec.models.target.families import decoder_layers
from specdec.models.target.target import Target
from specdec.training.objectives.base import Objective, TrainingBatch
from specdec.training.objectives.recipe import Recipe, check_weights

__all__ = ["Blocks", "DFlashObjective", "text_at"]

# rate, schedule, warm-up, epochs and clipping: the papers'; DSpark's batch is 512
_RECIPE = Recipe(6e-4, warmup_ratio=0.04, epochs=6)
_GAMMAS = {16: 7.0, 10: 5.0}  # DFlash's, by block size
_GAMMA = 4.0  # DFlash's for blocks of 8, DSpark's for its blocks of 7


@dataclass(frozen=True, slots=True)
class Blocks:
    """What is drafted behind anchors.

    Attributes:
        anchors: [B, M] int64 positions.
        places: [B, M, D] int64, position that each drafted token has, within the text.
        learnt: [B, M, D] bool, which of them count.
    """

    anchors: torch.Tensor
    places: torch.Tensor
    learnt: torch.Tensor


class DFlashObjective(Objective):
    """Loss of a block of masks.

    Args:
        network: what is trained.
        target: the frozen target.
        gamma: how slowly weights fall with the distance from the anchor; by default the paper's of this block size: 7
            for 16, 5 for 10, 4 for others.
        num_anchors: blocks of a text, drawn anew at each step; evaluation has as many, evenly spread.
        cross_entropy_weight: a of the equation.
        distance_weight: d of the equation.

    Raises:
        ValueError: a gamma that is not positive, no block, a negative weight or none above 0.
    """

    drafter_class: ClassVar[type[DFlash]] = DFlash
    recipe = _RECIPE
    network: DFlashNetwork

    def __init__(
        self,
        network: DFlashNetwork,
        target: Target,
        *,
        gamma: float | None = None,
        num_anchors: int = 512,
        cross_entropy_weight: float = 1.0,
        distance_weight: float = 0.0,
    ) -> None:
        super().__init__(network, target)
        self.gamma = _GAMMAS.get(network.config.block_size, _GAMMA) if gamma is None else gamma
        if not self.gamma > 0:
            raise ValueError(f"gamma: expected more than 0, got {self.gamma}")
        check_at_least(1, {"num_anchors": num_anchors})
        check_weights({"cross_entropy_weight": cross_entropy_weight, "distance_weight": distance_weight})
        self.num_anchors = num_anchors
        self.cross_entropy_weight = cross_entropy_weight
        self.distance_weight = distance_weight

    @classmethod
    def new_network(
        cls, target: Target, *, start_layers: Sequence[int] | None = None, **settings: Any
    ) -> DFlashNetwork:
        """A network whose layers are sized like the target's, with its LM head and embedding where it has its own.

        Args:
            target: the frozen target.
            start_layers: for each layer of the network that of the target (0-based) with whose weights it begins, and
                so the final norm; by default they begin with PyTorch's initial values.
            settings: as its configuration's `for_target` takes them: `tap_layers`, `block_size`, `num_layers`, ...

        Raises:
            TypeError: a setting that this kind does not have.
            ValueError: a value out of range, a draft vocabulary, which is not trained, or layers to begin with that
                are not like the network's.
        """
        network_class: Any = cls.drafter_class.network_class
        network: DFlashNetwork = network_class(network_class.config_class.for_target(target.model.config, **settings))
        network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
        if network.has_own_vocabulary:
            raise ValueError(
                f"draft_vocab_size: expected None, as training is over the target's vocabulary, got "
                f"{network.config.draft_vocab_size}"
            )
        model = target.model
        network.start_from(model.get_output_embeddings().weight, model.get_input_embeddings().weight)
        if start_layers is not None:
            _start_from_layers(network, target, start_layers)
        return network

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Decoder layers that the network reads."""
        return self.network.config.tap_layers

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss; `"cross_entropy"`, `"distance"` and what a kind adds; and `"depth_1"`, .. (cross-entropies)."""
        if batch.tokens.shape[1] < 3:  # no token to draft; zero, with a gradient that distributed training can reduce
            return {"loss": 0.0 * self.network.fc.weight.sum()}
        blocks = self._blocks(batch)
        states = self._states(batch, blocks)
        logits = self._logits(batch, blocks, states)
        weight = torch.exp(-torch.arange(blocks.places.shape[-1], device=logits.device) / self.gamma)
        weight = weight.expand(blocks.places.shape)[blocks.learnt]
        losses = self._losses(batch, blocks, states, logits)
        scale = weight.sum().clamp(min=torch.finfo(torch.float32).tiny)
        parts = {name: (weight * loss).sum() / scale for name, (_, loss) in losses.items()}
        total = sum((factor * parts[name] for name, (factor, _) in losses.items()), logits.new_zeros(()))
        return {"loss": total, **parts, **self._depths(blocks, losses["cross_entropy"][1])}

    def _losses(
        self, batch: TrainingBatch, blocks: Blocks, states: torch.Tensor, logits: torch.Tensor
    ) -> dict[str, tuple[float, torch.Tensor]]:
        """What is added up, by name: its factor and its [N] losses.

        Args:
            batch: the batch.
            blocks: what is drafted, N places of which are learnt.
            states: [B, M, D, C] of the rows that draft.
            logits: [N, n] of the learnt ones, over the batch's vocabulary.
        """
        labels = batch.vocabulary.labels(text_at(batch.labels, blocks.places)[blocks.learnt])
        losses = {"cross_entropy": (self.cross_entropy_weight, F.cross_entropy(logits, labels, reduction="none"))}
        if self.distance_weight:
            losses["distance"] = (self.distance_weight, self._distance(batch, blocks, logits))
        return losses

    def _distance(self, batch: TrainingBatch, blocks: Blocks, logits: torch.Tensor) -> torch.Tensor:
        """|q - p|_1 of each learnt place, [N]: twice the total variation distance to the target's law."""
        asked = torch.zeros_like(batch.loss_mask)
        rows = torch.arange(len(asked), device=asked.device)[:, None, None].expand_as(blocks.places)[blocks.learnt]
        columns = blocks.places[blocks.learnt] - 1  # the state in front of a place is the one that predicts it
        asked[rows, columns] = True
        order = asked.flatten().cumsum(0).view_as(asked) - 1  # blocks overlap: each law is made once
        law = batch.law(slice(None), asked)[order[rows, columns]]
        return (logits.softmax(-1) - law).abs().sum(-1)

    def _blocks(self, batch: TrainingBatch) -> Blocks:
        """Anchors, drawn among the places in front of learnt ones, or evenly spread over these; and what they draft."""
        mask = batch.loss_mask
        first_row, num_rows = self.drafter_class.first_row, self.network.config.block_size
        may = F.pad(mask[:, 2:], (1, 1))
        lots = torch.rand(mask.shape, device=mask.device) if self.training else _spread(may, self.num_anchors)
        chosen = lots.masked_fill(~may, -1.0).topk(min(self.num_anchors, mask.shape[1]), 1)
        anchors, order = chosen.indices.sort(1)
        behind = torch.arange(1, num_rows - first_row + 1, device=mask.device)
        places = anchors[..., None] + behind
        within = places < mask.shape[1]
        places = places.clamp(max=mask.shape[1] - 1)
        learnt = (text_at(mask, places) & within).int().cumprod(-1).bool()
        is_anchor = chosen.values.gather(1, order) >= 0
        return Blocks(anchors, places, learnt & is_anchor[..., None])

    def _states(self, batch: TrainingBatch, blocks: Blocks) -> torch.Tensor:
        """States of the rows that draft: [B, M, D, C]."""
        network = self.network
        context = network.read(torch.cat(batch.taps, -1).to(network.fc.weight.dtype))
        rows = network.read_anchors(batch.tokens.gather(1, blocks.anchors), self.embed)
        return network.see_blocks(context, rows, blocks.anchors)[:, :, self.drafter_class.first_row :]

    def _logits(self, batch: TrainingBatch, blocks: Blocks, states: torch.Tensor) -> torch.Tensor:
        """[N, n] float32 logits of the learnt places, over the batch's vocabulary."""
        own = self.network.lm_head
        return self.logits(batch, states[blocks.learnt], None if own is None else own.weight)

    def _depths(self, blocks: Blocks, losses: torch.Tensor) -> dict[str, torch.Tensor]:
        """Mean of the [N] losses by distance from the anchor."""
        depth = torch.arange(blocks.places.shape[-1], device=losses.device).expand(blocks.places.shape)[blocks.learnt]
        sums = losses.new_zeros(blocks.places.shape[-1]).index_add(0, depth, losses)
        counts = depth.bincount(minlength=len(sums)).clamp(min=1)
        return {f"depth_{place + 1}": mean for place, mean in enumerate((sums / counts).unbind())}


@torch.no_grad()
def _start_from_layers(network: DFlashNetwork, target: Target, layers: Sequence[int]) -> None:
    """Copy weights of the target's decoder layers and of its final norm."""
    decoder = target.model.get_decoder()
    theirs, number = decoder_layers(decoder), network.config.num_layers
    if len(layers) != number or not all(0 <= layer < len(theirs) for layer in layers):
        raise ValueError(f"start_layers: expected {number} layers below {len(theirs)}, got {tuple(layers)}")
    pairs = zip([*network.decoder, network.norm], [*(theirs[place] for place in layers), decoder.norm], strict=True)
    for own, layer in pairs:
        found, wanted = dict(layer.named_parameters()), dict(own.named_parameters())
        unlike = [
            name for name, parameter in wanted.items() if name not in found or found[name].shape != parameter.shape
        ]
        if unlike:
            raise ValueError(
                f"start_layers: expected layers like the network's, got others for {', '.join(unlike)}; qk_norm=False "
                "leaves out norms of the heads"
            )
        for name, parameter in wanted.items():
            parameter.copy_(found[name])


def text_at(texts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What stands at `places [B, M, D]` of `texts [B, T]`."""
    return texts.gather(1, places.flatten(1)).view_as(places)


def _spread(places: torch.Tensor, count: int) -> torch.Tensor:
    """[B, T] float: 1 at about `count` of each row's `places [B, T]` bool, evenly spread; 0 at the others."""
    number = places.cumsum(1)
    share = count / number[:, -1:].clamp(min=count)
    return (places & ((number * share).floor() > ((number - 1) * share).floor())).float()
