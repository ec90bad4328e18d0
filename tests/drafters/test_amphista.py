"""Amphista: the network against the paper's equations, its cache in decoding, its switches, and its files."""

import json
from dataclasses import asdict, replace

import pytest
import torch

import specdec
from lib.amphista_cases import CONFIG, LAYER, VARIANTS, Recording, drafted_logits, random_network
from lib.amphista_equations import equations_after
from lib.drafter_checks import check_drafter, propose
from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model, random_prompts
from specdec.drafters.amphista import Amphista
from specdec.drafting.candidates import Candidates
from specdec.loop.decoder import Decoder
from specdec.models.networks.amphista import AmphistaConfig, AmphistaNetwork
from specdec.models.networks.base import load_strictly
from specdec.models.networks.layer import DraftLayerConfig, MaskedAttention
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape

SHAPES = {
    "chain": TreeShape.chain(4),
    "k_config": TreeShape.from_k_config((3, 2, 2)),
    "leaves at every depth": TreeShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]),
}


def unroll(config):
    """The tree that shows the most: wide, and as deep as the heads allow."""
    return TreeShape.from_k_config((3, 2, 2, 1, 1)[: config.num_heads])


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
    assert choose.seen[0].shape == (1, 2, VOCAB_SIZE)
    expected = equations_after(network, model, text, root=5)[:2]
    torch.testing.assert_close(choose.seen[0][0], expected.float(), rtol=1e-4, atol=1e-4)


def test_nodes_of_a_depth_share_a_list(generator):
    model, network = build_model("llama"), random_network(CONFIG)
    shape = SHAPES["leaves at every depth"]
    text = random_prompts(generator, [6])[0]
    tree = propose(Amphista(network, shape), model, text, 5)
    best = drafted_logits(network, model, text, 5).topk(3).indices
    wanted = [5] + [int(best[shape.depth[node] - 1, shape.rank[node]]) for node in range(1, shape.num_nodes)]
    assert tree.tokens[0].tolist() == wanted


def test_laws_of_a_sampling_rule_reach_the_tree(generator):
    model, network = build_model("llama"), random_network(CONFIG)

    def draw(logits, num_ranks):
        return Candidates(logits.argsort()[..., :num_ranks], logits)

    tree = propose(Amphista(network, SHAPES["k_config"]), model, random_prompts(generator, [6])[0], 5, draw)
    assert tree.laws.shape == (1, 3, VOCAB_SIZE)
    # children of a node of depth d come from law d; the leaves have none
    assert tree.law_row.tolist() == [0, *[1] * 3, *[2] * 6, *[-1] * 12]


# Decoding


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decoding_with_ragged_acceptance(shape, generator):
    network = random_network(CONFIG)
    check_drafter(lambda: Amphista(network, shape), build_model("llama"), random_prompts(generator, [1, 4, 13]))


@pytest.mark.parametrize("family", ["opt", "llama3", "mistral_window"])
def test_decoding_other_families(family, generator):
    model = build_model(family)
    network = random_network(AmphistaConfig.for_target(model.config))
    shape = SHAPES["leaves at every depth"]
    check_drafter(lambda: Amphista(network, shape), model, random_prompts(generator, [9, 2]), max_new_tokens=24)


@pytest.mark.parametrize("name", list(VARIANTS)[1:])
def test_decoding_with_every_variant(name, generator):
    network = random_network(VARIANTS[name])
    shape = unroll(network.config)
    prompts = random_prompts(generator, [5, 3])
    check_drafter(lambda: Amphista(network, shape), build_model("llama"), prompts, max_new_tokens=16, min_tau=1.2)


def test_a_tree_of_the_root_alone_is_plain_decoding(generator):
    model, prompts = build_model("llama"), random_prompts(generator, [5, 3])
    result = Decoder(model, Amphista(random_network(CONFIG), TreeShape.chain(0))).decode(prompts, 6)
    assert result.tokens == Decoder(model).decode(prompts, 6).tokens


def test_cache_and_logits_of_a_batch_are_those_of_fresh_starts_of_its_rows(generator):
    model, network = build_model("llama"), random_network(CONFIG)
    prompts = random_prompts(generator, [1, 4, 13])
    snapshots = []

    class Watched(Amphista):
        def draft(self, root, choose):
            recording = Recording()
            tree = super().draft(root, recording)
            cache = self._prefix.cache
            snapshots.append((root.tolist(), cache.lengths.tolist(), cache.data.clone(), recording))
            return tree

    result = check_drafter(lambda: Watched(network, SHAPES["k_config"]), model, prompts)
    accepted = {count - 1 for row in result.stats.num_emitted for count in row}
    assert accepted >= {0, 1, 2, 3}, "some step lengths were not seen"
    # the first snapshots are the batch's; those of one row are check_drafter's own fresh starts
    batch = [snapshot for snapshot in snapshots if len(snapshot[0]) == 3]
    compared = 0
    for row, prompt in enumerate(prompts):
        text = torch.cat((prompt, torch.tensor(result.tokens[row])))
        for roots, lengths, data, recording in batch:
            length = lengths[row]
            if length >= len(text) - 1:
                continue  # the row has ended
            fresh, choose = Amphista(network, SHAPES["k_config"]), Recording()
            propose(fresh, model, text[:length], roots[row], choose)
            expected = fresh._prefix.cache.data[:, :, 0, :length]
            torch.testing.assert_close(data[:, :, row, :length], expected, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(recording.seen[0][row], choose.seen[0][0], rtol=1e-3, atol=1e-4)
            compared += 1
    assert compared > 20


# Switches


def head_logits(network, first, second):
    return network.logits(network.speak(first, second), slice(None))[0]


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
    torch.testing.assert_close(network.logits(states[0], slice(None)), heads(hidden[0]))


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


# Weights: initial values, configuration, files


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


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_configurations_survive_json(config):
    assert AmphistaConfig.from_dict(json.loads(json.dumps(asdict(config)))) == config


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
    vicuna = DraftLayerConfig(
        hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32, head_dim=128,
        max_position_embeddings=4096,
    )  # fmt: skip

    def size(**changes):
        with torch.device("meta"):
            network = AmphistaNetwork(AmphistaConfig(vocab_size=32000, layer=vicuna, **changes))
        return sum(parameter.numel() for parameter in network.parameters())

    saved = [1 - size(head_rank=rank) / size() for rank in (64, 512)]
    assert saved == pytest.approx([0.456, 0.398], abs=1e-3)


NAMES = {
    "fc.0.weight": (64, 128), "fc.0.bias": (64,), "fc.1.weight": (64, 128), "fc.1.bias": (64,),
    **{f"layers.{i}.self_attn.{p}_proj.weight": s for i in (0, 1)
       for p, s in {"q": (64, 64), "k": (16, 64), "v": (16, 64), "o": (64, 64)}.items()},
    **{f"layers.{i}.mlp.{p}_proj.weight": s for i in (0, 1)
       for p, s in {"gate": (48, 64), "up": (48, 64), "down": (64, 48)}.items()},
    **{f"layers.{i}.{n}_layernorm.weight": (64,) for i in (0, 1) for n in ("input", "post_attention")},
    "mlp_weight": (4, 64, 64), "mlp_bias": (4, 64), "position_encoding": (4, 64), "block.0.norm.weight": (64,),
    **{f"block.0.{p}_proj.weight": s for p, s in {"q": (64, 64), "k": (16, 64), "v": (16, 64), "o": (64, 64)}.items()},
    "lm_head": (4, 96, 64),
}  # fmt: skip


def test_files_hold_what_the_method_trains_and_nothing_else():
    network = random_network(CONFIG)
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == NAMES
    other = AmphistaNetwork(CONFIG)
    load_strictly(other, {name: tensor.half() for name, tensor in network.state_dict().items()})
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name].half())


@pytest.mark.parametrize("name", ["alpha", "low rank", "no staged adaptation"])
def test_folders_round_trip(name, tmp_path):
    model, network = build_model("llama"), random_network(VARIANTS[name])
    drafter = Amphista(network, SHAPES["k_config"])
    drafter.bind(Target(model))
    drafter.save_pretrained(tmp_path / "drafter")
    loaded = specdec.load_drafter(tmp_path / "drafter", model)
    assert (type(loaded), loaded.shape, loaded.network.config) == (Amphista, drafter.shape, network.config)
    for tensor, expected in zip(loaded.network.state_dict().values(), network.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("name", ["lm_head", "fc.1.weight", "position_encoding", "block.0.o_proj.weight"])
def test_files_that_do_not_fit_fail_with_the_tensors_name(name):
    tensors = dict(AmphistaNetwork(CONFIG).state_dict())
    missing = {other: tensor for other, tensor in tensors.items() if other != name}
    with pytest.raises(ValueError, match=rf"missing tensors \['{name}'\]"):
        load_strictly(AmphistaNetwork(CONFIG), missing)
    with pytest.raises(ValueError, match=rf"unexpected tensors \['{name}.extra'\]"):
        load_strictly(AmphistaNetwork(CONFIG), {**tensors, f"{name}.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=rf"^{name}: expected shape"):
        load_strictly(AmphistaNetwork(CONFIG), {**tensors, name: tensors[name][..., :-1]})


def test_a_file_of_another_variant_names_what_differs():
    tensors = AmphistaNetwork(replace(CONFIG, head_rank=8)).state_dict()
    with pytest.raises(ValueError, match=r"unexpected tensors \['lm_head_down'\]"):
        load_strictly(AmphistaNetwork(CONFIG), tensors)


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


def test_bad_trees_and_targets():
    network = AmphistaNetwork(CONFIG)
    with pytest.raises(ValueError, match="tree: expected a depth of at most 4, one level per head, got 5"):
        Amphista(network, TreeShape.chain(5))
    with pytest.raises(ValueError, match="tree: expected ranks below 96, got 96"):
        Amphista(network, TreeShape.from_paths([[rank] for rank in range(97)]))
    target = Target(build_model("llama"))
    narrow = AmphistaNetwork(replace(CONFIG, layer=replace(LAYER, hidden_size=32)))
    with pytest.raises(ValueError, match="drafter: expected hidden_size 64 as the target's, got 32"):
        Amphista(narrow, TreeShape.chain(2)).bind(target)
    with pytest.raises(ValueError, match="drafter: expected vocab_size 96 as the target's, got 97"):
        Amphista(AmphistaNetwork(replace(CONFIG, vocab_size=97)), TreeShape.chain(2)).bind(target)
