"""A slice of `make fuzz`, and that it notices a library which is wrong."""

import re
import sys
from collections import Counter

import pytest
import torch

import specdec.generation.settings
from lib.fuzz import main, run_call
from lib.fuzz_calls import KINDS, make_call
from lib.fuzz_flaws import FAILING_CODE, FLAWS
from lib.law_drafters import build_target
from specdec.loop.rules import RULES

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


def test_the_command_counts_outcomes_and_says_how_to_repeat_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--first-seed", "95", "--num-calls", "12"])
    assert main() == 0
    assert " success" in capsys.readouterr().out
    monkeypatch.setattr(specdec.generation.settings, "check_settings", lambda config, vocab_size: None)
    assert main() == 1
    assert re.search(r'FUZZ_ARGS="--first-seed \d+ --num-calls 1"', capsys.readouterr().out)
