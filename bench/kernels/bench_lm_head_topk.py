"""lm_head_topk: time of logits, k best tokens and log-sum-exp, against cuBLAS with torch.topk and torch.compile.

Questions: is the selection free beside the weights of full heads? Do low-rank heads, whose weights take a thirtieth of
the time, stay under 1.6 times their bytes, selection included?

    pytest bench/kernels/bench_lm_head_topk.py --benchmark-only
"""

import functools
from dataclasses import dataclass

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases, compiled
from specdec.bench.common.shapes import StepShape
from specdec.kernels.common.topk import TopK
from specdec.kernels.lm_head_topk import lm_head_topk
from specdec.kernels.reference.lm_head_topk import lm_head_topk as reference


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A way to use the op.

    Attributes:
        num_heads: K.
        num_best: k.
        rank: r of low-rank heads; None for full rank.
        shared_weight: all heads share one weight.
        all_nodes: one row per node of the tree, as the target scores it; otherwise one per request.
        has_bias: the heads have biases.
    """

    num_heads: int
    num_best: int
    rank: int | None = None
    shared_weight: bool = False
    all_nodes: bool = False
    has_bias: bool = False

    def num_rows(self, shape: StepShape) -> int:
        """Rows of every head."""
        return shape.batch * (shape.tree.num_nodes if self.all_nodes else 1)


KINDS = {
    "medusa": HeadKind(num_heads=4, num_best=10),
    "low_rank": HeadKind(num_heads=4, num_best=10, rank=128),
    "shared": HeadKind(num_heads=4, num_best=10, shared_weight=True),
    "hydra": HeadKind(num_heads=1, num_best=10, all_nodes=True, has_bias=True),
    "target_greedy": HeadKind(num_heads=1, num_best=1, all_nodes=True),
}


def make_inputs(kind: HeadKind, shape: StepShape, generator: torch.Generator) -> Call:
    """Random heads whose logits have a standard deviation of three."""
    model, batch = shape.model, kind.num_rows(shape)
    randn = functools.partial(torch.randn, generator=generator, device=generator.device, dtype=shape.dtype)
    inner = kind.rank or model.hidden_size
    x = randn(kind.num_heads, batch, model.hidden_size)
    weight = randn(1 if kind.shared_weight else kind.num_heads, model.vocab_size, inner)
    weight *= 3 * inner**-0.5
    down = None
    if kind.rank:
        down = randn(kind.num_heads, kind.rank, model.hidden_size) * model.hidden_size**-0.5
    bias = randn(*weight.shape[:2]) if kind.has_bias else None
    return Call(args=(x, weight), kwargs={"k": kind.num_best, "down": down, "bias": bias})


def product_and_topk(
    x: torch.Tensor, weight: torch.Tensor, *, k: int, down: torch.Tensor | None, bias: torch.Tensor | None
) -> TopK:
    """The usual eager code: products by cuBLAS, torch.topk (ties in any order) and logsumexp."""
    h = x if down is None else x @ down.mT
    logits = h @ weight.mT if bias is None else h @ weight.mT + bias[:, None]
    logits = logits.transpose(0, 1).float()
    values, tokens = torch.topk(logits, k, dim=-1)
    return TopK(values, tokens.int(), torch.logsumexp(logits, dim=-1), logits.isnan().any(dim=-1))


def outputs(call: Call, best: TopK) -> tuple[torch.Tensor, ...]:
    """What to compare: equal tokens are too much to ask, but those chosen must have the best logits, computed anew."""
    x, weight, down, bias = call.args[0].double(), call.args[1], call.kwargs["down"], call.kwargs["bias"]
    h = x if down is None else x @ down.double().mT  # [K, B, C or r]
    head = torch.arange(x.shape[0], device=x.device)[None, :, None].expand_as(best.tokens)
    rows = weight.expand(x.shape[0], -1, -1)[head, best.tokens.long()]  # [B, K, k, C or r]
    chosen = torch.einsum("bkjc,kbc->bkj", rows.double(), h)
    if bias is not None:
        chosen += bias.expand(x.shape[0], -1)[head, best.tokens.long()]
    return best.values, best.logsumexp, best.has_nan, chosen.float()


def head_cost(kind: HeadKind, shape: StepShape) -> cost.Cost:
    """Cost at a shape."""
    return cost.lm_head_topk(
        num_heads=kind.num_heads,
        batch=kind.num_rows(shape),
        **shape.sizes("width", "vocab_size", "element_bytes"),
        k=kind.num_best,
        rank=kind.rank,
        shared_weight=kind.shared_weight,
        has_bias=kind.has_bias,
    )


OPS = {
    name: BenchOp.of(
        lm_head_topk,
        reference,
        name=f"lm_head_topk_{name}",
        make=functools.partial(make_inputs, kind),
        others={"topk": product_and_topk, "compile": compiled(product_and_topk)},
        cost=functools.partial(head_cost, kind),
        outputs=outputs,
        shapes=shapes.step_shapes(
            models=[shapes.LLAMA_2_7B, shapes.LLAMA_3_8B], batches=[1, 8], trees=shapes.TREES[1:2], contexts=[2048]
        ),
    )
    for name, kind in KINDS.items()
}
bench_lm_head_topk = cases(OPS)
