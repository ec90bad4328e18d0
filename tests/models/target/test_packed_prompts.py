"""Prompts of a batch read without their padding leave what they leave with it."""

import pytest
import torch

from lib.families import FAMILIES, build_model
from specdec.models.target import target as module
from specdec.models.target.target import Target

LENGTHS = [3, 17, 1, 9]


def read(target, monkeypatch, share, chunk_size):
    """All chunks and the cache, with padding left out where less than `share` of a chunk is real."""
    monkeypatch.setattr(module, "_WORTH_PACKING", share)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.vocab_size, (len(LENGTHS), max(LENGTHS)), generator=generator)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    cache = target.new_cache(len(LENGTHS), max(LENGTHS) + 2)
    with torch.inference_mode(), target.hooked():
        chunks = list(target.prefill_chunks(tokens, lengths, cache, chunk_size=chunk_size))
        logits = chunks[-1].logits
    return chunks, logits, cache


@pytest.mark.parametrize("chunk_size", [5, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_taps_and_caches_are_those_of_padded_prompts(family, chunk_size, monkeypatch):
    target = Target(build_model(family), tap_layers=(-1, 0))
    packed, logits, cache = read(target, monkeypatch, 2.0, chunk_size)
    padded, expected, other = read(target, monkeypatch, -1.0, chunk_size)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(cache.lengths, other.lengths)
    for row, length in enumerate(LENGTHS):
        held = slice(0, length)
        torch.testing.assert_close(cache.data[:, :, row, held], other.data[:, :, row, held], atol=2e-5, rtol=1e-4)
        for one, two in zip(packed, padded, strict=True):
            real = slice(0, max(0, length - one.first))
            for states, others in zip((one.hidden, *one.taps), (two.hidden, *two.taps), strict=True):
                assert states.shape == others.shape
                torch.testing.assert_close(states[row, real], others[row, real], atol=2e-5, rtol=1e-4)


def test_only_chunks_with_padding_are_packed(monkeypatch):
    target = Target(build_model("llama"))
    shapes, forward = [], Target._forward

    def noted(self, tokens, *args):
        shapes.append(list(tokens.shape))
        return forward(self, tokens, *args)

    monkeypatch.setattr(Target, "_forward", noted)
    read(target, monkeypatch, module._WORTH_PACKING, 5)
    # 4 rows of 5 places: 14 tokens are real; then those of two rows; then those of the longest
    assert shapes == [[1, 14], [1, 9], [1, 5], [1, 2]]
    shapes.clear()
    monkeypatch.setattr("test_packed_prompts.LENGTHS", [6, 6, 6, 6])
    read(target, monkeypatch, 0.8, 64)
    assert shapes == [[4, 6]]
