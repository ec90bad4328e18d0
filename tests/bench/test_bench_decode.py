"""The decoding benchmark: a red gate stops it, arms take turns with plain decoding, what was cut off goes on."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lib.twin import twin_prompts, twin_target
from specdec.bench import decode
from specdec.bench.common.cost import Machine
from specdec.bench.common.journal import Journal, ended
from specdec.bench.decoding import cells
from specdec.bench.decoding.cells import Cell, run_cell
from specdec.bench.decoding.simulated import PROFILES, random_drafter
from specdec.common.provenance import read_records
from specdec.drafters.weightless.none import NoDrafter
from specdec.evaluation.arms import Arm, Decoded
from specdec.evaluation.records import ArmInfo
from specdec.generation.generate import KEPT
from specdec.loop.stats import AcceptanceStats


@pytest.fixture(scope="module")
def target():
    return twin_target()


@pytest.fixture(scope="module")
def prompts():
    return twin_prompts()


def make_cell(target, prompts, drafters=(), names=("medusa", "prompt_lookup"), **others):
    settings = {"repeats": 1, "machine": None, **others}
    return Cell(
        name="twin-b2-ctx12",
        model="twin",
        context="12",
        target=target,
        batches=[prompts],
        drafters={**dict(drafters), **{name: lambda name=name: random_drafter(name, target) for name in names}},
        reads={"medusa": {"lm_head": 0.8}},
        profile=settings.pop("profile", PROFILES["always"]),
        max_new_tokens=16,
        **settings,
    )


def records_of(cell, *, deadline=float("inf"), journal=None):
    found = run_cell(cell, deadline=deadline, journal=journal or Journal(None))
    return {record["arm"]: record for record, _ in found}


def change_arms(monkeypatch, change, names=("none", "medusa", "prompt_lookup")):
    """Arms of ours whose results are changed on the way out."""
    ours, our_plain = cells.our_arm, cells.our_arms

    def changed(arm):
        return replace(arm, run=lambda *call: change(arm.run(*call))) if arm.info.name in names else arm

    monkeypatch.setattr(cells, "our_arm", lambda *call: changed(ours(*call)))
    monkeypatch.setattr(cells, "our_arms", lambda *call: list(map(changed, our_plain(*call))))


def slow_clock(monkeypatch):
    """A clock by which every look takes longer than the one before, so that a busy machine changes nothing."""
    ticks = iter(range(10**6))
    look_at(monkeypatch, lambda: float(next(ticks)) ** 2)


def look_at(monkeypatch, clock):
    monkeypatch.setattr(cells, "time", SimpleNamespace(perf_counter=clock, monotonic=time.monotonic))


def test_a_cell_measures_every_arm_and_names_synthetic_acceptance(target, prompts, monkeypatch):
    slow_clock(monkeypatch)
    records = records_of(make_cell(target, prompts))
    assert list(records) == ["none", "medusa", "prompt_lookup", "transformers", "transformers_static"]
    assert "accelerator only" in records.pop("transformers_static")["missing"]
    for record in records.values():
        assert record["acceptance"] == "synthetic acceptance (always)"
        assert record["gate"] == "green"
        assert record["identical"]
        assert record["num_tokens"] == 2 * 15
        assert record["timing"] == "CPU wall time"
    medusa = records["medusa"]
    assert medusa["tau"] == 5
    assert medusa["efficiency"] == medusa["speedup"] / 5
    assert medusa["split_ms"].keys() == {"draft", "score", "verify", "commit"}
    assert medusa["split_of"] == "timed"
    assert not medusa["apart"]
    assert medusa["floor_bytes"]["drafter_weights"] == 4 * 4 * 64 * 256
    assert medusa["percent_of_floor"] is None
    assert records["none"]["speedup"] == records["none"]["tau"] == 1
    assert records["prompt_lookup"]["floor_bytes"] is None  # nobody counted its reads
    machine = Machine("made up", bytes_per_s=1e9, flops_per_s=1e12)
    measured = records_of(make_cell(target, prompts, machine=machine))["none"]
    assert measured["percent_of_floor"] == pytest.approx(100 * measured["floor_ms"] / measured["step_ms"])


def test_out_of_time_arms_are_named_and_the_baseline_is_not(target, prompts, monkeypatch):
    slow_clock(monkeypatch)
    records = records_of(make_cell(target, prompts), deadline=time.monotonic() - 1)
    assert "tokens_per_second" in records.pop("none")
    assert {record["missing"] for record in records.values()} == {"out of time"}


def test_a_run_that_was_cut_off_goes_on_with_the_arms_that_are_left(target, prompts, monkeypatch, tmp_path):
    """The baseline runs again, since a speedup is of one run; what failed comes last, and only once more."""
    slow_clock(monkeypatch)
    path = tmp_path / "x.jsonl"
    broken = {"broken": lambda: 1 / 0}
    cell = make_cell(target, prompts, drafters=broken)
    first = run_cell(cell, deadline=float("inf"), journal=Journal(path))
    assert [next(first)[0]["arm"] for _ in range(3)] == ["none", "broken", "medusa"]
    first.close()  # killed
    again = records_of(cell, journal=Journal(path, resume=True))
    assert list(again) == ["none", "prompt_lookup", "transformers", "transformers_static", "broken"]
    assert list(records_of(cell, journal=Journal(path, resume=True))) == ["none"]
    results = ended(read_records(path))
    assert len(results) == 6
    assert {record["arm"] for record in results if "failure" in record} == {"broken"}
    assert "ZeroDivisionError" in next(record["failure"] for record in results if "failure" in record)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_text_gets_no_number(dtype, prompts, monkeypatch):
    target = twin_target(dtype)

    def wrong(found):
        rows = [[*row[:3], *((token + 7) % 256 for token in row[3:4]), *row[4:]] for row in found.tokens]
        return replace(found, tokens=rows)

    slow_clock(monkeypatch)
    change_arms(monkeypatch, wrong, names=["medusa"])
    record = records_of(make_cell(target, prompts))["medusa"]
    assert record["gate"] == "red"
    assert "tokens_per_second" not in record
    assert [found["position"] for found in record["divergences"]] == [3, 3]
    assert min(found["margin"] for found in record["divergences"]) > 1


@pytest.mark.parametrize(("tolerance", "gate"), [(0.25, "green"), (1e-4, "red"), (0.0, "red")])
def test_a_difference_that_rounding_explains_is_reported_and_allowed(target, prompts, monkeypatch, tolerance, gate):
    near = cells.Divergence(prompt=0, position=1, plain=2, speculative=3, margin=1e-3, tolerance=tolerance)
    monkeypatch.setattr(cells, "first_divergence", lambda *_, index: near if index == 0 else None)
    found = cells._gate(make_cell(target, prompts), [[[1], [2]]], [[[1], [2]]])
    assert (found["gate"], found["identical"], len(found["divergences"])) == (gate, False, 1)


def test_an_error_of_the_compiler_is_no_failure_of_the_run(target, prompts, monkeypatch):
    slow_clock(monkeypatch)

    def broken(_target):
        def run(rows, request):
            raise ValueError("no compiler")

        return Arm(ArmInfo("transformers_static", "transformers"), run)

    monkeypatch.setattr(cells, "_compiled_arm", broken)
    records = records_of(make_cell(target, prompts))
    assert records["transformers_static"]["missing"] == "ValueError: no compiler"
    assert "gate" not in records["transformers_static"]


def test_an_arm_that_fails_is_red_and_the_others_are_measured(target, prompts, monkeypatch, capsys):
    slow_clock(monkeypatch)

    def broken():
        raise ValueError("no such drafter")

    records = records_of(make_cell(target, prompts, drafters={"broken": broken}))
    assert records["broken"]["gate"] == "red"
    assert records["broken"]["missing"] == "ValueError: no such drafter"
    assert "in broken" in capsys.readouterr().err
    assert records["medusa"]["gate"] == records["transformers"]["gate"] == "green"


def test_without_a_baseline_nothing_is_compared(target, prompts, monkeypatch):
    def full(found):
        raise torch.OutOfMemoryError("CUDA out of memory")

    change_arms(monkeypatch, full)
    records = records_of(make_cell(target, prompts))
    assert records.pop("none")["missing"] == "CUDA out of memory"
    assert {record["missing"] for record in records.values()} == {"no plain decoding: CUDA out of memory"}
    assert not any("gate" in record for record in records.values())


def test_phases_of_a_captured_step_come_from_the_eager_loop(target, prompts, monkeypatch):
    slow_clock(monkeypatch)
    times_ms = {"prefill": 1.0, "steps": 2.0}

    def captured(found):
        return replace(found, stats=replace(found.stats, captured=True, times_ms=times_ms))

    change_arms(monkeypatch, captured)
    record = records_of(make_cell(target, prompts))["medusa"]
    assert record["captured"]
    assert record["split_of"] == "eager"
    assert record["split_ms"].keys() == {"draft", "score", "verify", "commit"}


# Turns

BENCH = {"profile": None, "compiled": False}


class Bench:
    """A machine on which time passes with tokens alone, and arms that cost as much of it as they say."""

    def __init__(self, monkeypatch, costs, slowness=lambda num_calls: 1.0, capture_s=0.0, drafters=()):
        self.now, self.slowness, self.capture_s = 0.0, slowness, capture_s
        self.costs, self.drafters, self.calls = costs, dict(drafters), []
        look_at(monkeypatch, lambda: self.now)
        monkeypatch.setattr(cells, "our_arms", lambda *_: [self.arm("none")])
        monkeypatch.setattr(cells, "our_arm", lambda _target, name, _drafter: self.arm(name))
        monkeypatch.setattr(cells, "transformers_arms", lambda *_, **__: [self.arm("transformers")])

    def arm(self, name):
        cost, drafter = self.costs[name], self.drafters.get(name, lambda: None)()

        def run(prompts, request):
            length = request.max_new_tokens
            self.calls.append((name, length))
            times_ms = self.capture(drafter) if length > 1 else {}
            self.now += self.slowness(len(self.calls)) * (1.0 + cost * length)
            counts = [[1] * (length - 1) for _ in prompts]
            stats = AcceptanceStats(counts, counts, True, times_ms, length - 1) if drafter else None
            return Decoded([[7] * length for _ in prompts], stats)

        return Arm(ArmInfo(name, "specdec"), run, drafter)

    def capture(self, drafter):
        """There is room for one captured step."""
        if drafter is None or drafter in KEPT:
            return {}
        if KEPT:
            raise torch.OutOfMemoryError("CUDA out of memory")
        KEPT[drafter] = SimpleNamespace(release=lambda: None)
        self.now += self.capture_s
        return {"capture": 1.0}


def test_arms_take_turns_with_plain_decoding(target, prompts, monkeypatch):
    bench = Bench(monkeypatch, {"none": 1.0, "fast": 0.5, "transformers": 2.0})
    cell = make_cell(target, prompts, names=("fast",), **BENCH, repeats=4)
    records = records_of(replace(cell, drafters={"fast": lambda: None}))
    firsts = [pair["first"] for pair in records["fast"]["pairs"]]
    assert firsts in (["none", "fast"] * 2, ["fast", "none"] * 2)
    timed = [name for name, length in bench.calls if length == 16]
    own = timed.index("fast")
    assert timed[:own] == ["none"] * (1 + 4)  # its gate, and its own row
    assert timed[own + 1 : own + 9] == [name for pair in (firsts[:2], firsts[2:]) for name in (*pair, *pair[::-1])]
    assert {record["speedup"] for record in records.values()} == {1.0, 2.0, 0.5}


def test_a_drift_of_the_machine_is_not_taken_for_speed(target, prompts, monkeypatch):
    """It gets slower by a fiftieth with every call: one row after the other would make of twice as fast much less."""
    Bench(monkeypatch, {"none": 1.0, "fast": 0.5, "transformers": 1.0}, lambda num_calls: 1.02**num_calls)
    cell = make_cell(target, prompts, names=("fast",), **BENCH, repeats=5)
    records = records_of(replace(cell, drafters={"fast": lambda: None}))
    fast = records["fast"]
    assert fast["tokens_per_second"] / records["none"]["tokens_per_second"] < 1.6
    assert fast["speedup"] == pytest.approx(2, rel=0.07)
    assert fast["speedup_lowest"] < 2 < fast["speedup_highest"]
    assert records["transformers"]["speedup"] == pytest.approx(1, rel=0.07)


def test_a_jump_between_two_turns_is_in_one_ratio(target, prompts, monkeypatch):
    """The machine gets slower in the middle of the third repeat: of five turns three are fast, of the other arm two."""
    gate, turn, pair = 1, 3, 6  # calls
    before = gate + 5 * turn + gate + 2 * pair + turn
    Bench(monkeypatch, {"none": 1.0, "fast": 0.5, "transformers": 1.0}, lambda num_calls: 1 + 2 * (num_calls > before))
    cell = make_cell(target, prompts, names=("fast",), **BENCH, repeats=5)
    fast = records_of(replace(cell, drafters={"fast": lambda: None}))["fast"]
    ratios = [pair["speedup"] for pair in fast["pairs"]]
    assert ratios[:2] == ratios[3:] == [2, 2]
    assert ratios[2] in (6, pytest.approx(2 / 3))
    assert fast["speedup"] == 2


def test_what_does_not_fit_side_by_side_is_captured_anew_for_its_turns(target, prompts, monkeypatch):
    drafters = {"none": NoDrafter, "fast": lambda: random_drafter("prompt_lookup", target)}
    costs = {"none": 1.0, "fast": 0.5, "transformers": 1.0}
    Bench(monkeypatch, costs, capture_s=100.0, drafters=drafters)
    cell = make_cell(target, prompts, names=("fast",), **BENCH, repeats=3)
    records = records_of(replace(cell, drafters={"fast": lambda: None}))
    found = {name: (record.get("apart"), record.get("speedup")) for name, record in records.items()}
    assert found == {"none": (False, 1), "fast": (True, 2), "transformers": (False, 1)}  # no capture was timed


def test_transformers_assists_where_it_can(target, prompts, monkeypatch):
    slow_clock(monkeypatch)
    names = ("prompt_lookup", "draft_model", "medusa")
    settings = {"profile": None, "assisted": True, "compiled": False}
    cell = replace(make_cell(target, prompts, names=names, **settings), batches=[prompts[:1]])
    records = records_of(cell)
    theirs = ["transformers", "transformers_prompt_lookup", "transformers_draft_model"]
    assert list(records) == ["none", *names, *theirs]
    assert all(record["gate"] == "green" and record["speedup"] > 0 for record in records.values())


def test_a_text_of_one_token_has_no_speed(target, prompts, monkeypatch):
    slow_clock(monkeypatch)
    change_arms(monkeypatch, lambda found: replace(found, tokens=[row[:1] for row in found.tokens]), names=["none"])
    assert "first token" in records_of(make_cell(target, prompts, names=()))["none"]["missing"]


# The command


def test_the_most_telling_cells_come_first():
    found = decode.order(["a", "b"], [1, 8], [512, 2048])
    assert found[0] == ("a", 1, 2048)
    assert set(found[1:4]) == {("a", 1, 512), ("a", 8, 2048), ("b", 1, 2048)}
    assert found[-1] == ("b", 8, 512)
    assert decode.order([decode.BUNDLED], [1, 2], [2048]) == [(decode.BUNDLED, 1, 0), (decode.BUNDLED, 2, 0)]


def test_bad_options_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(decode, "can_draw", lambda: False)
    for arguments, message in (
        (["--drafters", "nobody"], "--drafters: expected some of"),
        (["--max-new-tokens", "1"], "--max-new-tokens of 2 or more"),
        (["--models", "gpt-9"], "invalid choice"),
        (["--pictures", "pictures"], "pip install 'specdec-triton[eval]'"),
    ):
        with pytest.raises(SystemExit):
            decode.main(arguments)
        assert message in capsys.readouterr().err


def test_the_command_measures_the_bundled_model(tmp_path, capsys):
    arguments = ["--dry", "--drafters", "medusa", "--output", str(tmp_path / "r.jsonl"), "--pictures", str(tmp_path)]
    assert decode.main(arguments) == 0
    records = ended(read_records(tmp_path / "r.jsonl"))
    assert {(record["model"], record["acceptance"]) for record in records} == {
        ("tiny", "synthetic acceptance (steady-75)"),
        ("bundled", "real acceptance"),
    }
    assert all(record["dry"] and record["provenance"]["torch"] for record in records)
    shown = capsys.readouterr().out
    assert "synthetic acceptance (steady-75)" in shown
    assert "real acceptance" in shown
    for model, context in (("tiny", 24), ("bundled", "own")):
        assert (tmp_path / f"{model}-b2-ctx{context}.svg").read_text().count("<svg") == 1
    assert "**synthetic acceptance (steady-75)**" in shown
    assert "transformers compiles generate on an accelerator only" in shown
