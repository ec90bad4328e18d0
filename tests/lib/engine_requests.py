"""Requests of all lengths, and what each of them emits alone."""

import torch

import specdec
from lib.law_drafters import VOCAB_SIZE

PATIENCE = 60
"""Seconds that a test waits for an end which is at hand."""


def requests(count=14, seed=3):
    """Prompts of all lengths, with numbers of new tokens that end rows at different times."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    prompts = [[number(0, VOCAB_SIZE) for _ in range(number(1, 20))] for _ in range(count)]
    return [(prompt, number(1, 25)) for prompt in prompts]


def alone(model, prompt, count, **settings):
    settings = {"do_sample": False, "eos_token_id": None, **settings}
    ids = specdec.generate(model, None, torch.tensor([prompt]), max_new_tokens=count, **settings)
    return ids[0, len(prompt) :].tolist()
