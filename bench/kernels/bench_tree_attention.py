"""tree_attention: time of one layer against PyTorch's attention with a mask, and against compiled FlexAttention.

Question: does a tree of 64 nodes read the cache at the speed of plain decoding, and what does the split of the keys
gain over an attention with one program per head?

    pytest bench/kernels/bench_tree_attention.py --benchmark-only

"sdpa" and "flex" are PyTorch's best chances. For "sdpa" the rows of a group are packed, so that no key is copied or
read twice; "flex" knows groups itself, reads the same lengths and ancestor words as the op, and skips blocks that
nobody sees. Masks are built once, outside the timed call, as a step would build them once for all layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, Provider, cases, compiled, eager
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference.tree_attention import tree_attention as reference
from specdec.kernels.tree_attention import tree_attention

SLOT_ALIGNMENT = 16  # PyTorch's fused kernels take masks of aligned rows only


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """A full prefix of random keys and values, one tree for all requests, and the masks of the other providers."""
    model, device, num_nodes = shape.model, generator.device, shape.tree.num_nodes
    normal = functools.partial(shape.normal, generator)
    capacity = -(shape.context + num_nodes) // SLOT_ALIGNMENT * -SLOT_ALIGNMENT
    caches = normal(2, shape.batch, capacity, model.num_kv_heads, model.head_dim)
    words = shape.tree.ancestors(device)
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)

    mask = torch.zeros(num_nodes, capacity, dtype=torch.bool, device=device)
    mask[:, : shape.context] = True
    bits = (words[0, :, :, None] >> torch.arange(32, device=device) & 1).flatten(1)
    mask[:, shape.context : shape.context + num_nodes] = bits[:, :num_nodes].bool()
    q = normal(shape.batch, num_nodes, model.num_heads, model.head_dim)
    masks = {
        "mask": mask.repeat_interleave(model.num_heads // model.num_kv_heads, 0)[None, None],
        "block_mask": tree_block_mask(lengths, words, num_nodes, capacity),
    }
    return Call(args=(q, caches[0], caches[1], lengths, words), kwargs={"scale": model.head_dim**-0.5, **masks})


def tree_block_mask(lengths: torch.Tensor, words: torch.Tensor, num_nodes: int, capacity: int) -> BlockMask:
    """FlexAttention's mask of a tree behind every row's prefix, from lengths [B] and ancestor words [1, N, W]."""

    def sees(b: torch.Tensor, _h: torch.Tensor, node: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        j = slot - lengths[b]
        in_tree = (j >= 0) & (j < num_nodes)
        j = torch.where(in_tree, j, 0)
        return (slot < lengths[b]) | (in_tree & (words[0, node, j // 32] >> j % 32 & 1 == 1))

    return create_block_mask(sees, lengths.shape[0], None, num_nodes, capacity, device=str(lengths.device))


def without_masks(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The op itself, which has neither a dense mask nor a block mask."""

    def call(*args: Any, scale: float, **_masks: Any) -> torch.Tensor:
        return function(*args, scale=scale)

    return call


def sdpa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *_in_the_mask: torch.Tensor,
    scale: float,
    mask: torch.Tensor,
    **_for_flex: BlockMask,
) -> torch.Tensor:
    """PyTorch's fused attention over the whole cache with a dense mask [1, 1, N * G, S]."""
    batch, num_nodes, _, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    rows = q.view(batch, num_nodes, kv_heads, -1, head_dim).transpose(1, 2).reshape(batch, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(
        rows, k_cache.transpose(1, 2), v_cache.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return out.view(batch, kv_heads, num_nodes, -1, head_dim).transpose(1, 2).reshape(q.shape)


def flex(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *_in_the_mask: torch.Tensor,
    scale: float,
    block_mask: BlockMask,
    **_for_sdpa: torch.Tensor,
) -> torch.Tensor:
    """FlexAttention over the whole cache with a block mask; to be compiled."""
    rows = (q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    out: torch.Tensor = flex_attention(*rows, block_mask=block_mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


SIZES = ("batch", "num_nodes", "num_heads", "num_kv_heads", "head_dim", "context", "element_bytes")
OP = BenchOp(
    name="tree_attention",
    make=make_inputs,
    definition=without_masks(reference),
    providers={
        "reference": Provider(without_masks(eager(reference)), capturable=False),  # reads the lengths on the host
        "sdpa": Provider(sdpa),
        "flex": compiled(flex, eager_on_cpu=True),
        "triton": Provider(without_masks(functools.partial(tree_attention, backend="triton")), needs_gpu=True),
    },
    cost=lambda shape: cost.tree_attention(**shape.sizes(*SIZES)),
    shapes=shapes.step_shapes(batches=[1, 8], trees=shapes.TREES[:3]),
)
# on a CPU it is, to be checked
bench_tree_attention = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")(cases(OP))
