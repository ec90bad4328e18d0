"""A step that was recorded once and is replayed gives what the eager loop gives."""

import pytest
import torch
from law_drafters import DRAFTERS, VOCAB_SIZE, build_target, make_drafter
from recorder import Recorder, references_as_kernels
from transformers import GenerationConfig

from specdec.acceptance import RULES, choose_rule
from specdec.decoder import Decoder
from specdec.models.target import Target
from specdec.processing import Processing

LENGTHS = {"one row": [5], "three rows": [3, 9, 1]}


def some_prompts(generator, lengths):
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def two_decoders(kind, rule, monkeypatch):
    """One that runs eagerly, and one that replays, on the same weights."""
    eager = Decoder(build_target(), make_drafter(kind), acceptance=rule)
    references_as_kernels(monkeypatch)
    target = Target(build_target(), backend="triton")
    return eager, Decoder(target, make_drafter(kind), acceptance=rule, capture=Recorder())


def rule_of(kind, sampling):
    return choose_rule("auto", make_drafter(kind), do_sample=sampling)


def same(result, expected):
    assert result.tokens == expected.tokens
    assert result.stats.num_emitted == expected.stats.num_emitted
    assert result.stats.reach == expected.stats.reach
    assert result.stats.num_target_passes == expected.stats.num_target_passes
    assert result.stats.captured
    assert not expected.stats.captured


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_replaying_a_recorded_step_gives_the_text_of_the_eager_loop(kind, sampling, lengths, generator, monkeypatch):
    eager, replayed = two_decoders(kind, rule_of(kind, sampling), monkeypatch)
    settings = {"stop_tokens": [2], "seed": 5}
    for max_new_tokens in (20, 12):  # one recording serves both
        prompts = some_prompts(generator, lengths)
        same(
            replayed.decode(prompts, max_new_tokens, **settings),
            eager.decode(prompts, max_new_tokens, **settings),
        )
    assert replayed.captured.engine.num_recorded == 1
