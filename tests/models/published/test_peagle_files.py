"""P-EAGLE's files, made up as each of its trainers writes them: read strictly, traps named."""

import json

import pytest
import torch
from safetensors.torch import save_file

import specdec
from lib.eagle_checks import DRAFT_TOKENS, random_peagle
from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model
from lib.published_files import file_config
from specdec.models.published import peagle, readers
from specdec.models.target.target import Target

MASK = 5
TAPS = (0, 1, 2)
IDS = "eagle_aux_hidden_state_layer_ids"
MASK_NAMES = ("mask_token_id", "ptd_token_id", "pard_token", "dspark_noise_token_id")
CHANGES = {"num_layers": 2, "own_embedding": True, "mask_token_id": MASK, "tap_layers": TAPS, "num_masks": 7}


def plain_file(network, **changes):
    """With names of EAGLE-3's authors, as SpecForge has them; layers by their outputs are those from 1 on."""
    config = file_config(draft_vocab_size=network.config.draft_vocab_size, num_hidden_layers=2, rms_norm_eps=1e-5)
    return dict(network.state_dict()), {**config, "mask_token_id": MASK, "norm_before_residual": False, **changes}


def specforge_file(network):
    return plain_file(network, parallel_drafting=True)


def amazon_file(network):
    """The first layer called 0, with a mask token of its own name."""
    tensors, config = plain_file(network, mask_token_id=None, ptd_token_id=MASK)
    return as_layer_0(tensors), config


def below_model_file(network):
    """Every name below `model.` but those of the head and its vocabulary."""
    tensors, config = amazon_file(network)
    outer = ("lm_head.weight", "d2t", "t2d")
    return {name if name in outer else f"model.{name}": tensor for name, tensor in tensors.items()}, config


def speculators_file(network):
    """Sizes of the layers apart, layers by their inputs, and how many tokens a pass proposes."""
    tensors, layer = plain_file(network)
    outer = {name: layer.pop(name) for name in ("draft_vocab_size", "mask_token_id", "norm_before_residual")}
    proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}]}
    kind = {"speculators_model_type": "peagle", "architectures": ["PEagleDraftModel"]}
    fields = {**kind, "speculators_config": proposals, IDS: [layer_id + 1 for layer_id in TAPS]}
    return as_layer_0(tensors), {**outer, **fields, "transformer_layer_config": layer}


def as_layer_0(tensors):
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LAYOUTS = {
    "specforge": specforge_file,
    "amazon": amazon_file,
    "below model": below_model_file,
    "speculators": speculators_file,
}


@pytest.fixture(scope="module")
def target():
    return Target(build_model("llama"))


@pytest.fixture(scope="module")
def network(target):
    return random_peagle(target.model, **CHANGES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(layout, network, target, tmp_path):
    tensors, config = LAYOUTS[layout](network)
    assert readers.recognise(set(tensors), config) == "peagle"
    taps = {} if layout == "speculators" else {"tap_layers": TAPS}  # the others do not say
    drafter = specdec.load_drafter(write(tmp_path / "theirs", tensors, config), target, tree=(2, 1), **taps)
    read = drafter.network
    assert (read.config.num_layers, read.config.mask_token_id, read.config.num_masks) == (2, MASK, 7)
    assert read.config.tap_layers == TAPS
    assert read.state_dict().keys() == network.state_dict().keys()
    assert all(torch.equal(read.state_dict()[name], tensor) for name, tensor in network.state_dict().items())
    ids = torch.tensor([[3, 5, 7, 2]])
    plain = specdec.generate(target, None, ids, max_new_tokens=12)
    assert torch.equal(specdec.generate(target, drafter, ids, max_new_tokens=12), plain)


@pytest.mark.parametrize("name", MASK_NAMES)
def test_a_mask_goes_by_any_of_its_names(name, network):
    tensors, config = plain_file(network)
    del config["mask_token_id"]
    assert peagle.read(tensors, {**config, name: MASK}, tap_layers=TAPS).config.mask_token_id == MASK


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"mask_token_id": None},
            ValueError,
            "^mask_token_id: expected one of mask_token_id, ptd_token_id, .* got none",
        ),
        (
            {"ptd_token_id": 4},
            ValueError,
            "^mask_token_id: expected one token, got {'mask_token_id': 5, 'ptd_token_id'",
        ),
        ({"mask_token_id": VOCAB_SIZE}, ValueError, "^mask_token_id: expected a token below 96, the vocabulary's size"),
        ({"parallel_drafting": False}, NotImplementedError, "^parallel_drafting: expected True"),
    ],
)
def test_a_mask_must_be_a_token(changes, error, match, network):
    tensors, config = plain_file(network)
    assert peagle.read(tensors, config, num_masks=4).config.num_masks == 4
    assert peagle.read(tensors, config).config.num_masks == 7
    with pytest.raises(error, match=match):
        peagle.read(tensors, {**config, **changes})


def test_pard_is_a_model_of_its_own():
    with pytest.raises(NotImplementedError, match="^pard_token: expected P-EAGLE's tensors"):
        peagle.read({"model.norm.weight": torch.ones(4)}, {"pard_token": 7})


@pytest.mark.parametrize("lacking", ["mask_hidden", "layers.1.mlp.up_proj.weight", "lm_head.weight", "d2t"])
def test_missing_tensors_are_named(lacking, network):
    tensors, config = plain_file(network)
    del tensors[lacking]
    with pytest.raises(ValueError, match=rf"missing tensors \[.*'{lacking}'"):
        peagle.read(tensors, config)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"d2t": torch.zeros_like(DRAFT_TOKENS)}, "d2t: expected offsets that lead to the .* tokens marked in t2d"),
        ({"d2t": DRAFT_TOKENS}, "d2t: expected offsets that lead to the .* tokens marked in t2d"),
        ({"d2t": -torch.arange(len(DRAFT_TOKENS)), "t2d": None}, "d2t: expected .* distinct tokens below 96, got 1"),
    ],
)
def test_a_draft_vocabulary_with_holes_is_named(change, match, network):
    tensors, config = plain_file(network)
    assert torch.equal(peagle.read(tensors, config).target_ids, DRAFT_TOKENS)
    changed = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
    with pytest.raises(ValueError, match=match):
        peagle.read(changed, config)


def test_the_embedding_of_the_target_is_shared(network, target, tmp_path):
    tensors, config = plain_file(network)
    weight = target.model.get_input_embeddings().weight.detach()
    assert weight.shape == (VOCAB_SIZE, HIDDEN_SIZE)
    folder = write(tmp_path / "same", {**tensors, "embed_tokens.weight": weight.clone()}, config)
    assert specdec.load_drafter(folder, target, tree=(2, 1), tap_layers=TAPS).network.embed_tokens is None
