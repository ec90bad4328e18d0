"""kernels.accept_typical against its eager reference and against typical acceptance written out for all paths."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.accept_calls import TYPICAL as RULE
from lib.accept_calls import typical_call as random_call
from lib.laws import NUM_TREES, assert_same, assert_sample_has_law, random_limits, random_logits
from lib.tensors import DEVICE, FLOATS, int32
from specdec.kernels.accept_typical import _launch_config, accept_typical
from specdec.kernels.reference.accept_typical import accept_typical as reference


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("vocab", [1, 300, 4097, 9000])
def test_matches_the_reference(generator, vocab, dtype, sampled):
    call = random_call(generator, vocab=vocab, dtype=dtype, sampled=sampled)
    limits = random_limits(generator, 3, max_depth=3)
    verdict = accept_typical(*call, **RULE, **limits, backend="triton")
    assert_same(verdict, reference(*call, **RULE, **limits))


def best_path(tokens, parent, probs, *, threshold, alpha, max_depth):
    """The rule of the paper over all root paths, in plain Python: longest, then most probable, then lowest."""
    found = [((0, 0.0, 0), [0])]
    for leaf in range(1, len(tokens)):
        path = [leaf]
        while path[0] > 0:
            path.insert(0, parent[path[0]])
        if path[0] != 0 or len(path) > max_depth + 1:
            continue
        total, typical = 0.0, True
        for above, node in itertools.pairwise(path):
            p = probs[above][tokens[node]]
            entropy = -sum(mass * math.log(mass) for mass in probs[above] if mass > 0)
            typical = typical and p > min(threshold, alpha * math.exp(-entropy))
            total += math.log(p) if p > 0 else -math.inf
        if typical:
            found.append(((len(path) - 1, total, -leaf), path))
    return max(found)[1]


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_the_path_is_the_longest_typical_one(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    num_nodes, vocab = data.draw(st.integers(1, 12)), data.draw(st.integers(2, 30))
    rule = {
        "threshold": data.draw(st.sampled_from([0.05, 0.2, 0.6])),
        "alpha": data.draw(st.sampled_from([0.1, 0.5, 2.0])),
    }
    max_depth = data.draw(st.integers(0, 4))
    tokens, parent, logits, _ = random_call(generator, batch=1, num_nodes=num_nodes, vocab=vocab, sampled=False)
    probs = logits[0].double().softmax(-1).tolist()
    expected = best_path(tokens[0].tolist(), parent[0].tolist(), probs, **rule, max_depth=max_depth)

    verdict = accept_typical(tokens, parent, logits, None, **rule, max_depth=max_depth, backend="triton")
    assert [node for node in verdict.path[0].tolist() if node >= 0] == expected
    assert verdict.next_root.item() == logits[0, expected[-1]].argmax().item()
    emitted = [tokens[0, node].item() for node in expected[1:]] + [verdict.next_root.item()]
    assert verdict.emitted[0].tolist() == emitted + [-1] * (max_depth + 1 - len(emitted))


def one_test(p, entropy_of_rest):
    """A tree of two nodes: token 0 has probability p, and 2**entropy_of_rest others share the rest."""
    rest = 2**entropy_of_rest
    logits = torch.tensor([p, *[(1 - p) / rest] * rest], dtype=torch.float64).log().float().to(DEVICE)
    return int32([[9, 0]]), int32([[-1, 0]]), logits.expand(1, 2, -1), None


@pytest.mark.parametrize("accept", ["triton", "reference"])
def test_the_bound_falls_with_the_entropy(accept):
    """One token of probability 0.1: typical beside 1024 others, not beside 2; a rule without H takes both or none."""
    accept_op, kwargs = (accept_typical, {"backend": "triton"}) if accept == "triton" else (reference, {})
    rule = {"threshold": 0.5, "alpha": 1.0, "max_depth": 1}
    for entropy_of_rest, accepted in ((10, 1), (1, 0)):
        assert accept_op(*one_test(0.1, entropy_of_rest), **rule, **kwargs).num_accepted.item() == accepted
    # the threshold is always enough
    rule["threshold"] = 0.09
    assert accept_op(*one_test(0.1, 1), **rule, **kwargs).num_accepted.item() == 1


def assert_turns_at_the_bound(call):
    """alpha is put a little below and above p / exp(-H)."""
    p = call[2][0, 0].double().softmax(-1)
    ratio = (p[0] * (-torch.xlogy(p, p).sum()).exp()).item()
    for factor, accepted in ((1 - 1e-5, 1), (1 + 1e-5, 0)):
        rule = {"threshold": 1.0, "alpha": ratio * factor, "max_depth": 1}
        assert accept_typical(*call, **rule, backend="triton").num_accepted.item() == accepted
        assert reference(*call, **rule).num_accepted.item() == accepted


@pytest.mark.parametrize("entropy_of_rest", [0, 3, 13], ids=["two tokens", "9 tokens", "8193 tokens in three tiles"])
def test_the_test_turns_at_its_bound(entropy_of_rest):
    assert_turns_at_the_bound(one_test(0.3, entropy_of_rest))


@pytest.mark.parametrize("other_tiles", [-20.0, -300.0, float("-inf")])
def test_tiles_of_little_or_no_mass_add_nothing_to_the_entropy(generator, other_tiles):
    """At -300 the mass of a tile underflows, but not the moment that it was given on its own."""
    logits = torch.randn(1, 1, 9000, generator=generator)
    logits[..., 0], logits[..., 4096:] = 5.0, logits[..., 4096:] + other_tiles
    assert_turns_at_the_bound((int32([[9, 0]]), int32([[-1, 0]]), logits.to(DEVICE).expand(1, 2, -1), None))


def test_ties_go_to_the_more_probable_path_then_to_the_lower_node():
    logits = torch.tensor([0.3, 0.5, 0.1, 0.1], device=DEVICE).log().expand(3, 4, -1)
    call = int32([[9, 0, 1, 0], [9, 0, 0, 0], [9, 2, 0, 0]]), int32([[-1, 0, 0, 0]]), logits, None
    for backend in ("triton", "reference"):
        verdict = accept_typical(*call, threshold=0.2, alpha=9.0, max_depth=1, backend=backend)
        assert verdict.path.tolist() == [[0, 2], [0, 1], [0, 2]]


def test_the_next_root_is_a_sample_of_the_last_node(generator):
    num_rows = 10 * NUM_TREES
    logits = random_logits(generator, 1, 1, 8).expand(num_rows, -1, -1)
    call = (
        int32([[0]]).expand(num_rows, -1),
        int32([[-1]]),
        logits,
        torch.rand(num_rows, generator=generator).to(DEVICE),
    )
    verdict = accept_typical(*call, **RULE, max_depth=0, backend="triton")
    assert_sample_has_law(verdict.next_root, logits[0, 0].double().softmax(-1))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_sample_has_law(verdict.next_root, (logits[0, 0].double() / 0.6).softmax(-1))


def test_the_lowest_of_equal_logits_is_the_next_root():
    logits = torch.zeros(1, 1, 9000, device=DEVICE)
    logits[0, 0, [4500, 4501, 8999]] = 3.0
    for backend in ("triton", "reference"):
        verdict = accept_typical(int32([[0]]), int32([[-1]]), logits, None, **RULE, max_depth=0, backend=backend)
        assert verdict.next_root.item() == 4500


def test_nan_and_infinity_count_as_impossible():
    logits = torch.full((2, 2, 6), float("nan"), device=DEVICE)
    logits[0, :, 3], logits[0, :, 4] = 1.0, float("-inf")
    call = int32([[9, 3], [9, 4]]), int32([[-1, 0]]), logits, None
    for backend in ("triton", "reference"):
        verdict = accept_typical(*call, **RULE, max_depth=1, backend=backend)
        assert verdict.emitted.tolist() == [[3, 3], [0, -1]]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"tokens": lambda t: t[:, :0]}, ValueError, r"tokens: expected 1 to 512 nodes, root included, got 0"),
        ({"logits": lambda t: t[:1]}, ValueError, r"logits: expected shape \[3, 9, any\], got \[1, 9, 40\]"),
        ({"uniform": lambda t: t[:1]}, ValueError, r"uniform: expected shape \[3\], got \[1\]"),
        ({"threshold": lambda _: 1.5}, ValueError, r"threshold: expected 0 to 1, got 1.5"),
        ({"alpha": lambda _: -0.1}, ValueError, r"alpha: expected 0 or more, got -0.1"),
        ({"alpha": lambda _: float("nan")}, ValueError, r"alpha: expected 0 or more, got nan"),
        ({"max_depth": lambda _: -1}, ValueError, r"max_depth: expected 0 or more, got -1"),
    ],
)
def test_wrong_arguments_are_named(generator, change, error, match):
    args = dict(zip(("tokens", "parent", "logits", "uniform"), random_call(generator), strict=True))
    args |= {"max_depth": 3, **RULE}
    for name, function in change.items():
        args[name] = function(args[name])
    with pytest.raises(error, match=match):
        accept_typical(**args)


def test_launch_config():
    config = _launch_config(65, 5, 128256)
    assert config.blocks == {"NUM_TILES": 32, "BLOCK_T": 32, "BLOCK_V": 4096, "BLOCK_N": 128, "BLOCK_D": 8}
    assert config.num_warps == 4
