"""kernels.accept_rejection against its eager reference, and its emitted law against the target's."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec.kernels.reference.accept_rejection as definition
from lib.laws import (
    DEVICE,
    FIELDS,
    NUM_TREES,
    assert_same,
    assert_sample_has_law,
    draw_tokens,
    int32,
    random_limits,
    random_logits,
    random_parents,
)
from specdec.kernels.accept_rejection import _launch_config, accept_rejection
from specdec.kernels.reference.accept_rejection import accept_rejection as reference

NAMES = ("tokens", "parent", "logits", "draft_logits", "draft_row", "uniform", "uniform_final")


def random_call(generator, *, batch=3, num_nodes=9, vocab=40, replacement=False, shared=True, dtype=torch.float32):
    parent = random_parents(generator, num_nodes, rows=1 if shared else batch)
    draft_row = torch.arange(num_nodes, dtype=torch.int32)
    draft_row[3::5] = -1
    draft_logits = random_logits(generator, batch, num_nodes, vocab, dtype=dtype)
    # the target is near the draft: at every place in a tree some tests pass and some do not
    logits = (draft_logits.float() + torch.randn(draft_logits.shape, generator=generator).to(DEVICE)).to(dtype)
    tokens = draw_tokens(generator, parent, draft_logits, draft_row.tolist(), replacement)
    uniform, uniform_final = torch.rand(batch, num_nodes, generator=generator), torch.rand(batch, generator=generator)
    uniform = uniform**0.5  # more rejections
    return tokens, parent, logits, draft_logits, draft_row.to(DEVICE), uniform.to(DEVICE), uniform_final.to(DEVICE)


@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [9, 300, 4096, 9000])
def test_matches_the_reference(generator, vocab, dtype, replacement):
    call = random_call(generator, vocab=vocab, dtype=dtype, replacement=replacement)
    limits = {"replacement": replacement, **random_limits(generator, 3)}
    assert_same(accept_rejection(*call, **limits, backend="triton"), reference(*call, **limits))


def test_large_trees_are_walked_as_in_the_reference(generator):
    call = random_call(generator, batch=1, num_nodes=300, vocab=400)
    limits = {"replacement": False, "max_depth": 9}
    assert_same(accept_rejection(*call, **limits, backend="triton"), reference(*call, **limits))


@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
def test_a_law_is_whole_again_after_an_accepted_sibling(generator, replacement):
    """The walk ends at its depth limit: the next root is drawn from p there, whatever was rejected on the way."""
    call = list(random_call(generator, batch=NUM_TREES, num_nodes=4, replacement=replacement))
    call[1] = int32([[-1, 0, 0, 0]])
    call[0] = draw_tokens(generator, call[1], call[3], [0, -1, -1, -1], replacement)
    expected = reference(*call, replacement=replacement, max_depth=1)
    assert (expected.path[:, 1] > 1).sum() > NUM_TREES / 10
    assert_same(accept_rejection(*call, replacement=replacement, max_depth=1, backend="triton"), expected)


@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
def test_decides_as_the_reference_on_many_trees(generator, quick_tiles, replacement):
    batch = 4000 if DEVICE == "cuda" else 250
    call = random_call(generator, batch=batch, num_nodes=7, vocab=9, replacement=replacement, shared=False)
    expected = reference(*call, replacement=replacement, max_depth=4)
    assert_same(accept_rejection(*call, replacement=replacement, max_depth=4, backend="triton"), expected)
    assert expected.num_accepted.unique().numel() >= 3, "the trees are too easy or too hard to tell anything"


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
    arguments = (
        int32(tokens), int32([LAW_PARENT]), torch.stack(logits).to(DEVICE), torch.stack(draft_logits).to(DEVICE),
        int32([0, 1, 2, -1, -1]), torch.tensor(uniform, dtype=torch.float64, device=DEVICE),
        torch.tensor(uniform_final, dtype=torch.float64, device=DEVICE),
    )  # fmt: skip
    return arguments, torch.tensor(weights, dtype=torch.float64)


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
        dtype = torch.float64 if accept is reference else torch.float32
        call = (
            int32([tokens] * 3), int32([LAW_PARENT]),
            p.log().to(dtype).to(DEVICE).expand(3, 5, -1), q.log().to(dtype).to(DEVICE).expand(3, 3, -1),
            int32([0, -1, -1, -1, -1]), torch.tensor(uniform, dtype=dtype, device=DEVICE),
            torch.full((3,), 0.5, dtype=dtype, device=DEVICE),
        )  # fmt: skip
        verdict = accept(*call, replacement=replacement, max_depth=2, **kwargs)
        assert verdict.path[:, 1].tolist() == [1, 2, -1]


@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
def test_a_sample_of_a_larger_vocabulary_has_the_target_law(generator, quick_tiles, replacement):
    """Drafts and uniforms are random: two siblings with one child each, as they are drawn in earnest."""
    num_rows, vocab = 4000, 12
    parent, draft_row = int32([[-1, 0, 0, 1, 2]]), [0, 1, 1, -1, -1]
    laws = random_logits(generator, 2, vocab, common=3)
    draft_logits = random_logits(generator, 1, 2, vocab, common=3).expand(num_rows, -1, -1)
    tokens = draw_tokens(generator, parent, draft_logits, draft_row, replacement)
    logits = laws[[0, 1, 1, 0, 0]].expand(num_rows, -1, -1)
    uniform, uniform_final = torch.rand(num_rows, 5, generator=generator), torch.rand(num_rows, generator=generator)
    call = tokens, parent, logits, draft_logits, int32(draft_row), uniform.to(DEVICE), uniform_final.to(DEVICE)
    verdict = reference(*call, replacement=replacement, max_depth=2)
    probs = laws.double().softmax(-1)
    assert_sample_has_law(verdict.emitted[:, 0], probs[0])
    assert_sample_has_law(verdict.emitted[verdict.num_accepted >= 1, 1], probs[1])
    with pytest.raises(AssertionError, match="chi-square"):  # the draft's law is another
        assert_sample_has_law(verdict.emitted[:, 0], draft_logits[0, 0].double().softmax(-1))

    # the kernel on some of the rows, too few to tell that law apart; on all of them on a GPU
    some = slice(None if DEVICE == "cuda" else 120)
    own = [tensor if i in (1, 4) else tensor[some] for i, tensor in enumerate(call)]
    got = accept_rejection(*own, replacement=replacement, max_depth=2, backend="triton")
    for field in FIELDS:
        assert torch.equal(getattr(got, field), getattr(verdict, field)[some])
    assert_sample_has_law(got.emitted[:, 0], probs[0])


def test_a_draft_that_is_sure_of_itself_leaves_an_exact_rest():
    """q(0) = 1 - 5e-7: in fp32 1 - q(0) has an error of some per cent, and so would the second child's threshold."""
    draft = torch.tensor([16.0, 0.2, 0.1, 0.0], device=DEVICE)
    target = torch.tensor([0.5, 0.0, 0.3, 0.1], device=DEVICE)
    p, q = target.double().softmax(-1).cpu(), draft.double().softmax(-1).cpu()
    # node 2 is tested against q without token 0; a low target makes the threshold less than 1
    p = torch.tensor([0.4, 0.02, 0.28, 0.3], dtype=torch.float64)
    (_, _), (threshold, _) = definition.sibling_tries(p, q, [0, 1], replacement=False)
    assert 0.01 < threshold < 0.99
    for factor, accepted in ((1 - 1e-4, 2), (1 + 1e-4, -1)):
        call = (
            int32([[9, 0, 1]]), int32([[-1, 0, 0]]), p.log().float().to(DEVICE).expand(1, 3, -1), draft[None, None],
            int32([0, -1, -1]), torch.tensor([[0.5, 0.99, threshold * factor]], device=DEVICE),
            torch.tensor([0.5], device=DEVICE),
        )  # fmt: skip
        verdict = accept_rejection(*call, replacement=False, max_depth=1, backend="triton")
        assert verdict.path[0, 1].item() == accepted


def test_a_residual_without_mass_gives_way_to_the_target(generator):
    """p = q, and a uniform of 1, which no generator yields, rejects all the same."""
    logits = random_logits(generator, 1, 1, 30).expand(1, 3, -1)
    call = (
        int32([[9, 0, 1]]), int32([[-1, 0, 0]]), logits, logits[:, :1], int32([0, -1, -1]),
        torch.ones(1, 3, device=DEVICE), torch.tensor([0.7], device=DEVICE),
    )  # fmt: skip
    expected = (logits[0, 0].double().softmax(-1).cumsum(-1) > 0.7).int().argmax().item()
    for accept, kwargs in ((accept_rejection, {"backend": "triton"}), (reference, {})):
        verdict = accept(*call, replacement=False, max_depth=1, **kwargs)
        assert verdict.path.tolist() == [[0, -1]]
        assert verdict.next_root.item() == expected


def test_nothing_is_tried_once_the_draft_has_nothing_left(generator):
    """Token 0 has all of q: a second draw without replacement has no law, whatever was put in the tree."""
    draft_logits = torch.tensor([[[0.0, float("-inf"), float("-inf")]]], device=DEVICE)
    logits = torch.tensor([0.1, 0.6, 0.3], device=DEVICE).log().expand(1, 3, -1)
    uniform = torch.tensor([[0.5, 0.5, 0.0]], device=DEVICE)
    call = int32([[9, 0, 1]]), int32([[-1, 0, 0]]), logits, draft_logits, int32([0, -1, -1]), uniform
    for accept, kwargs in ((accept_rejection, {"backend": "triton"}), (reference, {})):
        verdict = accept(*call, torch.tensor([0.9], device=DEVICE), replacement=False, max_depth=1, **kwargs)
        assert verdict.path.tolist() == [[0, -1]]
        assert verdict.next_root.item() == 2  # norm(p without token 0): 2/3 for token 1, 1/3 for token 2


def test_children_of_a_node_without_draft_law_are_not_tried(generator):
    call = list(random_call(generator))
    call[4] = torch.full_like(call[4], -1)
    verdict = accept_rejection(*call, replacement=False, max_depth=3, backend="triton")
    assert verdict.num_accepted.tolist() == [0, 0, 0]
    assert_same(verdict, reference(*call, replacement=False, max_depth=3))


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_a_row_of_a_batch_is_the_row_alone(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    call = random_call(
        generator, num_nodes=data.draw(st.integers(1, 8)), vocab=data.draw(st.integers(9, 70)), shared=False
    )
    limits = {"replacement": False, **random_limits(generator, 3)}
    together = accept_rejection(*call, **limits, backend="triton")
    b = data.draw(st.integers(0, 2))
    own = [tensor if i == 4 else tensor[b : b + 1] for i, tensor in enumerate(call)]
    alone = accept_rejection(*own, **{**limits, "budget": limits["budget"][b : b + 1]}, backend="triton")
    for field in FIELDS:
        assert torch.equal(getattr(alone, field)[0], getattr(together, field)[b])


def test_strided_inputs_are_read_in_place(generator):
    call = random_call(generator, num_nodes=12, vocab=64)
    narrow = [tensor[:, :7] for tensor in call[:4]] + [call[4][:7], call[5][:, :7], call[6]]
    narrow[4] = narrow[4].clamp(max=6)
    assert not narrow[2].is_contiguous()
    limits = {"replacement": False, "max_depth": 4}
    assert_same(accept_rejection(*narrow, **limits, backend="triton"), reference(*narrow, **limits))


def test_the_order_of_programs_does_not_matter(generator, reversed_programs):
    call = random_call(generator, vocab=9000)
    limits = {"replacement": False, "max_depth": 4}
    assert_same(accept_rejection(*call, **limits, backend="triton"), reference(*call, **limits))
    assert (2, 8, 2) in reversed_programs


def test_a_batch_of_no_rows_gives_a_verdict_of_no_rows(generator):
    call = random_call(generator, shared=True)
    empty = [tensor if i in (1, 4) else tensor[:0] for i, tensor in enumerate(call)]
    for backend in ("triton", "reference"):
        verdict = accept_rejection(*empty, replacement=False, max_depth=2, backend=backend)
        assert verdict.path.shape == (0, 3)


@pytest.mark.gpu
def test_a_captured_launch_replays_on_new_inputs(generator):
    call = random_call(generator, vocab=5000)
    limits = {"replacement": False, "max_depth": 4}
    accept_rejection(*call, **limits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdict = accept_rejection(*call, **limits)
    call[5].copy_(call[5].flip(1))
    graph.replay()
    assert_same(verdict, reference(*call, **limits))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"parent": lambda t: t.long()}, TypeError, r"parent: expected torch.int32, got torch.int64"),
        ({"logits": lambda t: t[:, :3]}, ValueError, r"logits: expected shape \[3, 9, any\], got \[3, 3, 40\]"),
        ({"draft_logits": lambda t: t[..., :7]}, ValueError, r"draft_logits: expected shape \[3, any, 40\]"),
        ({"draft_logits": lambda t: t[:, :0]}, ValueError, r"draft_logits: expected at least one law"),
        ({"draft_logits": lambda t: t.int()}, TypeError, r"draft_logits: expected torch.float32 or .*got torch.int32"),
        ({"draft_row": lambda t: t[:2]}, ValueError, r"draft_row: expected shape \[9\], got \[2\]"),
        ({"uniform": lambda t: t.double()}, TypeError, r"uniform: expected torch.float32, got torch.float64"),
        ({"uniform_final": lambda t: t[None]}, ValueError, r"uniform_final: expected shape \[3\], got \[1, 3\]"),
        ({"uniform_final": lambda t: t.to("meta")}, ValueError, r"uniform_final: expected a tensor on"),
    ],
)
def test_wrong_arguments_are_named(generator, change, error, match):
    args = dict(zip(NAMES, random_call(generator), strict=True))
    for name, function in change.items():
        args[name] = function(args[name])
    with pytest.raises(error, match=match):
        accept_rejection(**args, replacement=False, max_depth=3)


@pytest.mark.parametrize(
    ("vocab_size", "stages", "num_warps"),
    [(300, 1, 1), (2048, 1, 16), (4096, 1, 16), (32000, 4, 16), (50257, 1, 16), (128256, 4, 16)],
)
def test_launch_config(vocab_size, stages, num_warps):
    config = _launch_config(64, 5, vocab_size)
    assert config.blocks["STAGES"] == stages
    assert (config.blocks["BLOCK_N"], config.blocks["BLOCK_D"]) == (64, 8)
    assert config.num_warps == num_warps
