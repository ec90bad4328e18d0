"""What the tests of Amphista share: small networks of every variant, and the logits that a drafter computes."""

from dataclasses import replace

import torch

from lib.drafter_checks import Recording, propose
from lib.families import VOCAB_SIZE, build_model
from specdec.drafters.amphista import Amphista
from specdec.models.networks.amphista import AmphistaConfig, AmphistaNetwork
from specdec.models.networks.layer import DraftLayerConfig
from specdec.trees.shape import TreeShape

LAYER = replace(DraftLayerConfig.like(build_model("llama").config), intermediate_size=48)
CONFIG = AmphistaConfig(vocab_size=VOCAB_SIZE, layer=LAYER)
CHANGES = {
    "five heads": {"num_heads": 5},
    "one head": {"num_heads": 1},
    "alpha": {"block_layers": 2},
    "low rank": {"head_rank": 8},
    "no auto-embedding": {"auto_embedding": False},
    "no position encoding": {"position_encoding": False},
    "no staged adaptation": {"adaptation_layers": 0},
    "one adaptation layer": {"adaptation_layers": 1},
    "no sampled token": {"sampled_token": False},
}
VARIANTS = {"amphista": CONFIG, **{name: replace(CONFIG, **changes) for name, changes in CHANGES.items()}}


@torch.no_grad()
def fill(network, seed=0):
    """Every parameter random, and large enough for all parts to matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.ndim == 1 and "norm" in name
        parameter.copy_(1 + 0.3 * noise if is_norm else 0.5 * noise if "encoding" in name else 0.15 * noise)
    return network.eval()


def random_network(config, seed=0):
    """A network whose parameters are random."""
    return fill(AmphistaNetwork(config), seed)


def drafted_logits(network, model, text, root):
    """[K, V] logits of all heads after a text and its root, as a fresh drafter computes them."""
    choose = Recording()
    propose(Amphista(network, TreeShape.chain(network.config.num_heads)), model, text, root, choose)
    return choose.logits[0][0]
