"""Falcon's equations for its tests: one pair at a time, the whole text every time, no caches."""

import math

import torch

from specdec.models.networks.falcon import FalconConfig, FalconNetwork


def make_network(model, seed=0, **changes):
    """A network with weights large enough that its guesses depend on what it reads."""
    network = FalconNetwork(FalconConfig.for_target(model.config, **changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "layernorm" not in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return network


class Literal:
    """Falcon's guesses by the paper's equations: one pair at a time, the whole text every time, no caches.

    Args:
        network: whose weights to use.
        model: the target.
        text: [n] committed tokens.
        root: the token after them.
    """

    def __init__(self, network, model, text, root):
        self.weights = network.state_dict()
        self.config, self.k = network.config, network.config.block_size
        self.model = model
        states = model(text[None], output_hidden_states=True).hidden_states[-1][0]
        following = [*text.tolist()[1:], root]
        self.pairs = list(zip(states, following, strict=True))

    def embed(self, token):
        return self.model.get_input_embeddings()(torch.tensor(token))

    def cell(self, layer, x, hidden, cell):
        w = self.weights
        gates = w[f"lstm.weight_ih_l{layer}"] @ x + w[f"lstm.weight_hh_l{layer}"] @ hidden
        if self.config.lstm_bias:
            gates = gates + w[f"lstm.bias_ih_l{layer}"] + w[f"lstm.bias_hh_l{layer}"]
        i, f, g, o = gates.view(4, -1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell

    def fuse(self, pairs):
        """z of every pair."""
        zeros = torch.zeros(self.config.hidden_size)
        state = [(zeros, zeros), (zeros, zeros)]
        outputs = []
        for feature, token in pairs:
            x = torch.cat((self.embed(token), feature))
            for layer in (0, 1):
                before = state[layer] if self.config.recurrent else (zeros, zeros)
                state[layer] = self.cell(layer, x, *before)
                x = state[layer][0]
            outputs.append(x)
        return outputs

    def rotate(self, vector, position):
        size = vector.shape[-1]
        theta = self.config.layer.rope_parameters["rope_theta"]
        turned = vector.clone()
        for j in range(size // 2):
            angle = position * theta ** (-2 * j / size)
            cos, sin = math.cos(angle), math.sin(angle)
            turned[..., j] = vector[..., j] * cos - vector[..., j + size // 2] * sin
            turned[..., j + size // 2] = vector[..., j + size // 2] * cos + vector[..., j] * sin
        return turned

    def layer(self, z, position):
        """Output of the layer at one position that sees all of `z`."""
        sizes, w = self.config.layer, {name[9:]: value for name, value in self.weights.items() if name[:7] == "layers."}
        heads, groups = sizes.num_attention_heads, sizes.num_attention_heads // sizes.num_key_value_heads
        query = self.rotate((w["self_attn.q_proj.weight"] @ z[position]).view(heads, -1), position)
        keys = [
            self.rotate((w["self_attn.k_proj.weight"] @ other).view(heads // groups, -1), place)
            for place, other in enumerate(z)
        ]
        values = [(w["self_attn.v_proj.weight"] @ other).view(heads // groups, -1) for other in z]
        mixed = []
        for head in range(heads):
            scores = torch.stack([query[head] @ key[head // groups] for key in keys]) / math.sqrt(sizes.head_dim)
            mixed.append(sum(p * value[head // groups] for p, value in zip(scores.softmax(0), values, strict=True)))
        x = z[position] + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
        normed = x / torch.sqrt((x**2).mean() + sizes.rms_norm_eps) * w["post_attention_layernorm.weight"]
        gate = w["mlp.gate_proj.weight"] @ normed
        return x + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * (w["mlp.up_proj.weight"] @ normed))

    def guess(self, pairs):
        """The k features that the last block of k pairs gives."""
        z = self.fuse(pairs)
        return [self.layer(z, max(position, 0)) for position in range(len(z) - self.k, len(z))]

    def losses(self, shown, hidden, first=0):
        """Regression, KL divergence and cross-entropy of every pair with a known answer that was not shown it.

        Args:
            shown: pairs that read their answer: the state k places on, and the target's most probable token after it.
            hidden: [T, C] the target's states.
            first: the first pair that is learnt.
        """
        pairs = list(self.pairs)
        for pair in shown:
            answer = hidden[pair + self.k]
            pairs[pair] = (answer, int(self.model.lm_head(answer).argmax()))
        z = self.fuse(pairs)
        found = []
        for pair in range(first, len(pairs) - self.k):
            if pair in shown:
                continue
            end = (pair // self.k + 1) * self.k  # of its block
            feature, guess = hidden[pair + self.k], self.layer(z[:end], pair)
            p, q = self.model.lm_head(feature).softmax(0), self.model.lm_head(guess).softmax(0)
            off = (feature - guess).abs()
            smooth = torch.where(off < 1, off**2 / 2, off - 0.5).mean()
            found.append((smooth, (p * (p / q).log()).sum(), -q[p.argmax()].log()))
        return found

    def tokens(self, shape):
        """The token of every node, the root's left out."""
        found = {0: None}
        blocks = {(): (self.pairs, self.guess(self.pairs))}  # by rank path: all pairs up to here, and the guesses
        for node in range(1, shape.num_nodes):
            path = shape.rank_paths[node]
            above = path[: (len(path) - 1) // self.k * self.k]
            if above not in blocks:
                pairs, guesses = blocks[above[: -self.k]]
                ends = [
                    shape.rank_paths.index(above[:depth]) for depth in range(len(above) - self.k + 1, len(above) + 1)
                ]
                pairs = pairs + list(zip(guesses, (found[end] for end in ends), strict=True))
                blocks[above] = pairs, self.guess(pairs)
            logits = self.model.lm_head(blocks[above][1][len(path) - 1 - len(above)])
            found[node] = logits.topk(shape.max_rank + 1).indices[path[-1]].item()
        return [found[node] for node in range(1, shape.num_nodes)]
