"""What `generate` makes of keywords, a `generation_config` and the model's own: what transformers makes of them."""

import pytest
import torch
from transformers import GenerationConfig

import specdec
from lib.families import build_model, random_prompts

IDS = torch.tensor([[3, 4, 5]])


@pytest.mark.parametrize("width", [6, 30, 250])  # the last leaves less than 20 places of the context
def test_without_a_length_as_many_tokens_as_transformers(width, generator, model):
    ids = random_prompts(generator, [width])[0][None]
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, do_sample=False, eos_token_id=None)
    assert torch.equal(specdec.generate(model, None, ids, attention_mask=mask, eos_token_id=None), expected)


def test_a_config_is_filled_up_with_the_models_own(generator, model):
    ids = random_prompts(generator, [6])[0][None]
    mask = torch.ones_like(ids)
    greedy = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
    free = model.generate(ids, attention_mask=mask, **greedy)[0, 6:].tolist()
    model.generation_config.eos_token_id = free[5]
    model.generation_config.pad_token_id = 0
    model.generation_config.repetition_penalty = 1.05
    model.generation_config.chat_format = "chatml"  # no field: transformers does not read it
    for settings in ({}, {"repetition_penalty": 1.0}, {"eos_token_id": free[3]}, {"max_length": 12}):
        given = {"max_new_tokens": None if "max_length" in settings else 24, "do_sample": False, **settings}
        config = GenerationConfig(**given)
        before = config.to_dict()
        expected = model.generate(ids, attention_mask=mask, generation_config=config)
        assert torch.equal(specdec.generate(model, None, ids, attention_mask=mask, generation_config=config), expected)
        assert config.to_dict() == before, "the caller's object must not change"
    for keywords in ({"eos_token_id": None}, {"repetition_penalty": None}):  # keywords win, also with None
        config = GenerationConfig(max_new_tokens=24, do_sample=False)
        expected = model.generate(ids, attention_mask=mask, generation_config=config, **keywords)
        assert torch.equal(specdec.generate(model, None, ids, generation_config=config, **keywords), expected)
        through = model.generate(
            ids, attention_mask=mask, generation_config=config, custom_generate=specdec.hf_generate, **keywords
        )
        assert torch.equal(through, expected)


def test_settings_of_sampling_without_sampling_are_reported(caplog, model):
    model.generation_config.temperature = 0.6  # not the caller's: no warning
    specdec.generate(model, None, IDS, max_new_tokens=2, top_p=1.0, top_k=None)
    assert not caplog.records
    specdec.generate(model, None, IDS, max_new_tokens=2, temperature=0.7, top_p=0.9)
    assert [record.getMessage() for record in caplog.records] == [
        "do_sample: expected True with temperature=0.7, top_p=0.9, got False; decoding is greedy"
    ]
    caplog.clear()
    specdec.generate(model, None, IDS, max_new_tokens=2, temperature=0.7, do_sample=True)
    assert not caplog.records


def test_arguments_of_transformers_that_ask_for_nothing_are_accepted(model):
    neutral = {"past_key_values": None, "synced_gpus": False, "use_model_defaults": True, "assistant_model": None}
    neutral |= {"num_beams": 1, "guidance_scale": 1.0, "encoder_no_repeat_ngram_size": 0, "output_attentions": False}
    expected = specdec.generate(model, None, IDS, max_new_tokens=4)
    assert torch.equal(specdec.generate(model, None, IDS, max_new_tokens=4, **neutral), expected)


def test_refused_values_are_shown_in_short(model):
    with pytest.raises(ValueError, match=r"^assistant_model: expected None, got LlamaForCausalLM; pass it as drafter$"):
        specdec.generate(model, None, IDS, assistant_model=build_model("llama"))
    for name in ("nonsense", "past_key_values", "dola_layers", "max_new_tokens"):
        with pytest.raises((ValueError, NotImplementedError), match=f"^{name}: expected ") as caught:
            specdec.generate(model, None, IDS, **{name: torch.zeros(50, 50)})
        assert len(str(caught.value)) < 200
        assert "\n" not in str(caught.value)
