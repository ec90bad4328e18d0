"""Riding on `model.generate`: `custom_generate=specdec.hf_generate`, and transformers' pipelines through it."""

import pytest
import torch
from transformers import DynamicCache, pipeline
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    StopStringCriteria,
    TemperatureLogitsWarper,
)

import specdec
from lib.families import build_model, random_prompts
from lib.host_code import Alternating, EndsAt, KeepingStreamer, noisy_copy

GREEDY = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}


def both(model, ids, drafter, **settings):
    ours = model.generate(ids, custom_generate=specdec.hf_generate, drafter=drafter, **settings)
    return ours, model.generate(ids, **settings)


def assert_same(*args, **settings):
    assert torch.equal(*both(*args, **settings))


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
def test_gives_what_transformers_gives(settings, model, ids):
    settings = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0, **settings}
    assert_same(model, ids, noisy_copy(model), attention_mask=torch.ones_like(ids), **settings)


def test_left_padded_batches_and_max_length(generator):
    model = build_model("qwen3")
    ids = torch.stack(random_prompts(generator, [8, 8]))
    ids[1, :3] = 0
    mask = (ids != 0).long()
    assert_same(model, ids, "prompt_lookup", attention_mask=mask, do_sample=False, max_length=25)


def test_sampling_settings_apply_once(model, ids):
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 9, "top_p": 0.9, "max_new_tokens": 30}
    ours = model.generate(ids, custom_generate=specdec.hf_generate, drafter=noisy_copy(model), seed=3, **settings)
    direct = specdec.generate(model, noisy_copy(model), ids, seed=3, **settings)
    assert torch.equal(ours, direct)


def test_results_and_tree_come_through(model, ids):
    settings = {**GREEDY, "tree": (2, 2), "return_dict_in_generate": True, "output_scores": True}
    output = model.generate(ids, custom_generate=specdec.hf_generate, drafter=noisy_copy(model), **settings)
    assert output.lossless
    assert output.stats.tau >= 1
    assert len(output.scores) == 16


def test_a_pipeline_drafts_too():
    model, tokenizer = specdec.load_tiny()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = "import os\n\ndef read(path):\n"
    settings = {"do_sample": False, "max_new_tokens": 24}
    ours = generator(text, custom_generate=specdec.hf_generate, drafter="prompt_lookup", **settings)
    assert ours == generator(text, **settings)


def test_prompts_are_repeated_once(model, ids):
    settings = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8, "pad_token_id": 0}
    two = torch.cat((ids, ids.flip(1)))
    output = model.generate(two, custom_generate=specdec.hf_generate, drafter="prompt_lookup", seed=1, **settings)
    assert output.shape == model.generate(two, **settings).shape
    assert torch.equal(output, specdec.generate(model, "prompt_lookup", two, seed=1, **settings))


def test_callers_criteria_of_transformers_types_are_obeyed(model, ids):
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, 8:].tolist()
    settings = {**GREEDY, "eos_token_id": plain[5], "attention_mask": torch.ones_like(ids)}
    ends = [MaxLengthCriteria(11), MaxLengthCriteria(30), EosTokenCriteria(plain[2]), EosTokenCriteria(plain[9])]
    for criterion in ends:
        assert_same(model, ids, noisy_copy(model), stopping_criteria=[criterion], **settings)
    ours, theirs = both(model, ids, noisy_copy(model), stopping_criteria=[MaxTimeCriteria(0.0)], max_time=99, **GREEDY)
    assert ours.shape[1] < 8 + 16
    assert theirs.shape[1] < 8 + 16
    with pytest.raises(NotImplementedError, match="stopping_criteria: .* beside min_new_tokens"):
        both(model, ids, None, stopping_criteria=[EosTokenCriteria(5)], min_new_tokens=3, **settings)
    with pytest.raises(NotImplementedError, match="stopping_criteria: .* beside forced_eos_token_id"):
        both(model, ids, None, stopping_criteria=[MaxLengthCriteria(11)], forced_eos_token_id=3, **settings)


def test_stop_strings_as_a_criterion():
    model, tokenizer = specdec.load_tiny()
    ids = tokenizer("def read_lines(path):\n", return_tensors="pt").input_ids
    plain = tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :])
    criteria = [StopStringCriteria(tokenizer=tokenizer, stop_strings=[plain[12:15]])]
    ours, theirs = both(model, ids, "prompt_lookup", stopping_criteria=criteria, do_sample=False, max_new_tokens=24)
    assert torch.equal(ours, theirs)
    assert ours.shape[1] < ids.shape[1] + 24


@pytest.mark.parametrize("place", [0, 4])
def test_pad_token_within_a_full_mask_is_a_token(place, model, ids):
    settings = {**GREEDY, "pad_token_id": int(ids[0, place]), "eos_token_id": 1}
    assert_same(model, ids, "prompt_lookup", attention_mask=torch.ones_like(ids), **settings)


@pytest.mark.parametrize("copies", [1, 2])
def test_every_row_has_its_own_allowed_tokens(copies, model, ids):
    two = torch.cat((ids, ids.flip(1)))
    settings = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": copies > 1, "num_return_sequences": copies}

    def allowed(row, text):  # one token is possible: sampling has no choice
        return [10 * (row + 1) + len(text) % 3]

    assert_same(model, two, "prompt_lookup", prefix_allowed_tokens_fn=allowed, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"min_length": 14},
        {"min_new_tokens": 6},
        {"forced_eos_token_id": 5},
        {"begin_suppress_tokens": list(range(6, 50))},
        {"exponential_decay_length_penalty": (3, 1.5)},
        {"bad_words_ids": [[7], [8, 9]], "suppress_tokens": [11]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_on_left_padded_batches(settings, model, padded):
    ids, mask = padded
    settings = {**GREEDY, "eos_token_id": list(range(40, 60)), **settings}
    assert_same(model, ids, "prompt_lookup", attention_mask=mask, **settings)


@pytest.mark.parametrize("sizes", [[3], [2, 3]], ids=str)
def test_callers_processors_of_transformers_types_take_the_place_of_settings(sizes, model, ids):
    processors = [NoRepeatNGramLogitsProcessor(size) for size in sizes]
    assert_same(model, ids, "prompt_lookup", logits_processor=processors, no_repeat_ngram_size=2, **GREEDY)


def test_only_the_setting_of_a_processors_own_type_gives_way(model, padded):
    ids, mask = padded
    stops = list(range(40, 90))
    processors = [MinNewTokensLengthLogitsProcessor(8, 2, stops)]
    settings = {**GREEDY, "attention_mask": mask, "eos_token_id": stops, "min_length": 16}
    assert_same(model, ids, "prompt_lookup", logits_processor=processors, **settings)


def test_callers_warpers_act_beside_those_of_the_settings(model, ids):
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 5, "max_new_tokens": 12, "pad_token_id": 0, "seed": 3}
    processors = [TemperatureLogitsWarper(0.5)]
    ours = model.generate(
        ids, custom_generate=specdec.hf_generate, drafter="prompt_lookup", logits_processor=processors, **settings
    )
    direct = specdec.generate(model, "prompt_lookup", ids, logits_processor=processors, **settings)
    assert torch.equal(ours, direct)


def test_refuses_by_name(model, ids):
    refused = {
        "inputs_embeds": model.get_input_embeddings()(ids),
        "position_ids": torch.arange(8)[None] + 3,
        "past_key_values": model(ids[:, :4]).past_key_values,
    }
    for name, value in refused.items():
        with pytest.raises(NotImplementedError, match=f"^{name}: expected"):
            model.generate(ids, custom_generate=specdec.hf_generate, **{name: value}, **GREEDY)
    for name, advice in (("assistant_model", "drafter"), ("streamer", "spec_streamer")):
        with pytest.raises(NotImplementedError, match=f"^{name}: expected .*; pass it as {advice}"):
            specdec.hf_generate(model, ids, **{name: model})


def test_position_ids_that_say_nothing_new_and_an_empty_cache_are_taken(model, padded):
    ids, mask = padded
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    empty = {"position_ids": positions, "past_key_values": DynamicCache(), "custom_generate": specdec.hf_generate}
    ours = model.generate(ids, attention_mask=mask, **empty, **GREEDY)
    assert torch.equal(ours, model.generate(ids, attention_mask=mask, **GREEDY))


def test_streamer_gets_the_text_and_its_end(model, ids):
    streamer = KeepingStreamer()
    settings = {**GREEDY, "custom_generate": specdec.hf_generate, "drafter": "lookahead"}
    streamer.check(model.generate(ids, spec_streamer=streamer, **settings)[0].tolist())
