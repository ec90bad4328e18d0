"""Measures what `tree_budget` plans with: the target's pass by number of rows, the drafter's time, and acceptance.

    plan = tune(target, drafter, prompts, batch_size=4)     # takes seconds
    print(plan)
    drafter = with_tree(drafter, plan.tree)

On a GPU passes and drafts are captured and replayed, as decoding does it: run one by one, their launches would hide
what they cost. What acceptance and commit cost is the same for all trees and is left out. Two measurements may choose
different trees, the more so on a busy machine; greedy text is the same with any tree. Nothing is measured unless it is
asked for (`specdec tune`; of unions, `specdec.tuning.union`).
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from specdec.drafters.weightless.none import NoDrafter
from specdec.drafting.base import Drafter, Prompt, Room
from specdec.drafting.candidates import Best
from specdec.loop.decoder import Decoder, without_autograd
from specdec.loop.graphs import CannotCaptureError, CudaGraphs, Graphs
from specdec.loop.memory import tensors_of
from specdec.loop.rules import Naive
from specdec.loop.step import StepReport
from specdec.models.target.target import Target
from specdec.trees.plan import TreePlan
from specdec.trees.shape import TreeShape
from specdec.tuning.budget import StepCosts, plan_tree, subtree

__all__ = ["MAX_ROWS", "Measure", "check_context", "measure_costs", "measure_ms", "measure_reach", "probe_prompts"]
__all__ += ["replayed", "time_drafts", "time_passes", "tune", "with_tree"]

MAX_ROWS = 128
"""Most tree nodes of all rows together: with more, the target's matrix products cost arithmetic, not bandwidth."""

Measure = Callable[[Callable[[], object]], float]
"""Times a function: returns milliseconds of one call."""

_ROUNDS = 5


def measure_ms(function: Callable[[], object]) -> float:
    """Milliseconds of a call: the least of a few, which was disturbed least; waits for the GPU if there is one."""
    times = []
    for _ in range(2 + _ROUNDS):
        _wait()
        begin = time.perf_counter()
        function()
        _wait()
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times[2:])


def replayed(graphs: Graphs, measure: Measure = measure_ms) -> Measure:
    """`measure` on replays of a function that `graphs` recorded, or on the function itself if it cannot be."""

    def measure_replays(function: Callable[[], object]) -> float:
        try:
            recording = graphs.record(function)
        except CannotCaptureError:
            return measure(function)
        return measure(recording.replay)

    return measure_replays


def tune(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[torch.Tensor] | None = None,
    *,
    batch_size: int = 1,
    context: int = 512,
    max_new_tokens: int = 64,
    max_rows: int = MAX_ROWS,
    measure: Measure | None = None,
) -> TreePlan:
    """Measure, and choose the part of the drafter's tree that is expected to give the most tokens per second.

    Args:
        target: the target.
        drafter: with the largest tree to consider.
        prompts: 1-D int64 tensors to measure acceptance on; by default texts that the target writes itself.
        batch_size: rows that will be decoded together.
        context: tokens of text per row at which passes are timed.
        max_new_tokens: tokens per prompt that acceptance is measured on.
        max_rows: most tree nodes of all rows together.
        measure: what times a function; by default `measure_ms`, on a GPU of replays.

    Raises:
        ValueError: a drafter whose tree cannot be cut, or sizes that do not fit the target.
    """
    shape = _static_tree(drafter)
    if not shape.num_draft_tokens:
        raise ValueError(f"drafter: expected one that proposes tokens, got {drafter.kind} with the root alone")
    with_tree(drafter, shape)  # a drafter that takes no other tree is refused before anything is measured
    check_context(target, shape.num_nodes, batch_size=batch_size, context=context)
    prompts = probe_prompts(target) if prompts is None else prompts
    reach = measure_reach(Decoder(target, drafter), prompts, max_new_tokens)
    sizes = {"batch_size": batch_size, "context": context, "max_rows": max_rows}
    costs, place = measure_costs(target, drafter, shape, measure=measure, **sizes)
    return plan_tree(shape, reach, costs, batch_size=batch_size, place=place)


def check_context(target: Target, num_nodes: int, *, batch_size: int, context: int) -> None:
    """Raise ValueError for sizes at which a tree of `num_nodes` cannot be timed."""
    most = target.max_positions - num_nodes - 2
    if batch_size < 1 or not 1 <= context <= most:
        raise ValueError(
            f"batch_size, context: expected at least 1 row of 1 to {most} tokens, got {batch_size}, {context}"
        )


def measure_costs(
    target: Target,
    drafter: Drafter,
    shape: TreeShape,
    *,
    batch_size: int,
    context: int,
    max_rows: int = MAX_ROWS,
    measure: Measure | None = None,
) -> tuple[StepCosts, str]:
    """What steps with a tree and with parts of it cost, and where that was measured, for people.

    Args:
        target: the target.
        drafter: what drafts.
        shape: the largest tree.
        batch_size: rows that will be decoded together.
        context: tokens of text per row.
        max_rows: most tree nodes of all rows together.
        measure: as for `tune`.
    """
    if measure is None:
        measure = replayed(CudaGraphs(target.device)) if target.device.type == "cuda" else measure_ms
    text = torch.randint(0, target.vocab_size, (batch_size, context), generator=torch.Generator().manual_seed(0))
    costs = StepCosts(
        pass_ms=time_passes(target, text, shape.num_nodes, max_rows, measure),
        draft_ms=_draft_ms(target, drafter, shape, text, measure),
    )
    place = f"context {context}, {target.device.type}, {str(target.dtype).removeprefix('torch.')}, {drafter.kind}"
    return costs, place


def with_tree(drafter: Drafter, tree: TreeShape) -> Drafter:
    """The same drafter with another tree, sharing its network; plain decoding for the root alone.

    Raises:
        ValueError: a drafter that has no tree to change, or cannot draft this one.
    """
    return drafter.with_tree(tree) if tree.num_draft_tokens else NoDrafter()


def probe_prompts(target: Target, *, num_prompts: int = 4, length: int = 32, seed: int = 0) -> list[torch.Tensor]:
    """Texts of the target's own: sampled from it after a single token, so that no tokenizer and no data are needed."""
    first = target.model.config.get_text_config(decoder=True).bos_token_id
    if isinstance(first, int):
        starts = [first] * num_prompts
    else:
        starts = [index * (target.vocab_size // num_prompts) for index in range(num_prompts)]
    prompts = [torch.tensor([start]) for start in starts]
    texts = Decoder(target, acceptance=Naive()).decode(prompts, length, seed=seed).tokens
    return [torch.cat((prompt, torch.tensor(text))) for prompt, text in zip(prompts, texts, strict=True)]


def measure_reach(decoder: Decoder, prompts: Sequence[torch.Tensor], max_new_tokens: int) -> list[float]:
    """How often the accepted path of a step runs through each node of the drafter's static tree; 1 for the root.

    Args:
        decoder: a target with the drafter.
        prompts: 1-D int64 tensors, decoded greedily one at a time.
        max_new_tokens: tokens per prompt.
    """
    shape = _static_tree(decoder.drafter)
    counts = torch.zeros(shape.num_nodes, dtype=torch.int64)
    num_steps = 0
    for prompt in prompts:
        paths: list[torch.Tensor] = []

        def note(report: StepReport, paths: list[torch.Tensor] = paths) -> None:
            assert report.output is not None
            paths.append(report.output.path[0].cpu())

        decoder.decode([prompt], max_new_tokens, on_step=note)
        steps = paths[1:-1]  # the first is prefill, and the end of the text cuts the last one short
        num_steps += len(steps)
        for path in steps:
            counts[path[path >= 0].long()] += 1
    if not num_steps:
        raise ValueError(f"max_new_tokens: expected enough to measure acceptance on, got {max_new_tokens}")
    return [1.0, *(counts[1:] / num_steps).tolist()]


def _static_tree(drafter: Drafter) -> TreeShape:
    if not isinstance(drafter.shape, TreeShape):
        raise ValueError(
            f"tree: expected a static tree to choose a part of, got {drafter.shape}; num_nodes is its budget"
        )
    return drafter.shape


def time_passes(
    target: Target, text: torch.Tensor, num_nodes: int, max_rows: int, measure: Measure
) -> Mapping[int, float]:
    """Times of the target's pass for trees of 1, 2, 3, 4, 6, 8, ... nodes and the whole one, by rows of the batch."""
    batch_size, context = text.shape
    most = max(1, min(num_nodes, max_rows // batch_size))
    # passes of 3 rows may cost what those of 2 do, and those of 4 a lot more: so it is with the products of some CPUs
    between = {size for power in range(10) for size in (2**power, 3 * 2**power)}
    sizes = sorted({1, most, *(size for size in between if size < most)})
    lengths = torch.full((batch_size,), context, dtype=torch.int32, device=target.device)
    times: dict[int, float] = {}
    with without_autograd(target.device), target.hooked():
        cache = target.new_cache(batch_size, context + most)
        cache.lengths.copy_(lengths)  # what the cache holds changes no time
        for size in sizes:
            chain = TreeShape.chain(size - 1)
            depth = torch.from_numpy(chain.depth.copy()).to(target.device)[None]
            words = torch.from_numpy(chain.ancestor_words.copy()).to(target.device)[None]
            tokens = torch.arange(size, device=target.device).expand(batch_size, -1) % target.vocab_size

            def run(tokens: torch.Tensor = tokens, depth: torch.Tensor = depth, words: torch.Tensor = words) -> object:
                return target.score(tokens, depth, words, cache).scores.best

            times[size * batch_size] = measure(run)
    # fewer rows can always be filled up: what says that they take longer is a disturbance
    return {rows: min(time for more, time in times.items() if more >= rows) for rows in times}


def _draft_ms(
    target: Target, drafter: Drafter, shape: TreeShape, text: torch.Tensor, measure: Measure
) -> Sequence[float]:
    """Times of drafting by depth: measured for the shallowest and the whole tree, a line in between."""
    first_level = subtree(shape, list(shape.levels[1]))
    times = {}
    for tree in (first_level, shape):
        one = with_tree(drafter, tree)
        times[tree.max_depth] = time_drafts(target, one, text, measure)[0]
    drafter.bind(target)
    shallow, whole = times[1], times[shape.max_depth]
    slope = (whole - shallow) / max(1, shape.max_depth - 1)
    return [0.0, *(max(0.0, shallow + slope * depth) for depth in range(shape.max_depth))]


def time_drafts(target: Target, drafter: Drafter, text: torch.Tensor, measure: Measure) -> list[float]:
    """Milliseconds of a draft behind a text, and of what the drafter learns from a step, in each of its ways.

    Args:
        target: the target.
        drafter: bound to it by this.
        text: [B, T] int64.
        measure: what times a function.
    """
    tokens = text.to(target.device)
    lengths = torch.full((text.shape[0],), text.shape[1], dtype=torch.int32, device=target.device)
    prompt = Prompt(tokens, lengths, max_length=text.shape[1] + 1)
    root = tokens[:, -1].int()
    drafter.bind(target)
    times = []
    with without_autograd(target.device), target.hooked(), drafter.session():
        cache = target.new_cache(text.shape[0], text.shape[1] + 1)
        output = target.prefill(tokens, lengths, cache)
        for way in range(drafter.num_ways):
            # a way may leave what other ways would read
            room = Room(text.shape[0], prompt.max_length, text.shape[1], 1, may_ask=target.device.type == "cpu")
            one = drafter.copy_for(room, target.device)
            one.start(prompt, output)
            one.take(way)
            counters = [(tensor, tensor.clone()) for tensor in tensors_of(one) if not tensor.is_floating_point()]
            one.draft(root, Best())
            moved = [(tensor, before) for tensor, before in counters if not torch.equal(tensor, before)]

            def draft(one: Drafter = one, moved: list[tuple[torch.Tensor, torch.Tensor]] = moved) -> object:
                for tensor, before in moved:  # a draft goes on from where the last one ended
                    tensor.copy_(before)
                return one.draft(root, Best())

            times.append(measure(draft))
    return times


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
