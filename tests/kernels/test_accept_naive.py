"""kernels.accept_naive against its eager reference, and its emitted law against the target's."""

import itertools
import math

import pytest
import torch

from lib.laws import (
    NUM_TREES,
    assert_same,
    assert_sample_has_law,
    cell_middles,
    random_logits,
)
from lib.tensors import DEVICE, int32
from specdec.kernels.accept_naive import accept_naive
from specdec.kernels.common.primitives import tiles_config
from specdec.kernels.reference.accept_greedy import accept_greedy as greedy_reference
from specdec.kernels.reference.accept_naive import accept_naive as reference


def test_draws_from_every_tile(generator):
    logits = torch.randn(1, 30, 9000, generator=generator).to(DEVICE)
    uniform = ((torch.arange(30) + torch.rand(30, generator=generator)) / 30).to(DEVICE)
    call = int32([[0]]).expand(30, -1), int32([[-1]]), logits.view(30, 1, -1), uniform[:, None]
    expected = reference(*call, max_depth=0)
    assert (expected.next_root // 4096).unique().tolist() == [0, 1, 2]
    assert_same(accept_naive(*call, max_depth=0, backend="triton"), expected)


# The law: a tree of four nodes, 0 - 1 - 3 and 0 - 2, over three tokens. A node's law depends on its path.
LAW_PARENT = [[-1, 0, 0, 1]]
LAW_TOKENS = [9, 0, 2, 1]
LAW_PROBS = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.7, 0.1, 0.2]], dtype=torch.float64)
NODE_BEHIND = {(): 0, (0,): 1, (2,): 2, (0, 1): 3}


def all_cells():
    """Uniforms for every combination of the nodes' draws, and the probability of each combination."""
    middles = cell_middles(LAW_PROBS)
    draws = torch.tensor(list(itertools.product(range(3), repeat=4)))
    nodes = torch.arange(4)
    return middles[nodes, draws], LAW_PROBS[nodes, draws].prod(1)


def assert_emits_the_target_law(emitted, weights):
    """Sum over all cells: P(a token | the tokens before it) is the target's, for each prefix that the tree has."""
    for prefix, node in NODE_BEHIND.items():
        law = torch.zeros(3, dtype=torch.float64)
        for row, weight in zip(emitted.tolist(), weights, strict=True):
            if tuple(row[: len(prefix)]) == prefix and len(row) > len(prefix) and row[len(prefix)] >= 0:
                law[row[len(prefix)]] += weight
        chance = math.prod(LAW_PROBS[NODE_BEHIND[prefix[:d]], token].item() for d, token in enumerate(prefix))
        torch.testing.assert_close(law, chance * LAW_PROBS[node], rtol=0, atol=1e-12)


def law_call(uniform, dtype):
    batch = uniform.shape[0]
    tokens = int32([LAW_TOKENS] * batch)
    logits = LAW_PROBS.log().to(dtype).to(DEVICE).expand(batch, -1, -1)
    return tokens, int32(LAW_PARENT), logits, uniform.to(dtype).to(DEVICE)


def test_emits_exactly_the_target_law():
    uniform, weights = all_cells()
    verdict = reference(*law_call(uniform, torch.float64), max_depth=2)
    assert_emits_the_target_law(verdict.emitted, weights)
    assert_same(accept_naive(*law_call(uniform, torch.float32), max_depth=2, backend="triton"), verdict)


def test_the_cells_of_the_law_have_their_size():
    """The law above takes every cell as one draw; here both sides of every border are drawn."""
    borders = LAW_PROBS.cumsum(-1)[:, :2]
    for dtype, step in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        accept = reference if dtype == torch.float64 else accept_naive
        backend = {} if dtype == torch.float64 else {"backend": "triton"}
        for token, side in itertools.product(range(2), (-1, 1)):
            uniform = (borders[:, token] + side * step)[None]
            call = law_call(uniform, dtype)
            drawn = int32([[token + (side > 0)] * 4])
            assert_same(accept(*call, max_depth=2, **backend), greedy_reference(call[0], call[1], drawn, max_depth=2))


def test_the_law_test_rejects_a_wrong_rule():
    """Accepting any child whose token is at least as probable as the draw looks alike, and is not lossless."""
    uniform, weights = all_cells()
    tokens, parent, logits, uniform = law_call(uniform, torch.float64)
    drawn = (logits.softmax(-1).cumsum(-1) > uniform[..., None]).int().argmax(-1)
    p = logits.softmax(-1)
    for node, child in ((0, 1), (1, 3)):
        takes = p[:, node, LAW_TOKENS[child]] >= p[:, node].gather(1, drawn[:, node, None])[:, 0]
        drawn[:, node] = torch.where(takes, LAW_TOKENS[child], drawn[:, node])
    verdict = greedy_reference(tokens, parent, drawn.int(), max_depth=2)
    with pytest.raises(AssertionError):
        assert_emits_the_target_law(verdict.emitted, weights)


@pytest.mark.parametrize("accept", ["reference", "triton"])
def test_a_sample_of_a_larger_vocabulary_has_the_target_law(generator, accept):
    num_rows = 20000 if accept == "reference" else 10 * NUM_TREES
    vocab = 200 if accept == "reference" else 8
    logits = random_logits(generator, 1, 2, vocab) / 2  # so that more than one token is likely
    call = (
        int32([[0, 1]]).expand(num_rows, -1),
        int32([[-1, 0]]),
        logits.expand(num_rows, -1, -1),
        torch.rand(num_rows, 2, generator=generator).to(DEVICE),
    )
    verdict = (
        reference(*call, max_depth=1) if accept == "reference" else accept_naive(*call, max_depth=1, backend=accept)
    )
    probs = logits[0].double().softmax(-1)
    assert_sample_has_law(verdict.emitted[:, 0], probs[0])
    assert_sample_has_law(verdict.emitted[verdict.num_accepted == 1, 1], probs[1])
    with pytest.raises(AssertionError, match="chi-square"):
        assert_sample_has_law(verdict.emitted[:, 0], (probs[0] ** 0.5) / (probs[0] ** 0.5).sum())


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24, 1.0])
def test_impossible_tokens_are_never_drawn(uniform):
    logits = torch.full((1, 1, 5000), float("-inf"), device=DEVICE)
    logits[0, 0, 40], logits[0, 0, 4500] = 0.0, 1.0
    call = int32([[0]]), int32([[-1]]), logits, torch.full((1, 1), uniform, device=DEVICE)
    for accept, kwargs in ((accept_naive, {"backend": "triton"}), (reference, {})):
        assert accept(*call, max_depth=0, **kwargs).next_root.item() == (40 if uniform == 0 else 4500)


def test_nan_counts_as_impossible_and_an_empty_row_yields_a_token():
    logits = torch.full((2, 1, 6), float("nan"), device=DEVICE)
    logits[0, 0, 3] = 1.0
    call = int32([[0], [0]]), int32([[-1]]), logits, torch.full((2, 1), 0.5, device=DEVICE)
    for accept, kwargs in ((accept_naive, {"backend": "triton"}), (reference, {})):
        assert accept(*call, max_depth=0, **kwargs).next_root.tolist() == [3, 0]


@pytest.mark.parametrize(
    ("vocab_size", "num_tiles", "block_t", "block_v", "num_warps"),
    [(1, 1, 1, 1, 1), (300, 1, 1, 512, 2), (4096, 1, 1, 4096, 4), (32000, 8, 8, 4096, 4), (128256, 32, 32, 4096, 4)],
)
def test_tiles_depend_on_the_vocabulary_alone(vocab_size, num_tiles, block_t, block_v, num_warps):
    config = tiles_config(vocab_size)
    assert config.blocks == {"NUM_TILES": num_tiles, "BLOCK_T": block_t, "BLOCK_V": block_v}
    assert config.num_warps == num_warps
