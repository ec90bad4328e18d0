"""Replayed decoding against real decoding: the same steps and texts, and the target does not run."""

import json

import pytest
import torch

from lib.families import build_model, random_prompts
from lib.law_drafters import DRAFTERS, LEARNING, VOCAB_SIZE, build_target
from specdec.bundled.load import TINY_FOLDER, bundled_drafters, load_tiny
from specdec.drafters.load import load_drafter
from specdec.drafters.weightless.none import NoDrafter
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.evaluation.replay import RecordedTarget, record, replay
from specdec.loop.decoder import Decoder
from specdec.loop.rules import Naive
from specdec.models.target.target import Target


def replayed_and_real(target, drafter, prompts, new_tokens, *, stop_tokens=(), batch_size=2):
    """Statistics by row of a replay, and those of decoding in one batch; the texts are compared."""
    drafter.bind(target)  # taps what it reads
    recording = record(target, prompts, new_tokens, stop_tokens=stop_tokens, batch_size=3)
    real = Decoder(target, drafter).decode(prompts, new_tokens, stop_tokens=stop_tokens)
    assert [text.new.tolist() for text in recording.texts] == real.tokens
    return replay(RecordedTarget(target, recording), drafter, batch_size=batch_size), real.stats


def prompts_of(generator, lengths, vocab_size=VOCAB_SIZE):
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "lookahead" and name not in LEARNING])
def test_every_kind_takes_the_steps_of_real_decoding(name, generator):
    prompts = prompts_of(generator, [5, 1, 9, 3, 4])
    got, expected = replayed_and_real(Target(build_target()), DRAFTERS[name](), prompts, 20)
    assert got.num_emitted == expected.num_emitted
    assert got.deepest == expected.deepest
    assert got.acceptance_at_depth == expected.acceptance_at_depth
    assert got.lossless


@pytest.mark.parametrize("name", ["prompt_lookup", *bundled_drafters()])
def test_bundled_drafters_take_the_steps_of_real_decoding(name):
    model, tokenizer = load_tiny()
    target = Target(model)
    texts = json.loads((TINY_FOLDER / "prompts.json").read_text())[:3]
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]
    drafter = load_drafter(TINY_FOLDER / name if name in bundled_drafters() else name, target)
    got, expected = replayed_and_real(target, drafter, prompts, 32)
    assert got.num_emitted == expected.num_emitted
    assert got.tau > 1.2


@pytest.mark.parametrize("name", ["eagle", "draft_tree", "prompt_lookup"])
def test_texts_that_end_at_a_stop_token_end_there(name, generator):
    prompts = prompts_of(generator, [5, 2, 9, 3])
    target = Target(build_target())
    stops = [Decoder(target).decode(prompts, 6).tokens[0][5]]
    got, expected = replayed_and_real(target, DRAFTERS[name](), prompts, 20, stop_tokens=stops, batch_size=4)
    assert got.num_emitted == expected.num_emitted
    assert sum(got.num_emitted[0]) <= 5  # and the token of the prompt


def test_the_target_does_not_run(generator, monkeypatch):
    target = Target(build_model("llama"))
    recording = record(target, random_prompts(generator, [5, 7]), 12)
    recorded = RecordedTarget(target, recording)

    def never(*_, **__):
        raise AssertionError("the target ran")

    monkeypatch.setattr(target.model.get_decoder(), "forward", never)
    monkeypatch.setattr(target.model.get_output_embeddings(), "forward", never)
    assert sum(map(sum, replay(recorded, PromptLookup()).num_emitted)) == 2 * 11
    assert replay(recorded, None, batch_size=2).tau == 1
    with pytest.raises(NotImplementedError, match="passes that were recorded"):
        recorded.read_chunk(torch.ones(1, 2, dtype=torch.int64), 0, recorded.new_cache(1, 8))


def test_prompts_are_read_in_chunks_too(generator):
    target = Target(build_target())
    prompts = prompts_of(generator, [9, 4])
    recorded = RecordedTarget(target, record(target, prompts, 10))
    drafter = DRAFTERS["hydra++"]()
    whole = Decoder(recorded, drafter).decode(prompts, 10)
    assert Decoder(recorded, drafter).decode(prompts, 10, prefill_chunk_size=4).stats.num_emitted == (
        whole.stats.num_emitted
    )


def test_the_beginning_of_a_text_is_a_shorter_text(generator):
    target = Target(build_target())
    prompts = prompts_of(generator, [5, 7, 2])
    drafter = DRAFTERS["hydra"]()
    recorded = RecordedTarget(target, record(target, prompts, 20))
    expected = Decoder(target, drafter).decode(prompts, 9).stats.num_emitted
    assert replay(recorded, drafter, max_new_tokens=9).num_emitted == expected
    with pytest.raises(ValueError, match="max_new_tokens: expected at most the recorded 20, got 21"):
        replay(recorded, drafter, max_new_tokens=21)


def test_a_recording_is_read_as_it_was_written(generator, tmp_path):
    target = Target(build_target(), tap_layers=[1])
    recording = record(target, prompts_of(generator, [5, 7]), 6, stop_tokens=[3])
    recording.save(tmp_path / "recording.pt")
    read = type(recording).load(tmp_path / "recording.pt")
    assert (read.max_new_tokens, read.stop_tokens, read.tap_layers) == (6, (3,), (1,))
    for text, expected in zip(read.texts, recording.texts, strict=True):
        pairs = zip(
            (text.prompt, text.new, text.hidden, *text.taps),
            (expected.prompt, expected.new, expected.hidden, *expected.taps),
            strict=True,
        )
        assert all(torch.equal(one, other) for one, other in pairs)


def test_what_a_recording_cannot_answer_is_refused(generator):
    target = Target(build_target())
    prompts = prompts_of(generator, [5, 7])
    recorded = RecordedTarget(target, record(target, prompts, 10))
    with pytest.raises(NotImplementedError, match="lookahead"):
        replay(recorded, DRAFTERS["lookahead"]())
    with pytest.raises(ValueError, match=r"tap_layers: expected some of the recorded \[\], got \[1, 2\]"):
        recorded.tap([1, 2])
    with pytest.raises(ValueError, match=r"prompts: expected recorded ones alone, got others at \[1\]"):
        Decoder(recorded).decode([prompts[0], prompts[0][:2]], 4)
    with pytest.raises(NotImplementedError, match="greedy without processing"):
        Decoder(recorded, NoDrafter(), acceptance=Naive()).decode(prompts, 4, seed=0)
    with pytest.raises(ValueError, match="prompts: expected"):
        record(target, [], 4)


def test_a_drafter_of_another_text_is_noticed(generator):
    """The root is the only thing that a drafter is told; one that proposes another is broken."""

    class Forgetful(NoDrafter):
        def draft(self, root, choose):
            return super().draft((root + 1) % VOCAB_SIZE, choose)

    target = Target(build_target())
    recorded = RecordedTarget(target, record(target, prompts_of(generator, [5]), 4))
    with pytest.raises(RuntimeError, match="recorded roots"):
        replay(recorded, Forgetful())
