"""A draft layer computes the same where it is trained and where it drafts, and its packed weights are its own."""

import pytest
import torch
from safetensors.torch import load_file

from lib.law_drafters import build_target, make_drafter
from lib.recorder import references_as_kernels
from specdec.models.common.cache import KVCache
from specdec.models.common.packing import pack_network, packed
from specdec.models.common.passes import PromptPass, TreePass
from specdec.models.networks.layer import (
    CachedAttention,
    DraftLayer,
    DraftLayerConfig,
    MaskedAttention,
    Rotary,
    rotary_table,
)
from specdec.models.target.target import Target

BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.interpreter)]
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
NUM_TOKENS, NUM_PROMPT = 9, 4


def make_config(rope="default", **changes):
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1}
    return DraftLayerConfig(**sizes, head_dim=8, max_position_embeddings=32, rope_parameters=ROPES[rope], **changes)


def make_layer(config, dtype=torch.float32, **settings):
    layer = DraftLayer(config, **settings)
    for parameter in layer.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    return layer.to(dtype)


def trained_way(layer, rotary, x, norm):
    """The layer over a text, where gradients are wanted."""
    return layer(x, rotary.at(x, torch.arange(x.shape[1])[None]), MaskedAttention(), backend=None, norm=norm)


@torch.no_grad()
def drafting_way(layer, rotary, config, x, norm, backend):
    """The same with a cache: a prompt, and then a chain behind it."""
    batch_size, num_tokens = x.shape[:2]
    cache = KVCache(
        num_layers=1,
        batch_size=batch_size,
        capacity=num_tokens,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=x.dtype,
        device=x.device,
        backend=backend,
    )
    table = rotary_table(config, cache.capacity, x.device)
    prompt = PromptPass(start=0, num_tokens=NUM_PROMPT, batch_size=batch_size, device=x.device)
    cache.lengths.fill_(NUM_PROMPT)
    num_nodes = num_tokens - NUM_PROMPT
    chain = TreePass(
        lengths=cache.lengths,
        depth=torch.arange(num_nodes, dtype=torch.int32)[None],
        ancestors=(2 ** torch.arange(1, num_nodes + 1) - 1).int()[None, :, None],
        first_node=0,
        num_nodes=num_nodes,
        backend=backend,
    )
    places = torch.arange(cache.capacity, dtype=torch.int32)[None]
    parts = []
    for visible, part in ((prompt, x[:, :NUM_PROMPT]), (chain, x[:, NUM_PROMPT:])):
        attend = CachedAttention(cache, visible, table, places)
        parts.append(layer(part, rotary.at(part, attend.positions), attend, backend=backend, norm=norm))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("rope", "changes", "settings", "has_norm"),
    [
        ("default", {}, {}, True),
        ("linear", {"attention_bias": True}, {"input_norm": False}, False),
        ("yarn", {}, {}, False),
        ("default", {"qk_norm": True}, {"window": 6}, False),
    ],
)
def test_drafting_computes_what_was_trained(rope, changes, settings, has_norm, is_packed, backend):
    config = make_config(rope, **changes)
    layer, rotary = make_layer(config, **settings), Rotary(config)
    norm = torch.nn.RMSNorm(24, 1e-6) if has_norm else None
    x = torch.randn(2, NUM_TOKENS, 24)
    expected = trained_way(layer, rotary, x, norm).detach()
    if is_packed:
        pack_network(layer, torch.float32)
        assert packed([layer.mlp.gate_proj, layer.mlp.up_proj]) is not None
    got = drafting_way(layer, rotary, config, x, norm, backend)
    torch.testing.assert_close(got, expected, atol=2e-6 * float(expected.abs().max()), rtol=0)


def test_frequencies_that_depend_on_the_text_have_no_table():
    config = make_config("dynamic")
    layer, rotary = make_layer(config), Rotary(config)
    x = torch.randn(1, NUM_TOKENS, 24)
    assert rotary_table(config, 16, x.device) is None
    expected = trained_way(layer, rotary, x, None).detach()
    torch.testing.assert_close(drafting_way(layer, rotary, config, x, None, "reference"), expected)


@pytest.mark.interpreter
# the interpreter cuts bfloat16 off, where a GPU rounds
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_half_precision_is_rounded_by_the_kernels_as_by_their_definition(dtype, monkeypatch):
    config = make_config()
    layer, rotary = make_layer(config, dtype), Rotary(config)
    norm = torch.nn.RMSNorm(24, 1e-6).to(dtype)
    x = torch.randn(1, NUM_TOKENS, 24).to(dtype)
    got = drafting_way(layer, rotary, config, x, norm, "triton")
    references_as_kernels(monkeypatch)
    defined = drafting_way(layer, rotary, config, x, norm, "triton")
    # attention alone sums in another order; what rounds alike after it comes out alike
    assert (got == defined).float().mean() > 0.5
    exact = trained_way(layer.double(), rotary, x.double(), norm.double())
    bound = 2 * (defined - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (got - exact).abs().max() <= bound


def groups(network):
    for module in network.modules():
        if hasattr(module, "side_by_side"):
            yield [getattr(module, name) for name in module.side_by_side]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "amphista", "hydra++", "falcon", "parallelspec"])
def test_packed_weights_stay_the_networks_own(kind, tmp_path):
    drafter, target = make_drafter(kind), Target(build_target())
    network = drafter.network
    parameters, values = list(network.parameters()), {k: v.clone() for k, v in network.state_dict().items()}
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    assert list(groups(network))
    assert all(packed(group) is None for group in groups(network))
    drafter.bind(target)
    places = [parameter.data_ptr() for parameter in parameters]
    drafter.bind(target)
    assert [parameter.data_ptr() for parameter in parameters] == places
    assert all(mine is theirs for mine, theirs in zip(network.parameters(), parameters, strict=True))
    assert all(packed(group) is not None for group in groups(network))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    assert sum(storages.values()) == num_bytes
    assert all(torch.equal(network.state_dict()[name], value) for name, value in values.items())

    drafter.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == values.keys()
    assert all(torch.equal(saved[name], value) for name, value in values.items())
    assert sum(value.nbytes for value in saved.values()) == sum(value.nbytes for value in values.values())


def test_training_goes_into_packed_weights_and_new_weights_are_not_missed():
    config = make_config()
    layer, rotary = make_layer(config), Rotary(config)
    pack_network(layer, torch.float32)
    x = torch.randn(1, NUM_TOKENS, 24)

    def check():
        expected = trained_way(layer, rotary, x, None).detach()
        got = drafting_way(layer, rotary, config, x, None, "reference")
        torch.testing.assert_close(got, expected, atol=2e-6 * float(expected.abs().max()), rtol=0)
        return expected

    before = check()
    trained_way(layer, rotary, x, None).square().mean().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    trained = check()
    assert not torch.equal(before, trained)
    assert packed([layer.mlp.gate_proj, layer.mlp.up_proj]) is not None
    layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()}, assign=True)
    assert packed([layer.mlp.gate_proj, layer.mlp.up_proj]) is None
    assert not torch.equal(check(), trained)
