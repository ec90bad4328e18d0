"""Losses of EAGLE: regression of the target's states (EAGLE-1 and 2), and training-time test (EAGLE-3).

Paper: EAGLE (arXiv:2401.15077) section 4.2: SmoothL1 of the states plus 0.1 times the cross-entropy between the laws
that the target's LM head makes of them, under uniform noise on the input. EAGLE-3 (arXiv:2503.01840) section 3: the
network is unrolled on its own states as when drafting, step i weighs 0.8^i, and nothing is regressed.
Places: the network at pair (h_t, x_{t+1}) guesses token t + 2, in step i of an unrolled text token
t + 2 + i; the loss counts where that token may be learnt. Step i of EAGLE-3 sees of each place what a chain of i draft
tokens sees: the true pairs up to t, and all its own steps at t.
Choices beyond the papers: docs/drafters/eagle.md.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from specdec.common.checks import check_at_least
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.models.networks.eagle import EagleConfig, EagleNetwork
from specdec.models.networks.eagle3 import Eagle3Config, Eagle3Network
from specdec.models.networks.layer import MaskedAttention, Rotation, attend_among
from specdec.models.networks.mtp import MtpNetwork
from specdec.models.target.target import Target
from specdec.training.objectives.base import Objective, TrainingBatch, mean_cross_entropy, refuse_unread
from specdec.training.objectives.recipe import Recipe, check_decay
from specdec.training.objectives.vocabulary import Vocabulary
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

__all__ = [
    "EAGLE_RECIPES",
    "EagleObjective",
    "UnrolledAttention",
    "guesses_of",
    "most_frequent_tokens",
    "prepare_third",
    "unrolled",
]

# rates, betas and clipping as in the papers and the authors' scripts; warm-up 2000 and 12000 of 800000 steps
_EAGLE = Recipe(3e-5, betas=(0.9, 0.95), schedule="linear", warmup_ratio=0.0025, epochs=20, batch_size=16)
EAGLE_RECIPES = {
    1: replace(_EAGLE, weight_decay=0.01, clip_value=0.5),
    3: replace(_EAGLE, learning_rate=5e-5, warmup_ratio=0.015, epochs=40, clip_norm=0.5),
}
"""How each version is trained."""
_UNREAD = {1: ("num_unrolled", "decay"), 3: ("noise", "classification_weight")}


class EagleObjective(Objective):
    """Loss of either version.

    Args:
        network: what is trained.
        target: the frozen target.
        noise: version 1: states are read with noise from U(-noise, noise).
        classification_weight: version 1: weight of the cross-entropy beside the regression's 1.
        num_unrolled: version 3: steps of the training-time test; 1 trains on true states alone.
        decay: version 3: step i weighs decay ** i.

    Raises:
        ValueError: a negative noise or weight, no step at all, a decay outside (0, 1], or the other version's setting.
    """

    drafter_class = Eagle
    recipe = EAGLE_RECIPES[1]
    network: EagleNetwork | Eagle3Network

    def __init__(
        self,
        network: EagleNetwork | Eagle3Network,
        target: Target,
        *,
        noise: float = 0.1,
        classification_weight: float = 0.1,
        num_unrolled: int = 7,
        decay: float = 0.8,
    ) -> None:
        super().__init__(network, target)
        check_at_least(0, {"noise": noise, "classification_weight": classification_weight})
        check_at_least(1, {"num_unrolled": num_unrolled})
        check_decay(decay)
        self.version = 3 if isinstance(network, Eagle3Network) else 1
        self.recipe = EAGLE_RECIPES[self.version]
        self.noise = noise
        self.classification_weight = classification_weight
        self.num_unrolled = num_unrolled
        self.decay = decay
        refuse_unread(self, _UNREAD[self.version], f"version {self.version}")

    @classmethod
    def new_network(
        cls,
        target: Target,
        *,
        draft_tokens: Sequence[int] | torch.Tensor | None = None,
        start_from_target: bool = True,
        version: int = 1,
        **settings: Any,
    ) -> EagleNetwork | Eagle3Network:
        """A network whose layer is sized like the target's.

        Args:
            target: the frozen target.
            draft_tokens: version 3: the target's ids of the tokens that it may propose, in any order; needed when
                `draft_vocab_size` is less than the target's vocabulary. `most_frequent_tokens` makes them.
            start_from_target: version 3: begin with the target's LM head, and embedding if the network has its own.
            version: 1 for EAGLE-1 and EAGLE-2, or 3.
            settings: as `EagleConfig.for_target` or `Eagle3Config.for_target` takes them: `tap_layers`, ...

        Raises:
            TypeError: a setting that this kind does not have.
            ValueError: a value out of range, tap layers needed and not given, or draft tokens that do not fit.
        """
        if draft_tokens is not None:
            settings.setdefault("draft_vocab_size", len(draft_tokens))
        network = _new_network(target, version, settings)
        if isinstance(network, Eagle3Network):
            prepare_third(network, target, draft_tokens, start_from_target=start_from_target)
        else:
            network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
        return network

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Decoder layers whose outputs the loss needs: version 3's."""
        return getattr(self.network.config, "tap_layers", None) or ()

    @property
    def needs_best(self) -> bool:
        """A draft vocabulary learns where they are in it."""
        return isinstance(self.network, Eagle3Network) and self.network.has_own_vocabulary

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embedding of [..] tokens, the target's or the network's own: [.., C]."""
        own = getattr(self.network, "embed_tokens", None)
        return super().embed(tokens) if own is None else own(tokens)

    def drafter(self, shape: TreeShape | DynamicTree | None = None) -> Eagle:
        """As `Objective`."""
        network = self.network
        if isinstance(network, Eagle3Network):
            return Eagle3(network, Eagle3.default_tree(network.config) if shape is None else shape)
        return Eagle(network, Eagle.default_tree(network.config) if shape is None else shape)

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss, and its parts: `"regression"` and `"classification"`, or `"depth_1"`, `"depth_2"`, ..."""
        if batch.tokens.shape[1] < 3:  # no token to guess; zero, with a gradient that distributed training can reduce
            return {"loss": 0.0 * self.network.fc.weight.sum()}
        return self._regression_loss(batch) if self.version == 1 else self._unrolled_loss(batch)

    def _regression_loss(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        network = self.network
        features = batch.hidden[:, :-2].to(network.fc.weight.dtype)
        if self.training and self.noise:
            features = features + self.noise * (2 * torch.rand_like(features) - 1)
        positions = torch.arange(features.shape[1], device=features.device)[None]
        states = network(network.read(features), self.embed(batch.tokens[:, 1:-1]), positions, MaskedAttention())

        learnt = batch.loss_mask[:, 2:]
        count = learnt.sum().clamp(min=1)
        guess, truth = states[learnt], batch.hidden[:, 1:-1][learnt]
        error = F.smooth_l1_loss(guess.float(), truth.float(), reduction="sum") / truth.shape[1]
        law = batch.law(slice(1, -1), learnt)
        cross_entropy = F.cross_entropy(self.logits(batch, network.lm_states(guess)), law, reduction="sum")
        regression, classification = error / count, cross_entropy / count
        loss = regression + self.classification_weight * classification
        return {"loss": loss, "regression": regression, "classification": classification}

    def _unrolled_loss(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        network = self.network
        assert isinstance(network, Eagle3Network)
        read = network.read(torch.cat([tap[:, :-2] for tap in batch.taps], -1).to(network.fc.weight.dtype))
        loss, parts = read.new_zeros((), dtype=torch.float32), {}
        for step, following, states in unrolled(network, read, self.embed, batch.tokens, self.num_unrolled):
            cross_entropy = mean_cross_entropy(*guesses_of(self, batch, states, following))
            parts[f"depth_{step + 1}"] = cross_entropy
            loss = loss + self.decay**step * cross_entropy
        return {"loss": loss, **parts}


def prepare_third(
    network: Eagle3Network,
    target: Target,
    draft_tokens: Sequence[int] | torch.Tensor | None,
    *,
    start_from_target: bool,
) -> None:
    """Make a new network of version 3 ready for training, as `EagleObjective.new_network` says.

    Raises:
        ValueError: sizes of another target, or draft tokens that do not fit.
    """
    network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
    if draft_tokens is not None:
        network.set_draft_vocabulary(torch.as_tensor(draft_tokens))
    elif network.has_own_vocabulary:
        raise ValueError(
            f"draft_tokens: expected the ids of {network.config.num_draft_tokens} tokens with a draft vocabulary, "
            "got None; specdec.training.objectives.eagle.most_frequent_tokens makes them from token counts"
        )
    if start_from_target:
        model = target.model
        network.start_from(model.get_output_embeddings().weight, model.get_input_embeddings().weight)


def guesses_of(
    objective: Objective, batch: TrainingBatch, states: torch.Tensor, columns: slice | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a network of version 3 says of the tokens behind some columns, and what the target says of them.

    With a draft vocabulary only places count where the target's most probable token is in it.

    Args:
        objective: of the network.
        batch: the batch.
        states: [B, n, C] of the network.
        columns: the n columns of the texts; the guesses are about the tokens behind them.

    Returns:
        [N, D] float32 logits and laws of the learnt ones.
    """
    network = objective.network
    assert isinstance(network, Eagle3Network)
    # a draft vocabulary takes the place of the batch's, whose candidates it need not have
    vocabulary, own = batch.vocabulary, network.lm_head
    following = slice(columns.start + 1, columns.stop + 1) if isinstance(columns, slice) else columns + 1
    learnt = batch.loss_mask[:, following]
    if network.has_own_vocabulary:
        assert batch.best is not None
        vocabulary = Vocabulary.of(network.target_ids, network.config.vocab_size)
        learnt = learnt & network.t2d[batch.best[:, following]]
    guess = network.lm_states(states[learnt])
    if own is not None and network.has_own_vocabulary:
        logits = own(guess).float()
    else:
        logits = objective.logits(batch, guess, None if own is None else own.weight)
    return logits, batch.law_over(vocabulary, columns, learnt)


def _new_network(target: Target, version: int, settings: dict[str, Any]) -> EagleNetwork | Eagle3Network:
    """A network of this version, sized for a target."""
    if version == 3:
        return Eagle3Network(Eagle3Config.for_target(target.model.config, **settings))
    if version != 1:
        raise ValueError(f"version: expected 1 (EAGLE-1 and EAGLE-2) or 3, got {version!r}")
    if settings.keys() & {"tap_layers", "draft_vocab_size"}:
        raise ValueError("version: expected 3 with tap_layers or a draft vocabulary, got 1")
    return EagleNetwork(EagleConfig.for_target(target.model.config, **settings))


def unrolled(
    network: Eagle3Network | MtpNetwork,
    states: torch.Tensor,
    embed: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    num_unrolled: int,
) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """Run a network on its own states, as when drafting.

    Args:
        network: one decoder layer, or several that run behind each other.
        states: [B, T - 2, C] what stands for the target's states.
        embed: of tokens.
        tokens: [B, T] the text.
        num_unrolled: steps, or fewer where the text ends before.

    Yields:
        The step, the columns of the tokens that it read, and its states, which guess the tokens behind: [B, n, C].
    """
    attend = UnrolledAttention()
    for step in range(min(num_unrolled, tokens.shape[1] - 2)):
        places = tokens.shape[1] - 2 - step  # behind them the text ends before the token that would be guessed
        positions = torch.arange(step, step + places, device=states.device)[None]
        following = slice(1 + step, 1 + step + places)
        states = network(states[:, :places], embed(tokens[:, following]), positions, attend)
        yield step, following, states


def most_frequent_tokens(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The draft vocabulary of EAGLE-3: the tokens that the training text holds most often.

    Args:
        counts: [V] how often each token of the target's vocabulary occurs where the loss counts.
        size: how many to take; of equally frequent ones, those of the lowest ids.

    Returns:
        [size] int64 ids, ascending.
    """
    return counts.argsort(descending=True, stable=True)[:size].sort().values


class UnrolledAttention:
    """Attention of a network that is run several times over the same places, each time fed with its own states.

    A place of the first run sees the places before it; in a later run it sees what it saw in the first, and itself in
    every run since. Each run may leave out places at the end.
    """

    def __init__(self) -> None:
        self._of_layer: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        window: int | None,
    ) -> torch.Tensor:
        """As `Attend`."""
        all_keys, all_values = self._of_layer.setdefault(layer, ([], []))
        all_keys.append(rotation.rotate(key))
        all_values.append(value)
        num_places, last = query.shape[1], len(all_keys) - 1
        # place t of run r stands at position t + r
        reach = window or num_places + last + 1

        def visible(run: int, num_keys: int) -> torch.Tensor:
            own = torch.ones(num_places, num_keys, dtype=torch.bool, device=query.device).tril()
            return own.triu(1 - reach + last) if run == 0 else own.triu() & (last - run < reach)

        mask = torch.cat([visible(run, keys.shape[1]) for run, keys in enumerate(all_keys)], 1)
        return attend_among(rotation.rotate(query), torch.cat(all_keys, 1), torch.cat(all_values, 1), mask[None])
