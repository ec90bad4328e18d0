"""kernels.tree_attention against its float64 reference, and the reference against attention written out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, FLOATS
from lib.tolerances import assert_close_to_reference
from specdec.kernels.reference.tree_attention import tree_attention as reference
from specdec.kernels.tree_attention import _launch_config, _num_splits, tree_attention


def pack_bits(bits):
    """[..., T] bool -> [..., ceil(T / 32)] int32 words, written out one bit at a time."""
    words = torch.zeros(*bits.shape[:-1], math.ceil(bits.shape[-1] / 32), dtype=torch.int64)
    for j in range(bits.shape[-1]):
        words[..., j // 32] |= bits[..., j].long() << (j % 32)
    return words.to(torch.int32)  # bit 31 makes the word negative


def random_tree(num_nodes, generator):
    """[N, N] bool ancestors and [N] depth of a random tree with parent < child."""
    ancestors = torch.eye(num_nodes, dtype=torch.bool)
    depth = torch.zeros(num_nodes, dtype=torch.int32)
    for node in range(1, num_nodes):
        parent = int(torch.randint(0, node, (), generator=generator))
        ancestors[node] |= ancestors[parent]
        depth[node] = depth[parent] + 1
    return ancestors, depth


def make_call(
    generator, *, lengths=(37, 5), num_nodes=6, heads=(4, 2), head_dim=16, dtype=torch.float32, shared=False, **options
):
    """Arguments of tree_attention. Slots that no node may read hold NaN."""
    window, num_tree_nodes = options.get("window"), options.get("num_tree_nodes")
    batch, tree_size = len(lengths), num_tree_nodes or num_nodes
    capacity = max(lengths) + tree_size + 3
    trees = [random_tree(tree_size, generator) for _ in range(1 if shared else batch)]
    asking = slice(tree_size - num_nodes, tree_size)  # the last level of the tree
    q = torch.randn(batch, num_nodes, heads[0], head_dim, generator=generator)
    caches = torch.randn(2, batch, capacity, heads[1], head_dim, generator=generator)
    for b, length in enumerate(lengths):
        caches[:, b, length + tree_size :] = torch.nan
        if window is not None:
            caches[:, b, : max(0, length - window + 1)] = torch.nan
    args = {
        "q": q.to(dtype),
        "k_cache": caches[0].to(dtype),
        "v_cache": caches[1].to(dtype),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "ancestors": torch.stack([pack_bits(ancestors[asking]) for ancestors, _ in trees]),
    }
    args = {name: tensor.to(DEVICE) for name, tensor in args.items()}
    args |= {"scale": head_dim**-0.5, "num_tree_nodes": num_tree_nodes, "window": window}
    args["depth"] = None if window is None else torch.stack([depth[asking] for _, depth in trees]).to(DEVICE)
    return args


def assert_matches_reference(args):
    out = tree_attention(**args, backend="triton")
    assert_close_to_reference(out, reference(**args), reference(**args, upcast=False))
    return out


# the reference, on cases small enough to write out


def attend(q, keys, values, scale):
    """One query head over the rows of `keys`, in float64."""
    weights = (keys.double() @ q.double() * scale).softmax(0)
    return weights @ values.double()


@pytest.mark.parametrize("upcast", [True, False])
def test_reference_equals_attention_written_out_by_hand(generator, upcast):
    # root 0 with children 1 and 2, node 3 under 2; two slots of prefix; two query heads share one key head
    seen = [[0], [0, 1], [0, 2], [0, 2, 3]]
    args = make_call(generator, lengths=(2,), num_nodes=4, heads=(2, 1), head_dim=8)
    args["ancestors"] = torch.tensor([[[0b0001], [0b0011], [0b0101], [0b1101]]], dtype=torch.int32, device=DEVICE)
    out = reference(**args, upcast=upcast)
    for node, nodes in enumerate(seen):
        slots = [0, 1] + [2 + j for j in nodes]
        for head in range(2):
            expected = attend(
                args["q"][0, node, head], args["k_cache"][0, slots, 0], args["v_cache"][0, slots, 0], args["scale"]
            )
            torch.testing.assert_close(out[0, node, head].double(), expected, rtol=0, atol=1e-6)  # fp32 rounding


@pytest.mark.parametrize("upcast", [True, False])
def test_reference_windows_the_prefix_but_not_the_tree(generator, upcast):
    # a chain of 3 after 5 tokens, window 3: node i stands at position 5 + i and sees back to 3 + i
    args = make_call(generator, lengths=(5,), num_nodes=3, heads=(1, 1), head_dim=8, window=3)
    args["ancestors"] = torch.tensor([[[0b001], [0b011], [0b111]]], dtype=torch.int32, device=DEVICE)
    args["depth"] = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=DEVICE)
    out = reference(**args, upcast=upcast)
    for node, slots in enumerate([[3, 4, 5], [4, 5, 6], [5, 6, 7]]):
        expected = attend(
            args["q"][0, node, 0], args["k_cache"][0, slots, 0], args["v_cache"][0, slots, 0], args["scale"]
        )
        torch.testing.assert_close(out[0, node, 0].double(), expected, rtol=0, atol=1e-6)  # fp32 rounding


def test_plain_decoding_needs_no_mask_to_equal_the_masked_computation(generator):
    args = make_call(generator, lengths=(9, 4), num_nodes=1)
    unmasked = reference(**args)
    args["depth"] = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    torch.testing.assert_close(reference(**args | {"window": 100}), unmasked, rtol=0, atol=1e-6)  # fp32 rounding


# the kernel


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 96, 128, 256])
def test_every_head_dim_matches_the_reference(generator, dtype, head_dim):
    assert_matches_reference(make_call(generator, lengths=(70, 3), num_nodes=5, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_nodes", [1, 2, 31, 32, 33, 64, 65, 100])
def test_every_tree_size_matches_the_reference(generator, dtype, num_nodes):
    assert_matches_reference(make_call(generator, lengths=(40, 0), num_nodes=num_nodes, heads=(2, 2), dtype=dtype))


def test_the_largest_tree_matches_the_reference(generator):
    assert_matches_reference(make_call(generator, lengths=(20,), num_nodes=512, heads=(1, 1)))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 4), (6, 2), (8, 1)], ids=str)
def test_every_group_size_matches_the_reference(generator, heads):
    assert_matches_reference(make_call(generator, heads=heads, num_nodes=7))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_split_keys_match_the_reference(generator, dtype):
    # 0 and 63 leave splits without work, 600 uses them all
    assert_matches_reference(make_call(generator, lengths=(600, 63, 0), num_nodes=9, heads=(2, 1), dtype=dtype))


def test_one_tree_for_the_whole_batch_matches_the_reference(generator):
    assert_matches_reference(make_call(generator, lengths=(300, 12), num_nodes=40, shared=True))


@pytest.mark.parametrize(("num_nodes", "num_tree_nodes"), [(1, 2), (4, 37), (10, 70)])
def test_one_level_of_a_larger_tree_matches_the_reference(generator, num_nodes, num_tree_nodes):
    assert_matches_reference(make_call(generator, num_nodes=num_nodes, num_tree_nodes=num_tree_nodes))


@pytest.mark.parametrize("window", [1, 4, 20, 1000])
@pytest.mark.parametrize("shared", [False, True])
def test_sliding_window_matches_the_reference(generator, window, shared):
    assert_matches_reference(make_call(generator, lengths=(400, 3), num_nodes=8, window=window, shared=shared))


CALLS = {
    "lengths": st.lists(st.integers(0, 90), min_size=1, max_size=3),
    "num_nodes": st.integers(1, 40),
    "heads": st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    "head_dim": st.integers(1, 40),
    "window": st.sampled_from([None, None, 3, 50]),
}


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), shape=st.fixed_dictionaries(CALLS))
def test_any_shape_matches_the_reference(seed, shape):
    assert_matches_reference(make_call(torch.Generator().manual_seed(seed), **shape))


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32), shape=st.fixed_dictionaries(CALLS))
def test_a_row_and_a_node_do_not_know_the_others(seed, shape):
    """One row of the batch, its nodes asked for in another order: the same answers."""
    args = make_call(torch.Generator().manual_seed(seed), **shape)
    together = tree_attention(**args, backend="triton")
    b, order = (
        seed % len(shape["lengths"]),
        torch.randperm(shape["num_nodes"], generator=torch.Generator().manual_seed(seed)).to(DEVICE),
    )
    own = {name: value[b : b + 1] if isinstance(value, torch.Tensor) else value for name, value in args.items()}
    for name in ("q", "ancestors", "depth"):
        own[name] = None if own[name] is None else own[name][:, order]
    torch.testing.assert_close(tree_attention(**own, backend="triton")[0], together[b, order])


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32), shape=st.fixed_dictionaries(CALLS))
def test_weights_sum_to_one(seed, shape):
    """Values that are all 3 average to 3, whatever is seen, for every node sees itself."""
    args = make_call(torch.Generator().manual_seed(seed), **shape)
    args["v_cache"] = torch.where(args["v_cache"].isnan(), torch.nan, 3.0)
    out = tree_attention(**args, backend="triton")
    torch.testing.assert_close(out, torch.full_like(out, 3.0))


def test_a_node_that_sees_nothing_gets_zeros(generator):
    args = make_call(generator, lengths=(0, 300), num_nodes=3)
    args["ancestors"][:, 2] = 0
    out = assert_matches_reference(args)
    assert not out[0, 2].any()
    assert out[1, 2].any()


def test_hidden_nodes_do_not_change_the_output(generator):
    args = make_call(generator, lengths=(20,), num_nodes=3)
    args["ancestors"] = torch.tensor([[[0b001], [0b011], [0b101]]], dtype=torch.int32, device=DEVICE)
    before = tree_attention(**args, backend="triton")
    args["k_cache"][:, 22] = 7.0
    args["v_cache"][:, 22] = -7.0
    after = tree_attention(**args, backend="triton")
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])


def test_large_scores_do_not_overflow(generator):
    args = make_call(generator, lengths=(300,), dtype=torch.float16)
    args["q"] *= 100.0
    assert_matches_reference(args)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_nan_in_the_query_is_not_hidden(generator):
    args = make_call(generator, lengths=(300,), num_nodes=2)
    args["q"][0, 1, 0] = torch.nan
    out = tree_attention(**args, backend="triton")
    assert out[0, 1, 0].isnan().all()
    assert out[0, 0].isfinite().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="CPU tensors run the reference")
def test_cpu_tensors_run_the_reference_in_their_own_dtype(generator):
    args = make_call(generator, dtype=torch.float16)
    assert torch.equal(tree_attention(**args), reference(**args, upcast=False))


@pytest.mark.gpu
def test_heads_far_apart_are_addressed_beyond_32_bits(generator):
    args = make_call(generator, lengths=(5,), heads=(8, 8), dtype=torch.float16)
    expected = reference(**args), reference(**args, upcast=False)
    for name in ("k_cache", "v_cache"):  # 7 heads of 3.1e8 elements before the last one
        batch, capacity, heads, head_dim = args[name].shape
        far = torch.empty_strided(
            (batch, capacity, heads, head_dim), (0, head_dim, 310_000_000, 1), dtype=torch.float16, device="cuda"
        )
        args[name] = far.copy_(args[name])
    assert_close_to_reference(tree_attention(**args, backend="triton"), *expected)


# rejected arguments


def test_more_than_512_nodes_are_rejected():
    zeros = torch.zeros(1, 513, 1, 16)
    ancestors = torch.zeros(1, 513, 17, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"num_tree_nodes <= 512, got N = 513"):
        tree_attention(zeros, zeros, zeros, torch.zeros(1, dtype=torch.int32), ancestors, scale=1.0)


# launch settings


@pytest.mark.parametrize(
    ("num_rows", "head_dim", "itemsize", "blocks", "num_warps", "num_stages"),
    [
        (1, 128, 2, (16, 64, 128), 4, 3),
        (17, 128, 2, (32, 64, 128), 4, 3),
        (64, 128, 2, (64, 64, 128), 4, 3),
        (65, 128, 2, (128, 32, 128), 8, 4),
        (2048, 64, 2, (128, 32, 64), 8, 4),
        (64, 80, 2, (64, 64, 128), 4, 3),
        (512, 256, 2, (64, 32, 256), 8, 2),
        (64, 8, 4, (32, 32, 16), 4, 2),
        (64, 128, 4, (32, 32, 128), 4, 2),
        (64, 256, 4, (16, 32, 256), 8, 2),
    ],
)
def test_launch_config(num_rows, head_dim, itemsize, blocks, num_warps, num_stages):
    config = _launch_config(num_rows, head_dim, itemsize)
    assert tuple(config.blocks.values()) == blocks
    assert (config.num_warps, config.num_stages) == (num_warps, num_stages)


@pytest.mark.parametrize(
    ("num_programs", "num_rows", "capacity", "splits"),
    [
        (32, 64, 4096, 4),  # Llama-2-7B, one request, 64 nodes
        (32, 32, 4096, 8),
        (32, 1, 4096, 12),
        (32, 1, 512, 2),  # at least 256 keys for a split
        (32, 1, 100, 1),
        (256, 64, 4096, 1),  # eight requests fill the GPU
        (16, 256, 8192, 8),  # Llama-3-8B, one request, 64 nodes
        (8, 4, 100_000, 16),
    ],
)
def test_num_splits(num_programs, num_rows, capacity, splits):
    assert _num_splits(num_programs, num_rows, capacity) == splits
