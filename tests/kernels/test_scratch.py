"""kernels.common.scratch: counters that launches share, and who may share them."""

import threading
from contextlib import suppress

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lib.tensors import DEVICE, randn
from specdec.kernels import skinny_linear
from specdec.kernels.common.scratch import Scratch, arrival_counters

CPU = torch.device("cpu")


def taken(count, device=CPU):
    with arrival_counters(count, device) as counters:
        assert counters.dtype == torch.int32
        assert counters.tolist() == [0] * count
        return counters


def test_calls_without_a_scratch_have_counters_of_their_own():
    first, second = taken(3), taken(3)
    first.fill_(1)
    assert second.tolist() == [0, 0, 0]


def test_calls_with_a_scratch_share_its_counters():
    scratch = Scratch()
    with scratch.active():
        addresses = {taken(count).data_ptr() for count in (3, 1, 7)}
    assert addresses == {counters.data_ptr() for counters in scratch.counters()}
    assert len(addresses) == 1
    assert taken(3).data_ptr() not in addresses


def test_counters_that_have_become_too_few_stay_where_they_are():
    """A graph may read them."""
    scratch = Scratch()
    with scratch.active():
        small = taken(1).data_ptr()
        large = taken(10_000).data_ptr()
        assert taken(1).data_ptr() == large
    assert {counters.data_ptr() for counters in scratch.counters()} == {small, large}


def test_counters_of_a_launch_that_failed_are_not_used_again():
    scratch = Scratch()
    with scratch.active():
        with suppress(KeyboardInterrupt), arrival_counters(2, CPU) as counters:
            counters[1] = 1
            raise KeyboardInterrupt
        assert taken(2).data_ptr() != counters.data_ptr()
    assert len(scratch.counters()) == 2


def test_the_inner_of_two_scratches_is_used():
    outer, inner = Scratch(), Scratch()
    with outer.active():
        with inner.active():
            taken(2)
        assert not outer.counters()
        taken(2)
    assert len(outer.counters()) == len(inner.counters()) == 1


def test_another_thread_does_not_share():
    scratch, addresses = Scratch(), []
    with scratch.active():
        thread = threading.Thread(target=lambda: addresses.append(taken(2).data_ptr()))
        thread.start()
        thread.join()
        assert taken(2).data_ptr() not in addresses


def test_nothing_is_taken_where_nothing_is_counted():
    scratch = Scratch()
    with scratch.active():
        assert taken(0).shape == (0,)
    assert not scratch.counters()


class Operators(TorchDispatchMode):
    """Names of PyTorch's operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_launch_zeroes_nothing(generator):
    x, weight = randn(generator, 2, 1024), randn(generator, 8, 1024)
    seen = []
    with Scratch().active():
        for _ in range(2):
            with Operators() as operators:
                skinny_linear(x, weight, backend="triton")
            seen.append(operators.names.count("aten::zeros"))
    assert seen == [1, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("is_warm", [False, True], ids=["of the graph's own", "that are there"])
def test_a_graph_replays_with_counters(generator, is_warm):
    """Those that a capture finds, or those that it zeroes at every replay; eager launches come between."""
    x, weight, scratch = randn(generator, 2, 1024), randn(generator, 8, 1024), Scratch()
    expected = skinny_linear(x, weight, backend="triton")
    with scratch.active():
        if is_warm:
            skinny_linear(x, weight, backend="triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = skinny_linear(x, weight, backend="triton")
        assert len(scratch.counters()) == int(is_warm)
        for _ in range(3):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, expected)
            assert torch.equal(skinny_linear(x, weight, backend="triton"), expected)
    assert DEVICE == "cuda"
    assert not any(counters.any() for counters in scratch.counters())
