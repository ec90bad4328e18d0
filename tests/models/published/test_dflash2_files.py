"""DFlash2's files, saved by speculators or made up as z-lab's are: read strictly, and drafting losslessly."""

import json

import pytest
import torch
from safetensors.torch import save_file

import specdec
from lib import dflash2_cases
from lib.families import build_model
from specdec.drafters.dflash import DFlash
from specdec.models.networks.blocks.dflash2 import DFlash2Network


@pytest.fixture(scope="module")
def model():
    return build_model("llama")


def zlab_file(folder, network, **changes):
    """The network's tensors with the names and fields of z-lab, `changes` among those of DFlash2."""
    config, layer = network.config, network.config.layer
    own = {name: getattr(config, name) for name in (*dflash2_cases.SELECTOR, *dflash2_cases.CONVOLUTION)}
    own |= {"mask_token_id": config.mask_token_id, "target_layer_ids": [0, 1], **changes}
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    fields = {name: getattr(layer, name) for name in (*sizes, "max_position_embeddings", "rms_norm_eps")}
    fields |= {"vocab_size": config.vocab_size, "num_hidden_layers": config.num_layers, "num_target_layers": 3}
    fields |= {"architectures": ["DFlash2DraftModel"], "block_size": config.block_size, "dflash_config": own}
    fields["rope_theta"] = layer.rope_parameters["rope_theta"]
    tensors = {
        name + (".weight" if name.endswith("codebook") else ""): tensor.contiguous()
        for name, tensor in network.state_dict().items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def check_greedy(folder, model):
    ids = torch.tensor([[5, 9, 70, 11, 8]])
    plain = specdec.generate(model, None, ids, max_new_tokens=10)
    for tree in (None, (3, 2), "jetspec"):
        drafter = specdec.load_drafter(folder, model, tree=tree)
        assert torch.equal(specdec.generate(model, drafter, ids, max_new_tokens=10), plain)


def test_zlabs_layout(model, tmp_path):
    network = dflash2_cases.make_network(model, tap_layers=(0, 1))
    folder = zlab_file(tmp_path / "file", network)
    drafter = specdec.load_drafter(folder, model)
    assert type(drafter) is DFlash
    assert type(drafter.network) is DFlash2Network
    state = drafter.network.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in network.state_dict().items())
    assert drafter.network.candidate_selector.top_k == 4
    check_greedy(folder, model)


def test_tensors_and_fields_that_contradict_are_named(model, tmp_path):
    network = dflash2_cases.make_network(model, tap_layers=(0, 1))
    with pytest.raises(ValueError, match="expected conv_kernel_size of a DFlash2 drafter"):
        specdec.load_drafter(zlab_file(tmp_path / "without", network, conv_kernel_size=0), model)


@torch.no_grad()
def test_what_speculators_save_is_read(model, tmp_path):
    theirs = dflash2_cases.their_model(dflash2_cases.make_network(model, tap_layers=(0, 1)).config)
    theirs.save_pretrained(tmp_path / "file")
    drafter = specdec.load_drafter(tmp_path / "file", model)
    state, saved = drafter.network.state_dict(), theirs.state_dict()
    assert type(drafter.network) is DFlash2Network
    assert drafter.network.config.tap_layers == (0, 1)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in state.items() if name in saved)
    assert {name for name in state if name.startswith("candidate_selector")} <= saved.keys()
    check_greedy(tmp_path / "file", model)
