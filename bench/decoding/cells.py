"""One cell of the decoding benchmark: a model, a batch size, a context, every arm. `decode.py` is the command.

Each arm is run once before it is timed; its text must be that of plain decoding. In fp32 and fp64 any difference is an
error and the arm gets no number. In half precision passes of different shapes round differently, so a difference is
allowed where the two tokens' logits are within four roundings of each other; it is reported with its margin.
"""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from specdec.bench.common.cost import Machine
from specdec.bench.common.journal import Journal, last_lines
from specdec.bench.common.machine import device_is_lost
from specdec.bench.common.traffic import StepBytes, step_bytes
from specdec.bench.decoding.arms import Arm, ArmTimes, UnavailableError, our_arm, time_arm, transformers_arm
from specdec.bench.decoding.simulated import AcceptanceProfile, SyntheticAcceptance
from specdec.drafting.base import Drafter
from specdec.evaluation.checking import Divergence, first_divergence
from specdec.loop.stats import AcceptanceStats
from specdec.models.target.target import Target

__all__ = ["BASELINE", "OUT_OF_TIME", "Cell", "arm_names", "run_cell"]

BASELINE = "none"
OUT_OF_TIME = "out of time"
_TRANSFORMERS, _COMPILED = "transformers", "transformers_static"
_WRONG = "its text is not that of plain decoding"
_SPLIT_TOKENS = 32  # of the eager generation that is split into phases


@dataclass(frozen=True, slots=True)
class Cell:
    """What to measure.

    Attributes:
        name: of the cell, part of the names of its files.
        model: name of the model.
        context: name of the context: tokens of the prompts, or where they come from.
        target: the model.
        batches: batches of prompts, decoded one after another.
        drafters: makers of drafters by name, the most telling first; a drafter lives as long as its row.
        reads: by drafter, what `count_reads` says of it.
        profile: of synthetic acceptance; None where drafters are trained.
        stop_tokens: tokens after which a text ends.
        max_new_tokens: new tokens per row.
        repeats: timed repeats.
        machine: limits that the floor is computed with; None where nothing was measured.
        compiled: run transformers' compiled generate too, which takes a minute to compile.
    """

    name: str
    model: str
    context: str
    target: Target
    batches: Sequence[Sequence[torch.Tensor]]
    drafters: Mapping[str, Callable[[], Drafter]]
    reads: Mapping[str, Mapping[str, float]]
    profile: AcceptanceProfile | None
    stop_tokens: Sequence[int]
    max_new_tokens: int
    repeats: int
    machine: Machine | None
    compiled: bool = True

    @property
    def acceptance(self) -> str:
        """Where acceptance comes from; part of every record and title."""
        return "real acceptance" if self.profile is None else f"synthetic acceptance ({self.profile.name})"

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return max(map(len, self.batches))

    def __str__(self) -> str:
        """Title of tables and pictures."""
        dtype = str(self.target.dtype).removeprefix("torch.")
        return (
            f"{self.model}, {dtype} on {self.target.device.type}, batch {self.batch_size}, context {self.context}, "
            f"greedy, {self.acceptance}"
        )


@dataclass(slots=True)
class _Reference:
    """What plain decoding gave in this cell."""

    tokens: list[list[list[int]]] = field(default_factory=list)
    tokens_per_second: float | None = None


def arm_names(name: str, drafters: Iterable[str], *, compiled: bool) -> list[str]:
    """What a journal calls the arms of the cell of a name, with these drafters."""
    arms = [BASELINE, *drafters, _TRANSFORMERS, *([_COMPILED] if compiled else [])]
    return [f"{name} {arm}" for arm in arms]


def run_cell(
    cell: Cell, *, deadline: float, journal: Journal
) -> Iterator[tuple[dict[str, Any], list[tuple[str, float, float]]]]:
    """Measure every arm that is due.

    Args:
        cell: what to measure.
        deadline: `time.monotonic()` after which no further arm begins; the baseline always runs, since a speedup is a
            ratio of two times of one run.
        journal: what was measured before; the records are written to it, except of arms that there was no time for.

    Yields:
        A record per arm as soon as it is measured, and the spans of its last generation. A record has either figures,
        or `"missing"`, which says why there are none. `"gate"` is "red" if a text was wrong or an arm of ours failed.
    """
    reference = _Reference()
    target, stops = cell.target, cell.stop_tokens
    makers: dict[str, Callable[[], Arm]] = {BASELINE: lambda: our_arm(BASELINE, target, None, stops)}
    for name, make in cell.drafters.items():
        makers[name] = lambda make=make, name=name: _drafter_arm(cell, name, make, reference)  # type: ignore[misc]
    makers[_TRANSFORMERS] = lambda: transformers_arm(target, stops)
    makers[_COMPILED] = lambda: transformers_arm(target, stops, compiled=True)
    due = [
        key.removeprefix(f"{cell.name} ")
        for key in journal.due(arm_names(cell.name, cell.drafters, compiled=cell.compiled))
    ]
    missing = ""
    for name in [BASELINE, *(name for name in due if name != BASELINE)]:
        key = f"{cell.name} {name}"
        spans: list[tuple[str, float, float]] = []
        if missing:  # nothing to compare with
            record = {**_head(cell, name), "missing": f"no plain decoding: {missing}"}
        elif time.monotonic() > deadline and name != BASELINE:
            record = {**_head(cell, name), "missing": OUT_OF_TIME}
        else:
            journal.begin(key)
            record, spans = _measure(cell, name, makers[name], reference)
            journal.end(key, record, failed="failure" in record)
        if name == BASELINE and not reference.tokens:
            missing = record["missing"]
        yield record, spans


def _drafter_arm(cell: Cell, name: str, make: Callable[[], Drafter], reference: _Reference) -> Arm:
    """Ours with a drafter; with synthetic acceptance, every batch has a drafter that knows its continuation."""
    drafter = make()
    if cell.profile is None:
        return our_arm(name, cell.target, drafter, cell.stop_tokens)
    if len(cell.batches) != 1:
        raise ValueError(f"batches: expected one with synthetic acceptance, got {len(cell.batches)}")
    known = SyntheticAcceptance(drafter, torch.tensor(reference.tokens[0]), cell.profile)
    return our_arm(name, cell.target, known, cell.stop_tokens)


def _measure(
    cell: Cell, name: str, make: Callable[[], Arm], reference: _Reference
) -> tuple[dict[str, Any], list[tuple[str, float, float]]]:
    """Gate an arm, time it and make its record."""
    head = _head(cell, name)
    try:
        arm = make()
        tokens = [arm.run(prompts, cell.max_new_tokens)[0] for prompts in cell.batches]
        if name == BASELINE:
            reference.tokens = tokens
        head |= _gate(cell, tokens, reference)
        if head["gate"] == "red":
            return {**head, "missing": _WRONG, "failure": f"{_WRONG}: {head['divergences'][:3]}"}, []
        times = time_arm(
            arm, cell.batches, cell.max_new_tokens, repeats=cell.repeats, device=cell.target.device, tokens=tokens
        )
        phases, spans = _phases(cell, arm, times)
    except (UnavailableError, torch.OutOfMemoryError) as error:
        return {**head, "missing": str(error).splitlines()[0]}, []
    except Exception as error:  # the other arms are still worth measuring
        traceback.print_exc()
        missing = f"{type(error).__name__}: {error}".splitlines()[0]
        if name == _COMPILED and not device_is_lost():  # whatever transformers' compiler raises is no failure of ours
            return {**head, "missing": missing}, []
        return {**head, "gate": "red", "missing": missing, "failure": last_lines(traceback.format_exc())}, []
    finally:
        if cell.target.device.type == "cuda" and not device_is_lost():
            torch.cuda.empty_cache()
    if name == BASELINE:
        reference.tokens_per_second = times.num_timed / times.decode_s
    record = {**head, **_figures(cell, arm, times, reference)}
    return {**record, **phases}, spans


def _phases(cell: Cell, arm: Arm, times: ArmTimes) -> tuple[dict[str, Any], list[tuple[str, float, float]]]:
    """Milliseconds of each phase of a step for the record, and the spans of a generation, if anything knows them."""
    if not times.stats:
        return {}, []
    merged, last, loop = AcceptanceStats.merged(times.stats), times.stats[-1], "timed"
    if merged.captured and arm.run_eagerly is not None:
        try:
            merged = last = arm.run_eagerly(cell.batches[-1], min(cell.max_new_tokens, _SPLIT_TOKENS))
        except torch.OutOfMemoryError:  # the eager loop has memory of its own
            return {}, last.spans_ms
        loop = "eager"
    passes = max(merged.num_target_passes, 1)
    split = {phase: value / passes for phase, value in merged.times_ms.items() if phase != "prefill"}
    return {"split_ms": split, "split_of": loop}, last.spans_ms


def _head(cell: Cell, name: str) -> dict[str, Any]:
    return {
        "bench": "decode",
        "model": cell.model,
        "dtype": str(cell.target.dtype).removeprefix("torch."),
        "batch": cell.batch_size,
        "context": cell.context,
        "acceptance": cell.acceptance,
        "arm": name,
        "max_new_tokens": cell.max_new_tokens,
        "timing": "CUDA, wall time of whole generations" if cell.target.device.type == "cuda" else "CPU wall time",
    }


def _gate(cell: Cell, tokens: list[list[list[int]]], reference: _Reference) -> dict[str, Any]:
    """Compare texts with those of plain decoding."""
    divergences: list[Divergence] = []
    index = -1
    for prompts, batch, expected in zip(cell.batches, tokens, reference.tokens, strict=True):
        for prompt, got, plain in zip(prompts, batch, expected, strict=True):
            index += 1
            found = first_divergence(cell.target, prompt, plain, got, index=index)
            if found is not None:
                divergences.append(found)
    is_red = any(found.is_error for found in divergences)
    return {
        "identical": not divergences,
        "divergences": [asdict(found) for found in divergences],
        "gate": "red" if is_red else "green",
    }


def _figures(cell: Cell, arm: Arm, times: ArmTimes, reference: _Reference) -> dict[str, Any]:
    """The figures of an arm that was timed."""
    speed = times.num_timed / times.decode_s
    figures: dict[str, Any] = {
        "num_tokens": times.num_timed,
        "tokens_per_second": speed,
        "first_token_ms": 1e3 * times.first_s,
        "speedup": speed / reference.tokens_per_second if reference.tokens_per_second else None,
    }
    if not times.stats:
        return figures
    stats = AcceptanceStats.merged(times.stats)
    passes = max(stats.num_target_passes, 1)
    tau = stats.tau if stats.num_target_passes else 1.0
    step_ms = 1e3 * times.decode_s / passes
    bytes_ = _bytes(cell, arm)
    floor_ms = bytes_.floor_ms(cell.machine) if bytes_ and cell.machine else None
    return {
        **figures,
        "tau": tau,
        "acceptance_at_depth": stats.acceptance_at_depth,
        "efficiency": figures["speedup"] / tau if figures["speedup"] else None,
        "captured": stats.captured,
        "num_steps": stats.num_target_passes,
        "step_ms": step_ms,
        "floor_bytes": asdict(bytes_) if bytes_ else None,
        "floor_ms": floor_ms,
        "percent_of_floor": 100 * floor_ms / step_ms if floor_ms else None,
    }


def _bytes(cell: Cell, arm: Arm) -> StepBytes | None:
    """What a step of the average batch must read; None if nobody counted the drafter's reads."""
    drafter = arm.drafter.drafter if isinstance(arm.drafter, SyntheticAcceptance) else arm.drafter
    reads = {} if arm.name == BASELINE else cell.reads.get(arm.name)
    if drafter is None or reads is None:
        return None
    rows = [prompt.shape[0] for prompts in cell.batches for prompt in prompts]
    lengths = [round(sum(rows) / len(rows))] * cell.batch_size
    return step_bytes(cell.target, drafter, reads, lengths=lengths, expected_new=cell.max_new_tokens / 2)
