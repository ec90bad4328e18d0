"""Hydra's equations as the paper writes them, a position at a time: no batch, no cache, none of specdec's networks."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model
from specdec.models.networks.hydra import HydraConfig, HydraNetwork
from specdec.models.networks.layer import DraftLayerConfig

LAYER = replace(DraftLayerConfig.like(build_model("llama").config), intermediate_size=48)
CONFIGS = {
    "hydra": HydraConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=3),
    "hydra++": HydraConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=3, num_layers=3, dropout=0.2, prefix=LAYER),
    "shared tail": HydraConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=3, num_layers=4, shared_tail=True),
}


@torch.no_grad()
def random_network(config, seed=0):
    """A network whose guesses depend on everything that it reads."""
    generator = torch.Generator().manual_seed(seed)
    network = HydraNetwork(config).eval()
    for parameter in network.parameters():
        width = parameter.shape[-1] if parameter.ndim == 2 else 8
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / math.sqrt(width))
    return network


def literal_prefix(weights, hidden, layer):
    """p_t for the last of hidden [t + 1, C]: one decoder layer and a norm."""
    groups, half = layer.num_attention_heads // layer.num_key_value_heads, layer.head_dim // 2

    def norm(x, name):
        return x / (x.pow(2).mean() + layer.rms_norm_eps).sqrt() * weights[f"prefix.{name}.weight"]

    def project(x, name):
        return weights[f"prefix.layer.{name}_proj.weight"] @ x

    def turn(vector, position):  # pairs (i, i + D / 2) as complex numbers
        angles = position * 10000.0 ** -(torch.arange(half, dtype=vector.dtype) / half)
        pairs = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag))

    inputs = [norm(h, "layer.input_layernorm") for h in hidden]
    last = len(hidden) - 1
    attended = []
    for head, query in enumerate(project(inputs[last], "self_attn.q").split(layer.head_dim)):
        of_head = [project(x, "self_attn.k").split(layer.head_dim)[head // groups] for x in inputs]
        keys = [turn(key, position) for position, key in enumerate(of_head)]
        values = [project(x, "self_attn.v").split(layer.head_dim)[head // groups] for x in inputs]
        scores = torch.stack([turn(query, last) @ key for key in keys]) / math.sqrt(layer.head_dim)
        attended.append(sum(share * value for share, value in zip(scores.softmax(0), values, strict=True)))
    x = hidden[last] + project(torch.cat(attended), "self_attn.o")
    y = norm(x, "layer.post_attention_layernorm")
    return norm(x + project(F.silu(project(y, "mlp.gate")) * project(y, "mlp.up"), "mlp.down"), "norm")


def literal_head(weights, config, head, state, embeddings):
    """Logits of one head for one node: embeddings of the root and of the tokens on the way to the node."""
    features = torch.cat([state, *embeddings])
    for layer in range(config.num_layers):
        block = f"heads.{head}.blocks.{min(layer, 1) if config.shared_tail else layer}"
        gate = F.silu(weights[f"{block}.linear.weight"] @ features + weights[f"{block}.linear.bias"])
        if layer == 0:
            features = weights[f"{block}.residual.weight"] @ features + weights[f"{block}.residual.bias"]
        features = features + gate
    return weights[f"heads.{head}.lm_head.weight"] @ features + weights[f"heads.{head}.lm_head.bias"]


@torch.no_grad()
def literal_state(network, model, text):
    hidden = model.model(text[None]).last_hidden_state[0]
    return literal_prefix(network.state_dict(), hidden, LAYER) if network.config.prefix_attention else hidden[-1]


@torch.no_grad()
def literal_tokens(network, model, text, root, shape):
    """The tree's tokens, node by node."""
    state, embed = literal_state(network, model, text), model.get_input_embeddings().weight
    tokens, weights = [root], network.state_dict()
    for node in range(1, shape.num_nodes):
        path = [above for above in range(node) if shape.ancestors[node][above]]
        seen = [embed[tokens[above]] for above in path]
        logits = literal_head(weights, network.config, shape.depth[node] - 1, state, seen)
        tokens.append(int(logits.argsort(descending=True)[shape.rank[node]]))
    return tokens
