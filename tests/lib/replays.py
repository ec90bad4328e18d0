"""Two decoders on the same weights, one of which replays what was recorded, and what has to be equal."""

import torch

from lib.law_drafters import VOCAB_SIZE, build_target, make_drafter
from lib.recorder import Recorder, references_as_kernels
from specdec.loop.decoder import Decoder
from specdec.models.target.target import Target


def some_prompts(generator, lengths):
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def two_decoders(kind, rule, monkeypatch):
    """One that runs eagerly, and one that replays, on the same weights."""
    eager = Decoder(build_target(), make_drafter(kind), acceptance=rule)
    references_as_kernels(monkeypatch)
    target = Target(build_target(), backend="triton")
    return eager, Decoder(target, make_drafter(kind), acceptance=rule, capture=Recorder())


def same(result, expected):
    assert result.tokens == expected.tokens
    assert result.stats.captured
    assert not expected.stats.captured
    if expected.stats.plan is not None and any(step.cost_ms for step in expected.stats.plan.steps):
        return  # steps were chosen by what they took
    assert result.stats.num_emitted == expected.stats.num_emitted
    assert result.stats.deepest == expected.stats.deepest
    assert result.stats.num_target_passes == expected.stats.num_target_passes
