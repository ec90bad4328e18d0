"""What DFlash drafts: what transformers' own generator of candidates drafts, and trees over the same laws."""

import pytest
import torch
from transformers import GenerationConfig, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import specdec
from lib.dflash_cases import make_network
from lib.drafter_checks import Recording, propose
from lib.families import HIDDEN_SIZE, build_model
from lib.tensors import assert_near
from specdec.drafters.dflash import DFlash
from specdec.trees.shape import TreeShape

MASK, BLOCK, TAPS = 3, 5, [0, 1]


def save_theirs(folder, window):
    """A small network of transformers' with weights that all matter."""
    config = MuseGlimmerAssistantConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=TAPS,
        sliding_window=window,
    )
    model = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape) + ("norm" in name))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize("window", [6, 64])
def test_a_chain_is_what_transformers_drafts(window, tmp_path):
    model = build_model("llama")
    assistant = save_theirs(tmp_path, window)
    generator = DFlashTokenCandidateGenerator(
        assistant, model.get_input_embeddings(), model.get_output_embeddings(), GenerationConfig(max_length=60)
    )
    generator.model_kwargs_overrides = {}
    text = torch.randint(4, 90, (1, 30))
    states = model(text, output_hidden_states=True)
    num_read = 0
    for length, accepted in ((9, None), (12, 2), (13, 0), (18, 4)):  # tokens in front of the root
        generator.is_main_model_prefill = accepted is None
        states_of_step = [hidden[:, num_read:length] for hidden in states.hidden_states]
        inputs = {"position_ids": torch.arange(length + 1)[None], "attention_mask": torch.ones(1, length + 1)}
        found, logits = generator.get_candidates(
            text[:, : length + 1], inputs, type("Outputs", (), {"hidden_states": states_of_step})(), False, accepted
        )
        drafter = specdec.load_drafter(tmp_path, model, tree=found.shape[1] - length - 1)
        choose = Recording()
        tree = propose(drafter, model, text[0, :length], int(text[0, length]), choose)
        torch.testing.assert_close(choose.logits[0], logits, atol=1e-4, rtol=1e-5)
        assert tree.tokens.tolist() == [found[0, length:].tolist()]
        num_read = length


@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"windows": (4, None), "causal_windows": True}], ids=str)
def test_a_depth_drafts_the_same_in_every_tree(changes):
    model, text = build_model("llama"), torch.arange(5, 16)
    drafter = DFlash(make_network(model, **changes), TreeShape.chain(4))
    whole = Recording()
    propose(drafter, model, text, 20, whole)
    logits = whole.logits[0]
    assert logits.shape[1] == 4
    for shape in (TreeShape.chain(1), TreeShape.from_k_config((3, 2))):
        seen = Recording()
        tree = propose(drafter.with_tree(shape), model, text, 20, seen)
        assert_near(seen.logits[0], logits[:, : shape.max_depth])
        for node in range(1, shape.num_nodes):
            best = logits[0, shape.depth[node] - 1].topk(4).indices
            assert tree.tokens[0, node] == best[shape.rank[node]]


def test_only_a_causal_block_is_cut():
    model = build_model("llama")
    for changes, num_rows in (
        ({}, BLOCK),
        ({"causal": True}, 3),
        ({"windows": (4, None), "causal_windows": True}, BLOCK),
    ):
        drafter = DFlash(make_network(model, **changes), TreeShape.chain(2))
        propose(drafter, model, torch.arange(5, 16), 20)
        assert {passes.num_rows for passes in drafter._passes.values()} == {num_rows}
