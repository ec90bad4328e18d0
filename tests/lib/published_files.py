"""The files of other people, made up: names and shapes as their authors have them, at a small width."""

import json

import torch

from lib.drafter_checks import propose
from lib.eagle_checks import DRAFT_TOKENS, Literal, drafter_of
from lib.families import HIDDEN_SIZE, VOCAB_SIZE, random_prompts
from lib.hydra_equations import LAYER, random_network
from specdec.models.networks.hydra import HydraConfig
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads
from specdec.trees.shape import TreeShape

DRAFT_VOCAB = len(DRAFT_TOKENS)

WIDTH, HEADS, KV_HEADS, MLP = HIDDEN_SIZE, 8, 2, 96
_PLAIN = """{
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "max_position_embeddings": 256, "model_type": "llama",
    "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06, "torch_dtype": "float16"
}"""


def eagle_file(*, bias=True, config_bias=None, qkv_bias=False, dtype=torch.float32, **changes):
    """Tensors and `config.json` of an EAGLE-1 or EAGLE-2 drafter."""
    shapes = {
        "embed_tokens.weight": (VOCAB_SIZE, WIDTH),
        "fc.weight": (WIDTH, 2 * WIDTH),
        **layer_shapes("layers.0", WIDTH),
        **({"fc.bias": (WIDTH,)} if bias else {}),
    }
    if qkv_bias:
        sizes = {"q": WIDTH, "k": KV_HEADS * WIDTH // HEADS, "v": KV_HEADS * WIDTH // HEADS}
        shapes |= {f"layers.0.self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    return fill(shapes, dtype), file_config(bias=config_bias, **changes)


def eagle3_file(*, dtype=torch.float16, draft_vocab=DRAFT_VOCAB, **changes):
    """Tensors and `config.json` of an EAGLE-3 drafter."""
    shapes = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        **layer_shapes("midlayer", 2 * WIDTH),
        "midlayer.hidden_norm.weight": (WIDTH,),
        "midlayer.input_layernorm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (draft_vocab, WIDTH),
    }
    tensors = fill(shapes, dtype)
    if draft_vocab < VOCAB_SIZE:
        tensors["d2t"] = DRAFT_TOKENS - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, DRAFT_TOKENS, True)
    return tensors, file_config(draft_vocab_size=draft_vocab, **changes)


def layer_shapes(prefix, width):
    kv_size = KV_HEADS * WIDTH // HEADS
    shapes = {
        **{f"self_attn.{name}_proj": (size, width) for name, size in (("q", WIDTH), ("k", kv_size), ("v", kv_size))},
        "self_attn.o_proj": (WIDTH, WIDTH),
        **{f"mlp.{name}_proj": (MLP, WIDTH) for name in ("gate", "up")},
        "mlp.down_proj": (WIDTH, MLP),
        "post_attention_layernorm": (WIDTH,),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def fill(shapes, dtype):
    generator = torch.Generator().manual_seed(1)
    return {
        name: (torch.randn(shape, generator=generator) * (1 if len(shape) == 1 else shape[1] ** -0.5)).to(dtype)
        for name, shape in shapes.items()
    }


def file_config(**changes):
    """The authors' `config.json`: fields of a LLaMA with one layer."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": MLP, "vocab_size": VOCAB_SIZE}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config = {**json.loads(_PLAIN), **sizes, **heads, **changes}
    return {name: value for name, value in config.items() if value is not None}


def check_drafts(network, model, generator, **settings):
    """What a network drafts is what its equations give."""
    shape = TreeShape.from_k_config((2, 2))
    (text,) = random_prompts(generator, [4])
    drafter = drafter_of(network, shape, **settings)
    tree = propose(drafter, model, text, 5)
    literal = Literal(network, model)
    literal.config = drafter.saved_config
    pairs = {0: literal.true_pairs(model, text, 5)}
    for node in range(1, shape.num_nodes):
        above = pairs[shape.parent[node]]
        assert (
            tree.tokens[0, node]
            == literal.logits(literal.state_after(above)).argsort(descending=True)[shape.rank[node]]
        )
        pairs[node] = literal.extend(above, int(tree.tokens[0, node]))


def published_names(network):
    """The authors' name of every tensor, where dropout modules take every other index and tail blocks are aliases."""
    config, names = network.config, {}
    shift = 1 if config.prefix_attention else 0
    for kind in ("weight", "bias"):
        for head in range(config.num_heads):
            for layer in range(config.num_layers):
                ours = f"heads.{head}.blocks.{min(layer, 1) if config.shared_tail else layer}"
                theirs = f"hydra_mlp.{head}.{layer + shift * (layer + 1)}"
                names[f"{theirs}.linear.{kind}"] = f"{ours}.linear.{kind}"
                if layer == 0:
                    names[f"{theirs}.res_connection.{kind}"] = f"{ours}.residual.{kind}"
            names[f"hydra_lm_head.{head}{'.1' * shift}.{kind}"] = f"heads.{head}.lm_head.{kind}"
    for name in network.state_dict():
        if name.startswith("prefix."):
            ours = name.removeprefix("prefix.").replace("layer.", "layers.0.", 1)
            names["prefix_embeding_layer." + ours] = name
    return names


def hydra_file(network, dtype=torch.float32):
    """A network as the authors' file: its tensors, and others that are of no use."""
    tensors = {theirs: network.state_dict()[ours].to(dtype) for theirs, ours in published_names(network).items()}
    tensors["input_embed_fn.weight"] = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    if network.config.prefix_attention:
        tensors["prefix_embeding_layer.embed_tokens.weight"] = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
        inv_freq = 10000.0 ** -(torch.arange(4) / 4)
        tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = inv_freq.bfloat16()
    return tensors


def network_as_published(num_layers, prefix=LAYER, num_heads=3):
    return random_network(HydraConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads, num_layers, num_layers > 2, prefix=prefix))


def falcon_file(model, width=HIDDEN_SIZE):
    """Tensors and config.json under the authors' names; fp32, the embedding inside."""
    sizes = {
        "embed_tokens.weight": (VOCAB_SIZE, width),
        "lstm.weight_ih_l0": (4 * width, 2 * width),
        "lstm.weight_hh_l0": (4 * width, width),
        "lstm.bias_ih_l0": (4 * width,),
        "lstm.bias_hh_l0": (4 * width,),
        "lstm.weight_ih_l1": (4 * width, width),
        "lstm.weight_hh_l1": (4 * width, width),
        "lstm.bias_ih_l1": (4 * width,),
        "lstm.bias_hh_l1": (4 * width,),
        "layers.0.self_attn.q_proj.weight": (width, width),
        "layers.0.self_attn.k_proj.weight": (width // 4, width),
        "layers.0.self_attn.v_proj.weight": (width // 4, width),
        "layers.0.self_attn.o_proj.weight": (width, width),
        "layers.0.mlp.gate_proj.weight": (96, width),
        "layers.0.mlp.up_proj.weight": (96, width),
        "layers.0.mlp.down_proj.weight": (width, 96),
        "layers.0.post_attention_layernorm.weight": (width,),
    }
    generator = torch.Generator().manual_seed(3)
    tensors = {name: 0.2 * torch.randn(size, generator=generator) for name, size in sizes.items()}
    config = file_config(hidden_size=width, k_mask=3, rms_norm_eps=1e-5, rope_theta=1000000.0)
    return tensors, config


def random_heads(generator):
    """Medusa's heads, all of whose parameters matter."""
    heads = MedusaHeads(MedusaConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=3, num_layers=2))
    for parameter in heads.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return heads
