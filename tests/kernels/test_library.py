"""kernels.library: every op is one node for torch.compile and torch.export, and eager calls do not notice."""

import io
import operator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lib.op_calls import CALLS, LAUNCHERS, call_of, tensors_of
from lib.tensors import int32, randn
from specdec.kernels.common import library
from specdec.kernels.common.dynamic_tree import Beam


def rand(*shape):
    """The same for the same shape."""
    return randn(torch.Generator().manual_seed(sum(shape)), *shape)


def assert_same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_every_launcher_is_registered_and_called_here():
    assert sorted(LAUNCHERS) == sorted(library.REGISTERED) == sorted(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_an_op_passes_the_checks_of_torch(name):
    torch.library.opcheck(library.REGISTERED[name], *call_of(name))


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_gives_what_an_eager_call_gives(name):
    launcher = LAUNCHERS[name]
    args, kwargs = call_of(name)
    expected = tensors_of(launcher(*args, **kwargs)), args

    torch.compiler.reset()
    args, kwargs = call_of(name)
    compiled = torch.compile(lambda *a, **k: tensors_of(launcher(*a, **k)), fullgraph=True, backend="aot_eager")
    assert_same(compiled(*args, **kwargs), expected[0])
    for changed, eager in zip(args, expected[1], strict=True):
        assert not isinstance(changed, torch.Tensor) or torch.equal(changed, eager)


@pytest.mark.parametrize("name", CALLS)
def test_arguments_with_an_underscore_are_declared_as_changed(name):
    arguments = library.REGISTERED[name]._schema.arguments
    declared = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    assert declared == [argument.name for argument in arguments if argument.name.endswith("_")]
    args, kwargs = call_of(name)
    LAUNCHERS[name](*args, **kwargs)
    changed = [i for i, (now, then) in enumerate(zip(args, CALLS[name][0], strict=True)) if not same(now, then)]
    assert [arguments[i].name for i in changed] == declared


def same(now, then):
    return not isinstance(now, torch.Tensor) or torch.equal(now, then)


def step(x, weight, q, k, positions, table, slots, cache, lengths, words, tokens):
    """One layer's worth of ops, then a verdict and the commit."""
    gate = LAUNCHERS["swiglu"](LAUNCHERS["rms_norm"](x, weight, eps=1e-5))
    q = LAUNCHERS["rope_kv_write"](q, k, k, positions, table, slots, cache[0, 0], cache[0, 1])
    out = LAUNCHERS["tree_attention"](q, cache[0, 0], cache[0, 1], lengths, words, scale=0.25)
    parent = torch.where(positions[:1] > positions[0, 0], 0, -1).to(torch.int32)
    verdict = LAUNCHERS["accept_greedy"](tokens, parent, tokens.roll(-1, 1), max_depth=2)
    LAUNCHERS["kv_compact"](cache, lengths, verdict.path, verdict.num_accepted)
    return gate, out.sum(dim=2), verdict.num_emitted, verdict.next_root, cache.sum(dim=-1)


STEP_OPS = ["rms_norm", "swiglu", "rope_kv_write", "tree_attention", "accept_greedy", "kv_compact"]


def step_inputs(batch=2):
    slots = int32([[5, 6, 7], [2, 3, 4], [0, 1, 2]])[:batch].contiguous()
    positions = int32([[5, 6, 6], [2, 3, 3], [0, 1, 1]])[:batch].contiguous()
    tokens = int32([[1, 2, 2], [3, 4, 4], [5, 9, 9]])[:batch].contiguous()
    states = rand(batch, 3, 8), rand(8), rand(batch, 3, 4, 16), rand(batch, 3, 2, 16)
    cache, words = rand(2, 2, batch, 8, 2, 16), int32([[[1], [3], [5]]])
    return *states, positions, rand(9, 16), slots, cache, slots[:, 0].contiguous(), words, tokens


def ops_in(graph):
    """Names of the ops of this package in a graph, in their order."""
    names = {overload: name for name, overload in library.REGISTERED.items()}
    return [names[node.target] for node in graph.nodes if node.target in names]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_function_of_several_ops_compiles_to_one_graph(backend):
    inputs, expected = step_inputs(), step(*step_inputs())
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    assert_same(compiled(*inputs), expected)


def test_each_op_is_one_node_of_the_graph():
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return module.forward

    torch.compiler.reset()
    torch.compile(step, fullgraph=True, backend=keep)(*step_inputs())
    assert len(graphs) == 1
    assert ops_in(graphs[0]) == STEP_OPS


def test_another_batch_size_needs_one_more_compilation_at_most():
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for batch in (2, 3, 2):
        assert_same(compiled(*step_inputs(batch)), step(*step_inputs(batch)))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "traced"])
def test_a_function_of_several_ops_is_exported_saved_and_loaded(strict):
    class Step(torch.nn.Module):
        def forward(self, *args):
            return step(*args)

    expected = step(*step_inputs())
    program = torch.export.export(Step(), step_inputs(), strict=strict)
    assert ops_in(program.graph) == STEP_OPS
    assert operator.getitem in {node.target for node in program.graph.nodes}  # the fields of the verdict
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_same(torch.export.load(file).module()(*step_inputs()), expected)


def test_results_are_contiguous_as_the_shape_functions_promise():
    """Whatever layout eager PyTorch picks inside a reference: compiled code relies on the strides it was told."""
    turned = rand(3, 4).t()
    for result in (turned, (turned, turned), Beam(turned, turned, turned, turned, turned)):
        flat = library._flatten(result)
        for tensor in [flat] if isinstance(flat, torch.Tensor) else flat:
            assert tensor.is_contiguous()
            assert torch.equal(tensor, turned)


def test_a_compiled_call_still_names_a_wrong_argument():
    torch.compiler.reset()
    compiled = torch.compile(LAUNCHERS["rms_norm"], fullgraph=True, backend="aot_eager")
    with pytest.raises(TypeError, match="weight: expected torch.float32, got torch.float16"):
        compiled(rand(2, 8), rand(8).half(), eps=1e-5)


def test_an_eager_call_does_not_pass_the_dispatcher():
    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen = []
    with Record():
        step(*step_inputs())
    assert seen
    assert not set(seen) & set(library.REGISTERED.values())
    with Record():
        library.REGISTERED["swiglu"](rand(2, 8))
    assert library.REGISTERED["swiglu"] in seen


def test_a_launcher_keeps_its_name_signature_and_docstring():
    for name, launcher in LAUNCHERS.items():
        assert launcher.__name__ == name
        assert launcher.__doc__ == launcher.__wrapped__.__doc__
