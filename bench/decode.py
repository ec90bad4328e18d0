"""Decoding speed: plain decoding, transformers' own `generate` eager and compiled, and every drafter, in one run.

Questions: does our runtime cost anything over `model.generate`? How much of tau becomes speed (efficiency = speedup /
tau)? How far is a step from the bytes that it must read, and which phase takes the rest?

    python -m specdec.bench.decode                                         # the bundled model, real acceptance
    python -m specdec.bench.decode --device cuda --minutes 10 --output decode.jsonl --pictures pictures
        --models llama-2-7b llama-3-8b vicuna-13b --batches 1 2 4 8 --contexts 512 2048 8192
    python -m specdec.bench.decode --dry --output decode.jsonl             # every part of it, tiny, on the CPU

The bundled model and its drafters are trained. The large shapes have random weights, drafters at their published sizes
included, and *synthetic acceptance* (`bench/decoding/simulated.py`), as every record, table and picture says.

An arm is one way to decode, called as by `specdec eval`; a cell is one model, batch size and context with every arm in
it, each timed in turns with plain decoding (`bench/decoding/cells.py`). The most telling cells and arms come first,
every record is written at once, and each cell has its share of the time, so that a run which is cut off has told most;
with `--resume` the next one goes on where it ended. No arm gets a number before its text was compared with plain
decoding; the exit status is 1 if one was wrong.
"""

import argparse
import functools
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.bench.common.journal import AGAIN, LEFT, Journal
from specdec.bench.common.machine import device_is_lost, measure_machine
from specdec.bench.common.pictures import NEEDS, can_draw, draw_lanes, middle_steps
from specdec.bench.common.shapes import MODELS, TINY, ModelShape
from specdec.bench.common.tables import decode_tables
from specdec.bench.common.traffic import count_reads
from specdec.bench.decoding.cells import OUT_OF_TIME, Cell, arm_names, run_cell
from specdec.bench.decoding.simulated import DRAFTERS, PROFILES, random_drafter, random_target
from specdec.bundled.load import TINY_FOLDER, bundled_drafters, load_tiny, tiny_drafter
from specdec.drafters.load import load_drafter
from specdec.drafting.base import Drafter
from specdec.models.target.target import Target

__all__ = ["Model", "cells", "main", "order"]

BUNDLED = "bundled"
_SHAPES = {shape.name.lower(): shape for shape in (*MODELS, TINY)}
_TWIN = ModelShape("twin", 7, 64, 96, 4, 2, 16, 256)  # deep enough for the rule that says what EAGLE-3 reads
_DRY = ModelShape("tiny", 3, 64, 96, 4, 2, 16, 256)


@dataclass(frozen=True, slots=True)
class Model:
    """A target that was built, and what all its cells share.

    Attributes:
        target: the model.
        prompts: from a batch size and a context to batches of prompts.
        drafters: makers by name, the most telling first.
        reads: by drafter, what `count_reads` says of it.
    """

    target: Target
    prompts: Callable[[int, int], list[list[torch.Tensor]]]
    drafters: Mapping[str, Callable[[], Drafter]]
    reads: Mapping[str, Mapping[str, float]]


def order(models: Sequence[str], batches: Sequence[int], contexts: Sequence[int]) -> list[tuple[str, int, int]]:
    """Model, batch and context of every cell, the most telling first.

    Args:
        models: names, the most telling first. The bundled model has prompts of its own, and context 0.
        batches: batch sizes.
        contexts: tokens of the prompts.
    """
    found = [
        (model, batch, context)
        for model, batch in itertools.product(models, batches)
        for context in ((0,) if model == BUNDLED else contexts)
    ]
    usual = (models[0], batches[0], 2048 if 2048 in contexts else contexts[0])
    # in how many respects a cell differs from the usual one; then a model's cells together: it is built only once
    return sorted(found, key=lambda cell: (_distance(cell, usual), models.index(cell[0])))


def _distance(cell: tuple[str, int, int], usual: tuple[str, int, int]) -> int:
    return (cell[0] != usual[0]) + (cell[1] != usual[1]) + (cell[2] not in (0, usual[2]))


def cells(options: argparse.Namespace, journal: Journal) -> Iterator[tuple[Cell, float]]:
    """Every cell with an arm that is due, and the part of all the time that it may take.

    A model is built when its first cell is due.
    """
    places = []
    for index, (model, batch, context) in enumerate(order(options.models, options.batches, options.contexts)):
        name = f"{model}-b{batch}-ctx{context or 'own'}"
        drafters = [name for name in _drafter_names(model) if name in (options.drafters or [name])]
        others = {"compiled": index == 0 or options.compile_everywhere, "assisted": model == BUNDLED and batch == 1}
        if journal.due(arm_names(name, drafters, **others)):
            places.append((name, model, batch, context, drafters, others))
    built: dict[str, Model] = {}
    for index, (name, model, batch, context, drafters, others) in enumerate(places):
        if model not in built:
            built.clear()  # one large model at a time
            gc.collect()
            built[model] = _bundled(options) if model == BUNDLED else _random(model, options)
        found = built[model]
        cell = Cell(
            name=name,
            model=model,
            context=str(context) if context else "of the bundled prompts",
            target=found.target,
            batches=found.prompts(batch, context),
            drafters={drafter: found.drafters[drafter] for drafter in drafters},
            reads=found.reads,
            profile=None if model == BUNDLED else PROFILES[options.profile],
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
            machine=measure_machine() if options.device == "cuda" else None,
            **others,
        )
        yield cell, 1 / (len(places) - index)
        del cell, found  # or the model would stay while the next one is built


def _drafter_names(model: str) -> list[str]:
    """The drafters that a model is measured with, the most telling first."""
    return ["prompt_lookup", "lookahead", *bundled_drafters()] if model == BUNDLED else [*DRAFTERS]


def _bundled(options: argparse.Namespace) -> Model:
    """The bundled model, with its own prompts."""
    dtype = getattr(torch, options.dtype) if options.dtype else torch.float32
    loaded, tokenizer = load_tiny(device=options.device, dtype=dtype)
    target = Target(loaded)
    here = Target(load_tiny()[0])
    trained = bundled_drafters()
    sources = {name: str(tiny_drafter(name)) if name in trained else name for name in _drafter_names(BUNDLED)}
    texts = json.loads((TINY_FOLDER / "prompts.json").read_text())[: 2 if options.dry else None]
    encoded = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]
    makers = {name: functools.partial(load_drafter, source, target) for name, source in sources.items()}
    reads = {name: count_reads(here, load_drafter(source, here)) for name, source in sources.items()}

    def prompts(batch: int, _context: int) -> list[list[torch.Tensor]]:
        return [encoded[start : start + batch] for start in range(0, len(encoded), batch)]

    return Model(target, prompts, makers, reads)


def _random(model: str, options: argparse.Namespace) -> Model:
    """Random weights of a true shape."""
    default = torch.bfloat16 if options.device == "cuda" else torch.float32
    dtype = getattr(torch, options.dtype) if options.dtype else default
    shape = _DRY if options.dry else _SHAPES[model]
    room = max(options.contexts) + options.max_new_tokens + 1
    target = Target(random_target(shape, max_positions=room, device=options.device, dtype=dtype))

    def prompts(batch: int, context: int) -> list[list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(context)
        rows = torch.randint(0, target.vocab_size, (batch, context), generator=generator)
        return [list(rows)]

    makers = {name: functools.partial(random_drafter, name, target) for name in DRAFTERS}
    return Model(target, prompts, makers, _twin_reads())


@functools.cache
def _twin_reads() -> Mapping[str, Mapping[str, float]]:
    """How often each kind's draft reads each weight, from small twins on the CPU."""
    twin = Target(random_target(_TWIN, max_positions=1024, device="cpu", dtype=torch.float32))
    return {name: count_reads(twin, random_drafter(name, twin)) for name in DRAFTERS}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 1 if any text was wrong, else LEFT if there was no time for all."""
    options = _options(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    always = {"dry": "dry run on a CPU: nothing was timed on a GPU"} if options.dry else {}
    journal = Journal(options.output, resume=options.resume, always=always)
    num_red = num_left = 0
    for cell, share in cells(options, journal):
        left = deadline - time.monotonic()
        if left <= 0 and share < 1:
            print(f"no time: {cell}", flush=True)
            num_left += 1
            continue
        records, lanes = [], {}
        for record, spans in run_cell(cell, deadline=time.monotonic() + share * left, journal=journal):
            records.append(record)
            if spans:
                lanes[record["arm"]] = middle_steps(spans)
            num_red += record.get("gate") == "red"
            num_left += record.get("missing") == OUT_OF_TIME
            if "failure" in record and device_is_lost():
                print(decode_tables(records), flush=True)
                return AGAIN
        print(decode_tables(records), flush=True)
        if options.pictures is not None:
            _draw(options.pictures / f"{cell.name}.svg", lanes, str(cell))
        del cell  # with its model, before the next one is built
    return 1 if num_red else LEFT if num_left else 0


def _draw(file: Path, lanes: Mapping[str, Sequence[tuple[str, float, float]]], title: str) -> None:
    """Draw a timeline; one that shows other arms, of a run before this one, stays beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    earlier = len([*file.parent.glob(f"{file.stem}*{file.suffix}")])
    if earlier:
        file = file.with_name(f"{file.stem}-{earlier + 1}{file.suffix}")
    file.write_text(draw_lanes(lanes, title), encoding="utf-8")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="specdec.bench.decode", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=(BUNDLED, *_SHAPES), default=[BUNDLED], help="default: bundled")
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="the most telling first (default: 1)")
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048], help="of random weights (default: 2048)")
    parser.add_argument("--drafters", nargs="+", default=[], help="these alone (default: all)")
    parser.add_argument("--profile", choices=tuple(PROFILES), default="steady-75", help="of synthetic acceptance")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="default: bfloat16 for random weights on a GPU, else float32")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60.0, help="time for everything (default: 60)")
    parser.add_argument(
        "--compile-everywhere", action="store_true", help="compiled generate in all cells, not in the first alone"
    )
    parser.add_argument("--output", type=Path, help="JSON-lines file that records are appended to")
    parser.add_argument("--resume", action="store_true", help="only what the file of --output does not have yet")
    parser.add_argument("--pictures", type=Path, help="folder that receives a timeline (SVG) of every cell")
    parser.add_argument("--dry", action="store_true", help="everything once, tiny, on the CPU")
    options = parser.parse_args(arguments)
    if options.dry:
        options.models, options.batches, options.contexts = [TINY.name, BUNDLED], [2], [24]
        options.max_new_tokens, options.repeats, options.device = 6, 1, "cpu"
    known = {*DRAFTERS, *bundled_drafters()}
    if unknown := set(options.drafters) - known:
        parser.error(f"--drafters: expected some of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
    if options.max_new_tokens < 2 or min(options.batches) < 1 or min(options.contexts) < 1 or options.repeats < 1:
        parser.error("expected --max-new-tokens of 2 or more, and --batches, --contexts and --repeats of 1 or more")
    if options.pictures is not None and not can_draw():
        parser.error(f"--pictures: {NEEDS}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected an NVIDIA GPU for cuda, found none")
    return options


if __name__ == "__main__":
    sys.exit(main())
