"""kernels.rope_kv_write against float64, against transformers' LLaMA and against what a rotation is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, FLOATS, int32
from lib.tolerances import assert_close_to_reference
from specdec.kernels.reference.rope_kv_write import rope_kv_write as reference
from specdec.kernels.rope_kv_write import _launch_config, rope_kv_write

NAMES = ("q", "k", "v", "positions", "cos_sin_table", "slots", "k_cache_", "v_cache_")
NUM_POSITIONS = 50


def table_of(angles):
    """[P, D / 2] angles as [P, D] cosines and sines."""
    return torch.cat([angles.cos(), angles.sin()], dim=1).float().to(DEVICE)


def plain_table(head_dim):
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return table_of(torch.arange(NUM_POSITIONS, dtype=torch.float64)[:, None] * frequencies)


def random_call(
    generator, *, batch=2, tokens=3, heads=4, kv_heads=2, head_dim=16, capacity=9, dtype=torch.float32, skip=0.0
):
    """Arguments by name; every token has a slot of its own, and the caches hold sentinels."""

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

    slots = torch.stack([torch.randperm(capacity, generator=generator)[:tokens] for _ in range(batch)])
    slots[torch.rand(slots.shape, generator=generator) < skip] = -1
    values = (
        randn(batch, tokens, heads, head_dim),
        randn(batch, tokens, kv_heads, head_dim),
        randn(batch, tokens, kv_heads, head_dim),
        torch.randint(0, NUM_POSITIONS, (batch, tokens), generator=generator, dtype=torch.int32).to(DEVICE),
        plain_table(head_dim),
        slots.to(torch.int32).to(DEVICE),
        torch.full((batch, capacity, kv_heads, head_dim), 77.0, dtype=dtype, device=DEVICE),
        torch.full((batch, capacity, kv_heads, head_dim), 78.0, dtype=dtype, device=DEVICE),
    )
    return dict(zip(NAMES, values, strict=True))


def run(function, args, **kwargs):
    """Rotated queries and both caches, without touching the caches of `args`."""
    args = args | {name: args[name].clone() for name in ("k_cache_", "v_cache_")}
    return function(**args, **kwargs), args["k_cache_"], args["v_cache_"]


def assert_right(args):
    q, k_cache, v_cache = run(rope_kv_write, args, backend="triton")
    wide = args | {name: args[name].double() for name in ("q", "k", "v", "k_cache_", "v_cache_")}
    expected, eager = run(reference, wide), run(reference, args, upcast=False)
    scale = max(1.0, args["q"].abs().max().item(), args["k"].abs().max().item())
    assert_close_to_reference(q, expected[0], eager[0], scale=scale)
    assert_close_to_reference(k_cache, expected[1], eager[1], scale=scale)
    assert torch.equal(v_cache, eager[2])
    # what has no slot keeps its sentinel, bit by bit
    written = torch.zeros(k_cache.shape[:2], dtype=torch.bool, device=DEVICE)
    for b, row in enumerate(args["slots"].tolist()):
        written[b, [slot for slot in row if slot >= 0]] = True
    assert (k_cache[~written] == 77.0).all()
    assert (v_cache[~written] == 78.0).all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_quarter_turn_written_by_hand(backend):
    half_pi = torch.tensor([[0.0, 0.0], [torch.pi / 2, torch.pi]], dtype=torch.float64)
    args = {
        "q": torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], device=DEVICE),
        "k": torch.tensor([[[[5.0, 6.0, 7.0, 8.0]]]], device=DEVICE),
        "v": torch.tensor([[[[9.0, 10.0, 11.0, 12.0]]]], device=DEVICE),
        "positions": int32([[1]]),
        "cos_sin_table": table_of(half_pi),
        "slots": int32([[1]]),
        "k_cache_": torch.zeros(1, 3, 1, 4, device=DEVICE),
        "v_cache_": torch.zeros(1, 3, 1, 4, device=DEVICE),
    }
    q = rope_kv_write(**args, backend=backend)
    # the pair (1, 3) turns by a quarter, (2, 4) by a half
    torch.testing.assert_close(q.flatten().tolist(), [-3.0, -2.0, 1.0, -4.0], atol=1e-5, rtol=0)
    torch.testing.assert_close(args["k_cache_"][0, 1, 0].tolist(), [-7.0, -6.0, 5.0, -8.0], atol=1e-5, rtol=0)
    assert args["v_cache_"][0, 1, 0].tolist() == [9.0, 10.0, 11.0, 12.0]
    assert args["k_cache_"][0, [0, 2]].count_nonzero() == args["v_cache_"][0, [0, 2]].count_nonzero() == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "tokens": 1, "heads": 1, "kv_heads": 1, "head_dim": 2},
        {"tokens": 5, "heads": 3, "kv_heads": 3, "head_dim": 64},
        {"tokens": 4, "heads": 10, "kv_heads": 5, "head_dim": 80},
        {"batch": 1, "tokens": 2, "heads": 40, "kv_heads": 40, "head_dim": 96, "capacity": 3},
        {"tokens": 3, "heads": 6, "kv_heads": 2, "head_dim": 128},
        {"tokens": 2, "heads": 7, "kv_heads": 1, "head_dim": 256},
        {"tokens": 2, "heads": 6, "kv_heads": 6, "head_dim": 6},
    ],
    ids=lambda sizes: f"{sizes['heads']}x{sizes['head_dim']}",
)
def test_matches_float64(generator, sizes, dtype):
    assert_right(random_call(generator, **sizes, dtype=dtype))


def llama_rope(head_dim, scaled):
    """transformers' module for the frequencies, its function that applies them, and our table of it."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if scaled:
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    config = llama.LlamaConfig(**sizes, max_position_embeddings=NUM_POSITIONS, rope_parameters=rope)
    module = llama.LlamaRotaryEmbedding(config).to(DEVICE)
    cos, sin = module(torch.zeros((), device=DEVICE), torch.arange(NUM_POSITIONS, device=DEVICE)[None])
    half = head_dim // 2
    return module, llama.apply_rotary_pos_emb, torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1)


@pytest.mark.parametrize("scaled", [False, True], ids=["default", "llama3"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_equals_the_rotary_positions_of_llama(generator, head_dim, scaled):
    """Bit by bit; but Triton's interpreter cuts bfloat16 off."""
    module, apply_rotary, table = llama_rope(head_dim, scaled)
    for dtype in FLOATS:
        args = random_call(generator, tokens=5, heads=6, kv_heads=3, head_dim=head_dim, dtype=dtype)
        args["cos_sin_table"] = table
        cos, sin = module(args["q"], args["positions"].long())
        q, k = apply_rotary(args["q"].transpose(1, 2), args["k"].transpose(1, 2), cos, sin)
        expected_q, expected_k = q.transpose(1, 2), k.transpose(1, 2)
        inexact = torch.bfloat16 if DEVICE == "cpu" else None
        for backend in ("reference", "triton"):
            got_q, k_cache, _ = run(rope_kv_write, args, backend=backend)
            got_k = torch.stack([k_cache[b, row.long()] for b, row in enumerate(args["slots"])])
            if backend == "reference" or dtype != inexact:
                assert torch.equal(got_q, expected_q)
                assert torch.equal(got_k, expected_k)
            else:  # numbers up to 5
                torch.testing.assert_close((got_q, got_k), (expected_q, expected_k), atol=0.1, rtol=0)


def test_the_llama3_table_is_another_one():
    assert not torch.equal(llama_rope(64, scaled=False)[2], llama_rope(64, scaled=True)[2])


@settings(deadline=None, max_examples=20)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 20),
)
def test_any_shape_matches_float64(seed, batch, tokens, kv_heads, group, half):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"batch": batch, "tokens": tokens, "heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": 2 * half}
    assert_right(random_call(generator, **sizes, skip=0.3))


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32), st.integers(0, 20), st.integers(0, 20), st.integers(1, 9))
def test_scores_depend_on_the_distance_alone(seed, position, distance, shift):
    args = random_call(torch.Generator().manual_seed(seed), batch=1, tokens=2, heads=1, kv_heads=1)
    args["slots"] = int32([[0, 1]])
    scores = []
    for first in (position, position + shift):
        args["positions"] = int32([[first + distance, first]])
        q, k_cache, _ = run(rope_kv_write, args, backend="triton")
        scores.append((q[0, 0, 0] * k_cache[0, 1, 0]).sum())
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=1e-4)


def test_a_token_without_a_slot_is_rotated_but_not_written(generator):
    args = random_call(generator, tokens=4, capacity=9)
    args["slots"] = int32([[-1, 3, -1, 0], [-1, -1, -1, -1]])
    assert_right(args)
    _, k_cache, v_cache = run(rope_kv_write, args, backend="triton")
    assert (k_cache[1] == 77.0).all()
    assert (v_cache[1] == 78.0).all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_places_that_count_from_a_length_are_those_from_zero(generator, backend):
    """One row of depths and node numbers for the whole batch, as a tree has; nothing is written for -1."""
    depth, nodes = int32([[0, 1, 1, 2]]), int32([[0, 1, -1, 2]])
    lengths = int32([5, 0, 2])
    args = random_call(generator, batch=3, tokens=4, dtype=torch.float32)
    expected = args | {
        "positions": (depth + lengths[:, None]).int(),
        "slots": torch.where(nodes < 0, -1, nodes + lengths[:, None]).int(),
    }
    got = args | {"positions": depth, "slots": nodes, "lengths": lengths}
    assert all(map(torch.equal, run(rope_kv_write, got, backend=backend), run(reference, expected, upcast=False)))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("lengths", [None, [NUM_POSITIONS - 2, NUM_POSITIONS]], ids=["absolute", "lengths"])
def test_a_position_past_the_table_takes_its_last_row(generator, backend, lengths):
    args = random_call(generator, tokens=3, capacity=NUM_POSITIONS + 5)
    base = torch.zeros(2, 1) if lengths is None else torch.tensor(lengths)[:, None]
    places = torch.tensor([[0, 1, 3], [0, 2, 900]]) + (NUM_POSITIONS - 2 if lengths is None else 0)
    args["positions"], args["slots"] = places.int().to(DEVICE), int32([[0, 1, 2]])
    if lengths is not None:
        args["lengths"] = int32(lengths)
    clamped = args | {"positions": ((places + base).clamp(max=NUM_POSITIONS - 1) - base).int().to(DEVICE)}
    got, expected = run(rope_kv_write, args, backend=backend), run(reference, clamped, upcast=False)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_table_may_be_rounded_ahead(generator, dtype):
    args = random_call(generator, dtype=dtype)
    table = args["cos_sin_table"].to(dtype)
    calls = (args | {"cos_sin_table": one} for one in (table, table.float()))
    got, expected = (run(rope_kv_write, call, backend="triton") for call in calls)
    assert all(map(torch.equal, got, expected))


def test_position_zero_turns_nothing(generator):
    args = random_call(generator)
    args["positions"] = torch.zeros_like(args["positions"])
    q, _, _ = run(rope_kv_write, args, backend="triton")
    assert torch.equal(q, args["q"])


def test_no_tokens(generator):
    args = random_call(generator)
    args |= {name: args[name][:, :0] for name in ("q", "k", "v", "positions", "slots")}
    for backend in ("triton", "reference"):
        assert run(rope_kv_write, args, backend=backend)[0].shape == (2, 0, 4, 16)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "block_h", "block_d", "num_warps"),
    [
        (32, 128, 16, 64, 4),
        (8, 128, 8, 64, 2),
        (40, 128, 16, 64, 4),
        (1, 256, 1, 128, 1),
        (2, 64, 2, 32, 1),
        (5, 80, 8, 64, 2),
    ],
)
def test_launch_config(kv_heads, head_dim, block_h, block_d, num_warps):
    config = _launch_config(kv_heads, head_dim)
    assert config.blocks == {"BLOCK_H": block_h, "BLOCK_D": block_d}
    assert config.num_warps == num_warps
