"""What ParallelSpec's tests share: networks in which every weight matters, and the paper's equations.

The equations are written out for one text, one place and one head at a time, in fp64: the masks are tokens at the end
of the text, and everything is causal.
"""

import math

import pytest
import torch

from specdec.models.networks.parallelspec import ParallelSpecConfig, ParallelSpecNetwork
from specdec.trees.shape import TreeShape

VARIANTS = {
    "medusa": {"variant": "medusa"},
    "eagle": {"variant": "eagle"},
    "eagle, trained features": {"variant": "eagle", "mask_feature": "trained"},
}
SHAPES = {
    "one node": TreeShape.chain(1),
    "chain as deep as it goes": TreeShape.chain(4),
    "k_config": TreeShape.from_k_config((3, 2, 2)),
    "leaves at every depth": TreeShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]),
}
each_variant = pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)


def make_network(model, generator=None, **settings):
    """A network with three masks in which every weight matters."""
    network = ParallelSpecNetwork(ParallelSpecConfig.for_target(model.config, **{"num_masks": 3, **settings}))
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + ("norm" in name))
    return network


class Equations:
    """Section 4.1 for one text: states and keys of a network, place by place."""

    def __init__(self, network, embedding):
        self.config = network.config
        self.weights = {name: tensor.detach().double() for name, tensor in network.state_dict().items()}
        self.embedding = embedding.detach().double()

    def normalise(self, x, name):
        eps = self.config.layer.rms_norm_eps
        return x / torch.sqrt((x * x).mean() + eps) * self.weights[f"{name}.weight"]

    def rotate(self, x, position):
        half = len(x) // 2
        theta = self.config.layer.rope_parameters["rope_theta"]
        out = x.clone()
        for i in range(half):
            angle = position * theta ** (-i / half)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def inputs(self, tokens, hidden):
        """Inputs of the layer at all tokens, and at the masks behind the last: eagle pairs state j with token j + 1."""
        masks = list(self.weights["masks"])
        if self.config.variant == "medusa":
            return [self.embedding[token] for token in tokens] + masks
        features = list(hidden.double()[: len(tokens) - 1])
        pairs = list(zip((self.embedding[token] for token in tokens[1:]), features, strict=True))
        given = self.weights["mask_features"] if self.config.mask_feature == "trained" else features[-1:] * len(masks)
        pairs += list(zip(masks, given, strict=True))
        return [self.weights["fc.weight"] @ torch.cat(pair) + self.weights["fc.bias"] for pair in pairs]

    def project(self, x, position):
        """Query and key per head, rotated, and value per head."""
        if self.config.variant == "medusa":
            x = self.normalise(x, "layer.input_layernorm")
        query, key, value = (
            (self.weights[f"layer.self_attn.{name}_proj.weight"] @ x).split(self.config.layer.head_dim)
            for name in "qkv"
        )
        return [self.rotate(q, position) for q in query], [self.rotate(k, position) for k in key], value

    def states(self, tokens, hidden):
        """[K + 1, C] states at the last token and the masks."""
        inputs = self.inputs(tokens, hidden)
        projected = [self.project(x, position) for position, x in enumerate(inputs)]
        states = []
        for place in range(len(inputs) - self.config.num_masks - 1, len(inputs)):
            heads = []
            for head, query in enumerate(projected[place][0]):
                shared = head * self.config.layer.num_key_value_heads // self.config.layer.num_attention_heads
                scores = torch.stack([query @ projected[j][1][shared] for j in range(place + 1)])
                scores = (scores / math.sqrt(self.config.layer.head_dim)).softmax(0)
                heads.append(sum(score * projected[j][2][shared] for j, score in enumerate(scores)))
            x = inputs[place] + self.weights["layer.self_attn.o_proj.weight"] @ torch.cat(heads)
            y = self.normalise(x, "layer.post_attention_layernorm")
            gate, up = (self.weights[f"layer.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
            x = x + self.weights["layer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
            states.append(self.normalise(x, "norm") if self.config.variant == "medusa" else x)
        return torch.stack(states)
