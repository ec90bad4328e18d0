"""Sampled output has the target's own law: every drafter, every lossless rule, several sets of warpers.

Many rows decode the same prompt with seeds of their own; the law of their first three tokens is compared with the
target's, which transformers computes for every possible beginning. Seeds are fixed, so a right rule passes for good.
"""

from functools import lru_cache

import pytest
import torch

import specdec
from lib.host_code import by_transformers
from lib.law_drafters import DRAFTERS, SAMPLING_RULES, VOCAB_SIZE, build_target, judged_by, make_drafter
from lib.laws import chi_square_p_value
from specdec.common.randomness import Uniforms, row_seeds
from specdec.drafting.candidates import DraftLaw
from specdec.loop.decoder import Decoder
from specdec.loop.rules import Naive, Rejection, Traversal
from specdec.models.target.scores import Scores

NUM_ROWS = 600
PROMPT = torch.tensor([2, 4, 1, 2, 4, 3, 0, 2, 4])
WARPERS = {
    "plain": {"top_k": 0},
    "cold and cut": {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
    "path": {"repetition_penalty": 1.8, "min_p": 0.08, "top_k": 0},
}
CASES = judged_by(SAMPLING_RULES)


@lru_cache
def law(warpers):
    """[V, V, V] the target's law of three tokens after the prompt, one text at a time."""
    target, settings = build_target(), WARPERS[warpers]

    def after(text):
        with torch.no_grad():
            scores = target(text[None]).logits[0, -1:]
        return by_transformers(settings, text[None], scores)[0].double().softmax(-1)

    joint = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    first = after(PROMPT)
    for a in range(VOCAB_SIZE):
        second = after(torch.cat((PROMPT, torch.tensor([a]))))
        for b in range(VOCAB_SIZE):
            joint[a, b] = first[a] * second[b] * after(torch.cat((PROMPT, torch.tensor([a, b]))))
    return joint


def sample(kind, rule, settings, num_rows=NUM_ROWS):
    """[V, V, V] counts of the first three tokens, and the acceptance length."""
    settings = {"do_sample": True, "max_new_tokens": 3, "seed": 11, "return_dict_in_generate": True, **settings}
    prompts = PROMPT.expand(num_rows, -1)
    output = specdec.generate(build_target(), make_drafter(kind), prompts, acceptance=rule, **settings)
    new = output.sequences[:, len(PROMPT) :]
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
    counts.index_put_(tuple(new.T), torch.ones(num_rows), accumulate=True)
    return counts, output.stats.tau


@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize(("kind", "rule"), CASES)
def test_the_first_three_tokens_have_the_targets_law(kind, rule, warpers):
    expected = law(warpers).flatten()
    counts, tau = sample(kind, SAMPLING_RULES[rule], WARPERS[warpers])
    if "naive" not in rule and warpers == "plain":  # elsewhere all drafts may be improbable for the target
        assert tau > 1.02, "nothing was accepted: no rule was at work"
    assert not counts.flatten()[expected == 0].any(), "a token of probability 0 was emitted"
    p_value = chi_square_p_value(counts.flatten(), expected)
    assert p_value > 1e-3, f"chi-square: p = {p_value:.2g}"


class ChildFirst(Naive):
    """Deliberately wrong: accepts the first child whenever the target gives it a fair chance."""

    def verify(self, tree, scores, limits, uniforms):
        child = tree.tokens[:, 1].long()
        tilted = scores.logits.clone()
        tilted[:, 0].scatter_add_(1, child[:, None], torch.ones(len(child), 1))
        return super().verify(tree, Scores.of(tilted), limits, uniforms)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [("draft_tree", ChildFirst()), ("draft_tree", "mixed"), ("medusa", ChildFirst())],
)
def test_a_wrong_rule_fails_the_law_test(kind, wrong, monkeypatch):
    if wrong == "mixed":  # drawn without replacement, judged as if drawn with it
        wrong = Rejection(replacement=True)
        monkeypatch.setattr(Rejection, "chooser", lambda self, law, uniforms: Traversal().chooser(law, uniforms))
    counts, _ = sample(kind, wrong, WARPERS["plain"], num_rows=2000)
    assert chi_square_p_value(counts.flatten(), law("plain").flatten()) < 1e-4


@pytest.mark.parametrize("rule", [rule for rule in SAMPLING_RULES if rule != "naive"])
def test_candidates_have_the_drafters_law(rule, generator):
    logits = torch.randn(1, 1, 4, generator=generator)
    chooser = SAMPLING_RULES[rule].chooser(DraftLaw(temperature=0.8), Uniforms(row_seeds(3, 4000)))
    first, second = chooser(logits.expand(4000, -1, -1), 2).tokens[:, 0].T
    law = (logits[0, 0].double() / 0.8).softmax(-1)
    pairs = law[:, None] * law
    if "with replacement" not in rule:
        pairs = (pairs / (1 - law[:, None])).fill_diagonal_(0)
    assert chi_square_p_value(torch.bincount(4 * first + second, minlength=16), pairs.flatten()) > 1e-3


def test_a_row_depends_on_its_seed_alone():
    target, kinds = build_target(), [kind for kind in DRAFTERS if kind != "none"]
    prompts = [PROMPT, PROMPT[:5], PROMPT[:2]]
    for kind in kinds:
        decoder = Decoder(target, make_drafter(kind), acceptance=Naive())
        together = decoder.decode(prompts, 20, seed=[5, 6, 7]).tokens
        assert decoder.decode(prompts, 20, seed=[5, 6, 7]).tokens == together, "a seed replays"
        assert decoder.decode(prompts[::-1], 20, seed=[7, 6, 5]).tokens == together[::-1]
        for row, prompt in enumerate(prompts):
            assert decoder.decode([prompt], 20, seed=[5 + row]).tokens == [together[row]]
        assert decoder.decode(prompts, 20, seed=[8, 9, 10]).tokens != together


def test_seeds_come_from_torch_when_none_is_given():
    decoder = Decoder(build_target(), acceptance=Naive())
    torch.manual_seed(3)
    first = decoder.decode([PROMPT], 20).tokens
    assert decoder.decode([PROMPT], 20).tokens != first
    torch.manual_seed(3)
    assert decoder.decode([PROMPT], 20).tokens == first
    generator = torch.Generator().manual_seed(4)
    second = decoder.decode([PROMPT], 20, seed=generator).tokens
    assert decoder.decode([PROMPT], 20, seed=torch.Generator().manual_seed(4)).tokens == second


def test_several_sequences_per_prompt_differ():
    ids = torch.stack((PROMPT, PROMPT.flip(0)))
    settings = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12, "seed": 0}
    output = specdec.generate(build_target(), make_drafter("draft_tree"), ids, **settings)
    assert output.shape == (6, len(PROMPT) + 12)
    assert torch.equal(output[:, : len(PROMPT)], ids.repeat_interleave(3, 0))
    assert len({tuple(row.tolist()) for row in output}) == 6


@pytest.mark.parametrize("settings", [(0.09, 0.3), (0.05, 0.05**0.5), (0.25, 0.5)])
def test_typical_acceptance_is_the_papers_formula_and_says_that_it_is_lossy(settings):
    threshold, alpha = settings
    target = build_target()
    rule = specdec.Typical(threshold=threshold, alpha=alpha)
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 40, "seed": 1}
    settings |= {"acceptance": rule, "return_dict_in_generate": True}
    output = specdec.generate(target, make_drafter("draft_chain"), PROMPT[None], **settings)
    assert not output.lossless
    text, place = PROMPT.tolist(), len(PROMPT)
    new = output.sequences[0].tolist()
    with torch.no_grad():
        probs = (target(output.sequences).logits[0].double() / 0.7).softmax(-1)
    assert new[place] == probs[place - 1].argmax()
    place += 1
    for count in output.stats.num_emitted[0]:
        is_typical = []
        for at in range(place, place + count):
            p = probs[at - 1]
            entropy = -(p * p.log()).sum()
            is_typical.append(bool(p[new[at]] > min(threshold, alpha * torch.exp(-entropy))))
        place += count
        assert all(is_typical[:-1])
        # the end of the text may cut a step within what it accepted
        assert new[place - 1] == probs[place - 2].argmax() or (place == len(new) and is_typical[-1])
    assert place == len(new)
    assert text == new[: len(PROMPT)]


def drawn_root_law(rule, warpers):
    """[V, V, V] the law of three tokens after the prompt: roots are drawn, what is typical follows for sure."""
    target, drafter = build_target(), make_drafter("draft_chain")
    joint = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)

    def after(text):
        with torch.no_grad():
            scores = target(text[None]).logits[0, -1:]
        return by_transformers(WARPERS[warpers], text[None], scores)[0].double().softmax(-1)

    def draw_root(text, mass):
        for token, chance in enumerate(after(text)):
            if chance > 0:
                follow(torch.cat((text, torch.tensor([token]))), mass * chance)

    def follow(text, mass):
        """A text that ends in a root."""
        for _ in range(drafter.shape.max_depth):
            if len(text) < len(PROMPT) + 3:
                with torch.no_grad():  # its model lacks the last token
                    guess = drafter.model(text[None].clamp(max=VOCAB_SIZE - 2)).logits[0, -1].argmax()
                p = after(text)
                if p[guess] <= min(rule.threshold, rule.alpha * torch.exp(torch.xlogy(p, p).sum())):
                    break
                text = torch.cat((text, guess[None]))
        if len(text) == len(PROMPT) + 3:
            joint[tuple(text[len(PROMPT) :])] += mass
        else:
            draw_root(text, mass)

    draw_root(PROMPT, 1.0)
    return joint


@pytest.mark.parametrize("warpers", WARPERS)
def test_typical_acceptance_with_drawn_roots_has_the_law_of_its_formula(warpers):
    rule = specdec.Typical(threshold=0.1, alpha=0.1, root="sampled")
    expected = drawn_root_law(rule, warpers).flatten()
    assert expected.sum() == pytest.approx(1)
    counts, tau = sample("draft_chain", rule, WARPERS[warpers])
    assert tau > 1.2, "hardly anything was accepted"
    assert not counts.flatten()[expected == 0].any(), "a token of probability 0 was emitted"
    assert chi_square_p_value(counts.flatten(), expected) > 1e-3
    # lossy: the target's own law is another one, and greedy roots give one text
    assert chi_square_p_value(counts.flatten(), law(warpers).flatten()) < 1e-3
    assert (sample("draft_chain", specdec.Typical(threshold=0.1, alpha=0.1), WARPERS[warpers])[0] > 0).sum() == 1


def test_where_nothing_is_drafted_drawn_roots_have_the_targets_law():
    counts, tau = sample("none", specdec.Typical(root="sampled"), WARPERS["plain"])
    assert tau == 1
    assert chi_square_p_value(counts.flatten(), law("plain").flatten()) > 1e-3


def test_drawn_roots_need_sampling_and_say_so():
    with pytest.raises(
        ValueError, match="acceptance: Typical\\(.*root='sampled'\\) samples, which contradicts do_sample"
    ):
        specdec.generate(build_target(), None, PROMPT[None], acceptance=specdec.Typical(root="sampled"))
    with pytest.raises(ValueError, match="root: expected 'greedy' or 'sampled', got 'drawn'"):
        specdec.Typical(root="drawn")
