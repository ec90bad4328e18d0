"""DSpark networks with random weights, and speculators' model with the same ones, asked about every block of a text."""

import pytest
import torch

from lib.references import block_settings, reference
from specdec.models.networks.dspark import DSparkConfig, DSparkNetwork
from specdec.models.target.target import Target

RANK = 6
HEADS = {
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "bare confidence": {"markov_head_type": "gated", "confidence_with_markov": False},
    "without confidence": {"has_confidence": False},
    "without bias": {"markov_rank": 0, "has_confidence": False},
}
"""Switches of the heads by name; the last one is what DeepSpec calls DFlash."""


CHANGES = {
    "causal": {"causal": True},
    "windows": {"windows": (3, None), "window_from": "anchor"},
    "own vocabulary": {"draft_vocab_size": 30, "shares_lm_head": False},
    "own embedding, the target's embedding read": {"own_embedding": True, "tap_layers": (-1, 1)},
}
"""Switches of the layers."""


def random_network(model, *, seed=0, **changes) -> DSparkNetwork:
    """A network for `model` whose bias weighs as much as its states."""
    sizes = {"tap_layers": (0, 2), "block_size": 4, "num_layers": 2, "markov_rank": RANK, "mask_token_id": 3}
    network = DSparkNetwork(DSparkConfig.for_target(model.config, **{**sizes, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.3 * noise + ("norm" in name))
            else:
                parameter.copy_(noise if "markov_w" in name else 1.5 / parameter.shape[1] ** 0.5 * noise)
    if network.has_own_vocabulary:
        network.set_draft_vocabulary(network.config.vocab_size - 1 - torch.arange(network.config.num_draft_tokens))
    return network.eval()


def their_config(config: DSparkConfig):
    """The configuration of speculators' model of these sizes."""
    theirs = reference("speculators.models.dspark")
    return theirs.DSparkSpeculatorConfig(
        **block_settings(config),
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head_type,
        enable_confidence_head=config.has_confidence,
        confidence_head_with_markov=config.confidence_with_markov and config.markov_rank > 0,
    )


@torch.no_grad()
def their_model(network: DSparkNetwork, model):
    """Speculators' model with the weights of `network`, for the target `model`."""
    theirs = reference("speculators.models.dspark").DSparkDraftModel(their_config(network.config)).eval()
    missing, unexpected = theirs.load_state_dict(network.state_dict(), strict=False)
    shared = ("embed_tokens", "lm_head", "verifier", "d2t", "t2d")
    assert not unexpected
    assert all(name.startswith(shared) for name in missing), missing
    theirs.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
    head = model.get_output_embeddings().weight
    theirs.lm_head.weight.copy_(head[network.target_ids] if network.lm_head is None else network.lm_head.weight)
    return theirs


@torch.no_grad()
def their_blocks(theirs, features: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [M, b, draft V] and log-odds [M, b] of the M blocks whose anchors are the tokens 0 .. M - 1 of a text.

    Args:
        theirs: their model.
        features: [1, T, F] the target's states.
        tokens: [1, T] the text, b tokens longer than M: a block is told its own.
    """
    core, seen = reference("speculators.models.dspark.core"), {}
    length, block = tokens.shape[1], theirs.block_size

    def remember(logits, targets, confidence, *args, **settings):
        seen.update(logits=logits, confidence=confidence)
        return None, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "compute_metrics", remember)
        ones = torch.ones(1, length)
        width = theirs.config.transformer_layer_config.hidden_size
        unread = torch.zeros(1, length, width), torch.zeros(1, length, dtype=torch.long)
        theirs.forward(features, tokens, ones, *unread, max_anchors=length - block)
    confidence = seen["confidence"]
    return (
        seen["logits"].view(length - block, block, -1),
        None if confidence is None else confidence.view(length - block, block),
    )


class Theirs:
    """What speculators' model says behind any path of a tree, read anew from the whole text each time.

    Args:
        network: ours, whose weights it has.
        model: the target.
    """

    def __init__(self, network: DSparkNetwork, model) -> None:
        self.target = Target(model, tap_layers=network.config.tap_layers)
        self.places = self.target.tap(network.config.tap_layers)
        self.block_size = network.config.block_size
        self.theirs = their_model(network, model)

    @torch.no_grad()
    def block(self, text: torch.Tensor, root: int, path: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [b, draft V] and log-odds [b] of the block behind `text [T]` whose tokens are `path`."""
        taps = self.target.read(text[None]).taps
        features = torch.cat([taps[place] for place in self.places], -1)
        features = torch.nn.functional.pad(features, (0, 0, 0, 1 + self.block_size))
        told = torch.zeros(1 + self.block_size, dtype=torch.int64)
        told[: 1 + len(path)] = torch.tensor([root, *path])
        logits, confidence = their_blocks(self.theirs, features, torch.cat((text, told))[None])
        return logits[-1], None if confidence is None else confidence[-1]

    def behind(self, text: torch.Tensor, root: int, path: list[int]) -> torch.Tensor:
        """[draft V] logits of what follows the last token of `path`, which may be empty."""
        return self.block(text, root, path)[0][len(path)]
