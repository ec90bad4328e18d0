"""The chat model's drafters that ship: small enough, exact, and as good as the page says."""

import pytest
import torch

import specdec
from specdec.bundled.load import SMOLLM2_FOLDER, bundled_drafters

QUESTIONS = ["Write a short poem about rain.", "Why do leaves fall in autumn?"]


def test_they_are_within_their_budget():
    assert bundled_drafters("smollm2")
    assert sum(path.stat().st_size for path in SMOLLM2_FOLDER.rglob("*") if path.is_file()) <= 40e6


@pytest.mark.smollm2
@pytest.mark.parametrize("name", bundled_drafters("smollm2"))
def test_a_drafter_that_ships_is_exact_and_accepted(smollm2, name):
    model, tokenizer = smollm2
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [torch.tensor(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    report = specdec.check(model, f"smollm2/{name}", prompts, max_new_tokens=24)
    assert report.identical, report
    assert report.tau > 1.4
