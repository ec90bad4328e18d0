"""One cell of the decoding benchmark: a model, a batch size, a context, every arm. `decode.py` is the command.

Gate. Each arm is run once before it is timed; its text must be that of plain decoding. In fp32 and fp64 any difference
is an error and the arm gets no number. In half precision passes of different shapes round differently, so a difference
is allowed where the two tokens' logits are within four roundings of each other; it is reported with its margin.

Turns. An arm is timed in turns with plain decoding: both in every repeat, one right after the other, and what came
first in one repeat comes second in the next. A turn is a call for one token and a call for all; the tokens after the
first are divided by the difference of their times, so that the prompt's pass, and whatever else a call does once, is in
no figure.

Speedup. A ratio within each repeat, and the median of them: a drift of the machine hits both sides of a ratio alike,
and one disturbed repeat does not move the median. A ratio of two medians could set a fast repeat of one arm against a
slow one of the other. Repeats are too few for a bootstrap: the record has every pair, and the lowest and highest ratio.

Memory. What plain decoding captured stays for the cell, what a drafter needs for its row. Where they do not fit side by
side, each is captured anew for its turns; a turn in which something was captured is not counted.
"""

import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from specdec.bench.common.cost import Machine
from specdec.bench.common.journal import Journal, last_lines
from specdec.bench.common.machine import device_is_lost
from specdec.bench.common.traffic import StepBytes, step_bytes
from specdec.bench.decoding.simulated import AcceptanceProfile, SyntheticAcceptance
from specdec.drafting.base import Drafter
from specdec.evaluation.arms import Arm, Decoded, Request, our_arm, our_arms, transformers_arm, transformers_arms
from specdec.evaluation.checking import Divergence, first_divergence
from specdec.evaluation.records import PLAIN
from specdec.generation.generate import KEPT
from specdec.loop.decoder import Decoder
from specdec.loop.stats import AcceptanceStats
from specdec.models.target.target import Target

__all__ = ["OUT_OF_TIME", "Cell", "Pair", "Turn", "UnavailableError", "arm_names", "run_cell"]

OUT_OF_TIME = "out of time"
_TRANSFORMERS, _COMPILED = "transformers", "transformers_static"
_ASSISTED = ("prompt_lookup", "draft_model")  # drafters that have a counterpart in transformers
_WRONG = "its text is not that of plain decoding"
_SPLIT_TOKENS = 32  # of the eager generation that is split into phases

Spans = list[tuple[str, float, float]]
_Found = TypeVar("_Found")


class UnavailableError(RuntimeError):
    """An arm cannot run or be timed here; the message says why."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What to measure.

    Attributes:
        name: of the cell, part of the names of its files.
        model: name of the model.
        context: name of the context: tokens of the prompts, or where they come from.
        target: the model; its stop tokens end texts.
        batches: batches of prompts, decoded one after another.
        drafters: makers of drafters by name, the most telling first; a drafter lives as long as its row.
        reads: by drafter, what `count_reads` says of it.
        profile: of synthetic acceptance; None where drafters are trained.
        max_new_tokens: new tokens per row.
        repeats: timed repeats.
        machine: limits that the floor is computed with; None where nothing was measured.
        compiled: run transformers' compiled generate too, which takes a minute to compile.
        assisted: run transformers' assisted generation too; for batches of one prompt and real acceptance.
    """

    name: str
    model: str
    context: str
    target: Target
    batches: Sequence[Sequence[torch.Tensor]]
    drafters: Mapping[str, Callable[[], Drafter]]
    reads: Mapping[str, Mapping[str, float]]
    profile: AcceptanceProfile | None
    max_new_tokens: int
    repeats: int
    machine: Machine | None
    compiled: bool = True
    assisted: bool = False

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


@dataclass(frozen=True, slots=True)
class Turn:
    """A call of an arm for one token of every row, and a call for all of them, over all batches.

    Attributes:
        first_s: seconds of the first.
        decode_s: seconds by which the second was longer.
        stats: of the second, per batch, from arms that have some.
    """

    first_s: float
    decode_s: float
    stats: list[AcceptanceStats]


@dataclass(frozen=True, slots=True)
class Pair:
    """One repeat: the turn of an arm and that of plain decoding beside it; of plain decoding itself one and the same.

    Attributes:
        first: name of the arm that went first.
        arm: the arm's turn.
        plain: plain decoding's.
    """

    first: str
    arm: Turn
    plain: Turn


def arm_names(name: str, drafters: Iterable[str], *, compiled: bool, assisted: bool) -> list[str]:
    """What a journal calls the arms of the cell of a name, with these drafters; arguments as of `Cell`."""
    given = list(drafters)
    theirs = [f"{_TRANSFORMERS}_{drafter}" for drafter in _ASSISTED if assisted and drafter in given]
    arms = [PLAIN, *given, _TRANSFORMERS, *theirs, *([_COMPILED] if compiled else [])]
    return [f"{name} {arm}" for arm in arms]


def run_cell(cell: Cell, *, deadline: float, journal: Journal) -> Iterator[tuple[dict[str, Any], Spans]]:
    """Measure every arm that is due.

    Args:
        cell: what to measure.
        deadline: `time.monotonic()` after which no further arm begins; plain decoding always runs, as the others are
            compared with it.
        journal: what was measured before; the records are written to it, except of arms that there was no time for.

    Yields:
        A record per arm as soon as it is measured, and the spans of its last generation. A record has either figures,
        or `"missing"`, which says why there are none. `"gate"` is "red" if a text was wrong or an arm of ours failed.
    """
    run = _Run(cell, our_arms(cell.target, {})[0])
    arms = arm_names(cell.name, cell.drafters, compiled=cell.compiled, assisted=cell.assisted)
    due = [key.removeprefix(f"{cell.name} ") for key in journal.due(arms)]
    missing = ""
    for name in [PLAIN, *(name for name in due if name != PLAIN)]:
        key = f"{cell.name} {name}"
        spans: Spans = []
        if missing:  # nothing to compare with
            record = {**_head(cell, name), "missing": f"no plain decoding: {missing}"}
        elif time.monotonic() > deadline and name != PLAIN:
            record = {**_head(cell, name), "missing": OUT_OF_TIME}
        else:
            journal.begin(key)
            begin = time.monotonic()
            record, spans = run.measure(name)
            record["wall_s"] = round(time.monotonic() - begin, 1)
            journal.end(key, record, failed="failure" in record)
        if name == PLAIN and not run.texts:
            missing = record["missing"]
        yield record, spans


@dataclass(slots=True)
class _Run:
    """A cell that is being measured.

    Attributes:
        cell: the cell.
        plain: plain decoding, which every arm takes turns with.
        texts: per batch and row, what plain decoding gave; empty before it did.
        apart: whether the arm at hand and plain decoding do not fit into memory side by side.
    """

    cell: Cell
    plain: Arm
    texts: list[list[list[int]]] = field(default_factory=list)
    apart: bool = False

    def measure(self, name: str) -> tuple[dict[str, Any], Spans]:
        """Gate an arm, time it and make its record."""
        head = _head(self.cell, name)
        self.apart = False
        try:
            arm = self.make(name)
            texts = [batch.tokens for batch in self.with_room(lambda: self.decode(arm, self.cell.max_new_tokens))]
            if name == PLAIN:
                self.texts = texts
            head |= _gate(self.cell, texts, self.texts)
            if head["gate"] == "red":
                return {**head, "missing": _WRONG, "failure": f"{_WRONG}: {head['divergences'][:3]}"}, []
            pairs = self.with_room(lambda: self.pairs(arm))
            record = {**head, **_figures(self.cell, arm, pairs, texts, self.texts), "apart": self.apart}
            phases, spans = self.phases(arm, pairs[-1].arm.stats)
        except (UnavailableError, torch.OutOfMemoryError) as error:
            return {**head, "missing": str(error).splitlines()[0]}, []
        except Exception as error:  # the other arms are still worth measuring
            traceback.print_exc()
            missing = f"{type(error).__name__}: {error}".splitlines()[0]
            if name.startswith(f"{_TRANSFORMERS}_") and not device_is_lost():  # their compiler, their assistants
                return {**head, "missing": missing}, []
            return {**head, "gate": "red", "missing": missing, "failure": last_lines(traceback.format_exc())}, []
        finally:
            if self.cell.target.device.type == "cuda" and not device_is_lost():
                torch.cuda.empty_cache()
        return {**record, **phases}, spans

    def make(self, name: str) -> Arm:
        """The arm of a name; with synthetic acceptance, its drafter knows plain decoding's text.

        Raises:
            UnavailableError: compiled generate, where transformers does not compile.
        """
        cell = self.cell
        if name == PLAIN:
            return self.plain
        if name == _COMPILED:
            return _compiled_arm(cell.target)
        if name not in cell.drafters:
            assistants = {of: cell.drafters[of]() for of in _ASSISTED if name == f"{_TRANSFORMERS}_{of}"}
            theirs = transformers_arms(cell.target, assistants, batch_size=cell.batch_size)
            return next(arm for arm in theirs if arm.info.name == name)
        drafter = cell.drafters[name]()
        if cell.profile is not None:
            if len(cell.batches) != 1:
                raise ValueError(f"batches: expected one with synthetic acceptance, got {len(cell.batches)}")
            drafter = SyntheticAcceptance(drafter, torch.tensor(self.texts[0]), cell.profile)
        return our_arm(cell.target, name, drafter)

    def decode(self, arm: Arm, num_tokens: int) -> list[Decoded]:
        """What an arm gives for every batch."""
        return [arm.run(prompts, Request(num_tokens, 0.0, tuple(range(len(prompts))))) for prompts in self.cell.batches]

    def pairs(self, arm: Arm) -> list[Pair]:
        """The repeats of an arm that was run before.

        Raises:
            UnavailableError: more tokens took no more time by the clock.
        """
        arms = [self.plain] if arm is self.plain else [self.plain, arm]
        random.Random(f"{self.cell.name} {arm.info.name}").shuffle(arms)
        found = []
        for _ in range(self.cell.repeats):
            turns = [self.turn(one, [other for other in arms if other is not one]) for one in arms]
            by_name = {one.info.name: turn for one, turn in zip(arms, turns, strict=True)}
            found.append(Pair(arms[0].info.name, by_name[arm.info.name], by_name[PLAIN]))
            arms.reverse()
        return found

    def turn(self, arm: Arm, others: Sequence[Arm]) -> Turn:
        """Time an arm; where memory is short, without what the others captured.

        Raises:
            UnavailableError: more tokens took no more time by the clock.
        """
        for other in others if self.apart else ():
            self.forget(other)
        for _ in range(2):
            self.decode(arm, 1)  # the other arm has just had all caches
            first_s, _ = self.seconds(arm, 1)
            whole_s, decoded = self.seconds(arm, self.cell.max_new_tokens)
            stats = [batch.stats for batch in decoded if batch.stats is not None]
            if not any("capture" in one.times_ms for one in stats):
                break
        if whole_s <= first_s:
            raise UnavailableError(
                f"{self.cell.max_new_tokens} tokens of {arm.info.name} took no longer than one; longer texts are needed"
            )
        return Turn(first_s, whole_s - first_s, stats)

    def seconds(self, arm: Arm, num_tokens: int) -> tuple[float, list[Decoded]]:
        """Wall time of decoding all batches, which ends with tokens on the host, and what they gave."""
        begin = time.perf_counter()
        decoded = self.decode(arm, num_tokens)
        return time.perf_counter() - begin, decoded

    def phases(self, arm: Arm, stats: Sequence[AcceptanceStats]) -> tuple[dict[str, Any], Spans]:
        """Milliseconds of each phase of a step for the record, and the spans of a generation, if anything knows them.

        A captured step is one piece. Then they are those of a short generation of the eager loop.
        """
        if not stats:
            return {}, []
        merged, last, loop = AcceptanceStats.merged(stats), stats[-1], "timed"
        if merged.captured:
            if arm is not self.plain:
                self.forget(arm)  # the eager loop has memory of its own
            try:
                merged = last = self.with_room(lambda: self.decode_eagerly(arm))
            except torch.OutOfMemoryError:
                return {}, last.spans_ms
            loop = "eager"
        passes = max(merged.num_target_passes, 1)
        split = {phase: value / passes for phase, value in merged.times_ms.items() if phase != "prefill"}
        return {"split_ms": split, "split_of": loop}, last.spans_ms

    def decode_eagerly(self, arm: Arm) -> AcceptanceStats:
        """Statistics of a short generation of the eager loop."""
        target, num_tokens = self.cell.target, min(self.cell.max_new_tokens, _SPLIT_TOKENS)
        eager = Decoder(target, arm.drafter, capture=False)
        return eager.decode(self.cell.batches[-1], num_tokens, stop_tokens=target.stop_tokens).stats

    def with_room(self, run: Callable[[], _Found]) -> _Found:
        """What `run` gives; where memory is short, once more without what plain decoding captured, and so from then on.

        Raises:
            torch.OutOfMemoryError: it does not suffice even then.
        """
        try:
            return run()
        except torch.OutOfMemoryError:
            if not self.forget(self.plain):
                raise
        self.apart = True
        return run()

    def forget(self, arm: Arm) -> bool:
        """Free what calls of an arm captured, and the memory that it is on; returns whether there was anything."""
        kept = None if arm.drafter is None else KEPT.pop(arm.drafter, None)
        if kept is not None:
            kept.release()
            torch.cuda.empty_cache()
        return kept is not None


def _compiled_arm(target: Target) -> Arm:
    """Transformers' `generate` with a static cache, which it compiles for."""
    if target.device.type != "cuda":
        raise UnavailableError(f"transformers compiles generate on an accelerator only, not on {target.device.type}")
    return transformers_arm(target, _COMPILED, "generate, compiled", {"cache_implementation": "static"})


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


def _gate(cell: Cell, texts: list[list[list[int]]], expected: list[list[list[int]]]) -> dict[str, Any]:
    """Compare texts with those of plain decoding."""
    divergences: list[Divergence] = []
    index = -1
    for prompts, batch, plain_batch in zip(cell.batches, texts, expected, strict=True):
        for prompt, got, plain in zip(prompts, batch, plain_batch, strict=True):
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


def _figures(
    cell: Cell, arm: Arm, pairs: Sequence[Pair], texts: list[list[list[int]]], plain_texts: list[list[list[int]]]
) -> dict[str, Any]:
    """The figures of an arm that was timed.

    Raises:
        UnavailableError: the texts are one token long.
    """
    num_tokens, num_plain = (sum(len(row) - 1 for batch in found for row in batch) for found in (texts, plain_texts))
    if not num_tokens or not num_plain:
        raise UnavailableError("every text ends with its first token")
    speeds = [num_tokens / pair.arm.decode_s for pair in pairs]
    plain_speeds = [num_plain / pair.plain.decode_s for pair in pairs]
    ratios = [speed / plain for speed, plain in zip(speeds, plain_speeds, strict=True)]
    figures: dict[str, Any] = {
        "num_tokens": num_tokens,
        "tokens_per_second": statistics.median(speeds),
        "first_token_ms": 1e3 * statistics.median(pair.arm.first_s for pair in pairs),
        "speedup": statistics.median(ratios),
        "speedup_lowest": min(ratios),
        "speedup_highest": max(ratios),
        "pairs": [
            {"first": pair.first, "tokens_per_second": speed, "plain_tokens_per_second": plain, "speedup": ratio}
            for pair, speed, plain, ratio in zip(pairs, speeds, plain_speeds, ratios, strict=True)
        ],
    }
    if not pairs[-1].arm.stats:
        return figures
    stats = AcceptanceStats.merged(pairs[-1].arm.stats)
    passes = max(stats.num_target_passes, 1)
    tau = stats.tau if stats.num_target_passes else 1.0
    step_ms = 1e3 * statistics.median(pair.arm.decode_s for pair in pairs) / passes
    bytes_ = _bytes(cell, arm)
    floor_ms = bytes_.floor_ms(cell.machine) if bytes_ and cell.machine else None
    return {
        **figures,
        "tau": tau,
        "acceptance_at_depth": stats.acceptance_at_depth,
        "efficiency": figures["speedup"] / tau,
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
    reads = {} if arm.info.name == PLAIN else cell.reads.get(arm.info.name)
    if drafter is None or reads is None:
        return None
    rows = [prompt.shape[0] for prompts in cell.batches for prompt in prompts]
    lengths = [round(sum(rows) / len(rows))] * cell.batch_size
    return step_bytes(cell.target, drafter, reads, lengths=lengths, expected_new=cell.max_new_tokens / 2)
