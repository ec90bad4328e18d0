"""DFlash's networks with random weights that all matter, for a target."""

import torch

from specdec.kernels.common.verdict import Verdict
from specdec.models.common.cache import KVCache
from specdec.models.networks.blocks.dflash2 import DFlash2Config, DFlash2Network
from specdec.models.networks.dflash import BlockPasses
from specdec.models.networks.prefix import FeaturePrefix

CHANGES = {
    "causal": {"causal": True},
    "windows of rows": {"windows": (4, None), "causal_windows": True},
    "windows of anchors": {"windows": (3, 5), "window_from": "anchor"},
    "own vocabulary": {"draft_vocab_size": 40, "shares_lm_head": False},
    "own embeddings, scales": {
        "own_embedding": True,
        "own_mask_embedding": True,
        "input_embedding_scale": 2.0,
        "output_multiplier": 0.5,
    },
}


def make_network(model, **changes):
    """A network of two layers and blocks of five rows that reads two layers of the model."""
    sizes = {"num_layers": 2, "block_size": 5, "tap_layers": (0, 2), "mask_token_id": 3}
    network = DFlash2Network(DFlash2Config.for_target(model.config, **{**sizes, **changes}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + ("norm" in name))
    if network.has_own_vocabulary:
        network.set_draft_vocabulary(torch.arange(network.config.num_draft_tokens) * 2)
    return network


@torch.no_grad()
def drafted_states(network, embed, features, tokens, accepted, backend):
    """States of a block behind a prompt of each length, and behind what each step accepts: [step] of [B, R, C]."""
    num_rows, batch_size = network.config.block_size, features.shape[0]
    max_new, layer = 4, network.config.layer
    cache = KVCache(
        num_layers=network.config.num_layers,
        batch_size=batch_size,
        capacity=features.shape[1] + max_new + num_rows,
        num_kv_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        dtype=features.dtype,
        device=features.device,
        backend=backend,
    )
    network.backend = backend
    prefix = FeaturePrefix(cache, layer, max_new=max_new, feature_size=features.shape[2])
    passes = BlockPasses(network.config.views, max_new, num_rows, features.device)
    lengths = torch.tensor(accepted[0], dtype=torch.int32)
    prompt = tokens[:, : int(lengths.max())]
    for first in range(0, prompt.shape[1], 5):  # in chunks
        pairs = prefix.start(prompt, lengths, features[:, first : first + 5][:, : prompt.shape[1] - first], first=first)
        if pairs is not None:
            network.write(network.read(pairs.features), pairs.attend)
    states, rows = [], torch.arange(batch_size)
    for count in [*accepted[1:], None]:
        root = tokens[rows, lengths.long()].int()
        pairs = prefix.read(root)
        positions, attend = passes.behind(prefix, pairs.counts)
        states.append(
            network(network.read(pairs.features), network.read_anchors(root.long(), embed), positions, attend)
        )
        prefix.advance()
        if count is None:
            return states
        # nodes 0 .. count of a chain were accepted
        nodes = torch.arange(max_new)[None].expand(batch_size, -1)
        took = torch.tensor(count, dtype=torch.int32)
        path = torch.where(nodes <= took[:, None], nodes, -1).int()
        chain = lengths[:, None] + nodes
        emitted = torch.where(nodes <= took[:, None], tokens.gather(1, chain + 1), -1).int()
        there = chain[:, :, None].expand(-1, -1, features.shape[2])
        prefix.commit(Verdict(path, took, emitted[:, 0], emitted), features.gather(1, there))
        lengths += took + 1
