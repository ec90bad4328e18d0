"""Prompts in chunks: the same text, and no memory that grows with them beside the cache."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig

import specdec
from lib.drafter_cases import KINDS, SHAPES
from lib.drafter_cases import make_drafter as around
from lib.families import HIDDEN_SIZE, build_model
from lib.law_drafters import DRAFTERS, LEARNING, VOCAB_SIZE, build_target, make_drafter
from lib.recorder import Recorder, storages
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.loop.decoder import Decoder
from specdec.loop.rules import choose_rule
from specdec.loop.step import Generation
from specdec.models.common.passes import PromptPass
from specdec.trees.shape import TreeShape

LENGTHS = [13, 1, 6, 12, 3]  # the last tokens lie in several chunks, at the ends and beginnings of some


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_chunks_give_the_text_of_one_piece(kind, sampling, generator):
    prompts = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    drafter = make_drafter(kind)
    decoder = Decoder(build_target(), drafter, acceptance=choose_rule("auto", drafter, do_sample=sampling))
    whole = decoder.decode(prompts, 12, seed=4)
    for chunk_size in (1, 3, 6, 12):
        chunked = decoder.decode(prompts, 12, seed=4, prefill_chunk_size=chunk_size)
        assert chunked.tokens == whole.tokens
        assert kind in LEARNING or chunked.stats.num_emitted == whole.stats.num_emitted


class Peak(TorchDispatchMode):
    """Most bytes of tensors that were made while it was active and lived at the same time."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = storages((args, kwargs))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                self.alive[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())
        living = {key: storage() for key, storage in self.alive.items()}
        self.alive = {key: self.alive[key] for key, storage in living.items() if storage is not None}
        self.num_bytes = max(self.num_bytes, sum(storage.nbytes() for storage in living.values() if storage))
        return out


def prefill_bytes(decoder, monkeypatch, length, **settings):
    """What a prompt of this length takes beside the memory that was laid out for it."""
    begin, peak = Generation.begin, Peak()

    def measured(*args, **kwargs):
        with peak:
            return begin(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Generation, "begin", measured)
        decoder.decode([torch.arange(length) % 50], 2, **settings)
    return peak.num_bytes


@pytest.mark.parametrize("kind", [*KINDS, "draft_model", "prompt_lookup"])
def test_a_long_prompt_takes_no_more_memory_than_a_short_one_beside_the_cache(kind, monkeypatch):
    model = build_model("llama")
    decoder = Decoder(model, make(kind))
    short, long = (prefill_bytes(decoder, monkeypatch, length, prefill_chunk_size=8) for length in (80, 240))
    state_bytes = 4 * HIDDEN_SIZE  # what is left are masks and the tokens themselves
    assert long - short < state_bytes / 2 * (240 - 80)
    assert prefill_bytes(decoder, monkeypatch, 240) - short > 4 * state_bytes * (240 - 80), "the measure sees nothing"


@pytest.mark.parametrize("capture", [False, Recorder()], ids=["eager", "captured"])
def test_a_lack_of_memory_in_a_chunk_names_the_size_to_lower(capture, monkeypatch):
    decoder = Decoder(build_model("llama"), capture=capture)
    expected = decoder.decode([torch.arange(20)], 4).tokens

    def full(self, query, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    match = (
        r"memory: expected .* GiB on cpu .*, got CUDA out of memory.*; lower prefill_chunk_size \(here 6 tokens of 1"
    )
    with monkeypatch.context() as patch:
        patch.setattr(PromptPass, "attend", full)
        with pytest.raises(torch.OutOfMemoryError, match=match):
            decoder.decode([torch.arange(20)], 4, prefill_chunk_size=6)
    assert decoder.target.model.config._attn_implementation != "specdec"
    assert decoder.decode([torch.arange(20)], 4, prefill_chunk_size=6).tokens == expected


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_of_chunks_below_one_are_refused(size):
    match = f"prefill_chunk_size: expected (an int of )?at least 1, got {size}"
    with pytest.raises(ValueError, match=match):
        Decoder(build_model("llama")).decode([torch.arange(20)], 4, prefill_chunk_size=size)
    with pytest.raises(ValueError, match=match):
        specdec.generate(build_model("llama"), None, torch.tensor([[1, 2]]), prefill_chunk_size=size)


def test_generate_takes_the_size_of_chunks_as_transformers_does(monkeypatch):
    sizes, attend = [], PromptPass.attend

    def noting(self, *args, **kwargs):
        sizes.append(self.num_tokens)
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(PromptPass, "attend", noting)
    model, ids = build_model("llama"), torch.arange(1, 21)[None]
    for settings in ({"prefill_chunk_size": 8}, {"generation_config": GenerationConfig(prefill_chunk_size=8)}):
        sizes.clear()
        specdec.generate(model, None, ids, max_new_tokens=2, **settings)
        assert sizes == [8] * 3 + [8] * 3 + [4] * 3


def make(kind):
    if kind == "draft_model":
        return DraftModel(build_model("llama", seed=1), TreeShape.chain(2))
    return PromptLookup() if kind == "prompt_lookup" else around(kind, SHAPES["chain"])
