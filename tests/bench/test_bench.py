"""The benchmark harness: a wrong kernel gets no number, costs are right by hand, and all benchmarks run on a CPU."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdec.bench import small_m
from specdec.bench.common import cost, machine, shapes, timing
from specdec.bench.common.cost import H200, Cost, Machine
from specdec.bench.common.harness import BenchOp, Call, Provider, WrongResultError, compiled
from specdec.bench.common.shapes import StepShape, TreeSize
from specdec.bench.kernels import bench_accept_naive, bench_rms_norm, bench_tree_attention
from specdec.common import provenance, source

ROOT = Path(__file__).resolve().parents[2]
SHAPE = StepShape(shapes.TINY, batch=2, tree=TreeSize(7, 2), context=5, dtype=torch.float32)
HAS_GPU = torch.cuda.is_available()


class RecordingBenchmark:
    """What the harness uses of pytest-benchmark's fixture; the rounds take 1, 2, 3 ... us."""

    def __init__(self):
        self.extra_info = {}
        self.group = None
        self.stats = None

    def pedantic(self, target, args=(), setup=None, rounds=1, warmup_rounds=0, iterations=1):
        for _ in range(warmup_rounds + rounds):
            if setup:
                setup()
            for _ in range(iterations):
                target(*args)
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[1e-6 * (i + 1) for i in range(rounds)]))


def make_op(function, *, dtype=torch.float32, definition=None, **settings):
    """An op that doubles a tensor, with `function` as the provider under test."""

    def make(shape, generator):
        values = torch.randn(shape.batch, 100, generator=generator, device=generator.device)
        return Call(args=((8 * values).to(dtype),))

    reference = definition or (lambda x: x * 2)
    return BenchOp(
        name="double",
        make=make,
        definition=reference,
        providers={"reference": Provider(reference), "tested": Provider(function)},
        cost=lambda shape: Cost(num_bytes=8 * 100 * shape.batch),
        **settings,
    )


def skips_the_last_element(x):
    out = torch.empty_like(x)
    out[:, :-1] = 2 * x[:, :-1]
    return out


WRONG = {
    "an integer off by one": (lambda x: x * 2 + (x == x.max()).int(), torch.int32, "elements differ"),
    "an integer not written": (skips_the_last_element, torch.int32, "2 of 200 elements differ"),
    "a float off": (lambda x: 2.001 * x, torch.float32, "error .* at most"),
    "a float not written": (skips_the_last_element, torch.float32, "error nan"),
    "another dtype": (lambda x: x.double() * 2, torch.float32, "expected torch.float32 .* got torch.float64"),
    "another shape": (lambda x: x[:1] * 2, torch.float32, r"\[2, 100\], got torch.float32 \[1, 100\]"),
    "one output too many": (lambda x: (x * 2, x), torch.float32, "expected outputs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_kernel_gets_no_number(case):
    function, dtype, match = WRONG[case]
    benchmark = RecordingBenchmark()
    with pytest.raises(WrongResultError, match=match):
        make_op(function, dtype=dtype).run(benchmark, "tested", SHAPE)
    assert benchmark.stats is None
    assert benchmark.extra_info == {}


def test_a_kernel_that_spoils_its_arguments_in_place_is_compared_by_them():
    op = make_op(
        lambda x: x.add_(1), definition=lambda x: x.mul_(2), outputs=lambda call, _: call.args[0], dtype=torch.int32
    )
    with pytest.raises(WrongResultError, match="elements differ"):
        op.check("tested", SHAPE)
    op.check("reference", SHAPE)


def test_memory_is_poisoned_for_the_check_alone():
    poisoned = []

    def doubles(x):
        poisoned.append(torch.are_deterministic_algorithms_enabled())
        return x * 2

    torch.use_deterministic_algorithms(False)
    make_op(doubles).check("tested", SHAPE)
    assert poisoned == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_compiled_provider_is_checked_and_timed_in_one_mode(monkeypatch):
    modes = []

    def doubles(x):
        modes.append(torch.are_deterministic_algorithms_enabled())
        return x * 2

    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    op = make_op(doubles)
    op = dataclasses.replace(op, providers={**op.providers, "compile": compiled(doubles, eager_on_cpu=True)})
    op.run(RecordingBenchmark(), "compile", SHAPE)
    assert set(modes) == {False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_rounding_is_no_error(dtype):
    make_op(lambda x: (x.double() * 2 * (1 + 1e-7)).to(dtype), dtype=dtype).check("tested", SHAPE)


def test_a_right_kernel_gets_its_figures():
    benchmark = RecordingBenchmark()
    make_op(lambda x: x + x).run(benchmark, "tested", SHAPE)
    info = benchmark.extra_info
    assert benchmark.group == "double tiny-b2-n7-ctx5"
    assert info["p20_us"] <= info["p50_us"] <= info["p80_us"]
    assert info["bytes"] == 1600
    assert info["provenance"]["device"] == (torch.cuda.get_device_name() if HAS_GPU else "cpu")
    json.dumps(info)
    if HAS_GPU:
        assert info["percent_of_roofline"] > 0
        assert "CUDA-graph replays" in info["timing"]
    else:
        assert info["p50_us"] == pytest.approx(15.5)  # rounds of 1 to 30 us
        assert info["roofline_us"] == pytest.approx(1600 / 4.3e6)
        assert info["roofline_machine"] == "NVIDIA H200"
        assert info["percent_of_roofline"] is None
        assert "CPU wall time" in info["timing"]


def test_a_provider_for_gpus_is_skipped_without_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    op = make_op(lambda x: x + x)
    op = BenchOp("double", op.make, op.definition, {**op.providers, "gpu": Provider(print, needs_gpu=True)}, op.cost)
    benchmark = RecordingBenchmark()
    with pytest.raises(pytest.skip.Exception, match="gpu needs an NVIDIA GPU"):
        op.run(benchmark, "gpu", SHAPE)
    assert benchmark.extra_info == {}
    machine.measure_machine.cache_clear()
    for measure in (machine.measure_machine, lambda: small_m.main(["--output", "nowhere"])):
        with pytest.raises(RuntimeError, match="expected an NVIDIA GPU"):
            measure()


def test_an_op_of_the_library_has_its_reference_and_its_kernel():
    """The definition computes in float64, the provider "reference" in the dtype of the inputs."""
    for op, others, waits in (
        (bench_rms_norm.RMS_NORM, ["torch", "compile"], False),
        (bench_accept_naive.OP, [], True),
    ):
        reference, triton = op.providers["reference"], op.providers["triton"]
        assert [*op.providers][: 1 + len(others)] == ["reference", *others]
        assert (reference.function.func, reference.function.keywords) == (op.definition, {"upcast": False})
        assert reference.capturable is not waits
        assert triton.function.keywords == {"backend": "triton"}
        assert (triton.function.func.__name__, triton.needs_gpu, triton.capturable) == (op.name, True, True)


def test_an_op_needs_a_reference_among_its_providers():
    op = make_op(lambda x: x)
    with pytest.raises(ValueError, match="providers: expected one named 'reference', got tested"):
        BenchOp("double", op.make, op.definition, {"tested": op.providers["tested"]}, op.cost)


@pytest.mark.parametrize(
    ("touched", "size", "free", "expected"),
    [
        (100, 100, 10**6, (40, 40)),  # small inputs: every launch has a copy of its own
        (150, 150, 10**6, (3, 40)),  # 3 * 150 bytes are more than four times a cache of 100
        (10**4, 10**4, 10**6, (1, 40)),
        (10, 10**6, 3 * 10**6, (3, 3)),  # room for three copies, which fit the cache: each is used once
        (10, 10**6, 10, (1, 1)),
    ],
)
def test_no_launch_finds_its_inputs_in_the_cache(touched, size, free, expected):
    l2_bytes = 1000 if touched == 100 else 100
    assert timing.rotation(touched, size, l2_bytes, free, 40) == expected


ATTENTION = {"num_nodes": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "context": 10, "element_bytes": 2}
LLAMA_PATH = {"num_layers": 32, "num_kv_heads": 32, "head_dim": 128, "element_bytes": 2, "batch": 1, "path_length": 6}
COSTS = {
    # keys 10 + 2; K and V 2*12*2*8*2, q and out 2*2*4*8*2, words 2*4, length 4
    "attention": (cost.tree_attention(batch=1, **ATTENTION), 768 + 256 + 8 + 4, 4 * 2 * 4 * 8 * 12),
    # 40 nodes in the cache: 50 keys and two words per node, words of their own for both rows
    "attention of a level": (
        cost.tree_attention(batch=2, **ATTENTION, num_tree_nodes=40, shared_tree=False),
        2 * 3200 + 2 * 256 + 2 * 16 + 8,
        4 * 2 * 2 * 4 * 8 * 50,
    ),
    # Llama-2-7B, four nodes moved: 4 * 32 layers * K and V * 8 KiB, read and written
    "compact": (cost.kv_compact(num_moved=4, **LLAMA_PATH), 2 * 4 * 32 * 2 * 8192 + 8 * 4, 0),
    # per row 4 candidates of 8 bytes, root and length; 3 tables of 5; 2 outputs of 2 * 5
    "expand": (cost.tree_expand(batch=2, num_nodes=5, candidate_bytes=8), 2 * (32 + 8) + 60 + 80, 0),
    # 10 tokens, 10 targets, 5 parents, 2 budgets, 1 stop token; 2 rows of 3 + 3 + 2
    "accept": (cost.accept_greedy(batch=2, num_nodes=5, max_depth=2, num_stop_tokens=1), 4 * (28 + 16), 0),
    # 5 tokens in and out; 2 rows of 11 numbers and 3 flags; deepest, a stop token, progress and the step in and out
    "emit": (cost.emit_step(batch=2, num_emitted=5, num_places=3, num_stops=1), 40 + 2 * 47 + 24 + 16, 0),
    "norm": (cost.rms_norm(num_rows=3, width=8, element_bytes=2), 2 * 8 * (3 + 3 + 1), 4 * 24),
    "add and norm": (cost.rms_norm(num_rows=3, width=8, element_bytes=2, residual=True), 2 * 8 * (6 + 6 + 1), 5 * 24),
    "linear": (cost.skinny_linear(num_rows=2, num_outputs=3, num_columns=5, element_bytes=2), 2 * (15 + 10 + 6), 60),
    # two seeds and the step, 10 numbers
    "uniforms": (cost.philox_uniform(batch=2, count=5), 24 + 40, 10),
    "exponentials": (cost.philox_uniform(batch=2, count=5, exponential=True), 24 + 40, 40),
}


@pytest.mark.parametrize("case", COSTS)
def test_costs_are_those_computed_by_hand(case):
    computed, num_bytes, num_flops = COSTS[case]
    assert computed == Cost(num_bytes, num_flops)


def test_the_roofline_is_the_larger_of_two_times():
    made_up = Machine("made up", bytes_per_s=1e9, flops_per_s=1e12)
    assert Cost(num_bytes=3000, num_flops=0).roofline_us(made_up) == pytest.approx(3)
    assert Cost(num_bytes=3000, num_flops=7_000_000).roofline_us(made_up) == pytest.approx(7)
    step = StepShape(shapes.LLAMA_2_7B, 1, TreeSize(1, 0), 2048, torch.bfloat16)
    assert bench_tree_attention.OP.cost(step).roofline_us(H200) == pytest.approx(
        7.8, abs=0.05
    )  # 33.6 MB of keys and values


@pytest.mark.parametrize("tree", [*shapes.TREES, TreeSize(5, 4), TreeSize(9, 1)], ids=str)
def test_a_regular_tree_is_a_tree(tree):
    parents, depths = tree.parents(), tree.depth("cpu")[0].tolist()
    assert tree.parent("cpu").tolist() == [parents]
    assert len(parents) == tree.num_nodes
    assert parents[0] == -1
    assert depths[0] == 0
    assert max(depths) == tree.max_depth
    assert all(0 <= parents[i] < i and depths[i] == depths[parents[i]] + 1 for i in range(1, tree.num_nodes))
    words = tree.ancestors("cpu")
    assert words.dtype == torch.int32
    assert words.shape == (1, tree.num_nodes, (tree.num_nodes + 31) // 32)
    for node in range(tree.num_nodes):
        expected, above = set(), node
        while above >= 0:
            expected.add(above)
            above = parents[above]
        bits = {32 * w + bit for w, word in enumerate(words[0, node].tolist()) for bit in range(32) if word >> bit & 1}
        assert bits == expected
    path = tree.path()
    assert len(path) == tree.max_depth + 1
    assert [parents[node] for node in path] == [-1, *path[:-1]]


def test_impossible_trees_are_refused():
    for num_nodes, max_depth in ((3, 3), (0, 0), (4, -1), (2, 0)):
        with pytest.raises(ValueError, match="max_depth: expected"):
            TreeSize(num_nodes, max_depth)


def test_large_shapes_need_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {shape.model for shape in shapes.step_shapes()} == {shapes.TINY}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = [str(shape) for shape in shapes.step_shapes(trees=[TreeSize(64, 5)])]
    assert len(names) == len(set(names)) == 3 * 4 * 3
    assert "Llama-3-8B-b8-n64-ctx8192" in names


def test_provenance_says_where_a_number_comes_from():
    record = provenance.provenance()
    assert record["torch"] == torch.__version__
    assert record["argv"][0] == Path(sys.argv[0]).name
    assert record["utc"].endswith("+00:00")
    assert (record["driver"] is None) is not HAS_GPU
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if head.returncode == 0:
        assert record["git_sha"] == head.stdout.strip()


def test_a_copy_without_git_is_told_its_commit(monkeypatch):
    monkeypatch.setattr(source, "command_output", lambda *_command: None)
    for name in ("SHA", "DIRTY"):
        monkeypatch.delenv(f"SPECDEC_GIT_{name}", raising=False)
    assert source.source_commit() == {"git_sha": None, "git_dirty": None}
    monkeypatch.setenv("SPECDEC_GIT_SHA", "abc")
    assert source.source_commit() == {"git_sha": "abc", "git_dirty": False}
    monkeypatch.setenv("SPECDEC_GIT_DIRTY", "1")
    assert source.source_commit() == {"git_sha": "abc", "git_dirty": True}


def test_provenance_names_no_folder_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(
        sys, "argv", [str(tmp_path / "run"), str(tmp_path / "a.jsonl"), f"--b={tmp_path}/b", "c/d", "8"]
    )
    assert provenance.provenance()["argv"] == ["run", "a.jsonl", "--b=b", "c/d", "8"]


def test_a_line_that_was_being_written_spoils_no_other(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    provenance.append_record(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2, "b')
    provenance.append_record(path, {"a": 3})
    assert [record["a"] for record in provenance.read_records(path)] == [1, 3]
    assert provenance.read_records(tmp_path / "none.jsonl") == []


def test_the_usual_step_is_measured_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = [str(shape) for shape in shapes.step_shapes()]
    assert names[:3] == [f"{model.name}-b1-n64-ctx2048" for model in shapes.MODELS]
    assert len(set(names)) == 3 * 4 * 4 * 3


def test_the_matrices_of_a_model_hold_its_weights():
    sizes = shapes.matrices(shapes.LLAMA_2_7B)
    per_layer = sum(outputs * inputs for name, (outputs, inputs) in sizes.items() if name != "lm_head")
    assert 32 * per_layer + 2 * 32000 * 4096 == pytest.approx(6.74e9, rel=1e-2)


def test_the_machine_is_described():
    described = machine.describe_machine()
    assert described["packages"]["torch"] == torch.__version__
    assert described["tools"].keys() == {"compute-sanitizer", "ncu", "nvcc"}


def test_all_kernel_benchmarks_run_without_a_gpu(tmp_path):
    records = tmp_path / "records.json"
    command = [sys.executable, "-m", "pytest", "bench/kernels", "--benchmark-only", f"--benchmark-json={records}"]
    command += ["-p", "no:cacheprovider"]
    # pytest-benchmark takes no times below a worker of xdist
    hidden = ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    infos = [record["extra_info"] for record in json.loads(records.read_text())["benchmarks"]]
    files = {path.stem.removeprefix("bench_") for path in (ROOT / "bench" / "kernels").glob("bench_*.py")}
    ops = {info["op"] for info in infos}
    assert not [file for file in files if not any(op.startswith(file) for op in ops)]
    for info in infos:
        assert info["provider"] != "triton"
        assert "CPU wall time" in info["timing"]
        assert info["p50_us"] > 0
        assert info["bytes"] > 0
        assert info["percent_of_roofline"] is None
        assert info["provenance"]["utc"]
