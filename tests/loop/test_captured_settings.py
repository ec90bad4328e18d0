"""Settings of the logits are data: one recorded step serves all values, and gives what the eager loop gives."""

import pytest
from transformers import GenerationConfig

from lib.law_drafters import make_drafter
from lib.replays import same, some_prompts, two_decoders
from specdec.loop.processing import Processing
from specdec.loop.rules import RULES, Typical, choose_rule

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("rule", [*(rule() for rule in RULES.values()), Typical(root="sampled")], ids=repr)
def test_every_rule_and_all_processing_at_once(rule, generator, monkeypatch):
    eager, replayed = two_decoders("draft_tree", rule, monkeypatch)
    prompts = some_prompts(generator, [4, 7])
    same(*(decoder.decode(prompts, 16, seed=3, processing=warped(prompts, decoder)) for decoder in (replayed, eager)))


def warped(prompts, decoder, **settings):
    config = GenerationConfig(**{"temperature": 0.8, "top_k": 5, "top_p": 0.95, "repetition_penalty": 1.3, **settings})
    lengths = [*map(len, prompts)]
    sizes = {"prompt_lengths": lengths, "width": max(lengths), "max_new_tokens": 16}
    return Processing(config, do_sample=True, **sizes, backend=decoder.backend)


def test_a_thousand_settings_share_one_recording(generator, monkeypatch):
    """Some of them decode, and give the text of the eager loop."""
    rule = choose_rule("rejection", make_drafter("draft_tree"), do_sample=True)
    eager, replayed = two_decoders("draft_tree", rule, monkeypatch)
    prompts, texts = some_prompts(generator, [4]), set()
    for call in range(1000):
        settings = {
            "temperature": 0.2 + call / 500,
            "top_k": call % 7,  # 0: all
            "top_p": (1.0, 0.7, 0.9)[call % 3],
            "min_p": (0.0, 0.05)[call % 2],
            "repetition_penalty": (1.0, 1.4, 0.8, 1.1)[call % 4],
        }
        processing = warped(prompts, replayed, **settings)
        assert replayed.warmup(max_length=9, processing=processing)
        if call % 33 == 0:
            expected = eager.decode(prompts, 5, seed=3, processing=warped(prompts, eager, **settings)).tokens[0]
            assert replayed.decode(prompts, 5, seed=3, processing=processing).tokens[0] == expected, settings
            texts.add(tuple(expected))
    assert replayed.captured.graphs.num_recorded == 1
    assert len(texts) > 5, "the settings did nothing"


def test_only_calls_that_set_nothing_have_another_recording(generator, monkeypatch):
    _, decoder = two_decoders("medusa", choose_rule("auto", make_drafter("medusa"), do_sample=True), monkeypatch)
    prompts = some_prompts(generator, [4])
    nothing = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    for settings, num_recorded in ((nothing, 1), ({}, 2), (nothing | {"top_k": 3}, 2), (nothing, 2)):
        decoder.decode(prompts, 4, seed=1, processing=warped(prompts, decoder, **settings))
        assert decoder.captured.graphs.num_recorded == num_recorded
