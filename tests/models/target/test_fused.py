"""models.fused: what the stock layers compute, and a model that is as it was afterwards."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lib.families import VOCAB_SIZE, build_model, random_prompts
from lib.scoring import random_tree, score
from lib.scripted_drafters import oracle
from lib.tensors import assert_near
from lib.tolerances import FLOOR
from specdec.loop.decoder import Decoder
from specdec.models.target import fused
from specdec.models.target.fused import FusedPath
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape

LLAMA_SHAPED = ["llama", "llama3", "mistral", "mistral_window", "qwen2", "qwen2_window", "qwen3"]


def make_biased(model, generator):
    """Give every bias a value: they start as zeros."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def num_fused(model):
    return FusedPath(model).num_layers


@pytest.mark.parametrize("family", LLAMA_SHAPED)
def test_a_tree_is_scored_as_by_the_stock_layers(family, generator):
    model = make_biased(build_model(family), generator)
    prompts, tree_tokens = random_prompts(generator, [19, 7, 13]), random_tree(generator, 3)
    _, expected, expected_cache = score(Target(model, tap_layers=(0, 2)), prompts, tree_tokens)
    _, got, cache = score(Target(model, tap_layers=(0, 2), fused=True), prompts, tree_tokens)
    assert_near(got.logits, expected.logits)
    assert_near(got.hidden, expected.hidden)
    assert_near(got.taps, expected.taps)
    assert_near(cache.data, expected_cache.data)
    assert num_fused(model) == 3


@pytest.mark.interpreter
@pytest.mark.parametrize("family", ["llama", "mistral_window", "qwen2", "qwen3"])
def test_a_tree_is_scored_by_the_kernels_as_by_the_stock_layers(family, generator):
    model = make_biased(build_model(family), generator)
    prompts, tree_tokens = random_prompts(generator, [14, 5]), random_tree(generator, 2)
    _, expected, expected_cache = score(Target(model), prompts, tree_tokens)
    target = Target(model, backend="triton")
    assert target.fused
    _, got, cache = score(target, prompts, tree_tokens)
    torch.testing.assert_close(got.logits, expected.logits, atol=5e-5, rtol=1e-5)
    for row, prompt in enumerate(prompts):  # one of them has read the prompts without their padding
        held = slice(0, len(prompt) + tree_tokens.shape[1])
        one, other = cache.data[:, :, row, held], expected_cache.data[:, :, row, held]
        torch.testing.assert_close(one, other, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_rounds_where_the_stock_layers_round(family, dtype, generator):
    model = make_biased(build_model(family), generator).to(dtype)
    prompts, tree_tokens = random_prompts(generator, [9, 5]), random_tree(generator, 2)
    wide = copy.deepcopy(model).float()
    exact = score(Target(wide), prompts, tree_tokens).tree.logits
    expected = score(Target(model), prompts, tree_tokens).tree.logits.float()
    got = score(Target(model, fused=True), prompts, tree_tokens).tree.logits.float()
    # where the products come out alike, so does everything else, bit by bit
    assert (got == expected).float().mean() > 0.5
    bound = 2 * (expected - exact).abs().max() + FLOOR[dtype]
    assert (got - exact).abs().max() <= bound


@pytest.mark.parametrize("family", LLAMA_SHAPED)
def test_greedy_text_is_the_same_with_and_without(family, generator):
    model = build_model(family)
    prompts = random_prompts(generator, [9, 4, 13])
    expected = Decoder(model).decode(prompts, 64).tokens
    shape = TreeShape.from_k_config((3, 2, 1))
    for drafter in (None, oracle(shape, expected, VOCAB_SIZE)):
        result = Decoder(Target(model, fused=True), drafter).decode(prompts, 64)
        assert result.tokens == expected
    assert result.stats.tau > 3.5


def test_opt_is_left_alone(generator):
    model = build_model("opt")
    prompts, tree_tokens = random_prompts(generator, [9, 5]), random_tree(generator, 2)
    expected = score(Target(model), prompts, tree_tokens).tree.logits
    assert torch.equal(score(Target(model, fused=True), prompts, tree_tokens).tree.logits, expected)
    assert num_fused(model) == 0


def snapshot(model):
    """What must be as it was: attributes and hooks of every module, identities and values of all tensors."""
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    parameters = {name: (id(p), p.requires_grad, p.is_inference()) for name, p in model.named_parameters()}
    return attributes, hooks, parameters, list(model.state_dict())


@pytest.mark.parametrize("ending", [None, RuntimeError, KeyboardInterrupt])
def test_the_model_is_as_before_whatever_ends_the_block(ending, generator, tmp_path):
    model = build_model("qwen2")
    (prompt,) = random_prompts(generator, [9])
    before, weights = snapshot(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = model(prompt[None]).logits.detach()
    target = Target(model, fused=True)
    seen = []

    def fail(*_):
        seen.append(type(model.model.layers[0].forward).__name__)
        if ending is not None:
            raise ending

    handle = model.model.layers[2].mlp.down_proj.register_forward_hook(fail)
    with nullcontext() if ending is None else pytest.raises(ending):
        score(target, [prompt], random_tree(generator, 1))
    handle.remove()
    assert seen[-1] == "_Layer"
    assert snapshot(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(prompt[None]).logits, own)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode])
def test_the_model_can_be_trained_after_the_weights_were_packed(inside, generator):
    model, other = build_model("qwen2"), build_model("qwen2")
    with inside(), Target(model, fused=True).hooked():
        pass
    (prompt,) = random_prompts(generator, [9])
    for one in (model, other):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one(prompt[None], labels=prompt[None]).loss.backward()
        optimizer.step()
    for (name, parameter), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, msg=name)
    # training went into the packed weights
    stock = score(Target(model), [prompt], random_tree(generator, 1)).tree.logits
    assert not torch.equal(stock, torch.zeros_like(stock))


def groups(layer):
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]


def is_one_storage(linears):
    return len({linear.weight.untyped_storage().data_ptr() for linear in linears}) == 1


def test_weights_are_packed_once_and_take_no_more_memory(generator):
    model = build_model("llama")
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert not any(is_one_storage(group) for group in groups(model.model.layers[1]))
    places = []
    for _ in range(2):
        assert num_fused(model) == 3
        places.append([parameter.data_ptr() for parameter in model.parameters()])
    assert places[0] == places[1]
    assert all(is_one_storage(group) for layer in model.model.layers for group in groups(layer))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == num_bytes
    # a cast moves every parameter to a place of its own; the next block mends that
    model.double().float()
    assert not any(is_one_storage(group) for group in groups(model.model.layers[1]))
    prompts, tree_tokens = random_prompts(generator, [9]), random_tree(generator, 1)
    expected = score(Target(model), prompts, tree_tokens).tree.logits
    assert_near(score(Target(model, fused=True), prompts, tree_tokens).tree.logits, expected)
    assert all(is_one_storage(group) for layer in model.model.layers for group in groups(layer))


class Scaled(nn.Linear):
    """A linear layer of another class, as quantized and LoRA layers are."""

    @classmethod
    def of(cls, linear):
        scaled = cls(linear.in_features, linear.out_features, bias=False)
        scaled.weight = linear.weight
        return scaled

    def forward(self, x):
        return 0.5 * super().forward(x)


def replace_v(model):
    attention = model.model.layers[1].self_attn
    attention.v_proj = Scaled.of(attention.v_proj)


def halve(module, args, output):
    return 0.5 * output


def hooked(place, hook=halve):
    return lambda model: model.model.get_submodule(place).register_forward_hook(hook)


def tie(model):
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[2].mlp.up_proj.weight


def share_memory(model):
    weights = torch.stack([layer.self_attn.q_proj.weight.detach() for layer in model.model.layers])
    for layer, weight in zip(model.model.layers, weights, strict=True):
        layer.self_attn.q_proj.weight.data = weight


def replace_forward(model):
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: 0.5 * forward(*args, **kwargs)


CHANGES = {
    "another class": replace_v,
    "hook of a projection": hooked("layers.1.mlp.up_proj"),
    "hook of a norm": hooked("layers.1.input_layernorm"),
    "hook of a layer": hooked("layers.0", lambda module, args, output: output.flip(-1)),
    "hook of the final norm": hooked("norm"),
    "tied": tie,
    "shared memory": share_memory,
    "another forward": replace_forward,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:The .*forward")
def test_what_others_have_changed_goes_on_working(name, generator):
    model = build_model("llama")
    prompts, tree_tokens = random_prompts(generator, [9, 4]), random_tree(generator, 2)
    unchanged = score(Target(model), prompts, tree_tokens).tree.logits
    CHANGES[name](model)
    layers = 2 if name == "another forward" else 3
    places = [parameter.data_ptr() for parameter in model.model.layers[1].parameters()]
    expected = score(Target(model), prompts, tree_tokens).tree
    if name != "shared memory":
        assert not torch.allclose(expected.logits, unchanged, atol=1e-2), "the change changed nothing"
    got = score(Target(model, fused=True), prompts, tree_tokens).tree
    assert_near(got.logits, expected.logits)
    assert_near(got.hidden, expected.hidden)
    assert num_fused(model) == layers
    assert [parameter.data_ptr() for parameter in model.model.layers[1].parameters()] != places or layers == 2


def move(model):
    model.double().float()


def replace_layer(model):
    layer = type(model.model.layers[1])(model.config, layer_idx=1).eval()
    layer.load_state_dict(model.model.layers[2].state_dict())
    model.model.layers[1] = layer


def replace_weight(model):
    linear = model.model.layers[1].self_attn.k_proj
    linear.weight = nn.Parameter(-linear.weight.detach())


LATER_CHANGES = CHANGES | {"moved": move, "another layer": replace_layer, "another weight": replace_weight}
LATER_CHANGES["hook of a layer, before"] = lambda model: model.model.layers[1].register_forward_pre_hook(
    lambda module, args: (0.5 * args[0],)
)
LATER_CHANGES["another window"] = lambda model: model.config.__setattr__("sliding_window", 7)
LATER_CHANGES["training"] = lambda model: model.train()


@pytest.mark.parametrize("name", LATER_CHANGES)
@pytest.mark.filterwarnings("ignore:The .*forward")
def test_changes_between_two_blocks_are_noticed(name, generator):
    """The plan is kept from one block to the next; what was changed meanwhile must not be missed."""
    model = build_model("mistral_window" if name == "another window" else "llama")
    prompts, tree_tokens = random_prompts(generator, [9, 14]), random_tree(generator, 2)
    target = Target(model, fused=True)
    before = score(target, prompts, tree_tokens).tree
    LATER_CHANGES[name](model)
    expected = score(Target(model, fused=False), prompts, tree_tokens).tree
    got = score(target, prompts, tree_tokens).tree
    assert_near(got.logits, expected.logits)
    if name not in ("moved", "shared memory", "training"):
        assert not torch.allclose(got.logits, before.logits, atol=1e-2), "the change changed nothing"
    assert_near(score(target, prompts, tree_tokens).tree.logits, expected.logits)


def test_a_plan_is_made_once_for_a_model_that_stays(generator, monkeypatch):
    model = build_model("llama")
    prompts, tree_tokens = random_prompts(generator, [9]), random_tree(generator, 1)
    target, plans, kept = Target(model, fused=True, tap_layers=(1,)), [], fused._plan
    monkeypatch.setattr(fused, "_plan", lambda *args: plans.append(0) or kept(*args))
    expected = score(target, prompts, tree_tokens).tree.logits
    with Target(model, fused=False, tap_layers=(0,)).hooked():  # whose taps are no change
        assert torch.equal(score(target, prompts, tree_tokens).tree.logits, expected)
    with target.hooked():
        assert torch.equal(score(target, prompts, tree_tokens).tree.logits, expected)
    model.model.layers[0].self_attn.q_proj.weight.data.mul_(0.5)  # as training does
    assert not torch.equal(score(target, prompts, tree_tokens).tree.logits, expected)
    assert len(plans) == 1


def test_nested_blocks_and_targets_of_either_kind(generator):
    model = build_model("llama")
    prompts, tree_tokens = random_prompts(generator, [9]), random_tree(generator, 1)
    stock, path = Target(model, fused=False), Target(model, fused=True)
    expected = score(stock, prompts, tree_tokens).tree.logits
    before = snapshot(model)
    calls = []
    kept = fused.rope_kv_write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "rope_kv_write", lambda *args, **kwargs: calls.append(0) or kept(*args, **kwargs))
        for outer, inner in ((stock, path), (path, stock), (path, path)):
            calls.clear()
            with outer.hooked():
                got = score(inner, prompts, tree_tokens).tree.logits
            assert_near(got, expected)
            assert len(calls) == 3 * inner.fused
    assert snapshot(model) == before


@pytest.mark.interpreter
def test_by_default_the_backend_decides():
    model = build_model("llama")
    assert not Target(model).fused
    assert Target(model, backend="triton").fused
    assert not Target(model, backend="triton", fused=False).fused
