"""Bad trees, in every op that takes one: refused by name on the CPU, harmless in the kernels, which cannot ask."""

import inspect

import pytest
import torch

from lib.accept_calls import RULES
from lib.laws import assert_same
from lib.op_calls import CALLS, LAUNCHERS, arguments_of
from lib.tensors import DEVICE, float32, int32
from specdec.kernels.common import walk
from specdec.kernels.common.check import MAX_NODES, check_parent
from specdec.kernels.common.dynamic_tree import RerankedTree
from specdec.kernels.reference import sample_probs as sample_reference
from specdec.kernels.reference import tree_rerank as rerank_reference
from specdec.kernels.sample_probs import WarpSettings

WITH_PARENT = sorted(name for name, launcher in LAUNCHERS.items() if "parent" in inspect.signature(launcher).parameters)
OF_CANDIDATES = ["learn_chances", "tree_merge"]  # whose places take the part of nodes, in every row
OF_NODES = [name for name in WITH_PARENT if name != "tree_rerank"]


def on_cpu(arguments):
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def test_these_are_the_ops_with_parents():
    rules = {f"accept_{rule}" for rule in ("greedy", "naive", "rejection", "traversal", "typical")}
    assert {*WITH_PARENT} == rules | {*OF_CANDIDATES, "sample_probs", "tree_rerank", "warp_logits"}


NODE_CASES = {
    "a later node": ([-1, 0, 3, 0], "got 3 at place 2 of row 0"),
    "the node itself": ([-1, 1, 0, 0], "got 1 at place 1 of row 0"),
    "a root with a parent": ([0, 0, 0, 0], "got 0 at place 0 of row 0"),
    "no node": ([-1, 0, 4, 0], "got 4 at place 2 of row 0"),
    "less than -1": ([-1, 0, 0, -2], "got -2 at place 3 of row 0"),
}


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("case", NODE_CASES)
@pytest.mark.parametrize("name", OF_NODES)
def test_parents_that_are_no_earlier_nodes_are_refused(name, case, backend):
    parent, got = NODE_CASES[case]
    tokens = int32([[1, 2, 3, 4]] * 3)
    rows = int32([parent] * (3 if name in OF_CANDIDATES else 1))
    arguments = on_cpu(arguments_of(name, parent=rows, tokens=tokens, backend=backend))
    with pytest.raises(ValueError, match=f"parent: expected -1 or an earlier node, {got}"):
        LAUNCHERS[name](**arguments)


def test_the_row_of_a_bad_parent_is_named():
    with pytest.raises(ValueError, match="parent: expected -1 or an earlier node, got 2 at place 1 of row 1"):
        check_parent(torch.tensor([[-1, 0, 0], [-1, 2, 0]]))
    check_parent(torch.tensor([[-1, 0, -1, 2], [-1, -1, 1, 0]]))
    check_parent(torch.empty(0, 4))


@pytest.mark.parametrize(("parent", "got"), [(8, "8 at place 1 of row 0"), (-2, "-2 at place 1 of row 0")])
def test_parents_beyond_the_pool_are_refused(parent, got):
    arguments = on_cpu(arguments_of("tree_rerank", parent=int32([[-1, parent], [-1, 0], [-1, 0]])))
    with pytest.raises(ValueError, match=f"parent: expected -1 or a candidate below 8, got {got}"):
        LAUNCHERS["tree_rerank"](**arguments)


def test_a_gpu_is_not_asked():
    """On a device the values are unknown without waiting for it; meta tensors have none at all."""
    check_parent(torch.empty(1, 4, dtype=torch.int32, device="meta"))


# What no launcher refuses on a GPU: the kernels run on it, in bounds, to an end

UNCHECKED = [name for name in RULES if name != "traversal"]
WILD = [
    [3, 0, 5, 0, 4, 2, 10**6],  # a root with a parent, a circle, a node above itself, a far one
    [-1, 0, 0, -7, 1, 2, 3],
    [-1, 2, 1, 6, 6, 6, 6],
    [-1, 0, 1, 2, 3, 4, 5],
]


@pytest.fixture
def unchecked(monkeypatch):
    """Kernels see what they would see on a GPU, where no launcher looks."""
    for module in (walk, inspect.getmodule(inspect.unwrap(LAUNCHERS["tree_rerank"]))):
        monkeypatch.setattr(module, "check_parent", lambda *_, **__: None)


def as_padding(parent):
    return torch.where((parent >= 0) & (parent < torch.arange(parent.shape[1], device=parent.device)), parent, -1)


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_node_with_a_wild_parent_is_padding(generator, unchecked, name):
    parent = int32(WILD)
    for _ in range(5):
        tokens, _, *rest = RULES[name].call(generator, batch=len(WILD), num_nodes=7, vocab=7, shared=False)
        verdict = RULES[name].kernel(tokens, parent, *rest, max_depth=6, **RULES[name].options, backend="triton")
        expected = RULES[name].reference(tokens, as_padding(parent), *rest, max_depth=6, **RULES[name].options)
        assert_same(verdict, expected)


def test_a_climb_ends_at_a_wild_parent(generator, unchecked):
    parent = int32(WILD)
    tokens, _, logits, _ = RULES["naive"].call(generator, batch=len(WILD), num_nodes=7, vocab=7)
    settings = WarpSettings(repetition_penalty=1.5).on(DEVICE)
    got = LAUNCHERS["warp_logits"](logits, settings, tokens, parent, backend="triton")
    expected = sample_reference.warp_logits(logits, settings, tokens, as_padding(parent))
    torch.testing.assert_close(got, expected)


def test_a_list_of_a_wild_parent_is_never_taken(unchecked):
    tokens, logps = int32([[[1, 2], [3, 4], [5, 6]]]), -torch.ones(1, 3, 2, device=DEVICE)
    call = {"num_nodes": 7, "max_depth": 4}
    got = LAUNCHERS["tree_rerank"](tokens, logps, int32([[-1, 10**6, 0]]), int32([9]), **call, backend="triton")
    # a list below itself is never reached either
    expected = rerank_reference.tree_rerank(tokens, logps, int32([[-1, 2, 0]]), int32([9]), **call)
    for field in RerankedTree.__slots__:
        assert torch.equal(getattr(got, field), getattr(expected, field)), field


@pytest.mark.parametrize("wild", [-1, 3, 10**6])
def test_tokens_that_are_none_are_not_looked_up(generator, wild):
    """A tree that was padded wrongly: the token has probability 0, and its neighbours in memory are not read."""
    tokens, parent = int32([[0, wild, 1]]), int32([[-1, 0, 0]])
    logits = torch.tensor([0.2, 0.7, 0.1], device=DEVICE).log().expand(1, 3, -1)
    uniform = torch.tensor([[0.9, 0.5, 0.1]], device=DEVICE)
    typical = LAUNCHERS["accept_typical"](
        tokens, parent, logits, None, max_depth=1, threshold=0.1, alpha=1.0, backend="triton"
    )
    drafts = logits[:, :1], int32([0, 5, 5]), uniform, uniform[:, 0].contiguous()
    rejection = LAUNCHERS["accept_rejection"](
        tokens, parent, logits, *drafts, max_depth=1, replacement=True, backend="triton"
    )
    for verdict in (typical, rejection):
        assert 1 not in verdict.path.tolist()[0]
        assert verdict.num_accepted.item() in (0, 1)


def test_no_draft_law_is_read_without_a_walk():
    """exp(100) is infinite, and 0 times that is no mass."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE).log().expand(4, 1, -1)
    drafts = torch.full((4, 1, 4), 100.0, device=DEVICE), int32([0]), torch.ones(4, 1, device=DEVICE)
    call = int32([[0]] * 4), int32([[-1]]), logits, *drafts, float32([0.05, 0.2, 0.5, 0.9])
    verdict = LAUNCHERS["accept_rejection"](*call, max_depth=0, replacement=True, backend="triton")
    assert verdict.next_root.tolist() == [0, 1, 2, 3]


# Sizes


def too_large(name):
    """Arguments of a tree of one node too many."""
    nodes = torch.zeros(1, MAX_NODES + 1, dtype=torch.int32)
    parent, floats = nodes - 1, torch.zeros(1, MAX_NODES + 1, 3)
    return {
        "accept_greedy": {"tokens": nodes, "parent": parent, "target_tokens": nodes},
        "accept_naive": {"tokens": nodes, "parent": parent, "logits": floats},
        "accept_rejection": {"tokens": nodes, "parent": parent, "logits": floats},
        "accept_traversal": {"tokens": nodes, "parent": parent, "logits": floats},
        "accept_typical": {"tokens": nodes, "parent": parent, "logits": floats},
        "sample_probs": {"tokens": nodes, "parent": parent, "logits": floats, "history": None, "settings": None},
        "tree_expand": {"row": nodes[0], "rank": nodes[0], "depth": nodes[0]},
        "tree_merge": {"num_nodes": MAX_NODES + 1},
        "tree_rerank": {"num_nodes": MAX_NODES + 1},
        "warp_logits": {"tokens": nodes, "parent": parent, "logits": floats, "history": None, "settings": None},
    }[name]


@pytest.mark.parametrize("name", [*(name for name in WITH_PARENT if name != "learn_chances"), "tree_expand"])
def test_more_than_512_nodes_are_refused(name):
    with pytest.raises(ValueError, match=r": expected 1 to 512 nodes, root included, got 513"):
        LAUNCHERS[name](**on_cpu(arguments_of(name, **too_large(name))))


def test_the_largest_tree_is_not_too_large():
    nodes = torch.zeros(1, MAX_NODES, dtype=torch.int32, device=DEVICE)
    assert LAUNCHERS["accept_greedy"](nodes, nodes - 1, nodes, max_depth=1).num_accepted.tolist() == [0]


# Every launcher, every tensor: dtype, device and last stride


TENSORS = [
    (name, argument)
    for name in sorted(CALLS)
    for argument, value in arguments_of(name).items()
    if isinstance(value, torch.Tensor)
]
SINGLE = {name for name in CALLS if sum(case[0] == name for case in TENSORS) == 1}  # on its own device
OF_ANY_SHAPE = {("rms_norm", "x"), ("swiglu", "gate_up")}  # all but the last dimension are rows
OF_ANY_STRIDES = {("beam_step", "logsumexp")}


OTHER_WIDTH = {torch.int32: torch.int64, torch.int64: torch.int32, torch.float32: torch.float64, torch.bool: torch.int8}
OF_EITHER_WIDTH = {
    ("beam_step", "tokens"),
    ("lstm_recurrence", "counts"),
    ("lstm_recurrence", "first"),
    ("lstm_recurrence", "source"),
    ("tree_grow", "tokens"),
    ("tree_rerank", "tokens"),
    ("tree_expand", "candidates"),
    ("kv_compact", "cache_"),
}


@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_another_dtype_is_refused(name, argument):
    tensor = arguments_of(name)[argument]
    for dtype in (torch.complex64, OTHER_WIDTH[tensor.dtype])[: 1 if (name, argument) in OF_EITHER_WIDTH else 2]:
        wrong = arguments_of(name, **{argument: tensor.to(dtype)})
        with pytest.raises(TypeError, match=rf"^{argument}: expected torch\.\w+( or .*)?, got {dtype}"):
            LAUNCHERS[name](**wrong)


@pytest.mark.parametrize(("name", "argument"), [case for case in TENSORS if case not in OF_ANY_SHAPE])
def test_another_shape_is_refused(name, argument):
    wrong = arguments_of(name)
    wrong[argument] = wrong[argument][None, None, None, None, None, None, None]
    with pytest.raises(ValueError, match=r"^\w+(\[0\])?: expected "):
        LAUNCHERS[name](**wrong)


@pytest.mark.parametrize(("name", "argument"), [case for case in TENSORS if case[0] not in SINGLE])
def test_a_tensor_on_another_device_is_refused(name, argument):
    wrong = arguments_of(name)
    wrong[argument] = wrong[argument].to("meta")
    with pytest.raises(ValueError, match=r"^\w+(\[0\])?: expected a tensor on"):
        LAUNCHERS[name](**wrong)


OF_ROWS = [case for case in TENSORS if arguments_of(case[0])[case[1]].shape[-1:].numel() > 1]


@pytest.mark.parametrize(("name", "argument"), [case for case in OF_ROWS if case not in OF_ANY_STRIDES])
def test_a_last_dimension_with_gaps_is_refused(name, argument):
    wrong = arguments_of(name)
    wrong[argument] = torch.stack([wrong[argument]] * 2, dim=-1).flatten(-2)[..., ::2]
    with pytest.raises(ValueError, match=rf"^{argument}: expected stride 1 in the last dimension, got 2"):
        LAUNCHERS[name](**wrong)


@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_what_is_no_tensor_is_refused(name, argument):
    with pytest.raises(TypeError, match=rf"^{argument}: expected a torch.Tensor, got list"):
        LAUNCHERS[name](**arguments_of(name, **{argument: [1]}))
