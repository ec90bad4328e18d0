"""ParallelSpec: one pass over tokens and masks drafts what the paper's equations say."""

from dataclasses import replace

import pytest
import torch

from lib.drafter_checks import Recording, propose
from lib.families import VOCAB_SIZE, build_model, random_prompts
from lib.parallelspec_equations import Equations, each_variant, make_network
from specdec.drafters.parallelspec import ParallelSpec
from specdec.models.networks.layer import DraftLayerConfig
from specdec.models.networks.parallelspec import ParallelSpecConfig, ParallelSpecNetwork
from specdec.trees.shape import TreeShape


def assert_near(got, expected):
    """Up to fp32's error after a pass of the target and one of the network: some hundred roundings of the largest."""
    bound = 5e-5 * expected.abs().max().item()
    assert (got.double() - expected).abs().max().item() <= bound


@each_variant
@torch.no_grad()
def test_a_draft_is_what_the_equations_say(settings, generator):
    model = build_model("llama")
    network = make_network(model, generator, **settings)
    assert (network.mask_features is not None) == ("mask_feature" in settings)
    equations = Equations(network, model.get_input_embeddings().weight)
    for text in random_prompts(generator, [1, 4, 13]):
        choose = Recording()
        propose(ParallelSpec(network, TreeShape.from_k_config((2, 2, 1, 1))), model, text, root=5, choose=choose)
        states = equations.states([*text.tolist(), 5], model.model(text[None]).last_hidden_state[0])
        assert_near(choose.logits[0][0], states @ model.lm_head.weight.double().T)


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
    assert_near(seen[1], seen[4][:1])
    assert_near(seen[2], seen[4][:2])


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
