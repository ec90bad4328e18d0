"""A slice of `make fuzz`, and that it notices a library which is wrong."""

import re
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import specdec.generation.settings
from lib.fuzz import FuzzError, main, run_call
from lib.fuzz_calls import KINDS, make_call
from lib.fuzz_flaws import FAILING_CODE, FLAWS
from lib.law_drafters import build_target
from specdec.common.randomness import Uniforms
from specdec.generation.host_steps import HostSteps
from specdec.loop.decoder import DecodeState
from specdec.loop.processing import Processing
from specdec.loop.rules import RULES, Greedy, Naive
from specdec.models.target.target import Target

NUM_CALLS = 160


def test_a_slice_of_the_fuzz():
    outcomes = Counter(map(run_call, range(NUM_CALLS)))
    assert outcomes["success"] > NUM_CALLS / 2
    assert outcomes.keys() >= {"TypeError", "ValueError", "KeyboardInterrupt", "PlantedError"}


def test_everything_has_its_turn():
    calls = [make_call(seed) for seed in range(400)]
    assert {call.kind for call in calls} == set(KINDS)
    assert {call.rule for call in calls} == RULES.keys()
    assert {name for call in calls for name in call.makers} >= FAILING_CODE.keys()
    assert any(call.interrupt_at for call in calls)
    assert len({call.flaw.name for call in calls if call.flaw}) > 20


def test_a_call_is_made_from_its_seed_alone():
    def written(seed):
        return re.sub(r"0x\w+", "", str(make_call(seed)))

    first = [written(seed) for seed in range(20)]
    torch.manual_seed(2)
    assert [written(seed) for seed in range(20)] == first


@pytest.mark.parametrize("flaw", FLAWS, ids=lambda flaw: flaw.name)
def test_every_bad_argument_is_refused_by_name(flaw):
    arguments = {"drafter": None, "input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 4, **flaw.arguments}
    with pytest.raises(flaw.types, match=f"^{flaw.name}: "):
        specdec.generate(build_target(), **arguments)


def repeat_a_token(monkeypatch):
    verify = Greedy.verify

    def twice(self, *args):
        verdict = verify(self, *args)
        emitted = verdict.emitted.clone()
        emitted[:, 1:] = torch.where(emitted[:, 1:] >= 0, emitted[:, :-1], -1)
        return replace(verdict, emitted=emitted)

    monkeypatch.setattr(Greedy, "verify", twice)


def lose_a_token(monkeypatch):
    emit = DecodeState.emit

    def short(self, root, tokens, counts, stops):
        emit(self, root, tokens, counts.clamp(max=2), stops)

    monkeypatch.setattr(DecodeState, "emit", short)


def begin_with_the_least_probable_token(monkeypatch):
    monkeypatch.setattr(Naive, "first", lambda self, scores, uniforms: scores.logits[:, 0].argmin(-1).int())


def draw_by_the_place_in_the_batch(monkeypatch):
    draw = Uniforms.draw
    monkeypatch.setattr(
        Uniforms, "draw", lambda self, *args: (draw(self, *args) + torch.arange(len(self.seeds))[:, None] / 3) % 1
    )


def process_without_the_prompt(monkeypatch):
    process = Processing._process_row
    monkeypatch.setattr(
        Processing, "_process_row", lambda self, scores, text, *args: process(self, scores, text[-1:], *args)
    )


def end_texts_with_their_step(monkeypatch):
    first = HostSteps._first_stop
    monkeypatch.setattr(HostSteps, "_first_stop", lambda self, row, new: first(self, row, new) and len(new))


def leave_the_model_changed_after_an_error(monkeypatch):
    hooked = Target.hooked

    @contextmanager
    def careless(self):
        training = self.model.training
        try:
            with hooked(self):
                yield
        except BaseException:
            self.model.train(not training)
            raise

    monkeypatch.setattr(Target, "hooked", careless)


def take_any_setting(monkeypatch):
    monkeypatch.setattr(specdec.generation.settings, "check_settings", lambda config, vocab_size: None)


BROKEN = [
    repeat_a_token, lose_a_token, begin_with_the_least_probable_token, draw_by_the_place_in_the_batch,
    process_without_the_prompt, end_texts_with_their_step, leave_the_model_changed_after_an_error, take_any_setting,
]  # fmt: skip


@pytest.mark.parametrize("flaw", BROKEN)
def test_a_broken_library_is_caught(flaw, monkeypatch):
    flaw(monkeypatch)
    assert any(map(is_seen_by_an_assertion, range(NUM_CALLS)))


def is_seen_by_an_assertion(seed):
    """Whether the call of a seed fails by what it does: any other error may be the flaw's own."""
    try:
        run_call(seed)
    except FuzzError as error:
        return isinstance(error.__cause__, AssertionError) and f"call {seed}: " in str(error)
    return False


def test_the_command_counts_outcomes_and_says_how_to_repeat_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--num-calls", "12"])
    assert main() == 0
    assert " success" in capsys.readouterr().out
    take_any_setting(monkeypatch)
    assert main() == 1
    assert re.search(r'FUZZ_ARGS="--first-seed \d+ --num-calls 1"', capsys.readouterr().out)
