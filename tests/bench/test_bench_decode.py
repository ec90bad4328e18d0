"""The decoding benchmark: synthetic acceptance is what its profile says, floors are as by hand, a red gate stops it."""

import time
from dataclasses import replace

import pytest
import torch

from specdec.bench import decode
from specdec.bench.common.cost import Machine
from specdec.bench.common.journal import Journal, ended
from specdec.bench.common.pictures import lanes_svg, middle_steps
from specdec.bench.common.shapes import ModelShape
from specdec.bench.common.traffic import count_reads, step_bytes
from specdec.bench.decoding import cells
from specdec.bench.decoding.arms import Arm
from specdec.bench.decoding.cells import Cell, run_cell
from specdec.bench.decoding.simulated import (
    DRAFTERS,
    PROFILES,
    AcceptanceProfile,
    SyntheticAcceptance,
    leftmost_path,
    random_drafter,
    random_target,
)
from specdec.common.provenance import read_records
from specdec.loop.decoder import Decoder
from specdec.loop.stats import AcceptanceStats
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

SHAPE = ModelShape("twin", 7, 64, 96, 4, 2, 16, 256)
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def target():
    return Target(random_target(SHAPE, max_positions=256, device="cpu", dtype=torch.float32))


@pytest.fixture(scope="module")
def prompts():
    return list(torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def plain(target, prompts):
    return Decoder(target).decode(prompts, NEW_TOKENS).tokens


def synthetic(name, target, plain, profile, seed=0):
    return SyntheticAcceptance(random_drafter(name, target), torch.tensor(plain), profile, seed=seed)


# Synthetic acceptance


def test_the_random_target_counts_upwards_with_a_wide_margin(target, prompts, plain):
    assert plain == [[(int(prompt[-1]) + 1 + i) % 256 for i in range(NEW_TOKENS)] for prompt in prompts]
    half = Target(random_target(SHAPE, max_positions=256, device="cpu", dtype=torch.bfloat16))
    assert Decoder(half).decode(prompts, NEW_TOKENS).tokens == plain
    logits = target.read(torch.stack(prompts)).logits.topk(2).values
    assert (logits[..., 0] - logits[..., 1]).min() > 0.2 * logits.abs().max()


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_the_target_follows_as_deep_as_the_profile_says(name, target, prompts, plain):
    depths = {}
    for profile in ("always", "never"):
        drafter = synthetic(name, target, plain, PROFILES[profile])
        result = Decoder(target, drafter).decode(prompts, NEW_TOKENS)
        assert result.tokens == plain
        depths[profile] = [count - 1 for row in result.stats.num_emitted for count in row[:-1]]
    assert set(depths["never"]) == {0}
    if isinstance(drafter.shape, TreeShape):
        assert set(depths["always"]) == {drafter.planted_depth}
        # the nodes of lookahead's window are deeper, and can never be accepted
        assert name == "lookahead" or drafter.planted_depth == drafter.shape.max_depth
    else:  # a tree of another shape at every step
        assert min(depths["always"]) >= 1


@pytest.mark.parametrize("name", ["medusa", "eagle3", "lookahead"])
def test_the_drafter_and_the_target_do_all_their_work(name, target, prompts, plain, monkeypatch):
    """What is replaced are tokens: nodes, passes and the drafter's calls are those of the drafter alone."""
    calls = []
    for drafter in (random_drafter(name, target), synthetic(name, target, plain, PROFILES["never"])):
        inner = type(getattr(drafter, "drafter", drafter))
        seen = {"draft": 0, "commit": 0}
        for method in seen:
            original = getattr(inner, method)

            def counted(*args, original=original, method=method, seen=seen):
                seen[method] += 1
                return original(*args)

            monkeypatch.setattr(inner, method, counted)
        stats = Decoder(target, drafter).decode(prompts, 12).stats
        monkeypatch.undo()
        assert seen == dict.fromkeys(seen, stats.num_target_passes)
        calls.append(drafter.shape.num_nodes)
    assert calls[0] == calls[1]


def test_a_profile_has_the_tau_of_its_law(target, prompts, plain):
    profile = AcceptanceProfile("made up", (0.8, 0.5))
    assert profile.tau(3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    depths = profile.depths(4, 5000, 3, seed=2)
    assert 1 + depths.mean() == pytest.approx(profile.tau(3), abs=0.02)
    assert [(depths >= d).sum() / (depths >= d - 1).sum() for d in (1, 2, 3)] == pytest.approx(
        [0.8, 0.5, 0.5], abs=0.02
    )
    taus = {
        Decoder(target, synthetic("medusa", target, plain, profile, seed)).decode(prompts, NEW_TOKENS).stats.tau
        for seed in (1, 1, 2)
    }
    assert len(taus) == 2  # the seed decides
    with pytest.raises(ValueError, match="acceptance_at_depth: expected at least one probability"):
        AcceptanceProfile("bad", (1.2,))


def test_the_leftmost_path_follows_first_children():
    assert leftmost_path(TreeShape.from_k_config((2, 3)).rank_paths) == [0, 1, 3]
    assert leftmost_path(TreeShape.none().rank_paths) == [0]
    assert leftmost_path([(), (1,), (4,), (1, 2), (1, 0), (3, 0)]) == [0, 1, 4]


# Bytes


def test_bytes_of_a_step_are_those_computed_by_hand(target):
    config, width, vocab = target.model.config, 64, 256
    heads = random_drafter("medusa", target)
    found = step_bytes(target, heads, count_reads(target, heads), lengths=[100, 50], expected_new=10)
    layer = width * (64 + 32 + 32 + 64) + 3 * width * 96 + 2 * width
    assert found.target_weights == 4 * (config.num_hidden_layers * layer + width + vocab * width)
    assert found.target_cache == 170 * 7 * 2 * 2 * 16 * 4
    assert found.drafter_weights == 4 * 4 * (width * width + width + width * vocab)  # four of the five heads
    assert found.drafter_cache == 0
    machine = Machine("made up", bytes_per_s=1e9, flops_per_s=1e12)
    assert found.floor_ms(machine) == pytest.approx(found.total / 1e6)


def test_a_sequential_drafter_reads_its_layer_once_per_depth(target):
    eagle = random_drafter("eagle", target)
    reads = count_reads(target, eagle)
    passes = eagle.shape.max_depth
    assert reads["layers.0.self_attn.q_proj.weight"] == reads["target.lm_head.weight"] == passes == 5
    found = step_bytes(target, eagle, reads, lengths=[100])
    assert found.drafter_cache == passes * 100 * 2 * 2 * 16 * 4
    grown = random_drafter("eagle2", target)
    assert isinstance(grown.shape, DynamicTree)
    assert count_reads(target, grown)["target.lm_head.weight"] == grown.shape.depth + 1
    assert count_reads(target, random_drafter("parallelspec", target))["target.lm_head.weight"] == 1
    assert count_reads(target, random_drafter("prompt_lookup", target)) == {}


# Cells


def make_cell(target, prompts, machine=None, drafters=()):
    names = ("medusa", "prompt_lookup")
    return Cell(
        name="twin-b2-ctx12",
        model="twin",
        context="12",
        target=target,
        batches=[prompts],
        drafters={**dict(drafters), **{name: lambda name=name: random_drafter(name, target) for name in names}},
        reads={"medusa": {"lm_head": 0.8}},
        profile=PROFILES["always"],
        stop_tokens=(),
        max_new_tokens=16,
        repeats=1,
        machine=machine,
    )


def records_of(cell, *, deadline=float("inf"), journal=None):
    found = run_cell(cell, deadline=deadline, journal=journal or Journal(None))
    return {record["arm"]: record for record, _ in found}


def change_arms(monkeypatch, change, names=("none", "medusa", "prompt_lookup")):
    """Arms of ours whose tokens and statistics are changed on the way out."""
    original = cells.our_arm

    def our_arm(name, *args):
        arm = original(name, *args)
        return replace(arm, run=lambda *call: change(*arm.run(*call))) if name in names else arm

    monkeypatch.setattr(cells, "our_arm", our_arm)


def slow_clock(monkeypatch):
    """A clock by which every look takes a second, so that a busy machine changes nothing."""
    ticks = iter(range(10**6))
    monkeypatch.setattr("specdec.bench.decoding.arms.time.perf_counter", lambda: float(next(ticks)) ** 2)


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
    target = Target(random_target(SHAPE, max_positions=256, device="cpu", dtype=dtype))

    def wrong(tokens, stats):
        return [[*row[:3], *((token + 7) % 256 for token in row[3:4]), *row[4:]] for row in tokens], stats

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
    found = cells._gate(make_cell(target, prompts), [[[1], [2]]], cells._Reference(tokens=[[[1], [2]]]))
    assert (found["gate"], found["identical"], len(found["divergences"])) == (gate, False, 1)


def test_an_error_of_the_compiler_is_no_failure_of_the_run(target, prompts, monkeypatch):
    slow_clock(monkeypatch)

    def broken(target, stops, *, compiled=False):
        def run(rows, length):
            raise ValueError("no compiler")

        return Arm("transformers", run)

    monkeypatch.setattr(cells, "transformers_arm", broken)
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
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cells, "our_arm", full)
    records = records_of(make_cell(target, prompts))
    assert records.pop("none")["missing"] == "CUDA out of memory"
    assert {record["missing"] for record in records.values()} == {"no plain decoding: CUDA out of memory"}
    assert not any("gate" in record for record in records.values())


def test_phases_of_a_captured_step_come_from_the_eager_loop(target, prompts, monkeypatch):
    slow_clock(monkeypatch)
    times_ms = {"prefill": 1.0, "steps": 2.0}
    change_arms(monkeypatch, lambda tokens, stats: (tokens, replace(stats, captured=True, times_ms=times_ms)))
    record = records_of(make_cell(target, prompts))["medusa"]
    assert record["captured"]
    assert record["split_of"] == "eager"
    assert record["split_ms"].keys() == {"draft", "score", "verify", "commit"}


def test_the_most_telling_cells_come_first():
    found = decode.order(["a", "b"], [1, 8], [512, 2048])
    assert found[0] == ("a", 1, 2048)
    assert set(found[1:4]) == {("a", 1, 512), ("a", 8, 2048), ("b", 1, 2048)}
    assert found[-1] == ("b", 8, 512)
    assert decode.order([decode.BUNDLED], [1, 2], [2048]) == [(decode.BUNDLED, 1, 0), (decode.BUNDLED, 2, 0)]


def test_bad_options_are_refused(capsys):
    for arguments, message in (
        (["--drafters", "nobody"], "--drafters: expected some of"),
        (["--max-new-tokens", "1"], "--max-new-tokens of 2 or more"),
        (["--models", "gpt-9"], "invalid choice"),
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
        assert (tmp_path / f"{model}-b2-ctx{context}.svg").read_text().startswith("<svg")
    assert "**synthetic acceptance (steady-75)**" in shown
    assert "transformers compiles generate on an accelerator only" in shown


# Timelines


def test_a_timeline_shows_steps_from_the_middle():
    step = ("draft", "score", "verify", "commit")
    spans = [("prefill", 0.0, 5.0)]
    spans += [(name, 10.0 * i + j, 10.0 * i + j + 1) for i in range(1, 8) for j, name in enumerate(step)]
    found = middle_steps(spans, num_steps=3)
    assert [name for name, _, _ in found] == [*step] * 3
    assert found[0] == ("draft", 0.0, 1.0)
    assert found[4] == ("draft", 10.0, 11.0)
    assert [name for name, _, _ in middle_steps(spans, num_steps=99)] == [*step] * 7
    assert middle_steps([]) == []
    picture = lanes_svg({"a<b": found, "none": []}, "title")
    assert picture.count("<title>score") == 3
    assert "a&lt;b" in picture


def test_spans_of_the_loop_add_up_to_its_times(target, prompts):
    stats = Decoder(target).decode(prompts, 8).stats
    assert isinstance(stats, AcceptanceStats)
    names = [name for name, _, _ in stats.spans_ms]
    assert names == ["prefill", *["draft", "score", "verify", "commit"] * stats.num_target_passes]
    assert all(begin <= end for _, begin, end in stats.spans_ms)
    total = sum(end - begin for name, begin, end in stats.spans_ms if name == "score")
    assert total == pytest.approx(stats.times_ms["score"])
    assert replace(stats, spans_ms=[]).tau == stats.tau
