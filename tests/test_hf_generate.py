"""Riding on `model.generate`: `custom_generate=specdec.hf_generate`, and transformers' pipelines through it."""

import pytest
import torch
from families import build_model, random_prompts
from test_generate import noisy_copy
from test_processors import Alternating
from test_stopping import EndsAt
from transformers import pipeline

import specdec


def both(model, ids, drafter, **settings):
    ours = model.generate(ids, custom_generate=specdec.hf_generate, drafter=drafter, **settings)
    return ours, model.generate(ids, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 9, "eos_token_id": 5},
        {"logits_processor": [Alternating()]},
        {"stopping_criteria": [EndsAt(17)]},
        {"eos_token_id": list(range(40, 60))},
    ],
    ids=["plain", "penalty", "several", "own processor", "own criterion", "stop tokens"],
)
def test_gives_what_transformers_gives(settings, generator):
    model = build_model("llama")
    ids = random_prompts(generator, [8])[0][None]
    settings = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0, **settings}
    ours, theirs = both(model, ids, noisy_copy(model), attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(ours, theirs)


def test_left_padded_batches_and_max_length(generator):
    model = build_model("qwen3")
    ids = torch.stack(random_prompts(generator, [8, 8]))
    ids[1, :3] = 0
    mask = (ids != 0).long()
    ours, theirs = both(model, ids, "prompt_lookup", attention_mask=mask, do_sample=False, max_length=25)
    assert torch.equal(ours, theirs)


def test_sampling_settings_apply_once(generator):
    model = build_model("llama")
    ids = random_prompts(generator, [8])[0][None]
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 9, "top_p": 0.9, "max_new_tokens": 30}
    ours = model.generate(ids, custom_generate=specdec.hf_generate, drafter=noisy_copy(model), seed=3, **settings)
    direct = specdec.generate(model, noisy_copy(model), ids, seed=3, **settings)
    assert torch.equal(ours, direct)


def test_results_and_tree_come_through(generator):
    model = build_model("llama")
    ids = random_prompts(generator, [8])[0][None]
    output = model.generate(
        ids, custom_generate=specdec.hf_generate, drafter=noisy_copy(model), tree=(2, 2), do_sample=False,
        max_new_tokens=12, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    assert output.lossless
    assert output.stats.tau >= 1
    assert len(output.scores) == 12


def test_a_pipeline_drafts_too():
    model, tokenizer = specdec.load_tiny()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = "import os\n\ndef read(path):\n"
    settings = {"do_sample": False, "max_new_tokens": 24}
    ours = generator(text, custom_generate=specdec.hf_generate, drafter="prompt_lookup", **settings)
    assert ours == generator(text, **settings)
