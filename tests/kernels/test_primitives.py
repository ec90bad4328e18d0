"""kernels.primitives: the statistics that all acceptance kernels stand on."""

import pytest
import torch

from lib.laws import random_logits
from lib.tensors import int32
from lib.tiles import torch_tiles
from specdec.kernels.common.primitives import softmax_tiles, tiles_config


@pytest.mark.parametrize("moment", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 4096, 9000])
def test_statistics_of_tiles(generator, vocab, dtype, moment):
    logits = random_logits(generator, 3, 2, vocab, dtype=dtype)
    logits[0, 0, ::3] = float("nan")
    logits[0, 1, :4000] = float("-inf")
    config = tiles_config(vocab)
    settings = {"budget": int32([2, 0, 1]), "moment": moment}
    got, expected = softmax_tiles(logits, config, **settings), torch_tiles(logits, config, **settings)
    assert (got[2] is None) is (not moment)
    for a, b in zip(got, expected, strict=True):
        if b is not None:
            assert a.shape == (3, 2, config.blocks["NUM_TILES"])
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_finished_request_is_not_read(generator):
    logits = random_logits(generator, 2, 1, 50)
    largest, total, _ = softmax_tiles(logits, tiles_config(50), budget=int32([0, -1]))
    assert largest.tolist() == [[[float("-inf")]]] * 2
    assert total.tolist() == [[[0.0]]] * 2
