"""ParallelSpec: one pass over tokens and masks drafts what the paper's equations say."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lib.drafter_checks import Nudged, check_drafter, propose
from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model, random_prompts
from lib.laws import assert_sample_has_law
from lib.parallelspec_equations import SHAPES, VARIANTS, Equations, Recording, each_variant, make_network
from specdec.drafters.parallelspec import ParallelSpec
from specdec.drafting import draft_tree
from specdec.drafting.candidates import Candidates
from specdec.loop.decoder import Decoder
from specdec.loop.rules import choose_rule
from specdec.models.common import passes
from specdec.models.networks.base import load_strictly
from specdec.models.networks.layer import DraftLayerConfig
from specdec.models.networks.parallelspec import ParallelSpecConfig, ParallelSpecNetwork
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape


def decode_and_record(drafter, model, prompts, max_new_tokens):
    """Decode with mended proposals: the texts, and per step the lengths before it and the logits of the draft."""
    plain = Decoder(model).decode(prompts, max_new_tokens).tokens
    lengths, draft, choose = [], drafter.draft, Recording()
    nudged = Nudged(drafter, plain, prompts)

    def recording(root, _):
        done = nudged.num_done.tolist()
        lengths.append([len(prompt) + count for prompt, count in zip(prompts, done, strict=True)])
        return draft(root, choose)

    drafter.draft = recording
    result = Decoder(model, nudged).decode(prompts, max_new_tokens)
    assert result.tokens == plain
    assert result.stats.tau > 1.5, "hardly anything was accepted"
    texts = [torch.cat((prompt, torch.tensor(tokens))) for prompt, tokens in zip(prompts, plain, strict=True)]
    return texts, lengths, choose.logits


def assert_near(got, expected):
    """Up to fp32's error after a pass of the target and one of the network: some hundred roundings of the largest."""
    bound = 2e-5 * expected.abs().max().item()
    assert (got.double() - expected).abs().max().item() <= bound


@each_variant
@torch.no_grad()
def test_a_ragged_batch_drafts_what_the_equations_say(settings, generator):
    model = build_model("llama")
    network = make_network(model, generator, **settings)
    prompts = random_prompts(generator, [1, 4, 13])
    drafter = ParallelSpec(network, TreeShape.from_k_config((2, 2, 1, 1)))
    texts, lengths, logits = decode_and_record(drafter, model, prompts, 12)
    equations = Equations(network, model.get_input_embeddings().weight)
    checked = 0
    for row, text in enumerate(texts):
        hidden = model.model(text[None]).last_hidden_state[0]
        for before, step in zip(lengths, logits, strict=True):
            if before[row] < len(text) - 1:  # the row has not ended
                states = equations.states(text[: before[row] + 1].tolist(), hidden)
                assert_near(step[row], states @ model.lm_head.weight.double().T)
                checked += 1
    assert checked > 9


@each_variant
@torch.no_grad()
def test_the_cache_holds_the_keys_of_the_text_and_of_no_mask(settings, generator):
    model = build_model("llama")
    network = make_network(model, generator, **settings)
    prompts = random_prompts(generator, [1, 4, 13])
    drafter = ParallelSpec(network, SHAPES["k_config"])
    texts, lengths, _ = decode_and_record(drafter, model, prompts, 12)
    equations = Equations(network, model.get_input_embeddings().weight)
    cache = drafter._prefix.cache
    for row, text in enumerate(texts):
        # what the last draft has read of a row: its root too, which is a token more without features
        tokens = text[: lengths[-1][row] + 1].tolist()
        count = int(cache.lengths[row])
        assert count == len(tokens) - (settings["variant"] == "eagle")
        inputs = equations.inputs(tokens, model.model(text[None]).last_hidden_state[0])[:count]
        for position, x in enumerate(inputs):
            _, keys, values = equations.project(x, position)
            assert_near(cache.data[0, 0, row, position], torch.stack(keys))
            assert_near(cache.data[0, 1, row, position], torch.stack(values))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("settings", [VARIANTS["medusa"], VARIANTS["eagle"]], ids=["medusa", "eagle"])
def test_steps_that_accept_none_some_and_all_leave_no_trace(settings, shape, generator):
    model = build_model("llama")
    network = make_network(model, generator, **settings)
    check_drafter(
        lambda: ParallelSpec(network, shape),
        model,
        random_prompts(generator, [1, 4, 13]),
        max_new_tokens=20,
        min_tau=1.2,
    )


@pytest.mark.parametrize("settings", [VARIANTS["medusa"], VARIANTS["eagle"]], ids=["medusa", "eagle"])
@pytest.mark.parametrize("family", ["opt", "llama3", "qwen3"])
def test_other_families_are_drafted_for(family, settings, generator):
    model = build_model(family)
    network = make_network(model, generator, **settings)
    prompts = random_prompts(generator, [7, 2])
    check_drafter(lambda: ParallelSpec(network, SHAPES["k_config"]), model, prompts, max_new_tokens=16)


def test_masks_beyond_the_tree_change_nothing(generator):
    model = build_model("llama")
    network = make_network(model, generator)
    (text,) = random_prompts(generator, [6])
    seen = {}
    for depth in (1, 2, 4):
        choose = Recording()
        propose(ParallelSpec(network, TreeShape.chain(depth)), model, text, root=5, choose=choose)
        seen[depth] = choose.logits[0][0]
        assert seen[depth].shape == (depth, VOCAB_SIZE)
    torch.testing.assert_close(seen[1], seen[4][:1])
    torch.testing.assert_close(seen[2], seen[4][:2])


def test_every_depth_has_one_list_and_one_law(generator):
    model = build_model("llama")
    shape = SHAPES["leaves at every depth"]
    network = make_network(model, generator)

    def choose(logits, num_ranks):
        tokens = torch.arange(logits.shape[1])[:, None] * 10 + torch.arange(num_ranks)
        return Candidates(tokens.expand(len(logits), -1, -1), laws=logits.log_softmax(-1))

    tree = propose(ParallelSpec(network, shape), model, random_prompts(generator, [6])[0], root=5, choose=choose)
    # ten times the list's number and the rank
    assert tree.tokens.tolist() == [[5, 0, 1, 2, 10, 11, 10, 20, 20]]
    assert tree.laws.shape == (1, shape.max_depth, VOCAB_SIZE)
    assert tree.law_row.tolist() == [0, 1, 1, -1, 2, 2, -1, -1, -1]


@torch.no_grad()
def test_sampled_text_has_the_targets_law(generator):
    """The second token of many rows of one prompt; the first comes from the prompt, the second from a tree."""
    model = build_model("llama")
    network = make_network(model, generator, variant="medusa")
    for weight in (network.norm.weight, model.lm_head.weight):
        weight.mul_(0.4)  # flatter laws, which overlap more
    prompt, num_rows = random_prompts(generator, [3])[0], 500
    drafter = ParallelSpec(network, TreeShape.from_k_config((3, 2)))
    result = Decoder(model, drafter, acceptance=choose_rule("auto", drafter, do_sample=True)).decode(
        [prompt] * num_rows, 3, seed=0
    )
    assert result.stats.lossless
    assert result.stats.tau > 1.2, "hardly anything was accepted"
    first = model(prompt[None]).logits[0, -1].double().softmax(-1)
    texts = torch.cat((prompt.expand(VOCAB_SIZE, -1), torch.arange(VOCAB_SIZE)[:, None]), 1)
    second = first @ model(texts).logits[:, -1].double().softmax(-1)
    assert_sample_has_law(torch.tensor(result.tokens)[:, 1], second)


class NoSynchronisation(TorchDispatchMode):
    """Refuses what makes a host wait for a GPU: reading a number, and shapes that depend on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        is_boolean_index = name in ("aten::index", "aten::index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        refused = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::repeat_interleave")
        if name in refused or is_boolean_index:
            raise AssertionError(f"{name} synchronises")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [VARIANTS["medusa"], VARIANTS["eagle"]], ids=["medusa", "eagle"])
def test_a_draft_never_waits_for_the_device(settings, generator, monkeypatch):
    # the references of the kernels may read lengths; on a GPU kernels stand there
    def exempt(function):
        def run(*args, **kwargs):
            with _disable_current_modes():
                return function(*args, **kwargs)

        return run

    monkeypatch.setattr(passes.TreePass, "attend", exempt(passes.TreePass.attend))
    monkeypatch.setattr(draft_tree, "tree_expand", exempt(draft_tree.tree_expand))
    model = build_model("llama")
    drafter = ParallelSpec(make_network(model, generator, **settings), SHAPES["k_config"])
    draft, commit, calls = drafter.draft, drafter.commit, []

    def watched(function):
        def run(*args):
            calls.append(function)
            with NoSynchronisation():
                return function(*args)

        return run

    drafter.draft, drafter.commit = watched(draft), watched(commit)
    Decoder(model, drafter).decode(random_prompts(generator, [3, 8]), 6)
    assert {draft, commit} == set(calls)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (TreeShape.chain(5), r"tree: expected a depth of 1 to 4, the masks and one, got 5"),
        (TreeShape.none(), r"tree: expected a depth of 1 to 4, the masks and one, got 0"),
        (TreeShape.from_k_config((VOCAB_SIZE + 1,)), r"tree: expected ranks below 96, got 96"),
    ],
)
def test_trees_that_do_not_fit_are_refused(shape, message, generator):
    model = build_model("llama")
    with pytest.raises(ValueError, match=message):
        ParallelSpec(make_network(model, generator), shape).bind(Target(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "expected hidden_size 64 as the target's, got 32"),
        ({"vocab_size": 95}, "expected vocab_size 96 as the target's, got 95"),
    ],
)
def test_another_target_is_refused(changes, message, generator):
    model = build_model("llama")
    drafter = ParallelSpec(make_network(model, generator, **changes), SHAPES["k_config"])
    with pytest.raises(ValueError, match=message):
        drafter.bind(Target(model))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"variant": "hydra"}, ValueError, "variant: expected 'medusa' or 'eagle', got 'hydra'"),
        ({"mask_feature": "none"}, ValueError, "mask_feature: expected 'last' or 'trained', got 'none'"),
        ({"num_masks": 0}, ValueError, "num_masks: expected at least 1, got 0"),
        ({"vocab_size": 0}, ValueError, "vocab_size: expected at least 1, got 0"),
        ({"num_key_value_heads": 3}, ValueError, "num_key_value_heads: expected a divisor of 8, got 3"),
        ({"num_mask": 4}, TypeError, "num_mask"),
    ],
)
def test_bad_configurations_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        ParallelSpecConfig.for_target(build_model("llama").config, **changes)


def test_sizes_of_the_layer_can_be_set_one_by_one_or_together():
    config = build_model("llama").config
    own = DraftLayerConfig.like(config)
    assert ParallelSpecConfig.for_target(config, intermediate_size=40).layer == replace(own, intermediate_size=40)
    assert ParallelSpecConfig.for_target(config, layer=replace(own, head_dim=4)).layer == replace(own, head_dim=4)


@pytest.mark.parametrize(
    ("variant", "num_masks", "preset", "max_depth"),
    [
        ("medusa", 4, "medusa/mc_sim_7b_63", 4),
        ("eagle", 4, "eagle/mc_sim_7b_63", 5),
        ("eagle", 2, None, 3),
    ],
)
def test_the_default_tree_is_that_of_the_framework_as_deep_as_it_fits(variant, num_masks, preset, max_depth):
    config = ParallelSpecConfig.for_target(build_model("llama").config, variant=variant, num_masks=num_masks)
    shape = ParallelSpec.default_tree(config)
    assert shape.max_depth == max_depth
    if preset is not None:
        assert shape == TreeShape.preset(preset)
    ParallelSpec(ParallelSpecNetwork(config), shape)


# Checkpoints


@each_variant
def test_a_network_comes_back_from_its_tensors_and_its_configuration(settings, generator):
    network = make_network(build_model("qwen3"), generator, **settings)
    config = ParallelSpecConfig.from_dict(json.loads(json.dumps(asdict(network.config))))
    assert config == network.config
    again = ParallelSpecNetwork(config)
    load_strictly(again, network.state_dict())
    assert network.state_dict().keys() == again.state_dict().keys()
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


@each_variant
def test_names_and_shapes_of_the_tensors(settings, generator):
    network = make_network(build_model("llama"), generator, **settings)
    width, inner, keys = HIDDEN_SIZE, 96, 16
    expected = {
        "masks": (3, width),
        "layer.self_attn.q_proj.weight": (width, width),
        "layer.self_attn.k_proj.weight": (keys, width),
        "layer.self_attn.v_proj.weight": (keys, width),
        "layer.self_attn.o_proj.weight": (width, width),
        "layer.mlp.gate_proj.weight": (inner, width),
        "layer.mlp.up_proj.weight": (inner, width),
        "layer.mlp.down_proj.weight": (width, inner),
        "layer.post_attention_layernorm.weight": (width,),
    }
    if settings["variant"] == "medusa":
        expected |= {"layer.input_layernorm.weight": (width,), "norm.weight": (width,)}
    else:
        expected |= {"fc.weight": (width, 2 * width), "fc.bias": (width,)}
    if "mask_feature" in settings:
        expected["mask_features"] = (3, width)
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == expected


def test_wrong_tensors_are_named(generator):
    network = make_network(build_model("llama"), generator)
    tensors = network.state_dict()
    missing = {name: tensor for name, tensor in tensors.items() if name != "masks"}
    with pytest.raises(ValueError, match=r"missing tensors \['masks'\]"):
        load_strictly(network, missing)
    with pytest.raises(ValueError, match=r"unexpected tensors \['norm.weight'\]"):
        load_strictly(network, {**tensors, "norm.weight": torch.ones(HIDDEN_SIZE)})
    with pytest.raises(ValueError, match=r"masks: expected shape \[3, 64\], got \[4, 64\]"):
        load_strictly(network, {**tensors, "masks": torch.zeros(4, HIDDEN_SIZE)})
