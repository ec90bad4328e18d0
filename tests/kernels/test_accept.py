"""What the acceptance rules share: each decides as its reference, has its law and keeps its limits."""

import inspect

import pytest
import torch

from lib.accept_calls import RULES, drafted, traversal_of
from lib.laws import FIELDS, assert_same, assert_sample_has_law, random_limits, random_logits
from lib.tensors import DEVICE, FLOATS, int32

DRAFTED = ["rejection without replacement", "rejection with replacement", "traversal"]
SIZES = [(name, vocab) for name in DRAFTED for vocab in (9, 300, 4096, 9000)]
SIZES += [("naive", vocab) for vocab in (1, 5, 300, 4096, 4097, 9000)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("name", "vocab"), SIZES)
def test_matches_the_reference(generator, name, vocab, dtype):
    shape = {} if name == "traversal" else {"shared": vocab % 2 == 0}
    call = RULES[name].call(generator, vocab=vocab, dtype=dtype, **shape)
    assert_same(*RULES[name].both(*call, **random_limits(generator, 3, max_depth=8)))


@pytest.mark.parametrize("name", ["naive", "rejection without replacement", "traversal", "typical"])
def test_large_trees_are_judged_as_in_the_reference(generator, quick_tiles, name):
    call = RULES[name].call(generator, batch=1, num_nodes=300, vocab=400)
    assert_same(*RULES[name].both(*call, max_depth=20 if name == "traversal" else 9))


@pytest.mark.parametrize(
    ("name", "num_trees", "num_nodes"),
    [
        ("naive", 500, 6),
        ("rejection without replacement", 250, 7),
        ("rejection with replacement", 250, 7),
        ("typical", 300, 7),
    ],
)
def test_decides_as_the_reference_on_many_trees(generator, quick_tiles, name, num_trees, num_nodes):
    batch = 4000 if DEVICE == "cuda" else num_trees
    call = RULES[name].call(generator, batch=batch, num_nodes=num_nodes, vocab=9, shared=False)
    verdict, expected = RULES[name].both(*call, max_depth=4)
    assert_same(verdict, expected)
    assert expected.num_accepted.unique().numel() >= 3, "the trees are too easy or too hard to tell anything"


@pytest.mark.parametrize("name", DRAFTED)
def test_a_sample_of_a_larger_vocabulary_has_the_target_law(generator, quick_tiles, name):
    """Drafts and uniforms are random: two siblings with one child each, as they are drawn in earnest."""
    num_rows, vocab, parent = 4000, 12, [-1, 0, 0, 1, 2]
    laws = random_logits(generator, 2, vocab, common=3)
    draft_logits = random_logits(generator, 1, 2, vocab, common=3).expand(num_rows, -1, -1)
    logits = laws[[0, 1, 1, 0, 0]].expand(num_rows, -1, -1)
    drafts = logits, draft_logits, [0, 1, 1, -1, -1]
    if name == "traversal":
        call = traversal_of(generator, parent, *drafts, exponent=1)
    else:
        call = drafted(generator, int32([parent]), *drafts, **RULES[name].options, exponent=1)
    verdict = RULES[name].reference(*call, **RULES[name].options, max_depth=2)
    probs = laws.double().softmax(-1)
    assert_sample_has_law(verdict.emitted[:, 0], probs[0])
    assert_sample_has_law(verdict.emitted[verdict.num_accepted >= 1, 1], probs[1])
    with pytest.raises(AssertionError, match="chi-square"):  # the draft's law is another
        assert_sample_has_law(verdict.emitted[:, 0], draft_logits[0, 0].double().softmax(-1))

    # the kernel on some of the rows, too few to tell that law apart; on all of them on a GPU
    some = slice(None if DEVICE == "cuda" else 120)
    own = [tensor[some] if len(tensor) == num_rows else tensor for tensor in call]
    got = RULES[name].kernel(*own, **RULES[name].options, max_depth=2, backend="triton")
    for field in FIELDS:
        assert torch.equal(getattr(got, field), getattr(verdict, field)[some])
    assert_sample_has_law(got.emitted[:, 0], probs[0])


@pytest.mark.parametrize("stops", [[], [0], [1, 2]], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_budget_and_stop_tokens_cut_exactly_there(generator, quick_tiles, name, stops):
    batch = 24
    rule, call = RULES[name], RULES[name].call(generator, batch=batch, num_nodes=8)
    whole, _ = rule.both(*call, max_depth=7)
    budget = [row % 7 - 1 for row in range(batch)]
    verdict, _ = rule.both(*call, max_depth=7, budget=int32(budget), stop_tokens=int32(stops))
    for row, emitted in enumerate(whole.emitted.tolist()):
        expected = []
        for token in emitted[: max(budget[row], 0)]:
            expected.append(token)
            if token in stops or token == -1:
                break
        expected = [token for token in expected if token >= 0]
        assert verdict.emitted[row].tolist() == expected + [-1] * (8 - len(expected))
        assert verdict.num_accepted[row] == len(expected) - 1
        assert verdict.next_root[row] == (expected[-1] if expected else call[0][row, 0])
        assert verdict.path[row].tolist() == whole.path[row, : len(expected)].tolist() + [-1] * (8 - len(expected))


DRAFTED_REJECTED = [
    ("logits", lambda t: t[:, :3], ValueError, r"logits: expected shape \[3, 9, any\], got \[3, 3, 40\]"),
    ("draft_logits", lambda t: t[..., :7], ValueError, r"draft_logits: expected shape \[3, any, 40\]"),
    ("draft_logits", lambda t: t[:, :0], ValueError, r"draft_logits: expected at least one law"),
    ("draft_row", lambda t: t[:2], ValueError, r"draft_row: expected shape \[9\], got \[2\]"),
    ("uniform_final", lambda t: t[None], ValueError, r"uniform_final: expected shape \[3\], got \[1, 3\]"),
]
REJECTED = {
    "greedy": [
        ("tokens", lambda t: t[0], ValueError, r"tokens: expected shape \[any, any\], got \[9\]"),
        ("tokens", lambda t: t[:, :0], ValueError, r"tokens: expected 1 to 512 nodes, root included, got 0"),
        ("parent", lambda t: t[:, :4], ValueError, r"parent: expected shape \[any, 9\], got \[2, 4\]"),
        ("parent", lambda t: t.repeat(2, 1), ValueError, r"parent: expected 2 rows or 1, got shape \[4, 9\]"),
        ("target_tokens", lambda t: t[:1], ValueError, r"target_tokens: expected shape \[2, 9\], got \[1, 9\]"),
        ("max_depth", lambda _: -1, ValueError, r"max_depth: expected 0 or more, got -1"),
        ("budget", lambda _: int32([1]), ValueError, r"budget: expected shape \[2\], got \[1\]"),
        ("stop_tokens", lambda _: int32([[1]]), ValueError, r"stop_tokens: expected shape \[any\], got \[1, 1\]"),
    ],
    "naive": [
        ("logits", lambda t: t[:, :3], ValueError, r"logits: expected shape \[3, 7, any\], got \[3, 3, 40\]"),
        ("logits", lambda t: t[..., :0], ValueError, r"logits: expected a vocabulary of at least one token"),
        ("uniform", lambda t: t[:, 0], ValueError, r"uniform: expected shape \[3, 7\], got \[3\]"),
        ("uniform", lambda t: t.half(), TypeError, r"uniform: expected torch.float32, got torch.float16"),
        ("max_depth", lambda _: -1, ValueError, r"max_depth: expected 0 or more, got -1"),
    ],
    "rejection without replacement": DRAFTED_REJECTED,
    "traversal": [
        *DRAFTED_REJECTED,
        ("parent", lambda t: t.repeat(3, 1), ValueError, r"parent: expected shape \[1, 9\], got \[3, 9\]"),
        ("order", lambda t: t[1:], ValueError, r"order: expected shape \[9\], got \[8\]"),
        ("steps", lambda t: t[0], ValueError, r"steps: expected shape \[any, any\]"),
    ],
}


@pytest.mark.parametrize(
    ("name", "argument", "change", "error", "match"), [(name, *case) for name in REJECTED for case in REJECTED[name]]
)
def test_wrong_arguments_are_named(generator, name, argument, change, error, match):
    rule = RULES[name]
    arguments = inspect.signature(rule.kernel).bind_partial(*rule.call(generator)).arguments | {"max_depth": 8}
    arguments[argument] = change(arguments.get(argument))
    with pytest.raises(error, match=match):
        rule.kernel(**arguments, **rule.options)
