"""sample_probs: time of processing logits and of drawing from them, against top-k and sort in PyTorch.

Questions: what do the filters cost beside reading and writing the logits? Is a race bound by its logits or by its
random numbers?

    pytest bench/kernels/bench_sample_probs.py --benchmark-only
"""

from typing import Any

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases, compiled
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference import sample_probs as reference
from specdec.kernels.sample_probs import WarpSettings, sample_race, warp_logits

WARPERS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}


def random_logits(shape: StepShape, generator: torch.Generator) -> torch.Tensor:
    """[B, N, V] fp32 with a standard deviation of three, as a language model's."""
    size = (shape.batch, shape.tree.num_nodes, shape.model.vocab_size)
    return 3 * torch.randn(size, generator=generator, device=generator.device)


def make_warp_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """The default top-k of transformers, with a usual temperature and top-p."""
    settings = WarpSettings(**WARPERS).on(generator.device)
    return Call(args=(random_logits(shape, generator), settings), kwargs={})


def make_race_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """One draw for every node."""
    row_ids = torch.arange(shape.batch, dtype=torch.int32, device=generator.device)
    return Call(args=(random_logits(shape, generator), row_ids, torch.zeros_like(row_ids[:1])), kwargs={"seed": 1})


def topk_and_sort(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """The usual eager code, as in transformers, which knows top-k on the host."""
    scores = logits / settings[0, 0]
    scores = scores.masked_fill(scores < scores.topk(WARPERS["top_k"], dim=-1).values[..., -1:], float("-inf"))
    ordered, order = scores.sort(dim=-1)
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - settings[0, 2]
    return scores.masked_fill(dropped.scatter(-1, order, dropped), float("-inf"))


def finite(_: Call, processed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What to compare: which tokens were kept, and their logits."""
    kept = processed > float("-inf")
    return kept, processed.masked_fill(~kept, 0.0)


SIZES = ("batch", "num_nodes", "vocab_size")
SHAPES = shapes.step_shapes(
    models=[shapes.LLAMA_2_7B, shapes.LLAMA_3_8B], batches=[1], trees=shapes.TREES[1:3], contexts=[2048]
)
WARP = BenchOp.of(
    warp_logits,
    reference.warp_logits,
    name="sample_probs_warp",
    make=make_warp_inputs,
    others={"sort": topk_and_sort, "compile": compiled(topk_and_sort)},
    cost=lambda shape: cost.warp_logits(**shape.sizes(*SIZES), element_bytes=4),
    outputs=finite,
    shapes=SHAPES,
)
RACE = BenchOp.of(
    sample_race,
    reference.sample_race,
    name="sample_probs_race",
    make=make_race_inputs,
    others={},
    cost=lambda shape: cost.sample_race(**shape.sizes(*SIZES), element_bytes=4),
    shapes=SHAPES,
)
bench_warp_logits = cases(WARP)
bench_sample_race = cases(RACE)
