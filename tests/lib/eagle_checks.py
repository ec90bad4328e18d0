"""EAGLE networks with random weights, and the papers' equations restated for one token at a time."""

import torch

from lib.families import VOCAB_SIZE
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.models.networks.eagle import EagleConfig, EagleNetwork
from specdec.models.networks.eagle3 import Eagle3Config, Eagle3Network
from specdec.models.networks.peagle import PEagleConfig, PEagleNetwork

TAPS = (0, 1, 1)
DRAFT_TOKENS = torch.arange(1, VOCAB_SIZE, 3)
SWITCHES = {
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "joined": {"feature_norm": "joined"},
    "each": {"feature_norm": "each", "norm_output": True},
    "own_embedding": {"own_embedding": True, "norm_before_residual": True},
    "shares_lm_head": {"shares_lm_head": True, "draft_vocab_size": None},
}

# beyond the equations that are restated here, which are of one layer
LAYERS = {
    "two layers": {"num_layers": 2, "norm_output": True},
    "two layers, norms of heads": {"num_layers": 2, "qk_norm": True},
    "windows": {"num_layers": 2, "windows": (9, None)},
}


def drafter_of(network, shape, **settings) -> Eagle:
    """A drafter around a network of either version."""
    return (Eagle3 if isinstance(network, Eagle3Network) else Eagle)(network, shape, **settings)


def random_network(model, version: int, seed: int = 0, **changes) -> EagleNetwork | Eagle3Network:
    """A network for `model` with weights so large that guesses differ from place to place."""
    if version == 3:
        changes = {"tap_layers": TAPS, "draft_vocab_size": len(DRAFT_TOKENS), **changes}
        network = Eagle3Network(Eagle3Config.for_target(model.config, **changes))
    else:
        network = EagleNetwork(EagleConfig.for_target(model.config, **changes))
    return _filled(network, seed)


def random_peagle(model, seed: int = 0, **changes) -> PEagleNetwork:
    """The same of P-EAGLE, with three masks."""
    sizes = {"tap_layers": TAPS, "draft_vocab_size": len(DRAFT_TOKENS), "mask_token_id": 3, "num_masks": 3}
    return _filled(PEagleNetwork(PEagleConfig.for_target(model.config, **{**sizes, **changes})), seed)


def _filled(network, seed):
    is_third = isinstance(network, Eagle3Network)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            scale = 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[1] ** 0.5
            if name == "fc.weight" and is_third and network.config.feature_norm is None:
                scale /= 30  # the layers of a random target have large outputs, which would drown all that follows
            noise = scale * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in name else noise)
    if is_third and network.has_own_vocabulary:
        size, vocab_size = network.config.num_draft_tokens, network.config.vocab_size
        network.set_draft_vocabulary(DRAFT_TOKENS if size == len(DRAFT_TOKENS) else torch.arange(vocab_size)[-size:])
    return network.eval()


def record_logits(network, model) -> list[torch.Tensor]:
    """Keep the logits of every pass; when drafting [B, n, draft vocabulary], in the order of feeding."""
    passes, lm_states = [], network.lm_states
    lm_head = getattr(network, "lm_head", None) or model.get_output_embeddings()

    def recording(states):
        passes.append(lm_head(lm_states(states)))
        return lm_states(states)

    network.lm_states = recording
    return passes


class Literal:
    """EAGLE on a LLaMA target in float64: no batch, no cache, no mask; every pair is gone through for every state.

    A pair is (state, token after it, position). As there is one layer, a pair's key and value depend on it alone.
    """

    def __init__(self, network: EagleNetwork | Eagle3Network, model) -> None:
        self.config, self.layer = network.config, network.config.layer
        self.is_first = isinstance(network, EagleNetwork)
        self.weights = {name: tensor.double() for name, tensor in network.state_dict().items()}
        target = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
        self.embedding, self.head = (
            self.weights.get(f"{name}.weight", module.weight.detach().double()) for name, module in target.items()
        )

    def norm(self, x, name):
        return x / (x.square().mean() + self.layer.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]

    def project(self, x, name):
        bias = self.weights.get(f"{name}.bias")
        return self.weights[f"{name}.weight"] @ x + (0 if bias is None else bias)

    def turned(self, heads, position):
        """Rotary embedding: numbers i and i + D / 2 of a head are a complex number, turned by its own angle."""
        half = self.layer.head_dim // 2
        theta = self.layer.rope_parameters["rope_theta"]
        angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(heads[:, :half], heads[:, half:]) * torch.polar(torch.ones(half).double(), angle)
        return torch.cat((turned.real, turned.imag), 1)

    def inputs(self, state, token):
        """What the residual stream starts from, and what attention reads."""
        embedded = self.embedding[token]
        if self.is_first:
            z = self.project(torch.cat((embedded, state)), "fc")
            return z, z
        norms = self.norm(embedded, "midlayer.input_layernorm"), self.norm(state, "midlayer.hidden_norm")
        return norms[1] if self.config.norm_before_residual else state, torch.cat(norms)

    def state_after(self, pairs):
        """The state that follows the last pair, which sees all of them."""
        name = "layers.0" if self.is_first else "midlayer"
        dim = self.layer.head_dim

        def heads(pair, which):
            return self.project(self.inputs(*pair[:2])[1], f"{name}.self_attn.{which}_proj").view(-1, dim)

        queries = self.turned(heads(pairs[-1], "q"), pairs[-1][2])
        keys = [self.turned(heads(pair, "k"), pair[2]) for pair in pairs]
        values = [heads(pair, "v") for pair in pairs]
        group = self.layer.num_attention_heads // self.layer.num_key_value_heads
        attended = []
        for head, query in enumerate(queries):
            scores = torch.stack([query @ key[head // group] / dim**0.5 for key in keys])
            attended.append(sum(p * value[head // group] for p, value in zip(scores.softmax(0), values, strict=True)))
        x = self.inputs(*pairs[-1][:2])[0] + self.project(torch.cat(attended), f"{name}.self_attn.o_proj")
        a = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = self.project(a, f"{name}.mlp.gate_proj"), self.project(a, f"{name}.mlp.up_proj")
        x = x + self.project(gate * gate.sigmoid() * up, f"{name}.mlp.down_proj")
        return self.norm(x, "norm") if not self.is_first and self.config.norm_output else x

    def logits(self, state):
        """Logits over the target's vocabulary, -inf for tokens that the network cannot propose."""
        if self.is_first:
            return self.head @ state
        logits = torch.full((self.config.vocab_size,), -torch.inf, dtype=torch.float64)
        own = self.head @ (state if self.config.norm_output else self.norm(state, "norm"))
        for draft_id, logit in enumerate(own):
            logits[draft_id + int(self.weights["d2t"][draft_id]) if "d2t" in self.weights else draft_id] = logit
        return logits

    def feature(self, taps):
        """What the outputs of the target's layers at one token become."""
        if self.config.feature_norm == "each":
            taps = [self.norm(tap, f"fc_norm.{index}") for index, tap in enumerate(taps)]
        joined = torch.cat(taps)
        return self.project(self.norm(joined, "input_norm") if self.config.feature_norm == "joined" else joined, "fc")

    def true_pairs(self, model, text, root):
        """The pairs of a committed text and its root."""
        outputs = {}

        def keep(index):
            return lambda _, __, output: outputs.update({index: output[0].double()})

        handles = [layer.register_forward_hook(keep(index)) for index, layer in enumerate(model.model.layers)]
        states = model.model(text[None]).last_hidden_state
        for handle in handles:
            handle.remove()
        if self.is_first:
            features = states[0].double()
        else:
            taps = [outputs[layer] for layer in self.config.tap_layers]
            features = [self.feature([tap[t] for tap in taps]) for t in range(len(text))]
        following = [*text[1:].tolist(), root]
        return [(feature, token, t) for t, (feature, token) in enumerate(zip(features, following, strict=True))]

    def extend(self, pairs, token):
        """The pairs on the path to a draft token behind `pairs`."""
        return [*pairs, (self.state_after(pairs), token, pairs[-1][2] + 1)]
