"""kernels.philox_uniform against its eager reference, the published words and the laws of its numbers."""

from decimal import Decimal, localcontext

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.laws import assert_sample_has_law
from lib.tensors import DEVICE, int64
from specdec.kernels.common.philox import philox
from specdec.kernels.philox_uniform import _exponential, _launch_config, philox_exponential, philox_uniform
from specdec.kernels.reference import philox_uniform as reference

COUNTS = [1, 2, 3, 4, 5, 31, 60, 127, 128, 129, 1023, 1024, 1025, 3000]  # a program writes 128 numbers, or 1024
SEEDS = [0, -1, 2**63 - 1, -(2**63), 2**32, 0x123456789ABCDEF]
STEPS = [0, 1, 2**31, 2**32 - 1, 2**32 + 7, -5]


def assert_same_exponentials(got, expected):
    """Both round an fp64 logarithm that is off by a few 1e-16 to fp32, so they differ by its last place at most."""
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    assert (got > 0).all()  # also no NaN: every element was written; then the bits are ordered as the numbers
    assert (got.view(torch.int32) - expected.view(torch.int32)).abs().max() <= 1
    # a rounding border between the two is met about once in 10^8 numbers
    assert (got != expected).sum() <= 1


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_matches_the_reference(num_rows, count):
    seeds, step = int64(SEEDS[-num_rows:]), int64(11)
    call = {"stream": 3, "count": count}
    got = philox_uniform(seeds, step, **call, backend="triton")
    assert got.dtype == torch.float32
    assert torch.equal(got, reference.philox_uniform(seeds, step, **call))
    got = philox_exponential(seeds, step, **call, backend="triton")
    assert_same_exponentials(got, reference.philox_exponential(seeds, step, **call))


@pytest.mark.parametrize("stream", [0, 1, 2, 16, 2**31 - 1])
@pytest.mark.parametrize("step", STEPS)
def test_every_bit_of_seed_step_and_stream_counts_as_in_the_reference(step, stream):
    seeds, step = int64(SEEDS), int64(step)
    call = {"stream": stream, "count": 6}
    got = philox_uniform(seeds, step, **call, backend="triton")
    assert torch.equal(got, reference.philox_uniform(seeds, step, **call))
    got = philox_exponential(seeds, step, **call, backend="triton")
    assert_same_exponentials(got, reference.philox_exponential(seeds, step, **call))


# The definition


def test_philox_gives_the_published_words():
    """Known answers of Random123's own test file for philox4x32 with 10 rounds."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 2**32 - 1)
    words = philox((zero,) * 4, 0)
    assert [f"{word.item():08x}" for word in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    words = philox((ones,) * 4, 2**64 - 1)
    assert [f"{word.item():08x}" for word in words] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


def test_counters_of_philox_are_words_of_32_bits():
    counters = torch.tensor([5, 2**31 + 1, 2**32 - 3, 9])
    for other in (counters + 2**32, counters - 2**32, counters + 2**60):
        for word, expected in zip(philox(tuple(other), 7), philox(tuple(counters), 7), strict=True):
            assert torch.equal(word, expected)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_first_numbers_are_the_published_words(backend):
    """Seed, step and stream 0: the words of the counter 0 under the key 0."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    call = {"stream": 0, "count": 4, "backend": backend}
    uniforms = philox_uniform(int64([0]), int64(0), **call)
    assert uniforms.tolist() == [[(word >> 8) / 2**24 for word in words]]
    assert_same_exponentials(philox_exponential(int64([0]), int64(0), **call), exact_exponentials(words)[None])


def words_in_integers(seed, step, stream, count):
    """The definition in Python's integers, one word after the other."""
    words = []
    for i in range(count):
        c, key = [i // 4, step, stream, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
        for _ in range(10):
            high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
            high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
            c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
            key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
        words.append(c[i % 4])
    return words


@settings(deadline=None, max_examples=25)
@given(
    st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1), st.sampled_from([1, 7, 30])
)
def test_number_i_is_word_i_mod_4_of_counter_i_div_4(seed, step, stream, count):
    expected = [(word >> 8) / 2**24 for word in words_in_integers(seed, step, stream, count)]
    for backend in ("triton", "reference"):
        got = philox_uniform(int64([seed]), int64(step), stream=stream, count=count, backend=backend)
        assert got.tolist() == [expected]


# The logarithm


def exact_exponentials(words):
    """-log(1 - (word + 1/2) / 2^32) to 40 digits, rounded once."""
    with localcontext() as context:
        context.prec = 40
        values = [-(1 - (Decimal(word) + Decimal("0.5")) / 2**32).ln() for word in words]
    return torch.tensor([float(value) for value in values], dtype=torch.float64, device=DEVICE).float()


@triton.jit
def _exponentials_of_words_kernel(words_ptr, numbers_ptr):
    """One program turns 256 words into numbers."""
    offs = tl.arange(0, 256)
    words = tl.load(words_ptr + offs).to(tl.uint32)
    tl.store(numbers_ptr + offs, _exponential(words))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_smallest_and_the_largest_exponentials_are_exact(generator, monkeypatch, backend):
    """A word of 0 is a token that comes first however improbable; Philox gives it once in 4 billion numbers."""
    near = [2**bit + around for bit in range(33) for around in (-2, -1, 0, 1)]
    words = sorted({word for word in near if 0 <= word < 2**32})
    words += torch.randint(2**32, (256 - len(words),), generator=generator).tolist()
    if backend == "triton":
        got = torch.empty(256, device=DEVICE)
        _exponentials_of_words_kernel[(1,)](int64(words), got)
    else:
        monkeypatch.setattr(reference, "_words", lambda *_: int64(words)[None])
        got = reference.philox_exponential(int64([0]), int64(0), stream=0, count=256)[0]
    assert_same_exponentials(got, exact_exponentials(words))
    assert got[0].item() == pytest.approx(2.0**-33, rel=1e-7)
    assert got[words.index(2**32 - 1)].item() == pytest.approx(22.8739, rel=1e-5)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_numbers_have_their_laws(backend):
    call = {"stream": 5, "count": 1 << 14, "backend": backend}
    cells = torch.full((32,), 1 / 32)
    for seed in (1, 2):
        uniforms = philox_uniform(int64([seed]), int64(3), **call)
        assert_sample_has_law((uniforms[0] * 32).long(), cells)
        exponentials = philox_exponential(int64([seed]), int64(3), **call).double()
        assert_sample_has_law((-32 * torch.expm1(-exponentials[0])).long(), cells)


# What a number depends on


def test_a_row_draws_the_same_in_any_company():
    seeds, step = int64(SEEDS), int64(4)
    for op in (philox_uniform, philox_exponential):
        together = op(seeds, step, stream=2, count=130, backend="triton")
        for row in range(len(SEEDS)):
            # a part of a tensor of seeds, which begins anywhere in it
            assert torch.equal(op(seeds[row : row + 1], step, stream=2, count=130, backend="triton")[0], together[row])
        fewer = op(seeds, step, stream=2, count=9, backend="triton")
        assert torch.equal(fewer, together[:, :9])


@pytest.mark.parametrize("op", [philox_uniform, philox_exponential])
def test_other_seeds_steps_and_streams_give_other_numbers(op):
    call = {"stream": 2, "count": 40, "backend": "triton"}
    first = op(int64([5]), int64(1), **call)
    others = [
        op(int64([5 + 2**40]), int64(1), **call),
        op(int64([6]), int64(1), **call),
        op(int64([5]), int64(2), **call),
        op(int64([5]), int64(1), **call | {"stream": 3}),
    ]
    assert len(set(first[0].tolist())) == 40
    assert all((first != other).sum() >= 39 for other in others)


def test_seeds_and_steps_are_read_where_they_lie():
    """A seed and a step in the middle of other tensors, which keep what they hold."""
    table = torch.arange(12, device=DEVICE).view(3, 4)
    seeds, step = table[1, 1:], table[2, 3]
    got = philox_uniform(seeds, step, stream=0, count=10, backend="triton")
    assert torch.equal(got, reference.philox_uniform(int64([5, 6, 7]), int64(11), stream=0, count=10))
    assert torch.equal(table, torch.arange(12, device=DEVICE).view(3, 4))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("op", [philox_uniform, philox_exponential])
def test_no_numbers(op, backend):
    assert op(int64([1, 2]), int64(0), stream=0, count=0, backend=backend).shape == (2, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2**20, 2**20 + 1])
def test_numbers_past_2_to_the_31_are_in_their_places(count):
    seeds, step = torch.arange(2**11 + 1, device=DEVICE), int64(0)
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of device memory")
    got = philox_uniform(seeds, step, stream=1, count=count)[-1]
    assert torch.equal(got, philox_uniform(seeds[-1:], step, stream=1, count=count)[0])


@pytest.mark.parametrize(
    ("count", "block", "is_aligned", "num_warps"),
    [
        (0, 32, True, 1),
        (1, 32, False, 1),
        (128, 32, True, 1),
        (129, 256, False, 4),
        (50257, 256, False, 4),
        (60 * 128256, 256, True, 4),
    ],
)
def test_launch_config(count, block, is_aligned, num_warps):
    config = _launch_config(count)
    assert config.blocks == {"BLOCK": block, "IS_ALIGNED": is_aligned}
    assert config.num_warps == num_warps
