"""What several candidates bring, on the tiny pair with real acceptance: the orders that the MCSD paper reports."""

import json

import pytest
import torch

import specdec
from specdec.bundled.load import TINY_FOLDER, load_tiny, tiny_drafter

WIDTH = 16
RULES = {
    "without replacement": "rejection",
    "with replacement": specdec.Rejection(replacement=True),
    "naive": specdec.Naive(drawn=True),
}


@pytest.fixture(scope="module")
def tiny():
    model, tokenizer = load_tiny()
    texts = json.loads((TINY_FOLDER / "prompts.json").read_text())
    prompts = torch.stack([tokenizer(text, return_tensors="pt").input_ids[0, :WIDTH] for text in texts])
    return specdec.Target(model), prompts


def tau(tiny, tree, rule="auto", *, copies=1, **settings):
    target, prompts = tiny
    drafter = specdec.load_drafter(tiny_drafter("draft_model"), target, tree=tree)
    if copies > 1:
        settings |= {"do_sample": True, "top_k": 0, "num_return_sequences": copies, "seed": 0}
    settings |= {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 40, "return_dict_in_generate": True}
    output = specdec.generate(target, drafter, prompts, acceptance=rule, **settings)
    assert output.lossless
    return output.stats.tau


@pytest.mark.parametrize("rule", ["auto", "naive"])
def test_more_candidates_are_accepted_longer(tiny, rule):
    """Figure 3 of the paper: the same depth, from one candidate to 4x2x2, at T = 1."""
    assert tau(tiny, (4, 2, 2), rule, copies=3) > tau(tiny, (1, 1, 1), rule, copies=3) + 0.15


def test_more_candidates_are_accepted_longer_in_greedy_decoding(tiny):
    assert tau(tiny, (4, 2, 2)) > tau(tiny, (1, 1, 1)) + 0.3


def test_rules_accept_in_the_order_of_the_paper(tiny):
    """Table 4, T = 1: MCSS without replacement, MCSS with it, MCNS."""
    found = {name: tau(tiny, (8,), rule, copies=8, temperature=1.0) for name, rule in RULES.items()}
    assert found["without replacement"] > found["with replacement"] > found["naive"] + 0.05, found
    assert tau(tiny, (8,), "naive", copies=8, temperature=1.0) > found["naive"] + 0.03  # the best candidates, not drawn


def test_without_temperature_all_of_them_are_greedy_decoding(tiny):
    """As the target becomes certain, MCSS without replacement and MCNS follow its best token, and so does its text."""
    greedy = tau(tiny, (4, 2, 2))
    for rule in ("rejection", "naive", specdec.Naive(drawn=True)):
        settings = {"do_sample": True, "temperature": 0.05, "top_k": 0, "seed": 0}
        assert tau(tiny, (4, 2, 2), rule, **settings) == pytest.approx(greedy, abs=0.12), rule
