"""specdec.kernels.common.words: sets of nodes as bits of int32 words."""

import pytest
import torch

from specdec.kernels.common.words import pack_words, unpack_words


@pytest.mark.parametrize("num_bits", [1, 31, 32, 33, 64, 70])
def test_bit_j_lies_in_word_j_over_32(num_bits, device):
    words = pack_words(torch.eye(num_bits, dtype=torch.bool, device=device)).tolist()

    for j, row in enumerate(words):
        assert [word & 0xFFFFFFFF for word in row] == [1 << j % 32 if w == j // 32 else 0 for w in range(len(row))]
    assert len(words[0]) == (num_bits + 31) // 32


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 3, 33), (2, 0), (96,)])
def test_what_was_packed_is_unpacked(shape, generator, device):
    seen = (torch.rand(shape, generator=generator) < 0.5).to(device)
    words = pack_words(seen)

    assert words.dtype == torch.int32
    assert words.shape == (*shape[:-1], (shape[-1] + 31) // 32)
    assert torch.equal(unpack_words(words, shape[-1]), seen)


def test_a_view_is_packed_as_its_copy(generator, device):
    seen = (torch.rand(3, 40, 40, generator=generator) < 0.5).to(device)

    assert torch.equal(pack_words(seen.mT[:, ::2]), pack_words(seen.mT[:, ::2].contiguous()))
