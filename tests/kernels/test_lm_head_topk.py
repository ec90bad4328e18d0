"""kernels.lm_head_topk against a stable sort, to the last tie, and against float64 where rounding comes in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, FLOATS, randn
from lib.tolerances import FLOOR, assert_close_to_reference
from specdec.kernels.lm_head_topk import MAX_K, _launch_config, _lm_head_merge_kernel, _merge_config, lm_head_topk
from specdec.kernels.reference.lm_head_topk import lm_head_topk as reference

INF, NAN = float("inf"), float("nan")
TINY = 2.0**-149  # half of it rounds to zero, with its sign

# numpy, under the interpreter, reports the infinities and NaNs that these tests are about
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def small_integers(generator, *shape):
    """Their products and sums are exact, and many of them are equal."""
    return torch.randint(-1, 2, shape, generator=generator).float().to(DEVICE)


def assert_same(best, expected):
    for field in ("values", "tokens", "has_nan"):
        got, want = getattr(best, field), getattr(expected, field)
        assert got.dtype == want.dtype
        assert torch.equal(got, want), f"{field}: {got.tolist()} is not {want.tolist()}"
    torch.testing.assert_close(best.logsumexp, expected.logsumexp)


def assert_right(x, weight, *, k, **options):
    """Values, log-sum-exp and the logits of the tokens that were taken, within rounding of float64."""
    best = lm_head_topk(x, weight, k=k, **options, backend="triton")
    vocab_size = weight.shape[1]
    expected = reference(x, weight, k=vocab_size, **options)
    eager = reference(x, weight, k=vocab_size, **options, upcast=False)
    scale = max(1.0, expected.values.abs().max().item())
    if options.get("down") is not None:  # the state between the two products is rounded to its dtype
        scale *= FLOOR[x.dtype] / FLOOR[torch.float32]
    exact, rounded = (all_logits(full).gather(2, best.tokens.long()) for full in (expected, eager))
    assert_close_to_reference(best.values, exact, rounded, scale=scale)
    assert_close_to_reference(best.values, expected.values[..., :k], eager.values[..., :k], scale=scale)
    assert_close_to_reference(best.logsumexp, expected.logsumexp, eager.logsumexp, scale=scale)
    assert not best.has_nan.any()
    assert (best.values.diff() <= 0).all()
    assert (best.tokens.sort().values.diff() > 0).all()


def all_logits(full):
    """[B, K, V], of a selection of the whole vocabulary."""
    return torch.empty_like(full.values).scatter(2, full.tokens.long(), full.values)


def head_of(logits):
    """One head of width 1 whose logits for the state 1 are the given ones."""
    weight = torch.tensor(logits, dtype=torch.float32, device=DEVICE)
    return torch.ones(1, 1, 1, device=DEVICE), weight[None, :, None]


HAND_CASES = {
    "equal values, lowest token first": ([1, 3, 2, 3, 3], 3, [3, 3, 3], [1, 3, 4], False),
    "all equal": ([0, 0, 0, 0], 3, [0, 0, 0], [0, 1, 2], False),
    "one token": ([5], 1, [5], [0], False),
    "negative values": ([-3, -1, -2], 2, [-1, -2], [1, 2], False),
    "infinities": ([0, INF, -INF, INF], 4, [INF, INF, 0, -INF], [1, 3, 0, 2], False),
    "all -inf": ([-INF, -INF, -INF], 2, [-INF, -INF], [0, 1], False),
    "NaN counts as -inf": ([NAN, 1, -INF, 0], 4, [1, 0, -INF, -INF], [1, 3, 0, 2], True),
    "all NaN": ([NAN, NAN], 2, [-INF, -INF], [0, 1], True),
}


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("case", HAND_CASES)
def test_logits_written_by_hand(case, backend):
    logits, k, values, tokens, has_nan = HAND_CASES[case]
    best = lm_head_topk(*head_of(logits), k=k, backend=backend)
    assert best.values.tolist() == [[values]]
    assert best.tokens.tolist() == [[tokens]]
    assert best.has_nan.tolist() == [[has_nan]]
    cleaned = torch.tensor([-INF if value != value else value for value in logits], device=DEVICE)
    torch.testing.assert_close(best.logsumexp[0, 0], torch.logsumexp(cleaned, dim=0))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_minus_zero_equals_zero(backend):
    # halves of the smallest numbers: -0.0, 0.0, -0.0, 0.0
    x, weight = head_of([-TINY, TINY, -TINY, TINY, -1.0])
    best = lm_head_topk(x / 2, weight, k=4, backend=backend)
    assert best.tokens.tolist() == [[[0, 1, 2, 3]]]
    assert best.values.tolist() == [[[0.0] * 4]]
    assert not torch.signbit(best.values).any()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_bias_written_by_hand(backend):
    """The same weight for two states; what the bias adds decides, also between equal products and before a NaN."""
    x, weight = head_of([3.0, 1.0, 1.0, 0.0])
    x = torch.cat([x, -x], 1)
    bias = torch.tensor([[0.0, 0.5, 2.5, -INF]], device=DEVICE)
    best = lm_head_topk(x, weight, k=4, bias=bias, backend=backend)
    assert best.values.tolist() == [[[3.5, 3.0, 1.5, -INF]], [[1.5, -0.5, -3.0, -INF]]]
    assert best.tokens.tolist() == [[[2, 0, 1, 3]], [[2, 1, 0, 3]]]
    logits = torch.tensor([[3.0, 1.5, 3.5, -INF], [-3.0, -0.5, 1.5, -INF]], device=DEVICE)
    torch.testing.assert_close(best.logsumexp[:, 0], logits.logsumexp(1))
    bias[0, 1] = NAN
    best = lm_head_topk(x, weight, k=2, bias=bias, backend=backend)
    assert best.tokens.tolist() == [[[2, 0]], [[2, 0]]]
    assert best.has_nan.all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_bias_is_added_before_the_rounding(backend):
    """2048 + 1 is no half, and goes to 2048, as a linear layer rounds; 2048 + 1 + 1 is one."""
    x = torch.ones(1, 1, 2, device=DEVICE, dtype=torch.float16)
    weight = torch.tensor([[[2048.0, 0.0], [2048.0, 1.0]]], device=DEVICE, dtype=torch.float16)
    bias = torch.ones(1, 2, device=DEVICE, dtype=torch.float16)
    best = lm_head_topk(x, weight, k=2, bias=bias, rounded=True, backend=backend)
    assert best.values.tolist() == [[[2050.0, 2048.0]]]
    exact = lm_head_topk(x, weight, k=2, bias=bias, backend=backend).values
    assert exact[0, 0, 0] == 2050.0
    assert exact[0, 0, 1] == 2049.0 or backend == "reference"  # whose products are rounded


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "batch", "width", "vocab_size", "k"),
    [
        (1, 1, 1, 1, 1),
        (2, 3, 33, 129, 5),
        (3, 1, 64, 300, 10),
        (1, 2, 100, 128, 32),
        (1, 20, 70, 140, 2),
        (2, 70, 16, 70, 1),
        (1, 130, 70, 140, 1),
        (2, 200, 9, 130, 1),
        (1, 140, 9, 130, 3),
    ],
)
def test_matches_float64(generator, num_heads, batch, width, vocab_size, k, dtype):
    x = randn(generator, num_heads, batch, width, dtype=dtype)
    weight = randn(generator, num_heads, vocab_size, width, dtype=dtype)
    assert_right(x, weight, k=k)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "shared weight"])
def test_low_rank_heads_match_float64(generator, shared, dtype):
    x, down = randn(generator, 2, 3, 70, dtype=dtype), randn(generator, 2, 20, 70, dtype=dtype)
    weight = randn(generator, 1 if shared else 2, 200, 20, dtype=dtype)
    assert_right(x, weight, k=6, down=down)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "shared weight"])
@pytest.mark.parametrize("rank", [None, 12], ids=["full rank", "low rank"])
def test_a_bias_matches_float64(generator, rank, shared, dtype):
    weights = 1 if shared else 2
    x, down = randn(generator, 2, 3, 70, dtype=dtype), rank and randn(generator, 2, rank, 70, dtype=dtype)
    weight = randn(generator, weights, 200, rank or 70, dtype=dtype)
    assert_right(x, weight, k=6, down=down, bias=randn(generator, weights, 200, dtype=dtype, scale=5.0))


# the interpreter cuts bfloat16 off, where a GPU rounds
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_rounded_logits_have_the_ties_of_a_linear_layer(generator, dtype):
    """Whole numbers of some thousands, which float32 holds and the dtype rounds to a few dozen values."""
    x = torch.randint(1, 20, (2, 3, 20), generator=generator).to(DEVICE, dtype)
    weight = torch.randint(1, 20, (2, 300, 20), generator=generator).to(DEVICE, dtype)
    best = lm_head_topk(x, weight, rounded=True, k=20, backend="triton")
    assert_same(best, reference(x, weight, rounded=True, k=20))
    linear = (x.float() @ weight.float().mT).to(dtype).transpose(0, 1).float()
    assert torch.equal(best.values, linear.gather(2, best.tokens.long()))
    one = lm_head_topk(x, weight, rounded=True, k=1, backend="triton")
    assert torch.equal(one.tokens[..., 0], linear.argmax(-1).int())
    exact = lm_head_topk(x, weight, k=20, backend="triton")
    assert not torch.equal(best.tokens, exact.tokens)


def test_low_rank_heads_take_more_rows_than_a_skinny_product(generator):
    x, down = small_integers(generator, 1, 130, 8), small_integers(generator, 1, 4, 8)
    weight = small_integers(generator, 1, 9, 4)
    best = lm_head_topk(x, weight, k=1, down=down, backend="triton")
    assert_same(best, reference(x, weight, k=1, down=down))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 4), st.integers(1, 400), st.data())
def test_heavy_ties_are_broken_as_a_stable_sort_breaks_them(seed, num_heads, batch, vocab_size, data):
    """Sums of few small integers: dozens of tokens share every value, and ties cross the tiles."""
    generator = torch.Generator().manual_seed(seed)
    width = data.draw(st.integers(1, 5))
    x = small_integers(generator, num_heads, batch, width)
    weight = small_integers(generator, data.draw(st.sampled_from([1, num_heads])), vocab_size, width)
    bias = small_integers(generator, *weight.shape[:2]) if data.draw(st.booleans()) else None
    k = data.draw(st.integers(1, min(MAX_K, vocab_size)))
    assert_same(lm_head_topk(x, weight, k=k, bias=bias, backend="triton"), reference(x, weight, k=k, bias=bias))


@settings(deadline=None, max_examples=25)
@given(
    pieces=st.lists(
        st.tuples(st.sampled_from([-INF, -1.5, -TINY, 0.0, TINY, 2.0, INF, NAN]), st.integers(1, 90)),
        min_size=1,
        max_size=8,
    ),
    data=st.data(),
)
def test_special_values_in_any_place(pieces, data):
    """Runs of equal special values, longer and shorter than a tile."""
    logits = [value for value, length in pieces for _ in range(length)]
    k = data.draw(st.integers(1, min(MAX_K, len(logits))))
    x, weight = head_of(logits)
    best = lm_head_topk(x, weight, k=k, backend="triton")
    assert_same(best, reference(x, weight, k=k, upcast=False))
    assert best.has_nan.item() == any(value != value for value in logits)
    assert not best.values.isnan().any()


@pytest.mark.parametrize("vocab_size", [127, 128, 129, 257])
def test_the_ends_of_tiles_are_tokens_like_others(vocab_size):
    for token in {0, 126, min(127, vocab_size - 1), min(128, vocab_size - 1), vocab_size - 1}:
        logits = [-1.0] * vocab_size
        logits[token] = 1.0
        best = lm_head_topk(*head_of(logits), k=2, backend="triton")
        assert best.tokens.tolist() == [[[token, 1 if token == 0 else 0]]]


def test_the_whole_selection_may_lie_in_one_tile():
    logits = [0.0] * 300
    logits[140:172] = range(32, 0, -1)
    best = lm_head_topk(*head_of(logits), k=32, backend="triton")
    assert best.tokens.tolist() == [[list(range(140, 172))]]


def test_a_nan_stays_in_its_row_and_token(generator):
    x, weight = small_integers(generator, 2, 3, 6), small_integers(generator, 2, 150, 6)
    clean = reference(x, weight, k=8)
    x[1, 2, 4] = NAN
    best = lm_head_topk(x, weight, k=8, backend="triton")
    assert best.has_nan.tolist() == [[False, False], [False, False], [False, True]]
    assert best.tokens[2, 1].tolist() == list(range(8))
    assert best.values[2, 1].tolist() == [-INF] * 8
    assert best.logsumexp[2, 1] == -INF
    others = ~best.has_nan
    assert torch.equal(best.tokens[others], clean.tokens[others])
    assert torch.equal(best.values[others], clean.values[others])

    x[1, 2, 4] = 0.0
    weight[0, 149, 0] = NAN
    best = lm_head_topk(x, weight, k=8, backend="triton")
    assert best.has_nan.tolist() == [[True, False]] * 3
    assert not (best.tokens[:, 0] == 149).any()
    assert_same(best, reference(x, weight, k=8))


def merge_of(logits, k):
    """The merge kernel alone, on logits [rows, V] and on statistics of their tiles from PyTorch."""
    num_rows, vocab_size = logits.shape
    num_tiles = -(-vocab_size // 128)
    padded = torch.nn.functional.pad(logits, (0, num_tiles * 128 - vocab_size), value=-INF).view(num_rows, -1, 128)
    tile_max = padded.amax(dim=-1)
    tile_token = (padded == tile_max[..., None]).int().argmax(dim=-1) + 128 * torch.arange(num_tiles, device=DEVICE)
    tile_sum = torch.nan_to_num(padded - tile_max[..., None], nan=-INF).exp().sum(dim=-1)
    values = torch.empty(num_rows, k, device=DEVICE)
    tokens = torch.empty(num_rows, k, dtype=torch.int32, device=DEVICE)
    logsumexp = torch.empty(num_rows, device=DEVICE)
    has_nan = torch.empty(num_rows, dtype=torch.bool, device=DEVICE)
    tiles = tile_max, tile_token.int(), tile_sum, torch.zeros_like(tile_max, dtype=torch.bool)
    results = values, tokens, logsumexp, has_nan
    settings = _merge_config(num_tiles).kwargs()
    _lm_head_merge_kernel[(num_rows,)](logits, *tiles, *results, V=vocab_size, T=num_tiles, TOP=k, **settings)
    return values, tokens, logsumexp


@pytest.mark.parametrize("vocab_size", [1000, 32000, 2**18 - 5])
def test_the_merge_is_a_stable_sort_at_any_vocabulary(generator, vocab_size):
    """Values with 40 steps, so that thousands are equal, signed zeros and -inf among them."""
    logits = (randn(generator, 2, vocab_size) * 5).round() * -0.25
    logits[1] = torch.where(logits[1] > 0.25, -INF, logits[1])
    logits[1] = torch.where(logits[1] < -0.5, 0.0, logits[1])
    assert torch.signbit(logits[logits == 0]).unique().numel() == 2
    values, tokens, logsumexp = merge_of(logits, MAX_K)
    expected, order = torch.sort(logits + 0.0, dim=-1, descending=True, stable=True)
    assert torch.equal(tokens, order[:, :MAX_K].int())
    assert torch.equal(values, expected[:, :MAX_K])
    torch.testing.assert_close(logsumexp, torch.logsumexp(logits, dim=-1))


def test_the_merge_returns_neighbouring_floats_in_order(generator):
    """Keys compare all bits of a float, of either sign."""
    bits = torch.arange(500, dtype=torch.int32) + torch.tensor(1.0).view(torch.int32)
    ladder = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    logits = ladder[torch.randperm(1000, generator=generator)][None].to(DEVICE)
    for sign in (1, -1):
        values, tokens, _ = merge_of(sign * logits, MAX_K)
        expected, order = torch.sort(sign * logits, dim=-1, descending=True, stable=True)
        assert torch.equal(tokens, order[:, :MAX_K].int())
        assert torch.equal(values, expected[:, :MAX_K])


def test_one_best_token_is_the_first_of_many(generator):
    x, weight = small_integers(generator, 2, 3, 4), small_integers(generator, 2, 290, 4)
    one = lm_head_topk(x, weight, k=1, backend="triton")
    many = lm_head_topk(x, weight, k=9, backend="triton")
    assert torch.equal(one.tokens, many.tokens[..., :1])
    assert torch.equal(one.values, many.values[..., :1])
    assert torch.equal(one.logsumexp, many.logsumexp)


def test_a_shared_weight_is_the_same_weight_for_every_head(generator):
    x, weight = randn(generator, 3, 2, 20), randn(generator, 1, 140, 20)
    shared = lm_head_topk(x, weight, k=4, backend="triton")
    own = lm_head_topk(x, weight.repeat(3, 1, 1), k=4, backend="triton")
    assert_same(shared, own)


def test_log_probabilities_sum_to_one(generator):
    x, weight = randn(generator, 1, 4, 24, scale=3.0), randn(generator, 1, 20, 24)
    best = lm_head_topk(x, weight, k=20, backend="triton")
    total = (best.values - best.logsumexp[..., None]).exp().sum(dim=-1)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_large_logits_do_not_overflow():
    x, weight = head_of([800.0, 799.0, -900.0] + [-1000.0] * 130)
    for sign in (1.0, -1.0):
        best = lm_head_topk(sign * x, weight, k=3, backend="triton")
        assert_same(best, reference(sign * x, weight, k=3))
    # the sum of a tile of -inf is zero, its factor e^1000
    x, weight = head_of([-1000.0] * 128 + [-INF] * 2)
    assert_same(lm_head_topk(x, weight, k=2, backend="triton"), reference(x, weight, k=2))


@pytest.mark.parametrize("shape", [(2, 0), (0, 2)], ids=["no rows", "no heads"])
def test_nothing_in_nothing_out(shape):
    weight = torch.ones(shape[0], 30, 4, device=DEVICE)
    for backend in ("triton", "reference"):
        best = lm_head_topk(torch.ones(*shape, 4, device=DEVICE), weight, k=2, backend=backend)
        assert best.values.shape == best.tokens.shape == (shape[1], shape[0], 2)
        assert best.logsumexp.shape == best.has_nan.shape == (shape[1], shape[0])


def test_an_infinite_state_is_not_a_nan():
    """Tokens beyond the vocabulary would have the logit 0 * inf."""
    x, weight = head_of([1.0, 2.0, -3.0])
    best = lm_head_topk(INF * x, weight, k=3, backend="triton")
    assert best.values.tolist() == [[[INF, INF, -INF]]]
    assert best.tokens.tolist() == [[[0, 1, 2]]]
    assert not best.has_nan.any()


@pytest.mark.gpu
def test_a_captured_launch_replays_on_new_inputs(generator):
    x, weight = randn(generator, 4, 2, 64), randn(generator, 4, 1000, 16)
    down = randn(generator, 4, 16, 64)
    lm_head_topk(x, weight, k=10, down=down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        best = lm_head_topk(x, weight, k=10, down=down)
    x.neg_()
    graph.replay()
    expected = reference(x, weight, k=10, down=down)
    torch.testing.assert_close(best.values, expected.values)
    torch.testing.assert_close(best.logsumexp, expected.logsumexp)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"x": torch.ones(3, 5)}, ValueError, r"x: expected shape \[any, any, any\], got \[3, 5\]"),
        ({"x": torch.ones(2, 3, 5).double()}, TypeError, r"x: expected torch.float32 or .* got torch.float64"),
        ({"x": torch.ones(2, 5, 3).mT}, ValueError, r"x: expected stride 1 in the last dimension, got 3"),
        ({"weight": torch.ones(3, 40, 5)}, ValueError, r"weight: expected 1 or 2 heads as in x, got .*\[3, 40, 5\]"),
        ({"weight": torch.ones(2, 40, 6)}, ValueError, r"weight: expected a last dimension of 5 .*\[2, 40, 6\]"),
        ({"weight": torch.ones(2, 40, 5).half()}, TypeError, r"weight: expected torch.float32, got torch.float16"),
        ({"weight": torch.ones(2, 40, 5, device="meta")}, ValueError, r"weight: expected a tensor on"),
        ({"weight": torch.ones(1, 2**18 + 1, 5)}, ValueError, r"weight: expected a vocabulary of at most 262144"),
        ({"down": torch.ones(2, 4, 5)}, ValueError, r"down: expected shape \[2, 5, 5\], got \[2, 4, 5\]"),
        ({"down": torch.ones(1, 5, 5)}, ValueError, r"down: expected shape \[2, 5, 5\], got \[1, 5, 5\]"),
        ({"bias": torch.ones(2, 41)}, ValueError, r"bias: expected shape \[2, 40\], got \[2, 41\]"),
        ({"bias": torch.ones(1, 40)}, ValueError, r"bias: expected shape \[2, 40\], got \[1, 40\]"),
        ({"bias": torch.ones(2, 40).half()}, TypeError, r"bias: expected torch.float32, got torch.float16"),
        ({"k": 0}, ValueError, r"k: expected 1 to 32, got 0"),
        ({"k": 33}, ValueError, r"k: expected 1 to 32, got 33"),
        ({"weight": torch.ones(2, 7, 5), "k": 8}, ValueError, r"k: expected 1 to 7, got 8"),
    ],
)
def test_wrong_arguments_are_named(changes, error, match):
    args = {"x": torch.ones(2, 3, 5), "weight": torch.ones(2, 40, 5), "k": 4, **changes}
    with pytest.raises(error, match=match):
        lm_head_topk(args.pop("x"), args.pop("weight"), **args)


@pytest.mark.parametrize(
    ("num_rows", "itemsize", "k", "block_m", "more_m", "block_k", "num_warps"),
    [
        (1, 2, 1, 16, 0, 64, 8),
        (17, 2, 1, 32, 0, 64, 8),
        (64, 2, 10, 64, 0, 64, 8),
        (65, 2, 1, 128, 0, 64, 8),
        (128, 2, 1, 128, 0, 64, 8),
        (129, 2, 1, 128, 64, 64, 8),
        (500, 2, 1, 128, 64, 64, 8),
        (500, 2, 2, 128, 0, 64, 8),
        (1, 4, 1, 16, 0, 32, 4),
        (500, 4, 1, 32, 0, 32, 4),
    ],
)
def test_launch_config(num_rows, itemsize, k, block_m, more_m, block_k, num_warps):
    config = _launch_config(num_rows, itemsize, k)
    assert config.blocks == {"BLOCK_M": block_m, "MORE_M": more_m, "BLOCK_N": 128, "BLOCK_K": block_k}
    assert config.num_warps == num_warps
    shared_bytes = config.num_stages * (block_m + more_m + 128) * block_k * itemsize
    assert shared_bytes <= (96 if block_m <= 64 else 160) * 1024


@pytest.mark.parametrize(("num_tiles", "block_t", "num_warps"), [(1, 1, 1), (250, 256, 1), (1002, 1024, 4)])
def test_merge_config(num_tiles, block_t, num_warps):
    config = _merge_config(num_tiles)
    assert config.blocks["BLOCK_T"] == block_t
    assert config.num_warps == num_warps
