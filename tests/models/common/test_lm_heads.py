"""models.lm_heads: the best tokens by the kernel are those of the logits, and equal logits go to the lower token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from specdec.drafting.candidates import Best, choose_from
from specdec.kernels.reference.lm_head_topk import lm_head_topk as reference
from specdec.models.common import lm_heads
from specdec.models.common.lm_heads import LMHeads, best_of

BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.interpreter), None]


def whole(generator, *shape):
    """Small whole numbers: every sum of products is exact, and ties are everywhere."""
    return torch.randint(-2, 3, shape, generator=generator).float()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([0.5, 3.0, 1000.0]), st.booleans())
def test_best_of_keeps_the_order_of_a_stable_sort(seed, vocab_size, scale, is_half):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(2, 3, vocab_size, generator=generator)).round()
    odd = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0])[torch.randint(5, logits.shape, generator=generator)]
    logits = torch.where(torch.rand(logits.shape, generator=generator) < 0.2, odd, logits)
    logits = logits.half() if is_half else logits
    before = logits.clone()
    clean = logits.float().masked_fill(logits.isnan(), -math.inf) + 0.0
    order = torch.sort(clean, dim=-1, descending=True, stable=True).indices
    for k in {1, (vocab_size + 1) // 2, vocab_size}:
        assert torch.equal(best_of(logits, k), order[..., :k])
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


def heads_of_every_kind(generator, num_lists, vocab_size, width, rank, backend):
    """LM heads by name, with the weight, the projection and the bias that define them."""
    weight = whole(generator, num_lists, vocab_size, width)
    low, down = whole(generator, num_lists, vocab_size, rank), whole(generator, num_lists, rank, width)
    module = nn.Linear(width, vocab_size, bias=False)
    module.weight.data = whole(generator, vocab_size, width)
    bias, biased = whole(generator, num_lists, vocab_size), nn.Linear(width, vocab_size)
    biased.weight.data, biased.bias.data = whole(generator, vocab_size, width), whole(generator, vocab_size)
    return {
        "own": (LMHeads(weight, backend=backend), weight, None, None),
        "low rank": (LMHeads(low, down, backend=backend), low, down, None),
        "own biases": (LMHeads(weight, bias=bias, backend=backend), weight, None, bias),
        "shared": (LMHeads.of(module, backend=backend), module.weight.detach()[None], None, None),
        "shared bias": (LMHeads.of(biased, backend=backend), biased.weight.detach()[None], None, biased.bias[None]),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_best_tokens_are_those_of_the_op_with_many_ties(backend, generator):
    states = whole(generator, 2, 3, 8)
    for heads, weight, down, bias in heads_of_every_kind(generator, 3, 300, 8, 4, backend).values():
        rows = states.transpose(0, 1)
        expected = reference(rows, weight, k=5, down=down, bias=bias)
        logits = ((rows if down is None else rows @ down.mT) @ weight.mT).transpose(0, 1)
        logits = logits if bias is None else logits + bias
        torch.testing.assert_close(heads.logits(states), logits)
        best = heads.best(states, 5)
        assert torch.equal(best.tokens, expected.tokens)
        assert torch.equal(heads.best_tokens(states, 5).int(), expected.tokens)
        assert torch.equal(choose_from(Best(), heads, states, 5).tokens.int(), expected.tokens)
        asked = choose_from(Best(with_logps=True), heads, states, 5)
        assert torch.equal(asked.tokens, expected.tokens)
        torch.testing.assert_close(asked.logps, logits.float().log_softmax(-1).gather(2, expected.tokens.long()))
        torch.testing.assert_close(best.values, expected.values)
        torch.testing.assert_close(best.logsumexp, expected.logsumexp)
        assert not best.has_nan.any()
        # a rule of another kind is given the logits
        seen = []
        choose_from(lambda logits, num_ranks, seen=seen: seen.append((logits, num_ranks)), heads, states, 5)
        torch.testing.assert_close(seen[0][0], logits)


class Doubling(nn.Linear):
    """A head of another class, as quantized ones are."""

    def forward(self, x):
        return 2 * super().forward(x)


def hooked(head):
    head.register_forward_hook(lambda module, args, output: output.flip(-1))
    return head


@pytest.mark.parametrize(
    "head",
    [Doubling(8, 40), hooked(nn.Linear(8, 40, bias=False)), nn.Linear(8, 40).double()],
    ids=["another class", "a hook", "another dtype"],
)
@torch.no_grad()
def test_a_head_that_is_no_plain_linear_is_called_as_it_is(head, generator, monkeypatch):
    monkeypatch.setattr(lm_heads, "lm_head_topk", None)  # would fail if it was called
    states = torch.randn(2, 3, 8, generator=generator).to(head.weight.dtype)
    heads = LMHeads.of(head, backend="triton" if head.weight.dtype == torch.float32 else None)
    assert torch.equal(heads.best_tokens(states, 4), head(states).topk(4).indices)
    assert torch.equal(heads.best(states, 4).tokens, head(states).topk(4).indices.int())


@torch.no_grad()
def test_more_tokens_than_the_kernel_returns(generator):
    heads = LMHeads(torch.randn(2, 60, 8, generator=generator), backend="triton")
    states = torch.randn(1, 2, 8, generator=generator)
    assert torch.equal(heads.best_tokens(states, 40), heads.logits(states).topk(40).indices)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [37, 40, 43], ids=["longer than wanted", "as wanted", "shorter than wanted"])
@torch.no_grad()
def test_a_vocabulary_padded_otherwise(vocab_size, backend, generator):
    """Tokens that the head lacks are never the best, and those beyond the wanted ones are not there."""
    module, states = nn.Linear(8, 40), torch.randn(2, 3, 8, generator=generator)
    module.bias.data[38] = 100.0
    heads = LMHeads.of(module, backend=backend).over(vocab_size)
    logits = nn.functional.pad(module(states), (0, vocab_size - 40), value=-math.inf)
    assert torch.equal(heads.logits(states), logits)
    k = min(vocab_size, 30)
    best = heads.best(states, k)
    assert torch.equal(best.tokens, logits.topk(k).indices.int())
    assert torch.equal(heads.best_tokens(states, k).int(), best.tokens)
    torch.testing.assert_close(best.logsumexp, logits.logsumexp(-1))


@pytest.mark.interpreter
@torch.no_grad()
def test_the_whole_of_a_short_vocabulary(generator):
    """More tokens are asked for than the head has: those that it lacks come last."""
    module, states = nn.Linear(8, 10), torch.randn(1, 2, 8, generator=generator)
    tokens = LMHeads.of(module, vocab_size=12, backend="triton").best_tokens(states, 12)
    assert torch.equal(tokens[..., :10], module(states).topk(10).indices)
    assert tokens[..., 10:].tolist() == [[[10, 11]] * 2]


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_logits_of_a_row_are_added_to_all_its_states(backend, generator):
    head = nn.Linear(8, 150, bias=False)
    head.weight.data = whole(generator, 150, 8)
    states, added = whole(generator, 2, 3, 8), whole(generator, 2, 4, 150)[:, 1]
    expected = head(states) + added[:, None]
    heads = LMHeads.of(head, backend=backend).adding(added)
    best = heads.best(states, 5)
    assert torch.equal(heads.logits(states), expected)
    for tokens in (best.tokens, heads.best_tokens(states, 5)):
        assert torch.equal(tokens.long(), best_of(expected, 5))
    assert torch.equal(best.values, expected.gather(2, best_of(expected, 5)))
    torch.testing.assert_close(best.logsumexp, expected.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert not best.has_nan.any()
