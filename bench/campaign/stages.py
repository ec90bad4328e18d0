"""The stages of the campaign, the most telling first, with the time that each may take.

    call 1   machine, captured, tests                 does it run, and is it right?
    call 2   precompile, decode_7b                    what is it good for?
    call 3   decode_8b, kernels_first                 does it hold elsewhere; how far is a kernel from its roofline?
    later    the rest of the kernels and the captured steps, PyTorch's linear layers, sanitizers, other decoding

A call is nine minutes. Two numbers stand beside each stage: it is not begun with less than its least time, and gets its
most in all, over all calls, before the stages after it have had theirs.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.bench.common.pictures import can_draw
from specdec.bench.common.shapes import BATCHES, CONTEXTS, LLAMA_2_7B, LLAMA_3_8B, VICUNA_13B
from specdec.bench.decoding.simulated import DRAFTERS
from specdec.bundled.load import bundled_drafters

__all__ = ["MINUTES", "ROOT", "Stage", "stages"]

ROOT = Path(__file__).resolve().parents[2]

MINUTES = "{minutes}"
"""Stands in a command for the minutes that it is given."""

# by what an op decides: the share of a step, then the risk of its design; the rest follow in alphabetical order
_KERNELS = {
    "kernels_first": ("tree_attention", "lm_head_topk"),
    "kernels_next": ("skinny_linear", "draft_heads", "rms_norm", "rope_kv_write", "swiglu", "kv_compact"),
}
_FIRST_KINDS = ("none", "medusa", "eagle", "hydra")
_HAND_OVER = "compiled.race_check"
_SANITIZER = "compute-sanitizer"
_CAPTURED = "tests/loop/test_captured_gpu.py"


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the campaign.

    Attributes:
        name: what `--only` and reports call it.
        commands: command lines by name, which are unique among all stages; a log each.
        least_s: the stage is not begun with less time than that, in seconds.
        most_s: it gets no more than that, in seconds and over all calls, before the others have had theirs.
        jobs: commands that run at the same time; 1 if anything is timed.
        unavailable: why it cannot run on this machine, or None.
    """

    name: str
    commands: Mapping[str, Sequence[str]]
    least_s: float
    most_s: float
    jobs: int = 1
    unavailable: str | None = None


def stages(folder: Path, *, on_cpu: bool) -> list[Stage]:
    """The stages in their order; `on_cpu` has tiny sizes, and as few processes as possible.

    The commands leave their results in the folder, in files named after them.
    """
    if on_cpu:
        return _tiny_stages(folder)
    jobs = max(1, (os.cpu_count() or 1) - 2)
    models = [model.name.lower() for model in (LLAMA_2_7B, LLAMA_3_8B, VICUNA_13B)]
    every = ("--batches", *map(str, BATCHES), "--contexts", *map(str, sorted(CONTEXTS, key=lambda size: size != 2048)))
    return [
        Stage("machine", _module(folder, "machine", "common.machine"), 10, 60),
        Stage("captured", _captured_first(folder), 60, 180, jobs),
        Stage("tests", _tests(folder), 60, 240, jobs),
        Stage("precompile", _precompile(folder, models[:2]), 30, 120, jobs),
        Stage("decode_7b", _decode(folder, "decode_7b", "--models", models[0]), 120, 500),
        Stage("decode_8b", _decode(folder, "decode_8b", "--models", models[1]), 120, 400),
        *_kernel_stages(folder),
        Stage("captured_rest", _captured_rest(folder), 60, 240, jobs),
        Stage("small_m", _module(folder, "small_m", "small_m", "--resume"), 20, 120),
        *_sanitizers(folder),
        Stage("decode", _decode(folder, "decode", "--max-new-tokens", "128"), 60, 240),
        Stage("decode_all", _decode(folder, "decode_all", "--models", *models, *every), 120, 3600),
    ]


def _tiny_stages(folder: Path) -> list[Stage]:
    """The same commands where nothing is timed: one of each sort."""
    files, benchmarks = [ROOT / _CAPTURED, ROOT / "tests/kernels/test_tree_expand.py"], ROOT / "bench" / "kernels"
    decode = _module(folder, "decode", "decode", "--dry", "--resume", *_pictures(folder))
    return [
        Stage("machine", _module(folder, "machine", "common.machine", "--dry"), 1, 60),
        Stage("tests", {"tests": _pytest(folder, "tests", "--few", *files)}, 1, 60),
        Stage("kernels", {"kernels": _benchmark(folder, "kernels", sorted(benchmarks.glob("bench_*.py")))}, 1, 120),
        Stage("small_m", _module(folder, "small_m", "small_m", "--dry", "--resume"), 1, 60),
        Stage("hand_over", _module(folder, "hand_over", _HAND_OVER, "--resume"), 1, 60),
        Stage("decode", decode, 1, 120),
    ]


def _module(folder: Path, name: str, module: str, *arguments: str) -> dict[str, list[str]]:
    """A command that writes records to the file named after it."""
    output = ["--output", str(folder / f"{name}.jsonl")]
    return {name: [sys.executable, "-m", f"specdec.bench.{module}", *arguments, *output]}


def _decode(folder: Path, name: str, *arguments: str) -> dict[str, list[str]]:
    """Decoding on the GPU; 384 tokens, so that the prompt's pass is a small part of what is timed."""
    settings = ["--device", "cuda", "--max-new-tokens", "384", "--repeats", "3", "--minutes", MINUTES, "--resume"]
    return _module(folder, name, "decode", *settings, *_pictures(folder), *arguments)


def _pictures(folder: Path) -> tuple[str, ...]:
    """Timelines, where they can be drawn: figures do not wait for matplotlib."""
    return ("--pictures", str(folder / "pictures")) if can_draw() else ()


def _precompile(folder: Path, models: Sequence[str]) -> dict[str, list[str]]:
    """The kernels of the steps that are timed next, a process per step; else the GPU would wait for the compiler."""
    commands: dict[str, list[str]] = {}
    for model in models:
        for drafter in ("none", *DRAFTERS):
            arguments = ("--model", model, "--drafter", drafter)
            commands |= _module(folder, f"compile_{model}_{drafter}", "compiled.precompile", *arguments)
    return commands


def _pytest(folder: Path, name: str, *arguments: str | Path) -> list[str]:
    """Tests as cells of a journal; what hangs shows where in its log."""
    plugin = ["-p", "specdec.bench.campaign.cells", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=90"]
    place = [f"--rootdir={ROOT}", "--cells", str(folder / f"{name}.jsonl")]
    return [sys.executable, "-m", "pytest", *plugin, *place, *map(str, arguments)]


def _captured_first(folder: Path) -> dict[str, list[str]]:
    """The captured step against the eager loop for four drafters, in fp32 and bf16: a process each."""
    return {
        f"captured_{kind}": _pytest(folder, f"captured_{kind}", "--kinds", kind, ROOT / _CAPTURED)
        for kind in _FIRST_KINDS
    }


def _captured_rest(folder: Path) -> dict[str, list[str]]:
    """The other drafters, and the tests that are for no drafter."""
    others = sorted({*bundled_drafters(), "prompt_lookup", "lookahead"} - {*_FIRST_KINDS})
    found = {
        f"captured_{kind}": _pytest(folder, f"captured_{kind}", "--kinds", kind, ROOT / _CAPTURED) for kind in others
    }
    known = ",".join((*_FIRST_KINDS, *others))
    return found | {"captured_other": _pytest(folder, "captured_other", "--other-kinds", known, ROOT / _CAPTURED)}


def _tests(folder: Path) -> dict[str, list[str]]:
    """Tests of the kernels with few examples, a process per file; those that compile longest begin first."""
    value = {f"test_{name}": i for i, name in enumerate(name for group in _KERNELS.values() for name in group)}
    files = sorted((ROOT / "tests" / "kernels").glob("test_*.py"), key=lambda f: (value.get(f.stem, 99), f.stem))
    return {file.stem: _pytest(folder, file.stem, "--few", file) for file in files}


def _benchmark(folder: Path, name: str, files: Sequence[Path]) -> list[str]:
    """Benchmarks in one process: imports and libraries are loaded once."""
    # the settings of pyproject.toml, which an installed package is without
    options = ["-o", "python_files=bench_*.py", "-o", "python_functions=bench_*", "--benchmark-only"]
    return _pytest(folder, name, *options, *files)


def _kernel_stages(folder: Path) -> list[Stage]:
    files = {file.stem.removeprefix("bench_"): file for file in (ROOT / "bench" / "kernels").glob("bench_*.py")}
    groups = {stage: [files.pop(op) for op in ops] for stage, ops in _KERNELS.items()}
    groups["kernels_rest"] = [file for _, file in sorted(files.items())]
    return [Stage(name, {name: _benchmark(folder, name, group)}, 45, 240) for name, group in groups.items()]


def _sanitizers(folder: Path) -> list[Stage]:
    """The kernels that hand data over, plainly, which compiles them, and under three tools for a minute each."""
    missing = None if shutil.which(_SANITIZER) else f"{_SANITIZER} is not on the PATH"
    found = [Stage("hand_over", _module(folder, "hand_over", _HAND_OVER, "--resume"), 20, 120)]
    for tool in ("racecheck", "memcheck", "synccheck"):
        # memory of its own for every tensor, or the tool sees one large block in which nothing is out of bounds
        watched = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", _SANITIZER, "--tool", tool, "--error-exitcode", "1"]
        found.append(
            Stage(
                tool,
                {tool: [*watched, *_module(folder, tool, _HAND_OVER, "--resume")[tool]]},
                30,
                60,
                unavailable=missing,
            )
        )
    return found
