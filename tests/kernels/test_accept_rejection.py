"""kernels.accept_rejection against its eager reference, and its emitted law against the target's."""

import itertools

import pytest
import torch

import specdec.kernels.reference.accept_rejection as definition
from lib.accept_calls import rejection_call as random_call
from lib.accept_calls import two_leaves
from lib.laws import (
    FIELDS,
    NUM_TREES,
    assert_same,
    draw_tokens,
    random_logits,
)
from lib.tensors import DEVICE, int32
from specdec.kernels.accept_rejection import _launch_config, accept_rejection
from specdec.kernels.reference.accept_rejection import accept_rejection as reference


@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
def test_a_law_is_whole_again_after_an_accepted_sibling(generator, replacement):
    """The walk ends at its depth limit: the next root is drawn from p there, whatever was rejected on the way."""
    call = list(random_call(generator, batch=NUM_TREES, num_nodes=4, replacement=replacement))
    call[1] = int32([[-1, 0, 0, 0]])
    call[0] = draw_tokens(generator, call[1], call[3], [0, -1, -1, -1], replacement)
    expected = reference(*call, replacement=replacement, max_depth=1)
    assert (expected.path[:, 1] > 1).sum() > NUM_TREES / 10
    assert_same(accept_rejection(*call, replacement=replacement, max_depth=1, backend="triton"), expected)


# The law: a tree of five nodes over three tokens, 0 - 1 - 3 and 0 - 2 - 4. All laws depend on the tokens before.
LAW_PARENT = [-1, 0, 0, 1, 2]
LAW_CHILDREN = {0: [1, 2], 1: [3], 2: [4]}
ROOT_P, ROOT_Q = [0.5, 0.2, 0.3], [0.15, 0.6, 0.25]
SECOND_P = [[0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.8, 0.05, 0.15]]
SECOND_Q = [[0.3, 0.3, 0.4], [0.7, 0.2, 0.1], [0.2, 0.2, 0.6]]
THIRD_P = [0.2, 0.5, 0.3]


def law_drafts(replacement):
    """Every tree that the drafter can draw: tokens of nodes 1 to 4, and the probability."""
    for x in itertools.product(range(3), repeat=4):
        if not replacement and x[0] == x[1]:
            continue
        second = ROOT_Q[x[1]] if replacement else ROOT_Q[x[1]] / (1 - ROOT_Q[x[0]])
        yield (9, *x), ROOT_Q[x[0]] * second * SECOND_Q[x[0]][x[2]] * SECOND_Q[x[1]][x[3]]


def law_branches(tokens, probs, draft_probs, replacement):
    """All that can happen to one tree, by the definition's own tests: uniforms in the middle of each cell, its size."""

    def final(p, weight, uniform):
        before = 0.0
        for mass in p.tolist():
            if mass > 0:
                yield weight * mass, uniform, before + mass / 2
            before += mass

    def at(node, weight, uniform):
        p, children = probs[node], LAW_CHILDREN.get(node, [])
        if children:
            siblings = [tokens[j] for j in children]
            tries = definition.sibling_tries(p, draft_probs[node], siblings, replacement=replacement)
            for child, (ratio, residual) in zip(children, tries, strict=False):
                ratio = min(ratio, 1.0)
                if ratio > 0:
                    yield from at(child, weight * ratio, {**uniform, child: ratio / 2})
                if ratio == 1:
                    return
                weight, uniform, p = weight * (1 - ratio), {**uniform, child: (1 + ratio) / 2}, residual
        yield from final(p, weight, uniform)

    yield from at(0, 1.0, {})


def law_calls(replacement):
    """One row per branch of every drafted tree: the arguments in float64, and the probability of the branch."""
    rows = []
    for tokens, draft_probability in law_drafts(replacement):
        probs = [ROOT_P, SECOND_P[tokens[1]], SECOND_P[tokens[2]], THIRD_P, THIRD_P]
        draft_probs = [ROOT_Q, SECOND_Q[tokens[1]], SECOND_Q[tokens[2]]]
        p, q = (torch.tensor(values, dtype=torch.float64) for values in (probs, draft_probs))
        for weight, uniform, uniform_final in law_branches(tokens, p, q, replacement):
            uniforms = [uniform.get(n, 0.5) for n in range(5)]
            rows.append((tokens, p.log(), q.log(), uniforms, uniform_final, draft_probability * weight))
    tokens, logits, draft_logits, uniform, uniform_final, weights = zip(*rows, strict=True)
    laws = torch.stack(logits).to(DEVICE), torch.stack(draft_logits).to(DEVICE), int32([0, 1, 2, -1, -1])
    uniforms = (torch.tensor(values, dtype=torch.float64, device=DEVICE) for values in (uniform, uniform_final))
    return (int32(tokens), int32([LAW_PARENT]), *laws, *uniforms), torch.tensor(weights, dtype=torch.float64)


def in_float32(arguments):
    return tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in arguments)


def emitted_law(emitted, weights):
    """[3, 3, 3] law of the first three tokens; what a step did not emit comes from the target itself."""
    law = torch.zeros(3, 3, 3, dtype=torch.float64)
    for row, weight in zip(emitted.tolist(), weights, strict=True):
        second = torch.tensor(SECOND_P[row[0]] if row[1] < 0 else [float(v == row[1]) for v in range(3)])
        third = torch.tensor(THIRD_P if row[2] < 0 else [float(v == row[2]) for v in range(3)])
        law[row[0]] += weight * second.double()[:, None] * third.double()
    return law


def target_law():
    root, second, third = (torch.tensor(values, dtype=torch.float64) for values in (ROOT_P, SECOND_P, THIRD_P))
    return root[:, None, None] * second[:, :, None] * third


@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
def test_emits_exactly_the_target_law(quick_tiles, replacement):
    arguments, weights = law_calls(replacement)
    verdict = reference(*arguments, replacement=replacement, max_depth=2)
    torch.testing.assert_close(emitted_law(verdict.emitted, weights), target_law(), rtol=0, atol=1e-7)
    # the kernel on every branch of some trees; all of them on a GPU
    some = torch.arange(len(weights), device=DEVICE) % (1 if DEVICE == "cuda" else 6) == 0
    call = [tensor if i in (1, 4) else tensor[some] for i, tensor in enumerate(in_float32(arguments))]
    got = accept_rejection(*call, replacement=replacement, max_depth=2, backend="triton")
    for field in FIELDS:
        assert torch.equal(getattr(got, field), getattr(verdict, field)[some])


def no_subtraction(p, q, siblings, *, replacement):
    """Rejected tokens are taken out of p, as for a draft that is not random."""
    for token in siblings:
        yield (p[token] / q[token]).item(), p
        p = p.clone()
        p[token] = 0
        p = p / p.sum()


def no_renormalisation(p, q, siblings, *, replacement):
    """Right, but for the draft law, which keeps its rejected siblings."""
    return definition_tries(p, q, siblings, replacement=True)


definition_tries = definition.sibling_tries


@pytest.mark.parametrize("wrong", [no_subtraction, no_renormalisation])
def test_the_law_test_rejects_a_wrong_rule(monkeypatch, wrong):
    monkeypatch.setattr(definition, "sibling_tries", wrong)
    arguments, weights = law_calls(False)
    verdict = reference(*arguments, replacement=False, max_depth=2)
    assert weights.sum().item() == pytest.approx(1)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(emitted_law(verdict.emitted, weights), target_law(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
def test_tests_turn_at_their_thresholds(replacement):
    """The law above takes every cell as one branch; here both sides of every threshold of one tree are tried."""
    tokens = (9, 1, 2, 0, 1)
    p, q = torch.tensor(ROOT_P, dtype=torch.float64), torch.tensor(ROOT_Q, dtype=torch.float64)
    (first, _), (second, _) = definition.sibling_tries(p, q, tokens[1:3], replacement=replacement)
    for step, accept, kwargs in ((1e-9, reference, {}), (1e-5, accept_rejection, {"backend": "triton"})):
        uniform = [[0.5, first - step, 0.5, 2, 2], [0.5, first + step, second - step, 2, 2]]
        uniform += [[0.5, first + step, second + step, 2, 2]]
        drawn = torch.tensor(uniform, dtype=torch.float64), torch.full((3,), 0.5)
        floats = p.log().expand(3, 5, -1), q.log().expand(3, 3, -1), *drawn
        floats = [x.to(DEVICE, torch.float64 if accept is reference else torch.float32) for x in floats]
        call = int32([tokens] * 3), int32([LAW_PARENT]), *floats[:2], int32([0, -1, -1, -1, -1]), *floats[2:]
        verdict = accept(*call, replacement=replacement, max_depth=2, **kwargs)
        assert verdict.path[:, 1].tolist() == [1, 2, -1]


def test_a_draft_that_is_sure_of_itself_leaves_an_exact_rest():
    """q(0) = 1 - 5e-7: in fp32 1 - q(0) has an error of some per cent, and so would the second child's threshold."""
    draft = [16.0, 0.2, 0.1, 0.0]
    q = torch.tensor(draft, dtype=torch.float64).softmax(-1)
    # node 2 is tested against q without token 0; a low target makes the threshold less than 1
    p = torch.tensor([0.4, 0.02, 0.28, 0.3], dtype=torch.float64)
    (_, _), (threshold, _) = definition.sibling_tries(p, q, [0, 1], replacement=False)
    assert 0.01 < threshold < 0.99
    for factor, accepted in ((1 - 1e-4, 2), (1 + 1e-4, -1)):
        call = two_leaves(p.log().tolist(), draft, [0.5, 0.99, threshold * factor])
        verdict = accept_rejection(*call, replacement=False, max_depth=1, backend="triton")
        assert verdict.path[0, 1].item() == accepted


def test_a_residual_without_mass_gives_way_to_the_target(generator):
    """p = q, and a uniform of 1, which no generator yields, rejects all the same."""
    logits = random_logits(generator, 30)
    call = two_leaves(logits.tolist(), logits.tolist(), [1.0, 1.0, 1.0], 0.7)
    expected = (logits.double().softmax(-1).cumsum(-1) > 0.7).int().argmax().item()
    for accept, kwargs in ((accept_rejection, {"backend": "triton"}), (reference, {})):
        verdict = accept(*call, replacement=False, max_depth=1, **kwargs)
        assert verdict.path.tolist() == [[0, -1]]
        assert verdict.next_root.item() == expected


def test_nothing_is_tried_once_the_draft_has_nothing_left(generator):
    """Token 0 has all of q: a second draw without replacement has no law, whatever was put in the tree."""
    logits, draft_logits = torch.tensor([0.1, 0.6, 0.3]).log().tolist(), [0.0, float("-inf"), float("-inf")]
    call = two_leaves(logits, draft_logits, [0.5, 0.5, 0.0], 0.9)
    for accept, kwargs in ((accept_rejection, {"backend": "triton"}), (reference, {})):
        verdict = accept(*call, replacement=False, max_depth=1, **kwargs)
        assert verdict.path.tolist() == [[0, -1]]
        assert verdict.next_root.item() == 2  # norm(p without token 0): 2/3 for token 1, 1/3 for token 2


def test_children_of_a_node_without_draft_law_are_not_tried(generator):
    call = list(random_call(generator))
    call[4] = torch.full_like(call[4], -1)
    verdict = accept_rejection(*call, replacement=False, max_depth=3, backend="triton")
    assert verdict.num_accepted.tolist() == [0, 0, 0]
    assert_same(verdict, reference(*call, replacement=False, max_depth=3))


@pytest.mark.parametrize(
    ("vocab_size", "stages", "num_warps"),
    [(300, 1, 1), (2048, 1, 16), (4096, 1, 16), (32000, 4, 16), (50257, 1, 16), (128256, 4, 16)],
)
def test_launch_config(vocab_size, stages, num_warps):
    config = _launch_config(64, 5, vocab_size)
    assert config.blocks["STAGES"] == stages
    assert (config.blocks["BLOCK_N"], config.blocks["BLOCK_D"]) == (64, 8)
    assert config.num_warps == num_warps
