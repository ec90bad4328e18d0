"""What the tests of Amphista share: small networks of every variant, and the logits that a drafter computes."""

from dataclasses import replace

import torch

from lib.drafter_checks import propose
from lib.families import HIDDEN_SIZE, VOCAB_SIZE
from specdec.drafters.amphista import Amphista
from specdec.drafting.candidates import TopK
from specdec.models.networks.amphista import AmphistaConfig, AmphistaNetwork
from specdec.models.networks.layer import DraftLayerConfig
from specdec.trees.shape import TreeShape

LAYER = DraftLayerConfig(
    hidden_size=HIDDEN_SIZE, intermediate_size=48, num_attention_heads=8, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=256,
)  # fmt: skip
CONFIG = AmphistaConfig(vocab_size=VOCAB_SIZE, layer=LAYER)
VARIANTS = {
    "amphista": CONFIG,
    "five heads": replace(CONFIG, num_heads=5),
    "one head": replace(CONFIG, num_heads=1),
    "alpha": replace(CONFIG, block_layers=2),
    "low rank": replace(CONFIG, head_rank=8),
    "no auto-embedding": replace(CONFIG, auto_embedding=False),
    "no position encoding": replace(CONFIG, position_encoding=False),
    "no staged adaptation": replace(CONFIG, adaptation_layers=0),
    "one adaptation layer": replace(CONFIG, adaptation_layers=1),
    "no sampled token": replace(CONFIG, sampled_token=False),
}


@torch.no_grad()
def random_network(config, seed=0):
    """Every parameter random, and large enough for all parts to matter."""
    generator = torch.Generator().manual_seed(seed)
    network = AmphistaNetwork(config)
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.ndim == 1 and "norm" in name
        parameter.copy_(1 + 0.3 * noise if is_norm else 0.5 * noise if "encoding" in name else 0.15 * noise)
    return network.eval()


class Recording:
    """`TopK` that keeps the logits that it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, logits, num_ranks):
        self.seen.append(logits.clone())
        return TopK()(logits, num_ranks)


def drafted_logits(network, model, text, root):
    """[K, V] logits of all heads after a text and its root, as a fresh drafter computes them."""
    choose = Recording()
    propose(Amphista(network, TreeShape.chain(network.config.num_heads)), model, text, root, choose)
    return choose.seen[0][0]
