"""rope_kv_write: time per layer for the rows of one step, against the eager chain of ops and torch.compile.

Question: what does it cost beyond its launch, and what do the separate rotations and copies cost?

    pytest bench/kernels/bench_rope_kv_write.py --benchmark-only
"""

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases, compiled
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference.rope_kv_write import rope_kv_write as reference
from specdec.kernels.rope_kv_write import rope_kv_write


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """The nodes of a tree behind `context` tokens: node n in slot context + n, at position context + depth."""
    model, device = shape.model, generator.device
    batch, num_nodes = shape.batch, shape.tree.num_nodes
    capacity = shape.context + num_nodes
    fused = shape.normal(generator, batch, num_nodes, model.num_heads + 2 * model.num_kv_heads, model.head_dim)
    q, k, v = fused.split([model.num_heads, model.num_kv_heads, model.num_kv_heads], dim=2)
    frequencies = 10000.0 ** (-torch.arange(0, model.head_dim, 2, device=device) / model.head_dim)
    angles = torch.arange(capacity, device=device)[:, None] * frequencies
    nodes = torch.arange(num_nodes, dtype=torch.int32, device=device)[None]
    lengths = torch.full((batch,), shape.context, dtype=torch.int32, device=device)
    cache = torch.zeros(2, batch, capacity, model.num_kv_heads, model.head_dim, dtype=shape.dtype, device=device)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(shape.dtype)
    args = q, k, v, shape.tree.depth(device), table, nodes, cache[0], cache[1]
    return Call(args=args, kwargs={"lengths": lengths})


def rotate_then_copy(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_table: torch.Tensor,
    slots: torch.Tensor,
    k_cache_: torch.Tensor,
    v_cache_: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """What a transformers model does: gather and round the table, rotate in full width, one indexed copy per cache."""
    positions, slots = positions + lengths[:, None], slots + lengths[:, None]
    cos, sin = cos_sin_table[positions].to(q.dtype)[..., None, :].chunk(2, dim=-1)
    cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
    half = q.shape[-1] // 2
    rotated = [x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin for x in (q, k)]
    row = torch.arange(q.shape[0], device=q.device)[:, None]
    k_cache_[row, slots] = rotated[1]
    v_cache_[row, slots] = v
    return rotated[0]


OP = BenchOp.of(
    rope_kv_write,
    reference,
    make=make_inputs,
    others={"rotate_then_copy": rotate_then_copy, "compile": compiled(rotate_then_copy)},
    waits=True,
    cost=lambda shape: cost.rope_kv_write(
        num_tokens=shape.batch * shape.tree.num_nodes,
        **shape.sizes("num_heads", "num_kv_heads", "head_dim", "element_bytes"),
    ),
    outputs=lambda call, result: (result, call.args[6], call.args[7]),
    shapes=shapes.step_shapes(
        models=[shapes.LLAMA_2_7B, shapes.LLAMA_3_8B], batches=[1, 8], trees=shapes.TREES[:3], contexts=[2048]
    ),
)
bench_rope_kv_write = cases(OP)
