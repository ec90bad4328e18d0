"""models.Target: a hooked stock model scores trees exactly as it would score each path alone, and is restored after."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

import specdec
from lib.families import FAMILIES, build_model, pad, random_prompts
from lib.scoring import TREE, random_tree, score
from lib.tensors import assert_near
from specdec.models.target import families
from specdec.models.target.target import Target


@torch.no_grad()
def full_forward(model, tokens):
    """Logits of every position of one text, by the unhooked model."""
    return model(tokens[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_scores_equal_full_forwards_of_every_path(family, generator):
    model = build_model(family)
    prompts, tree_tokens = random_prompts(generator, [19, 7, 13]), random_tree(generator, 3)
    prefill, output, _ = score(Target(model), prompts, tree_tokens)
    for row, prompt in enumerate(prompts):
        expected = full_forward(model, prompt)
        assert_near(prefill.logits[row], expected[-1])
        for path in TREE.paths.tolist():
            nodes = [node for node in path if node >= 0]
            expected = full_forward(model, torch.cat((prompt, tree_tokens[row, nodes])))[len(prompt) :]
            assert_near(output.logits[row, nodes], expected)


@pytest.mark.parametrize("family", ["llama", "mistral_window", "opt"])
def test_chunked_prefill_equals_one_pass(family, generator):
    target = Target(build_model(family))
    prompts = random_prompts(generator, [23, 5, 16])
    ids, mask = pad(prompts, "right")
    lengths = mask.sum(1).int()
    outputs, caches = [], []
    for chunk_size in (64, 8, 1):
        with torch.no_grad(), target.hooked():
            caches.append(target.new_cache(3, 24))
            outputs.append(target.prefill(ids, lengths, caches[-1], chunk_size=chunk_size))
    for output, cache in zip(outputs[1:], caches[1:], strict=True):
        assert_near(output.logits, outputs[0].logits)
        assert torch.equal(cache.lengths, lengths)
        for row, length in enumerate(lengths.tolist()):
            expected = caches[0].data[:, :, row, :length]
            assert_near(cache.data[:, :, row, :length], expected)
            assert_near(output.hidden[row, :length], outputs[0].hidden[row, :length])


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_cache_after_a_commit_equals_a_fresh_prefill(family, generator):
    target = Target(build_model(family))
    prompts = random_prompts(generator, [11, 6])
    tree_tokens = random_tree(generator, 2)
    path = torch.tensor([[0, 1, 4, 7], [0, 2, 5, -1]], dtype=torch.int32)
    assert [TREE.parent[node] for node in (1, 4, 7, 2, 5)] == [0, 1, 4, 0, 2]
    num_accepted = torch.tensor([3, 2], dtype=torch.int32)
    _, _, cache = score(target, prompts, tree_tokens)
    cache.commit(path, num_accepted)
    with torch.no_grad(), target.hooked():
        for row, prompt in enumerate(prompts):
            kept = path[row, : int(num_accepted[row]) + 1].long()
            text = torch.cat((prompt, tree_tokens[row, kept]))[None]
            fresh = target.new_cache(1, 40)
            target.prefill(text, torch.tensor([text.shape[1]], dtype=torch.int32), fresh)
            length = int(cache.lengths[row])
            assert length == text.shape[1]
            assert_near(cache.data[:, :, row, :length], fresh.data[:, :, 0, :length])


def test_states_are_those_of_the_model(generator):
    model = build_model("llama")
    target = Target(model, tap_layers=(0, 2))
    (prompt,) = random_prompts(generator, [9])
    with torch.no_grad():
        states = model(prompt[None], output_hidden_states=True, use_cache=False).hidden_states
        with target.hooked():
            cache = target.new_cache(1, 20)
            output = target.prefill(prompt[None], torch.tensor([9], dtype=torch.int32), cache)
    assert_near(output.hidden, states[-1])  # after the final norm
    assert_near(output.taps[0], states[1])  # output of layer 0
    assert Target(model, tap_layers=(2,)).tap([0, 2]) == [1, 0], "places that were given out stay"
    assert output.taps[1].shape == states[-1].shape
    assert_near(model.model.norm(output.taps[1]), states[-1])


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_tap_of_minus_one_is_what_enters_the_first_layer(family, fused, generator):
    model = build_model(family)
    target = Target(model, tap_layers=(1, -1), fused=fused)
    (prompt,) = random_prompts(generator, [9])
    with torch.no_grad():
        states = model(prompt[None], output_hidden_states=True, use_cache=False).hidden_states
        with target.hooked():
            cache = target.new_cache(1, 20)
            read = target.prefill(prompt[None, :8], torch.tensor([8], dtype=torch.int32), cache)
            nodes = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.int32)
            scored = target.score(prompt[None, 8:], *nodes, cache)
    for output, place in ((read, slice(0, 8)), (scored, slice(8, 9))):
        assert torch.equal(output.taps[1], states[0][:, place])
        assert_near(output.taps[0], states[2][:, place])


def snapshot(model):
    modes = {name: module.training for name, module in model.named_modules()}
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return model.config._attn_implementation, modes, hooks, set(vars(model))


@pytest.mark.parametrize("ending", [None, RuntimeError, KeyboardInterrupt])
def test_the_model_is_restored_whatever_ends_the_block(ending, generator):
    model = build_model("llama")
    model.train()
    model.model.layers[1].eval()
    before = snapshot(model)
    target = Target(model, tap_layers=(1,))

    with nullcontext() if ending is None else pytest.raises(ending), target.hooked():
        assert not model.training
        cache = target.new_cache(1, 8)
        with torch.no_grad():
            target.prefill(torch.ones(1, 4, dtype=torch.int64), torch.tensor([4], dtype=torch.int32), cache)
        if ending is not None:
            raise ending
    assert snapshot(model) == before


def test_nested_hooks_restore_the_outer_state_last():
    model = build_model("llama")
    target = Target(model)
    before = snapshot(model)
    with target.hooked():
        with Target(model).hooked():
            assert model.config._attn_implementation == "specdec"
        assert model.config._attn_implementation == "specdec"
    assert snapshot(model) == before


class Int8Linear(nn.Module):
    """A linear layer whose weight is stored as int8 and a scale per row, as quantizing libraries put in."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = nn.Parameter(linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("packed", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, self.packed.to(x.dtype) * self.scale)


def test_quantized_linears_are_used_as_they_are(generator):
    model = build_model("llama")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    target = Target(model)
    (prompt,) = random_prompts(generator, [9])
    with torch.no_grad():
        expected = full_forward(model, prompt)[-1]
        with target.hooked():
            lengths = torch.tensor([9], dtype=torch.int32)
            logits = target.prefill(prompt[None], lengths, target.new_cache(1, 12)).logits[0]
    assert_near(logits, expected)
    assert all(isinstance(layer.self_attn.q_proj, Int8Linear) for layer in model.model.layers)


def test_a_hooked_model_refuses_foreign_calls():
    model = build_model("llama")
    with Target(model).hooked(), pytest.raises(RuntimeError, match="hooked by specdec"):
        model(torch.ones(1, 3, dtype=torch.int64))


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_every_listed_family_is_tested():
    assert {build_model(family).config.model_type for family in FAMILIES} == set(families.FAMILIES)


def test_unlisted_families_are_compared_with_their_own_forward():
    config = GPTNeoXConfig(**SMALL)
    Target(GPTNeoXForCausalLM(config))
    Target(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)))

    class Shifted(GPTNeoXForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            if "specdec_pass" in kwargs:
                output.logits = output.logits + 0.1
            return output

    with pytest.raises(NotImplementedError, match="gpt_neox family is not supported.*differ"):
        Target(Shifted(config))


def test_refuses_what_it_cannot_hook():
    with pytest.raises(TypeError, match="model: expected a transformers causal LM, got str"):
        Target("gpt2")
    with pytest.raises(TypeError, match="got Linear"):
        Target(nn.Linear(2, 2))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4))
    with pytest.raises(ValueError, match="model: expected a decoder-only model, got the encoder-decoder T5"):
        Target(t5)
    with pytest.raises(ValueError, match="expected a model with an LM head, got LlamaModel"):
        Target(LlamaModel(LlamaConfig(**SMALL)))
    with pytest.raises(NotImplementedError, match="gemma2 family"):
        Target(Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, num_key_value_heads=2)))
    longrope = {"rope_type": "longrope", "factor": 4.0, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    longrope |= {"rope_theta": 1e4, "original_max_position_embeddings": 32}
    with pytest.raises(NotImplementedError, match="rotary embeddings of the type longrope, which change"):
        Target(LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=longrope)))
    split = build_model("llama")
    split.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="model: expected all parameters on one device, got cpu, meta"):
        Target(split)
    with pytest.raises(ValueError, match="tap_layers: expected layers between 0 and 2, .* got \\[3\\]"):
        Target(build_model("llama"), tap_layers=(3,))


def test_a_head_that_tells_no_sizes_is_called_as_it_is(generator):
    """As layers of quantisers may be."""

    class Head(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, states):
            return self.linear(states)

    model, prompts = build_model("llama"), random_prompts(generator, [7])
    expected = specdec.generate(model, None, prompts[0][None], max_new_tokens=6)
    model.lm_head = Head(model.lm_head)
    assert torch.equal(specdec.generate(model, "prompt_lookup", prompts[0][None], max_new_tokens=6), expected)


def test_layers_of_different_sizes_are_refused():
    gemma4 = pytest.importorskip("transformers.models.gemma4")
    model = gemma4.Gemma4ForCausalLM(gemma4.Gemma4TextConfig(**SMALL, head_dim=8, num_key_value_heads=2))
    with pytest.raises(NotImplementedError, match="Gemma4ForCausalLM has layers of different sizes"):
        Target(model)


def test_trained_prompts_of_peft_are_refused():
    model = build_model("llama")
    model.active_peft_config = SimpleNamespace(is_prompt_learning=False)
    Target(model)
    model.active_peft_config.is_prompt_learning = True
    with pytest.raises(NotImplementedError, match=r"puts trained states before the text \(PEFT prompt learning\)"):
        Target(model)
