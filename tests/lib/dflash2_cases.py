"""DFlash2's networks with random weights that all matter, and speculators' model with the same."""

import torch

from lib.references import block_settings, reference
from specdec.models.networks.blocks.dflash2 import DFlash2Config, DFlash2Network

SELECTOR = {"selector_rank": 4, "selector_top_k": 4}
CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 4}


def shaken(network, scale=0.2):
    """The network with random numbers added to all of its parameters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return network.eval()


def make_network(model, **changes):
    """A network of two layers for a target, with blocks of five rows that read two layers of it."""
    sizes = {"num_layers": 2, "block_size": 5, "tap_layers": (0, 2), "mask_token_id": 3}
    config = DFlash2Config.for_target(model.config, **{**sizes, **SELECTOR, **CONVOLUTION, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return shaken(DFlash2Network(config), 0.3)


def their_model(config):
    """speculators' DFlash2 with the sizes of ours and random weights."""
    theirs = reference("speculators.models.dflash2")
    made = theirs.DFlash2DraftModel(
        theirs.DFlash2SpeculatorConfig(
            **block_settings(config),
            conv_kernel_size=config.conv_kernel_size,
            conv_group_size=config.conv_group_size,
            selector_rank=config.selector_rank,
            selector_top_k=config.selector_top_k,
        )
    )
    return shaken(made)
