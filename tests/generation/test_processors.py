"""Logits processors on trees: greedy output equals transformers' with the same processor, token for token."""

from itertools import pairwise

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

import specdec
from lib.families import VOCAB_SIZE, pad, random_prompts
from lib.host_code import Alternating, by_transformers, noisy_copy
from specdec.drafters.draft_model import DraftModel
from specdec.drafting.draft_tree import TreeTemplate
from specdec.loop.processing import Processing

NEW_TOKENS = 128
STOP = 17


class NeverAgain(LogitsProcessor):
    """Depends on the whole history: no token may follow the same token twice."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, text in enumerate(input_ids):
            scores[row, text[1:][text[:-1] == text[-1]]] = -torch.inf
        return scores


CASES = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "both": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "bad_words": {"bad_words_ids": [*([token] for token in range(5, 30)), [7, 8], [30, 31]]},
    "bias": {"sequence_bias": {(11,): 3.0, (12, 13): -8.0}},
    "min_new_tokens": {"min_new_tokens": 60, "eos_token_id": list(range(10, 30))},
    "min_length": {"min_length": 50, "eos_token_id": list(range(10, 30))},
    "both_minima": {"min_length": 100, "min_new_tokens": 20, "eos_token_id": list(range(10, 30))},
    "forced_eos": {"forced_eos_token_id": 9},
    "suppress": {"suppress_tokens": [1, 2, 3], "begin_suppress_tokens": list(range(40))},
    "decay": {"exponential_decay_length_penalty": (10, 1.3), "eos_token_id": STOP},
    "grammar": {"logits_processor": [Alternating()]},
    "history": {"logits_processor": [NeverAgain(), Alternating()]},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, text: list(range(int(text[-1]) % 3, VOCAB_SIZE, 3))},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers_with_the_same_processor(case, batch, generator, model):
    ids = torch.stack(random_prompts(generator, [9] * batch))
    settings = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **CASES[case]}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
    output = specdec.generate(
        model, noisy_copy(model), ids, tree=(3, 2), return_dict_in_generate=True, do_sample=False, **settings
    )
    assert torch.equal(output.sequences, expected)
    assert output.stats.tau > 1.2, "nothing was accepted: no node beyond the root was ever used"
    free_settings = {
        name: settings[name] for name in ("max_new_tokens", "pad_token_id", "eos_token_id") if name in settings
    }
    free = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **free_settings)
    assert not torch.equal(free, expected), "the processor did nothing"


@pytest.mark.parametrize("case", ["history", "repetition_penalty", "min_new_tokens", "forced_eos"])
def test_padding_is_no_history(case, generator, model):
    prompts = random_prompts(generator, [4, 15, 9])
    ids, mask = pad(prompts, "left")
    settings = {"max_new_tokens": 40, "pad_token_id": 0, **CASES[case]}
    sequences = specdec.generate(model, noisy_copy(model), ids, attention_mask=mask, tree=(3, 2), **settings)
    for row, prompt in enumerate(prompts):
        alone = specdec.generate(model, None, prompt[None], **settings)[0, len(prompt) :]
        assert torch.equal(sequences[row, ids.shape[1] :][: len(alone)], alone)


def test_behind_a_forced_first_token_another_is_suppressed(model):
    settings = {"forced_bos_token_id": 9, "max_new_tokens": 12, "do_sample": False}
    ids = torch.tensor([[3]])
    free = specdec.generate(model, None, ids, **settings)[0].tolist()
    settings["begin_suppress_tokens"] = [9, free[2]]
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert expected[0, 1] == 9
    assert expected[0, 2] != free[2]
    assert torch.equal(specdec.generate(model, None, ids, **settings), expected)


@pytest.mark.parametrize("given", [{}, {"top_k": None}, {"top_k": 0}, {"top_k": 3}])
def test_top_k_is_50_unless_a_keyword_says_none(given, model):
    """The scores show how many tokens stay possible."""
    settings = {"do_sample": True, "max_new_tokens": 2, "return_dict_in_generate": True, "output_scores": True, **given}
    ids = torch.tensor([[3, 4, 5]])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    through = model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=specdec.hf_generate, **settings)
    for output in (theirs, specdec.generate(model, None, ids, **settings), through):
        assert int(output.scores[0].isfinite().sum()) == {None: 96, 0: 96, 3: 3}.get(given.get("top_k", 50), 50)


class Strict(LogitsProcessor):
    """A grammar that knows the texts it allows and no others: a token is followed by one within 30 places of it."""

    def __init__(self, stop, longest):
        self.stop = stop
        self.longest = longest

    def __call__(self, input_ids, scores):
        assert input_ids.shape[1] < self.longest, "asked about a text that is complete"
        scores = scores.clone()
        for row, text in enumerate(input_ids.tolist()):
            assert all(after - token <= 30 for token, after in pairwise(text)), "asked about a text that it forbids"
            assert self.stop not in text, "asked about a text that has ended"
            scores[row, text[-1] + 31 :] = -torch.inf
        return scores


def test_a_grammar_is_never_asked_about_a_text_that_cannot_come_about(generator, model):
    ids, stop = torch.tensor([[5, 20, 9]]), None
    drafter = DraftModel(noisy_copy(model), specdec.as_tree_shape((4, 3, 2)))
    for most in (3, 40):
        settings = {"max_new_tokens": most, "eos_token_id": stop, "pad_token_id": 0}
        grammar = [Strict(stop, 3 + most)]
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=grammar, **settings)
        assert torch.equal(specdec.generate(model, drafter, ids, logits_processor=grammar, **settings), expected)
        stop = int(expected[0, -1])


WARPERS = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6, "top_k": 0},
    "min_p": {"min_p": 0.2, "top_k": 0},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.5},
    "typical_p": {"typical_p": 0.5, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.02, "top_k": 0},
    "eta": {"eta_cutoff": 0.05, "top_k": 0},
    "default": {},
    "path and warper": {"no_repeat_ngram_size": 1, "temperature": 0.5, "top_p": 0.9, "renormalize_logits": True},
}


@pytest.mark.parametrize("case", WARPERS)
def test_every_node_has_the_scores_of_its_own_text(case, generator):
    """What transformers computes for each node's whole text, one text at a time."""
    shape = specdec.TreeShape.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])
    template = TreeTemplate(shape, torch.device("cpu"))
    texts = random_prompts(generator, [6, 3])
    tokens = torch.randint(1, 20, (2, shape.num_nodes), generator=generator, dtype=torch.int32)
    logits = 3 * torch.randn(2, shape.num_nodes, VOCAB_SIZE, generator=generator)
    for node in range(1, shape.num_nodes):  # the drafted tokens are probable ones
        logits[:, shape.parent[node]].scatter_(1, tokens[:, node : node + 1].long(), 12.0)
    tree = specdec.DraftTree(tokens, template.parent, template.depth, template.ancestors, torch.tensor([3, 3]), 3)
    history = torch.full((2, 8), -1, dtype=torch.int32)  # ends in the root, behind places without a token
    history[:, -1] = tokens[:, 0]
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    config = GenerationConfig(**{"top_k": 50, **WARPERS[case]})
    processing = Processing(config, do_sample=True, prompt_lengths=[6, 3], max_new_tokens=9, width=6)
    processed = processing(logits, tree, history, torch.tensor([9, 9]), processing.settings)
    for row, text in enumerate(texts):
        expected = {}
        for node in range(shape.num_nodes):
            above = shape.parent[node]
            if node and (above not in expected or expected[above][tokens[row, node]] == -torch.inf):
                continue  # this node cannot be reached
            path = [above for above in range(node + 1) if shape.ancestors[node][above]]
            ids = torch.cat((text, tokens[row, path].long()))[None]
            expected[node] = by_transformers(WARPERS[case], ids, logits[row, node][None])[0]
            torch.testing.assert_close(processed[row, node], expected[node], atol=1e-5, rtol=1e-5)
        assert len(expected) > 1, "no node below the root was compared"


@pytest.mark.parametrize("sampling", [False, True])
def test_scores_and_logits_are_those_of_transformers(sampling, generator, model):
    ids = torch.stack(random_prompts(generator, [9, 9]))
    settings = {"max_new_tokens": 20, "repetition_penalty": 1.3, "eos_token_id": STOP, "pad_token_id": 0}
    settings |= dict.fromkeys(("output_scores", "output_logits", "return_dict_in_generate"), True)
    if sampling:  # one token is left, so that transformers must take the same
        settings |= {"do_sample": True, "top_k": 1, "temperature": 0.7}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    output = specdec.generate(model, noisy_copy(model), ids, tree=(3, 2), **settings)
    assert torch.equal(output.sequences, expected.sequences)
    new = expected.sequences[:, 9:]
    assert len(output.scores) == len(output.logits) == new.shape[1]
    for step in range(new.shape[1]):
        for row in range(2):
            if STOP in new[row, :step].tolist():
                assert output.scores[step][row].argmax() == 0
                continue
            for got, want in ((output.scores, expected.scores), (output.logits, expected.logits)):
                torch.testing.assert_close(got[step][row], want[step][row], atol=2e-4, rtol=1e-4)


def test_a_processor_is_never_shown_a_finished_row(generator, model):
    ids = torch.stack(random_prompts(generator, [6, 6]))
    stop = int(specdec.generate(model, None, ids[:1], max_new_tokens=4)[0, -1])
    seen = []

    def remember(input_ids, scores):
        seen.extend(text[6:].tolist() for text in input_ids)
        return scores

    specdec.generate(
        model, None, ids, max_new_tokens=30, eos_token_id=stop, pad_token_id=0, logits_processor=[remember]
    )
    assert [] in seen
    assert len(seen) > 5
    assert not any(stop in text for text in seen)
