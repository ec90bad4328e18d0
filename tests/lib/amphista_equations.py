"""Amphista as the paper writes it: one place and one attention head at a time, in float64, without a cache."""

import math

import torch


def rms_norm(x, weight, eps):
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def rope(x, position):
    rotated = x.clone()
    half = len(x) // 2
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(x))
        a, b = x[i], x[half + i]
        rotated[i] = a * math.cos(angle) - b * math.sin(angle)
        rotated[half + i] = b * math.cos(angle) + a * math.sin(angle)
    return rotated


def attention(weights, name, inputs, place, sees, config, turn):
    """What place `place` gathers from the places `sees`: a list of head outputs, joined and projected."""
    dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads

    def project(letter, where, head):
        return (weights[f"{name}.{letter}_proj.weight"] @ inputs[where])[head * dim : (head + 1) * dim]

    outputs = []
    for head in range(config.num_attention_heads):
        query = turn(project("q", place, head), place)
        scores = [torch.dot(query, turn(project("k", other, head // group), other)) / math.sqrt(dim) for other in sees]
        shares = torch.stack(scores).softmax(0)
        outputs.append(sum(s * project("v", o, head // group) for s, o in zip(shares, sees, strict=True)))
    return weights[f"{name}.o_proj.weight"] @ torch.cat(outputs)


def decoder_layer(weights, name, inputs, config):
    """SAL: what a LLaMA decoder layer makes of a list of states, each seeing itself and those before it."""
    eps = config.rms_norm_eps
    normed = [rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps) for x in inputs]
    outputs = []
    for t, x in enumerate(inputs):
        a = x + attention(weights, f"{name}.self_attn", normed, t, range(t + 1), config, rope)
        m = rms_norm(a, weights[f"{name}.post_attention_layernorm.weight"], eps)
        gate, up = weights[f"{name}.mlp.gate_proj.weight"] @ m, weights[f"{name}.mlp.up_proj.weight"] @ m
        outputs.append(a + weights[f"{name}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
    return outputs


def equations(network, hidden, following):
    """[K, V] logits after the last of the pairs (h_t, e_{t+1}), given as two lists of vectors."""
    config = network.config
    weights = {name: tensor.double() for name, tensor in network.state_dict().items()}
    stage = list(hidden)  # h_t, then h1_t, then h2_t
    read = [stage[-1]]
    for i in range(config.adaptation_layers):
        joined = stage
        if config.sampled_token:
            joined = [torch.cat((h, e)) for h, e in zip(stage, following, strict=True)]
        adapted = [weights[f"fc.{i}.weight"] @ x + weights[f"fc.{i}.bias"] for x in joined]
        stage = decoder_layer(weights, f"layers.{i}", adapted, config.layer)
        read.append(stage[-1])
    first, second = (read[1], read[2]) if config.adaptation_layers == 2 else (read[-1], read[-1])
    states = []
    for k in range(1, config.num_heads + 1):
        x = first if k <= config.num_heads // 2 else second
        inner = weights["mlp_weight"][k - 1] @ x + weights["mlp_bias"][k - 1]
        states.append(x + inner * torch.sigmoid(inner))
    if config.auto_embedding:
        if config.position_encoding:
            states = [x + weights["position_encoding"][k] for k, x in enumerate(states)]
        for i in range(config.block_layers):
            normed = [rms_norm(x, weights[f"block.{i}.norm.weight"], config.layer.rms_norm_eps) for x in states]
            everyone = range(config.num_heads)
            attended = [
                attention(weights, f"block.{i}", normed, k, everyone, config.layer, lambda x, place: x)
                for k in everyone
            ]
            states = [x + a for x, a in zip(states, attended, strict=True)]
    if config.head_rank is not None:
        states = [weights["lm_head_down"][k] @ x for k, x in enumerate(states)]
    return torch.stack([weights["lm_head"][k] @ x for k, x in enumerate(states)])


@torch.no_grad()
def equations_after(network, model, text, root):
    """The equations after a text and its root, from a plain run of the target."""
    hidden = model.model(text[None]).last_hidden_state[0].double()
    tokens = torch.cat((text[1:], torch.tensor([root])))
    return equations(network, hidden, model.get_input_embeddings()(tokens).double())
