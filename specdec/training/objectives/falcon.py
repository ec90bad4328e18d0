"""Falcon's training: coupled sequential glancing distillation (CSGD), two passes over every batch.

Equation:   pass 1, no gradient: guesses g_t of h_{t+k}; d: at how many places LM_head(g_t) and the target disagree
            N = floor(lambda d), lambda = 0.4 (1 - progress): at N places of a text, the first r < k of blocks drawn at
            random, r uniform, answers are shown: (h_t, x_{t+1}) <- (h_{t+k}, y_{t+k+1})
            pass 2: mean over the places that are not shown of
            L = SmoothL1(h_{t+k}, g_t) + 0.1 (0.9 KL(p_{t+k+1} | q_{t+k+1}) + 0.1 CE(y_{t+k+1}, q_{t+k+1}))
            p: the target's distribution, y its most probable token; q: softmax(LM_head(g_t))
            h_t comes with noise of U(-0.1, 0.1), answers without
Source:     Falcon (arXiv:2412.12639) section 3.2, equations 1 to 8, and section 4.3. In a block, what is shown
            precedes what is to be predicted (section 3.2; so does the authors' code), and nothing shown is asked for
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from specdec.common.checks import check_at_least
from specdec.drafters.falcon import Falcon
from specdec.models.networks.falcon import FalconConfig, FalconNetwork
from specdec.models.networks.layer import MaskedAttention
from specdec.models.target.target import Target
from specdec.training.objectives.base import Objective, TrainingBatch, mean_cross_entropy
from specdec.training.objectives.eagle import EAGLE_RECIPES

__all__ = ["FalconObjective", "glance_at", "relaxed_mask"]


class FalconObjective(Objective):
    """The three-part loss after a glance at the answers. In eval mode there is neither glance nor noise.

    Args:
        network: what is trained.
        target: the frozen target.
        glance_ratio: lambda at the beginning; it falls to 0 at the end. 0 leaves out glancing and its pass.
        noise: half the width of the uniform noise on the states.
        distillation_weight: of KL divergence and cross-entropy together, beside the regression's 1.
        soft_weight: of the KL divergence among these two.

    Raises:
        ValueError: a value out of its range.
    """

    drafter_class: ClassVar[type[Falcon]] = Falcon
    # learning rate and betas, EAGLE's too: section 4.3; the rest: EAGLE's, whose settings it follows
    recipe = replace(EAGLE_RECIPES[1], batch_size=4)
    network: FalconNetwork

    def __init__(
        self,
        network: FalconNetwork,
        target: Target,
        *,
        glance_ratio: float = 0.4,
        noise: float = 0.1,
        distillation_weight: float = 0.1,
        soft_weight: float = 0.9,
    ) -> None:
        super().__init__(network, target)
        for name, value in (("glance_ratio", glance_ratio), ("soft_weight", soft_weight)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}: expected 0 to 1, got {value}")
        check_at_least(0, {"noise": noise, "distillation_weight": distillation_weight})
        self.glance_ratio = glance_ratio
        self.noise = noise
        self.distillation_weight = distillation_weight
        self.soft_weight = soft_weight

    @classmethod
    def new_network(cls, target: Target, **settings: Any) -> FalconNetwork:
        """A network that hears the target's embeddings; `settings` are fields of `FalconConfig`."""
        network = FalconNetwork(FalconConfig.for_target(target.model.config, **settings))
        network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
        network.start_from(target.model.get_input_embeddings().weight.detach())
        return network

    @property
    def needs_best(self) -> bool:
        """They are what is shown and, in part, what is learnt."""
        return True

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss; its parts; at how many of the learnt places the first choice is the target's; the share shown."""
        ahead = self.network.config.block_size
        places = batch.loss_mask[:, ahead + 1 :]  # [B, P]: pair t is about token t + k + 1
        assert batch.best is not None
        best = batch.best[:, ahead + 1 :]
        answers = batch.hidden[:, ahead:-1]

        features, tokens = batch.hidden[:, :-1], batch.tokens[:, 1:]
        if self.training and self.noise:
            features = features + torch.empty_like(features).uniform_(-self.noise, self.noise)
        glanced = torch.zeros_like(places)
        if self.training and self.glance_ratio and ahead > 1:
            with torch.no_grad():
                wrong = torch.zeros_like(places)
                logits = self.logits(batch, self._guess(features, tokens, places))
                wrong[places] = batch.vocabulary.first_choice(logits) != best[places]
                ratio = self.glance_ratio * (1 - batch.progress)
                glanced = glance_at(places, (ratio * wrong.sum(1)).long(), ahead)
                beyond = (0, features.shape[1] - places.shape[1])  # pairs about nothing that is known
                shown = F.pad(glanced, beyond)
                features = torch.where(shown[..., None], F.pad(answers, (0, 0, *beyond)), features)
                tokens = torch.where(shown, F.pad(best, beyond), tokens)

        learnt = places & ~glanced
        guesses = self._guess(features, tokens, learnt)
        logits = self.logits(batch, guesses)
        count = max(guesses.shape[0], 1)  # a text without a usable place adds zero, not NaN
        regression = F.smooth_l1_loss(guesses.float(), answers[learnt].float(), reduction="sum")
        regression = regression / (count * guesses.shape[-1])
        soft = F.kl_div(logits.log_softmax(-1), batch.law(slice(ahead, -1), learnt), reduction="sum") / count
        hard = mean_cross_entropy(logits, batch.vocabulary.labels(best[learnt]))
        loss = regression + self.distillation_weight * (self.soft_weight * soft + (1 - self.soft_weight) * hard)
        parts = {"regression": regression.detach(), "soft": soft.detach(), "hard": hard.detach()}
        right = (batch.vocabulary.first_choice(logits.detach()) == best[learnt]).sum() / count
        share = glanced.sum() / places.sum().clamp(min=1)
        return {"loss": loss, **parts, "accuracy": right, "glanced": share}

    def _guess(self, features: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[number of places, C] guesses at the pairs of texts where `places [B, P]` is True."""
        dtype = next(self.network.parameters()).dtype
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        mask = relaxed_mask(tokens.shape[1], self.network.config.block_size, tokens.device)
        features, embedded = features.to(dtype), self.embed(tokens).to(dtype)
        guesses = self.network(features, embedded, positions, MaskedAttention(mask))
        return guesses[:, : places.shape[1]][places]


def relaxed_mask(num_pairs: int, block_size: int, device: torch.device) -> torch.Tensor:
    """[1, T, T] bool, True where pair i sees pair j: blocks of k from the text's beginning, each seen as a whole.

    No padding is ever seen from a place with a known answer: its block ends before the answer's token.
    """
    block = torch.arange(num_pairs, device=device) // block_size
    return (block <= block[:, None])[None]


def glance_at(places: torch.Tensor, counts: torch.Tensor, block_size: int) -> torch.Tensor:
    """Choose the places of each text whose answers are shown: the first few of random blocks, never a whole block.

    Args:
        places: [B, P] bool, places that are learnt.
        counts: [B] int64, how many to show; fewer are where there are no more blocks.
        block_size: k.

    Returns:
        [B, P] bool. Every run of them is followed by a place of its block that is learnt.
    """
    blocks = F.pad(places, (0, -places.shape[1] % block_size)).unflatten(1, (-1, block_size))  # [B, M, k]
    longest = blocks.long().cumprod(2).sum(2) - 1  # [B, M], with one left to learn
    lots = torch.rand(longest.shape, device=places.device)
    # rand() below 1 may round to 1 times a large block
    runs = (1 + (lots * longest).long()).minimum(longest).clamp(min=0)
    order = torch.rand(longest.shape, device=places.device).argsort(1)
    drawn = runs.gather(1, order)
    left = counts[:, None] - (drawn.cumsum(1) - drawn)  # before each block
    runs = torch.zeros_like(runs).scatter(1, order, drawn.minimum(left.clamp(min=0)))
    shown = torch.arange(block_size, device=places.device) < runs[..., None]
    return shown.flatten(1)[:, : places.shape[1]]
