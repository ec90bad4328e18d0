"""Sampled output of the bundled model has the model's own law, with every drafter that is bundled or needs no weights.

A small sub-vocabulary, the three best tokens of each place, leaves 27 texts of three tokens; their law is computed text
by text with transformers' own processors. Seeds are fixed, so a right rule passes for good.
"""

import pytest
import torch
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

import specdec
from lib.laws import chi_square_p_value
from specdec.bundled.load import bundled_drafters, load_tiny, tiny_drafter

NUM_ROWS = 300
NUM_TOKENS = 3
SETTINGS = {"temperature": 1.5, "top_k": 3}
TEXT = "def read(path):\n    return"
RULES = ("auto", "naive")
WITHOUT_Q = ("none", "prompt_lookup", "lookahead")
CASES = [
    (name, rule)
    for name in (*WITHOUT_Q, *bundled_drafters())
    for rule in RULES
    if rule == "auto" or name not in WITHOUT_Q
]


@pytest.fixture(scope="module")
def tiny():
    model, tokenizer = load_tiny()
    return model, tokenizer(TEXT, return_tensors="pt").input_ids[0]


@pytest.fixture(scope="module")
def law(tiny):
    """The probability of every text of three tokens that has one."""
    model, prompt = tiny
    processors = [TemperatureLogitsWarper(SETTINGS["temperature"]), TopKLogitsWarper(SETTINGS["top_k"])]
    texts = {(): 1.0}
    for _ in range(NUM_TOKENS):
        grown = {}
        for text, probability in texts.items():
            ids = torch.cat((prompt, torch.tensor(text, dtype=torch.int64)))[None]
            with torch.no_grad():
                scores = model(ids).logits[:, -1]
            for processor in processors:
                scores = processor(ids, scores)
            for token in scores[0].isfinite().nonzero().flatten().tolist():
                grown[(*text, token)] = probability * scores[0].softmax(-1)[token].item()
        texts = grown
    assert sum(texts.values()) == pytest.approx(1.0)
    return texts


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_the_first_three_tokens_have_the_models_law(tiny, law, name, rule):
    model, prompt = tiny
    source = tiny_drafter(name) if name in bundled_drafters() else name
    ids = prompt.expand(NUM_ROWS, -1)
    settings = {"max_new_tokens": NUM_TOKENS, "eos_token_id": [], "return_dict_in_generate": True, **SETTINGS}
    settings |= {"attention_mask": torch.ones_like(ids), "acceptance": rule, "do_sample": True, "seed": 5}
    output = specdec.generate(model, source, ids, **settings)
    assert output.lossless
    found = [tuple(row) for row in output.sequences[:, len(prompt) :].tolist()]
    assert set(found) <= law.keys(), "a text of probability 0 was emitted"
    counts = torch.tensor([float(found.count(text)) for text in law])
    p_value = chi_square_p_value(counts, torch.tensor(list(law.values()), dtype=torch.float64))
    assert p_value > 1e-3, f"chi-square: p = {p_value:.2g}"
