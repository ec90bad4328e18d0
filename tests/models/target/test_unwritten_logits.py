"""Greedy decoding without logits: the same tokens, no logits written, NaN found; and logits where they are needed."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from lib.families import FAMILIES, build_model, random_prompts
from lib.recorder import Recorder, references_as_kernels
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.weightless.lookahead import Lookahead
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.loop.decoder import Decoder
from specdec.loop.processing import Processing
from specdec.loop.step import NonFiniteLogitsError
from specdec.models.common import lm_heads
from specdec.models.common.lm_heads import LMHeads
from specdec.models.target.scores import Scores
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape

pytestmark = pytest.mark.interpreter

VOCAB_SIZE = 131  # more than one tile of the kernel, and no other size of the model


def tiny_model():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, initializer_range=0.3, **sizes)).eval()


def decoder_of(model, **settings):
    return Decoder(Target(model, **settings), PromptLookup(num_draft_tokens=3))


class Written(TorchDispatchMode):
    """The operators with a result of V columns; those of this package's kernels are none."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        shapes = [value.shape for value in tree_leaves(out) if isinstance(value, torch.Tensor)]
        self.names += [str(func) for shape in shapes if shape and shape[-1] == VOCAB_SIZE]
        return out


def custom_processing():
    """Settings that do nothing in the end, which nobody can know."""
    config = GenerationConfig(bad_words_ids=[[1, 2, 3, 4, 5, 6, 7]])
    return Processing(config, do_sample=False, prompt_lengths=[6], max_new_tokens=4, width=6)


def test_a_greedy_step_writes_no_logits_on_triton(device):
    model = tiny_model().to(device)
    prompt = torch.tensor([5, 9, 11, 5, 9, 11])
    expected = decoder_of(model, backend="reference" if device == "cpu" else None).decode([prompt], 4)
    decoder = decoder_of(model, backend="triton")
    with Written() as written:
        tokens = decoder.decode([prompt], 4).tokens
    assert written.names == []
    assert tokens == expected.tokens
    with written:
        assert decoder.decode([prompt], 4, on_step=lambda report: None, reads_logits=False).tokens == tokens
    assert written.names == []
    recorder = Recorder()
    captured = Decoder(decoder.target, PromptLookup(num_draft_tokens=3), capture=recorder)
    assert captured.decode([prompt], 4, on_step=lambda report: None, reads_logits=False).tokens == tokens
    (recording,) = recorder.recordings
    results = [value for call in recording.calls for value in tree_leaves(call[-1]) if isinstance(value, torch.Tensor)]
    assert results
    assert all(not value.ndim or value.shape[-1] != VOCAB_SIZE for value in results)
    for settings in ({"on_step": lambda report: None}, {"processing": custom_processing()}):
        with Written() as written:
            assert decoder.decode([prompt], 4, **settings).tokens == tokens
        assert written.names


DRAFTERS = {
    "none": lambda family: None,
    "lookahead": lambda family: Lookahead(),
    "draft_model": lambda family: DraftModel(build_model(family, seed=1), TreeShape.from_k_config((2, 1))),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_written_logits(family, kind, generator, monkeypatch):
    model, prompts = build_model(family), random_prompts(generator, [7, 3, 12])
    expected = Decoder(model, DRAFTERS[kind](family)).decode(prompts, 20).tokens
    references_as_kernels(monkeypatch)
    decoder = Decoder(Target(model, backend="triton"), DRAFTERS[kind](family))
    written = decoder.decode(prompts, 20, on_step=lambda report: None)
    assert written.tokens == expected
    monkeypatch.setattr(nn.Linear, "forward", without_head(model.get_output_embeddings()))
    assert decoder.decode(prompts, 20).tokens == expected


def without_head(head, forward=nn.Linear.forward):
    def call(self, x):
        assert self is not head, "the LM head ran as a module"
        return forward(self, x)

    return call


@pytest.mark.parametrize("backend", ["reference", "triton", None])
@torch.no_grad()
def test_equal_logits_go_to_the_lowest_token_and_nan_is_found_in_its_row(backend, generator):
    head = nn.Linear(4, 300, bias=False)
    head.weight.data = torch.randint(-1, 2, (300, 4), generator=generator).float()
    states = torch.randint(-1, 2, (3, 5, 4), generator=generator).float()
    logits = head(states)
    assert ((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).any()
    lowest = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    states[1, 3, 0] = torch.nan
    for scores in (Scores(LMHeads.of(head, backend=backend), states), Scores.of(head(states))):
        assert scores.has_nan.any(1).tolist() == [False, True, False]
        assert torch.equal(scores.best[::2].long(), lowest[::2])
        assert scores.best.dtype == torch.int32
        torch.testing.assert_close(scores.logits, head(states), equal_nan=True)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_nan_is_an_error_that_names_the_step(backend, generator, monkeypatch):
    model, prompts = build_model("llama"), random_prompts(generator, [5, 8])
    if backend == "triton":
        references_as_kernels(monkeypatch)
    decoder = decoder_of(model, backend=backend)
    steps = []

    def poison(report):
        steps.append(report)
        if len(steps) == 3:  # prefill and two steps
            model.lm_head.weight.data[17, 0] = torch.nan

    with pytest.raises(NonFiniteLogitsError, match="got NaN at step 3"):
        decoder.decode(prompts, 20, on_step=poison, reads_logits=False)
    with pytest.raises(NonFiniteLogitsError, match=r"got NaN while the prompt was run \(step 0\)"):
        decoder.decode(prompts, 20)


def count_calls(module):
    calls = []
    module.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    return calls


@torch.no_grad()
def test_the_head_runs_when_it_is_asked_for_and_once(generator):
    model = build_model("llama")
    calls = count_calls(model.lm_head)
    target = Target(model)
    (prompt,) = random_prompts(generator, [11])
    cache, depth = target.new_cache(1, 14), torch.tensor([[0, 1, 1]], dtype=torch.int32)
    with target.hooked():
        prefill = target.prefill(prompt[None], torch.tensor([11], dtype=torch.int32), cache, chunk_size=4)
        output = target.score(prompt[None, :3], depth, torch.tensor([[[1], [3], [5]]], dtype=torch.int32), cache)
        assert calls == []
        for _ in range(2):
            assert output.logits.shape == (1, 3, 96)
            assert prefill.logits.shape == (1, 96)
    assert calls == [(1, 3, 96), (1, 1, 96)]


class Inverted(LlamaForCausalLM):
    """Of a checked family by its config, and still with a forward pass of its own."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits
        return output


def inverts(module, args, output):
    output.logits = -output.logits
    return output


def other_class(model):
    model.__class__ = Inverted


def other_forward(model):
    own = model.forward
    model.forward = lambda *args, **kwargs: inverts(None, None, own(*args, **kwargs))


def hook(model):
    model.register_forward_hook(inverts)


def compiled(model):
    model._compiled_call_impl = lambda *args, **kwargs: inverts(None, None, model.forward(*args, **kwargs))


def hooked_head(model):
    model.lm_head.register_forward_hook(lambda module, args, output: -output)


@pytest.mark.parametrize("change", [other_class, other_forward, hook, compiled, hooked_head])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_what_a_model_makes_of_its_logits_counts(change, backend, generator, monkeypatch):
    model, (prompt,) = build_model("llama"), random_prompts(generator, [6])
    plain = decoder_of(model, backend="reference").decode([prompt], 8).tokens[0]
    change(model)
    text = prompt
    with torch.no_grad():
        for _ in range(8):
            text = torch.cat((text, model(text[None], use_cache=False).logits[0, -1:].argmax(-1)))
    if backend == "triton":
        references_as_kernels(monkeypatch)
        monkeypatch.setattr(lm_heads, "lm_head_topk", None)  # would fail if it was called
    assert decoder_of(model, backend=backend).decode([prompt], 8).tokens[0] == text[6:].tolist() != plain
