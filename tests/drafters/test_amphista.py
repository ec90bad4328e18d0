"""Amphista: the network against the paper's equations, its switches, and its initial values."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from lib.amphista_cases import CONFIG, VARIANTS, Recording, drafted_logits, random_network
from lib.amphista_equations import equations_after
from lib.drafter_checks import propose
from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model, random_prompts
from specdec.drafters.amphista import Amphista
from specdec.loop.decoder import Decoder
from specdec.models.networks.amphista import AmphistaConfig, AmphistaNetwork
from specdec.models.networks.layer import DraftLayerConfig, MaskedAttention
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads
from specdec.trees.shape import TreeShape

SHAPES = {
    "chain": TreeShape.chain(4),
    "k_config": TreeShape.from_k_config((3, 2, 2)),
    "leaves at every depth": TreeShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]),
}


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_drafts_are_what_the_papers_equations_say(config, length, generator):
    model, network = build_model("llama"), random_network(config)
    text = random_prompts(generator, [length])[0]
    expected = equations_after(network, model, text, root=5)
    got = drafted_logits(network, model, text, root=5)
    assert expected.std() > 0.3
    torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-4)


def test_a_tree_shallower_than_the_heads_still_hears_all_of_them(generator):
    model, network = build_model("llama"), random_network(CONFIG)
    text = random_prompts(generator, [6])[0]
    choose = Recording()
    propose(Amphista(network, TreeShape.chain(2)), model, text, 5, choose)
    assert choose.logits[0].shape == (1, 2, VOCAB_SIZE)
    expected = equations_after(network, model, text, root=5)[:2]
    torch.testing.assert_close(choose.logits[0][0], expected.float(), rtol=1e-4, atol=1e-4)


def test_nodes_of_a_depth_share_a_list(generator):
    model, network = build_model("llama"), random_network(CONFIG)
    shape = SHAPES["leaves at every depth"]
    text = random_prompts(generator, [6])[0]
    tree = propose(Amphista(network, shape), model, text, 5)
    best = drafted_logits(network, model, text, 5).topk(3).indices
    wanted = [5] + [int(best[shape.depth[node] - 1, shape.rank[node]]) for node in range(1, shape.num_nodes)]
    assert tree.tokens[0].tolist() == wanted


# Decoding


def test_a_tree_of_the_root_alone_is_plain_decoding(generator):
    model, prompts = build_model("llama"), random_prompts(generator, [5, 3])
    result = Decoder(model, Amphista(random_network(CONFIG), TreeShape.chain(0))).decode(prompts, 6)
    assert result.tokens == Decoder(model).decode(prompts, 6).tokens


# Switches


def head_logits(network, first, second):
    return network.lm_heads(slice(None)).logits(network.lm_states(first, second))[0]


@torch.no_grad()
def test_without_its_modules_amphista_is_medusa(generator):
    network = random_network(replace(CONFIG, adaptation_layers=0, auto_embedding=False))
    assert set(network.state_dict()) == {"mlp_weight", "mlp_bias", "lm_head"}
    heads = MedusaHeads(MedusaConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=4))
    heads.block_weight.copy_(network.mlp_weight[:, None])
    heads.block_bias.copy_(network.mlp_bias[:, None])
    heads.lm_head.copy_(network.lm_head)
    hidden = torch.randn(1, 3, HIDDEN_SIZE, generator=generator)
    states = network(hidden, None, torch.arange(3)[None], MaskedAttention())
    torch.testing.assert_close(network.lm_heads(slice(None)).logits(states[0]), heads(hidden[0]))


@torch.no_grad()
@pytest.mark.parametrize("auto_embedding", [True, False])
def test_heads_hear_each_other_in_the_auto_embedding_block_alone(auto_embedding, generator):
    network = random_network(replace(CONFIG, auto_embedding=auto_embedding))
    state = torch.randn(1, HIDDEN_SIZE, generator=generator)
    before = head_logits(network, state, state)
    for changed in range(4):
        kept = network.mlp_bias[changed].clone()
        network.mlp_bias[changed] += 1
        moved = (head_logits(network, state, state) - before).abs().amax(-1) > 1e-4
        assert moved.tolist() == [auto_embedding or head == changed for head in range(4)]
        network.mlp_bias[changed] = kept


@torch.no_grad()
@pytest.mark.parametrize(("num_heads", "num_first"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_the_first_half_of_the_heads_reads_the_first_stage(num_heads, num_first, generator):
    network = random_network(replace(CONFIG, num_heads=num_heads, auto_embedding=False))
    first, second, other = torch.randn(3, 1, HIDDEN_SIZE, generator=generator)
    moved = (head_logits(network, first, second) != head_logits(network, other, second)).any(-1)
    assert moved.tolist() == [True] * num_first + [False] * (num_heads - num_first)


@torch.no_grad()
def test_the_position_encoding_tells_equal_heads_apart(generator):
    state = torch.randn(1, HIDDEN_SIZE, generator=generator)
    for position_encoding in (True, False):
        network = random_network(replace(CONFIG, position_encoding=position_encoding))
        for parameter in (network.mlp_weight, network.mlp_bias, network.lm_head):
            parameter.copy_(parameter[:1].expand_as(parameter).clone())
        logits = head_logits(network, state, state)
        assert torch.allclose(logits[0], logits[1], atol=1e-5) == (not position_encoding)


@pytest.mark.parametrize("name", ["amphista", "one adaptation layer", "no sampled token", "no staged adaptation"])
def test_which_networks_read_the_root(name, generator):
    model, network = build_model("llama"), random_network(VARIANTS[name])
    text = random_prompts(generator, [6])[0]
    reads = not torch.equal(drafted_logits(network, model, text, 5), drafted_logits(network, model, text, 6))
    assert reads == network.config.reads_tokens == (name in ("amphista", "one adaptation layer"))


@torch.no_grad()
def test_low_rank_heads_are_full_heads_with_a_product_for_a_matrix(generator):
    low = random_network(replace(CONFIG, head_rank=8))
    full = random_network(CONFIG)
    assert low.lm_head.shape == (4, VOCAB_SIZE, 8)
    assert low.lm_head_down.shape == (4, 8, HIDDEN_SIZE)
    full.load_state_dict({n: t for n, t in low.state_dict().items() if not n.startswith("lm_head")}, strict=False)
    full.lm_head.copy_(torch.stack([b @ a for a, b in zip(low.lm_head_down, low.lm_head, strict=True)]))
    state = torch.randn(1, HIDDEN_SIZE, generator=generator)
    torch.testing.assert_close(head_logits(low, state, state), head_logits(full, state, state))


# Initial values and configuration


@torch.no_grad()
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_training_begins_with_the_targets_own_guess(config, generator):
    model, network = build_model("llama"), AmphistaNetwork(config)
    weight = model.get_output_embeddings().weight
    network.start_from(weight)
    if config.head_rank is not None:
        u, s, v = torch.linalg.svd(weight)
        rank = config.head_rank
        weight = (u[:, :rank] * s[:rank]) @ v[:rank]
    text = random_prompts(generator, [6])[0]
    hidden = model.model(text[None]).last_hidden_state[0, -1]
    got = drafted_logits(network, model, text, 5)
    torch.testing.assert_close(got, (weight @ hidden).expand_as(got), rtol=1e-4, atol=1e-4)


def test_a_configuration_for_a_target_has_its_sizes():
    config = AmphistaConfig.for_target(build_model("llama").config, num_heads=3, head_rank=16)
    assert (config.vocab_size, config.hidden_size, config.num_heads, config.head_rank) == (96, 64, 3, 16)
    assert (config.layer.intermediate_size, config.layer.num_key_value_heads) == (96, 2)
    assert (config.adaptation_layers, config.block_layers, config.auto_embedding) == (2, 1, True)


def test_the_default_tree_is_the_papers():
    tree = Amphista.default_tree(CONFIG)
    assert (tree.num_nodes, tree.max_depth) == (64, 4)
    assert [Amphista.default_tree(replace(CONFIG, num_heads=count)).max_depth for count in (1, 2, 3)] == [1, 2, 3]


def test_parameters_of_the_paper_shrink_by_its_45_percent():
    # the sentence of appendix A.2.4 that tells how large the block is; no memory is touched on the meta device
    vicuna = DraftLayerConfig.like(LlamaConfig(max_position_embeddings=4096))

    def size(**changes):
        with torch.device("meta"):
            network = AmphistaNetwork(AmphistaConfig(vocab_size=32000, layer=vicuna, **changes))
        return sum(parameter.numel() for parameter in network.parameters())

    saved = [1 - size(head_rank=rank) / size() for rank in (64, 512)]
    assert saved == pytest.approx([0.456, 0.398], abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_heads": 0}, "num_heads: expected at least 1, got 0"),
        ({"block_layers": 0}, "block_layers: expected at least 1, got 0"),
        ({"vocab_size": 0}, "vocab_size: expected at least 1, got 0"),
        ({"adaptation_layers": 3}, "adaptation_layers: expected 0, 1 or 2, got 3"),
        ({"head_rank": 0}, "head_rank: expected None or 1 to 64, got 0"),
        ({"head_rank": 65}, "head_rank: expected None or 1 to 64, got 65"),
    ],
)
def test_bad_configurations(changes, match):
    with pytest.raises(ValueError, match=match):
        replace(CONFIG, **changes)
