"""What holds for every op: it keeps to its memory, its rows do not know each other, and its programs need no order."""

import importlib
import itertools
import os

import pytest
import torch

from lib.guard import Guard
from lib.op_calls import BATCH, CALLS, LARGE_CALLS, LAUNCHERS, arguments_of, tensors_of
from specdec.kernels.common.scratch import Scratch

OPS = sorted(CALLS)
SIZES = {"small": CALLS, "large": LARGE_CALLS}
of_both_sizes = pytest.mark.parametrize("table", SIZES.values(), ids=SIZES)
of_every_op = pytest.mark.parametrize("name", OPS)

# The last program of the large call along each axis of the grid: where work is shared, so that order could matter.
LAST_PROGRAMS = {
    "accept_greedy": (2, 0, 0),
    "accept_naive": (6, 6, 2),
    "accept_rejection": (2, 6, 2),
    "accept_traversal": (2, 6, 2),
    "accept_typical": (6, 6, 2),
    "add_rms_norm": (2, 0, 0),
    "beam_step": (2, 0, 0),
    "commit_pairs": (2, 2, 0),
    "draft_heads": (0, 17, 1),
    "draft_heads_concat": (0, 1, 1),
    "emit_step": (0, 0, 0),
    "kv_compact": (1, 3, 2),
    "learn_chances": (2, 0, 0),
    "lm_head_topk": (5, 2, 1),
    "lstm_recurrence": (1, 4, 0),
    "philox_exponential": (8, 2, 0),
    "philox_uniform": (8, 2, 0),
    "rms_norm": (2, 0, 0),
    "rope_kv_write": (6, 2, 2),
    "sample_probs": (2, 2, 2),
    "sample_race": (1, 1, 2),
    "skinny_linear": (0, 1, 1),
    "swiglu": (2, 1, 0),
    "tree_attention": (2, 7, 2),
    "tree_expand": (2, 2, 0),
    "tree_grow": (44, 2, 0),
    "tree_merge": (2, 1, 0),
    "tree_rerank": (2, 0, 0),
    "warp_logits": (2, 2, 2),
}
# How many programs share the keys of a row, or how many rows a product takes, depends on the number of rows, and the
# rounding on that.
INEXACT_ALONE = {"lstm_recurrence", "tree_attention"}
# Trailing dimensions that lie together in memory; of all others the last alone.
PACKED = {("kv_compact", "cache_"): 2}
# Whose programs count themselves in, at the large size.
COUNTS_ARRIVALS = {"draft_heads", "draft_heads_concat", "skinny_linear", "tree_attention"}
ROOM = 5000  # elements before and behind an allocation: more than a program's block

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities, under the interpreter


def run(name, arguments, backend="triton"):
    """The tensors that a call gives back or changes."""
    results = tensors_of(LAUNCHERS[name](**arguments, backend=backend))
    changed = [value for argument, value in arguments.items() if argument.endswith("_")]
    return [result for result in results if result is not None] + changed


def assert_equal(got, expected):
    """To the last bit, NaN as well."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def tensors_in(arguments):
    """The tensors among the arguments, those of lists as well."""
    values = [item for value in arguments.values() for item in (value if isinstance(value, list) else [value])]
    return [value for value in values if isinstance(value, torch.Tensor)]


def map_tensors(function, arguments):
    """The arguments with their tensors changed by `function(name, tensor)`."""

    def changed(name, value):
        if isinstance(value, list):
            return [changed(name, item) for item in value]
        return function(name, value) if isinstance(value, torch.Tensor) else value

    return {name: changed(name, value) for name, value in arguments.items()}


def batch_dim(tensor):
    """The dimension of the rows, or None: nothing else has the size of the batch."""
    return tensor.shape.index(BATCH) if BATCH in tensor.shape else None


def rows_of(tensor, begin, end):
    dim = batch_dim(tensor)
    return tensor if dim is None else tensor.narrow(dim, begin, end - begin)


def of_rows(arguments, begin, end):
    return map_tensors(lambda _, tensor: rows_of(tensor, begin, end).contiguous(), arguments)


@of_both_sizes
@of_every_op
def test_the_rows_of_every_tensor_can_be_told(name, table):
    arguments = arguments_of(name, table)
    tensors = [*tensors_in(arguments), *run(name, arguments, "reference")]
    assert all(tuple(tensor.shape).count(BATCH) <= 1 for tensor in tensors)
    assert any(batch_dim(tensor) is not None for tensor in tensors)


@of_both_sizes
@of_every_op
def test_a_row_of_a_batch_is_the_row_alone(name, table):
    together = run(name, arguments_of(name, table))
    for b in (0, BATCH - 1):
        alone = run(name, of_rows(arguments_of(name, table), b, b + 1))
        for got, all_rows in zip(alone, together, strict=True):
            expected = rows_of(all_rows, b, b + 1)
            if name in INEXACT_ALONE:
                torch.testing.assert_close(got, expected)
            else:
                assert_equal(got, expected)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@of_every_op
def test_a_batch_of_no_rows_gives_results_of_no_rows(name, backend):
    empty = run(name, of_rows(arguments_of(name), 0, 0), backend)
    for got, full in zip(empty, run(name, arguments_of(name), "reference"), strict=True):
        assert got.shape == rows_of(full, 0, 0).shape
        assert got.dtype == full.dtype


def spread(tensor, packed, room):
    """The same values with others between them, NaN or 1, the dimensions before the last ones in the opposite order."""
    values = tensor.flatten(-packed) if tensor.ndim else tensor[None]
    *lead, last = values.shape
    filler = torch.nan if tensor.is_floating_point() else 1
    memory = torch.full([*(2 * size for size in reversed(lead)), last + room], filler, dtype=tensor.dtype)
    view = memory.to(tensor.device)[(slice(None, None, 2),) * len(lead)][..., 7 : 7 + last]
    view = view.permute(*reversed(range(len(lead))), len(lead)).copy_(values)
    return view.unflatten(-1, tensor.shape[-packed:]) if tensor.ndim else view[0]


def memory_of(tensor):
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


@of_both_sizes
@of_every_op
def test_strided_arguments_are_used_in_place_and_nothing_around_them_changes(name, table):
    packed, rooms = arguments_of(name, table), itertools.count(20, 4)  # no two tensors have the same strides
    arguments = map_tensors(lambda argument, x: spread(x, PACKED.get((name, argument), 1), next(rooms)), packed)
    before = map_tensors(lambda _, tensor: memory_of(tensor).clone(), arguments)
    expected, got = run(name, packed), run(name, arguments)
    assert_equal(got, expected)
    for argument in arguments:
        if argument.endswith("_"):  # only its elements may have changed
            view = arguments[argument]
            before[argument].as_strided(view.shape, view.stride(), view.storage_offset()).copy_(view)
    assert_equal(tensors_in(map_tensors(lambda _, tensor: memory_of(tensor), arguments)), tensors_in(before))


@of_every_op
def test_rows_may_share_their_memory(name):
    """Every row reads the first one's: an expanded argument, with a stride of 0."""

    def shared(argument, tensor):
        is_number = batch_dim(tensor) == tensor.ndim - 1  # one for each row, which have to lie together
        return tensor if is_number or argument.endswith("_") else rows_of(tensor, 0, 1).expand(tensor.shape)

    arguments = map_tensors(shared, arguments_of(name))
    packed = map_tensors(lambda _, tensor: tensor.clone(memory_format=torch.contiguous_format), arguments)
    assert_equal(run(name, arguments), run(name, packed))


class Fences:
    """Puts all memory that a launcher allocates between fences; the fences keep what `torch.empty` filled them with."""

    def __init__(self, monkeypatch):
        self.whole = []
        self.empty = torch.empty
        for owner, names in (
            (torch, ("empty", "empty_like", "zeros", "zeros_like")),
            (torch.Tensor, ("new_empty", "new_zeros")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, self.fenced(getattr(owner, name)))

    def fenced(self, allocate):
        def call(*args, **kwargs):
            inner = allocate(*args, **kwargs)
            whole = self.empty(inner.numel() + 2 * ROOM, dtype=inner.dtype, device=inner.device)
            self.whole.append((whole, whole.clone()))
            return whole[ROOM : ROOM + inner.numel()].copy_(inner.flatten()).view(inner.shape)

        return call

    def stand(self):
        for whole, before in self.whole:
            for fence in (slice(ROOM), slice(whole.numel() - ROOM, None)):
                assert_equal(whole[fence], before[fence])


@of_both_sizes
@of_every_op
def test_nothing_is_written_beside_a_result(name, table, monkeypatch):
    expected = run(name, arguments_of(name, table))
    arguments = arguments_of(name, table)
    with monkeypatch.context() as patch:
        fences = Fences(patch)
        got = run(name, arguments)
    assert_equal(got, expected)
    assert fences.whole or name == "kv_compact"  # which allocates nothing
    fences.stand()


@of_every_op
def test_the_order_of_programs_does_not_matter(name, request):
    forwards = run(name, arguments_of(name, LARGE_CALLS))
    indices = request.getfixturevalue("reversed_programs")
    assert_equal(run(name, arguments_of(name, LARGE_CALLS)), forwards)
    assert tuple(map(max, zip(*indices, strict=True))) == LAST_PROGRAMS[name]


@of_both_sizes
@of_every_op
def test_counters_are_left_at_zero(name, table):
    """Calls one after the other share their counters, those of the larger call and of the smaller."""
    alone, scratch = run(name, arguments_of(name, table)), Scratch()
    with scratch.active():
        for _ in range(2):
            assert_equal(run(name, arguments_of(name, table)), alone)
            assert not any(counters.any() for counters in scratch.counters())
    if table is LARGE_CALLS:
        assert (name in COUNTS_ARRIVALS) == bool(scratch.counters())


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are left out, which the interpreter allows"
)
@of_every_op
def test_a_launcher_never_waits_for_the_device(name, monkeypatch):
    """With launches that do nothing: what is left is what a launcher does on the host."""
    from triton.runtime.interpreter import InterpretedFunction

    arguments, launched = arguments_of(name), []
    monkeypatch.setattr(
        InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **kwargs: launched.append(self)
    )
    for module in ("common.walk", "learn_chances", "tree_merge", "tree_rerank"):  # values are looked at on a CPU alone
        monkeypatch.setattr(importlib.import_module(f"specdec.kernels.{module}"), "check_parent", lambda *_, **__: None)
    with monkeypatch.context() as patch:
        guard = Guard()
        guard.forbid(patch)
        with guard:
            LAUNCHERS[name](**arguments, backend="triton")
    assert launched


@pytest.mark.gpu
@of_every_op
def test_a_captured_launch_replays_on_new_inputs(name):
    """The rows in another order, and another step."""

    def renew(argument, tensor):
        if argument == "step":
            return tensor + 8
        return tensor if batch_dim(tensor) is None else tensor.flip(batch_dim(tensor))

    arguments = arguments_of(name, LARGE_CALLS)
    run(name, arguments_of(name, LARGE_CALLS))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(name, arguments)
    for times in (1, 2, 3):
        new = map_tensors(renew, arguments_of(name, LARGE_CALLS)) if times == 2 else arguments_of(name, LARGE_CALLS)
        for held, tensor in zip(tensors_in(arguments), tensors_in(new), strict=True):
            held.copy_(tensor)
        graph.replay()
        assert_equal(captured, run(name, new))
