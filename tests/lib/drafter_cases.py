"""A network of every kind and variant of drafter, with random weights that all matter, and a drafter around it."""

from functools import partial

from lib import (
    amphista_cases,
    dflash_cases,
    dspark_cases,
    eagle_checks,
    falcon_equations,
    hydra_equations,
    parallelspec_equations,
)
from lib.families import build_model
from lib.mtp_files import randomized
from specdec.drafters.kinds import NETWORK_KINDS, network_class
from specdec.drafting.network import NetworkDrafter
from specdec.models.networks.amphista import AmphistaConfig
from specdec.models.networks.hydra import HydraConfig
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads
from specdec.models.networks.mtp import MtpConfig, MtpNetwork
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

SHAPES = {
    "chain": TreeShape.chain(3),
    "k_config": TreeShape.from_k_config((3, 2, 2)),
    "leaves at every depth": TreeShape.from_paths([[0], [1], [3], [0, 0], [0, 2], [3, 0], [0, 0, 0], [3, 0, 1]]),
}
DYNAMIC = {
    "dynamic": DynamicTree(num_nodes=14, depth=3, top_k=4),
    "one pass": DynamicTree(num_nodes=5, depth=0, top_k=6),
}


def _medusa(model, **settings):
    return amphista_cases.fill(MedusaHeads(MedusaConfig.for_target(model.config, num_heads=3, **settings)))


def _hydra(model, make=HydraConfig.for_target, **settings):
    return hydra_equations.random_network(make(model.config, num_heads=3, **settings))


def _amphista(model, **settings):
    return amphista_cases.random_network(AmphistaConfig.for_target(model.config, **settings))


def _mtp(model, **changes):
    return randomized(MtpNetwork(MtpConfig.for_target(model.config, **changes)))


KINDS = {
    "medusa": _medusa,
    "hydra": _hydra,
    "hydra++": partial(_hydra, make=HydraConfig.plus_plus, num_layers=3),
    "eagle": partial(eagle_checks.random_network, version=1),
    "eagle3": partial(eagle_checks.random_network, version=3),
    "peagle": eagle_checks.random_peagle,
    "amphista": _amphista,
    "parallelspec": parallelspec_equations.make_network,
    "parallelspec, medusa": partial(parallelspec_equations.make_network, variant="medusa"),
    "falcon": falcon_equations.make_network,
    "dflash": dflash_cases.make_network,
    "mtp": _mtp,
    "dspark": dspark_cases.random_network,
}
"""Makers of a network for a model."""

VARIANTS = {
    "medusa, two layers": partial(_medusa, num_layers=2),
    "medusa, no LM heads": partial(_medusa, vocab_size=None),
    "hydra, shared tail": partial(_hydra, num_layers=4, shared_tail=True),
    "eagle, no bias": partial(eagle_checks.random_network, version=1, fc_bias=False),
    **{
        f"eagle3, {name}": partial(eagle_checks.random_network, version=3, **switches)
        for name, switches in eagle_checks.SWITCHES.items()
    },
    **{
        f"eagle3, {name}": partial(eagle_checks.random_network, version=3, **changes)
        for name, changes in eagle_checks.LAYERS.items()
    },
    **{
        f"peagle, {name}": partial(eagle_checks.random_peagle, **changes)
        for name, changes in eagle_checks.LAYERS.items()
    },
    "peagle, own embedding": partial(eagle_checks.random_peagle, own_embedding=True, feature_norm="each"),
    **{f"amphista, {name}": partial(_amphista, **changes) for name, changes in amphista_cases.CHANGES.items()},
    "parallelspec, trained features": partial(parallelspec_equations.make_network, mask_feature="trained"),
    "falcon, blocks of 1": partial(falcon_equations.make_network, block_size=1),
    "falcon, blocks of 3": partial(falcon_equations.make_network, block_size=3),
    "falcon, blocks of 4, not recurrent": partial(falcon_equations.make_network, block_size=4, recurrent=False),
    "mtp, three layers": partial(_mtp, num_layers=3),
    "mtp, states first": partial(_mtp, states_first=True),
    "falcon, no bias": partial(falcon_equations.make_network, lstm_bias=False),
    **{
        f"dflash, {name}": partial(dflash_cases.make_network, **changes)
        for name, changes in dflash_cases.CHANGES.items()
    },
    **{
        f"dspark, {name}": partial(dspark_cases.random_network, **changes)
        for name, changes in dspark_cases.HEADS.items()
    },
    **{
        f"dspark, {name}": partial(dspark_cases.random_network, **changes)
        for name, changes in dspark_cases.CHANGES.items()
    },
}


def drafter_around(network, shape) -> NetworkDrafter:
    """A drafter with this network."""
    made = next(made for made in map(network_class, NETWORK_KINDS) if made.network_class is type(network))
    return made(network, shape)


def make_drafter(name, shape, family="llama"):
    """A drafter of a kind or variant for a model of `lib.families`; the same weights each time."""
    return drafter_around({**KINDS, **VARIANTS}[name](build_model(family)), shape)
