"""Launches of every op at the shapes that matter, to be compiled ahead of time; see `specdec.bench.resources`."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton

from specdec.bench.common.shapes import LLAMA_2_7B, LLAMA_3_8B, TINY, VICUNA_13B, ModelShape, TreeSize
from specdec.kernels import accept_greedy, add_rms_norm, commit_pairs, kv_compact, rms_norm, tree_attention, tree_expand
from specdec.kernels.accept_naive import accept_naive
from specdec.kernels.accept_rejection import accept_rejection
from specdec.kernels.accept_traversal import accept_traversal
from specdec.kernels.accept_typical import accept_typical
from specdec.kernels.draft_heads import draft_heads, draft_heads_concat
from specdec.kernels.emit_step import emit_step
from specdec.kernels.learn_chances import learn_chances
from specdec.kernels.lm_head_topk import lm_head_topk
from specdec.kernels.lstm_recurrence import lstm_recurrence
from specdec.kernels.philox_uniform import philox_exponential, philox_uniform
from specdec.kernels.rope_kv_write import rope_kv_write
from specdec.kernels.sample_probs import WarpSettings, sample_probs
from specdec.kernels.skinny_linear import skinny_linear
from specdec.kernels.swiglu import swiglu
from specdec.kernels.tree_grow import tree_grow
from specdec.kernels.tree_merge import tree_merge
from specdec.kernels.tree_rerank import beam_step, tree_rerank

__all__ = ["Launch", "cases"]

_PLAIN = TreeSize(1, 0)
_NARROW = TreeSize(32, 4)
_WIDE = TreeSize(64, 5)
_LARGEST = TreeSize(512, 8)
_CAPACITY = 4096
_HEAD_DIM_80 = replace(LLAMA_2_7B, name="head-dim-80", head_dim=80)
_HEAD_DIM_256 = replace(LLAMA_2_7B, name="head-dim-256", num_heads=16, num_kv_heads=16, head_dim=256)
_IN_THEIR_DTYPES = [(model, torch.bfloat16) for model in (LLAMA_2_7B, LLAMA_3_8B, VICUNA_13B)] + [(TINY, torch.float32)]

Launch = Callable[[], Any]


def cases() -> dict[str, Launch]:
    """Launches to compile, by name; each runs its op once on meta tensors."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    mistral = replace(LLAMA_3_8B, name="Mistral-7B-window")
    attention: list[tuple[ModelShape, TreeSize, torch.dtype]] = [
        *[(LLAMA_2_7B, tree, bf16) for tree in (_PLAIN, _NARROW, _WIDE)],
        (LLAMA_2_7B, _WIDE, fp16),
        *[(LLAMA_3_8B, _PLAIN, bf16), (LLAMA_3_8B, _WIDE, bf16), (mistral, _WIDE, bf16), (VICUNA_13B, _WIDE, bf16)],
        *[(TINY, _PLAIN, fp32), (TINY, _WIDE, fp16)],
        *[(_HEAD_DIM_80, _WIDE, bf16), (_HEAD_DIM_256, _WIDE, bf16), (_HEAD_DIM_256, _WIDE, fp32)],
    ]
    found: dict[str, Launch] = {}
    for model, tree, dtype in attention:
        window = 4096 if model is mistral else None
        found[_name("tree_attention", model, tree, dtype)] = _tree_attention(model, tree, dtype, window)
    for model, dtype in _IN_THEIR_DTYPES:
        found[_name("kv_compact", model, _WIDE, dtype)] = _kv_compact(model, _WIDE, dtype)
        found[_name("rms_norm", model, None, dtype)] = _rms_norm(model, dtype)
        found[_name("add_rms_norm", model, None, dtype)] = _add_rms_norm(model, dtype)
    for tree in [_PLAIN, _WIDE, _LARGEST]:
        found[_name("tree_expand", None, tree, torch.int64)] = _tree_expand(tree)
        found[_name("accept_greedy", None, tree, torch.int32)] = _accept_greedy(tree)
        found[_name("emit_step", None, tree, torch.int32)] = _emit_step(tree, 1)
    found[_name("emit_step_64_rows", None, _WIDE, torch.int32)] = _emit_step(_WIDE, 64)
    return dict(sorted((found | _glue_cases() | _weight_cases() | _sampling_cases()).items()))


def _glue_cases() -> dict[str, Launch]:
    """Launches of the small kernels around the target's layers and of dynamic trees."""
    bf16 = torch.bfloat16
    found = {_name("commit_pairs_keep", LLAMA_3_8B, _WIDE, bf16): _commit_pairs(LLAMA_3_8B, _WIDE, bf16, keep=3)}
    for model, dtype in _IN_THEIR_DTYPES:
        found[_name("rope_kv_write", model, _WIDE, dtype)] = _rope_kv_write(model, _WIDE, dtype)
        found[_name("swiglu", model, None, dtype)] = _swiglu(model, dtype)
        found[_name("commit_pairs", model, _WIDE, dtype)] = _commit_pairs(model, _WIDE, dtype, keep=0)
    for model in [_HEAD_DIM_80, _HEAD_DIM_256]:
        found[_name("rope_kv_write", model, _WIDE, bf16)] = _rope_kv_write(model, _WIDE, bf16)
    for lists, tree in [(1, _PLAIN), (51, _WIDE), (204, _LARGEST)]:  # of 10 candidates
        found[_name("tree_rerank", None, tree, torch.int32)] = _tree_rerank(lists, tree)
    for ranks, tree in [(10, _WIDE), (16, _LARGEST)]:
        found[_name("tree_grow", None, tree, torch.int32)] = _tree_grow(ranks, tree, lattice=False)
    found[_name("tree_grow_lattice", None, _WIDE, torch.int32)] = _tree_grow(10, _WIDE, lattice=True)
    for size, tree in [(64, _NARROW), (256, _WIDE), (512, _LARGEST)]:  # of two, of four and of many drafters
        found[_name("tree_merge", None, tree, torch.int32)] = _tree_merge(size, tree)
        found[_name("learn_chances", None, tree, torch.int32)] = _learn_chances(size, tree)
    for lists in [1, 10]:
        found[_name(f"beam_step_{lists}x10", None, None, torch.int32)] = _beam_step(lists)
    return found


def _sampling_cases() -> dict[str, Launch]:
    """Launches of the acceptance rules that read whole rows of logits, and of sampling from them."""
    fp32 = torch.float32
    found: dict[str, Launch] = {}
    for model in [LLAMA_2_7B, LLAMA_3_8B]:
        found[_name("accept_naive", model, _WIDE, fp32)] = _accept_naive(model, _WIDE)
        found[_name("accept_typical", model, _WIDE, fp32)] = _accept_typical(model, _WIDE, sampled=True)
        found[_name("accept_rejection", model, _WIDE, fp32)] = _accept_rejection(model, _WIDE, replacement=False)
        found[_name("accept_traversal", model, _WIDE, fp32)] = _accept_traversal(model, _WIDE)
        found[_name("sample_probs", model, _WIDE, fp32)] = _sample_probs(model, _WIDE)
    race = _WIDE.num_nodes * model.vocab_size
    found[_name("philox_exponential", model, _WIDE, fp32)] = _philox(philox_exponential, race)
    found[_name("philox_uniform", None, _WIDE, fp32)] = _philox(philox_uniform, _WIDE.num_nodes)
    found[_name("philox_uniform_single", None, None, fp32)] = _philox(philox_uniform, 1)
    found[_name("philox_uniform", None, _LARGEST, fp32)] = _philox(philox_uniform, _LARGEST.num_nodes)
    # a vocabulary that four does not divide, so that rows begin anywhere
    found[_name("philox_exponential_odd", None, None, fp32)] = _philox(philox_exponential, 32001)
    found[_name("accept_typical_argmax", model, _WIDE, fp32)] = _accept_typical(model, _WIDE, sampled=False)
    found[_name("accept_rejection_replacement", model, _WIDE, fp32)] = _accept_rejection(model, _WIDE, replacement=True)
    found[_name("accept_naive", model, _LARGEST, fp32)] = _accept_naive(model, _LARGEST)
    found[_name("accept_typical", model, _LARGEST, fp32)] = _accept_typical(model, _LARGEST, sampled=True)
    found[_name("accept_rejection", model, _LARGEST, fp32)] = _accept_rejection(model, _LARGEST, replacement=False)
    found[_name("accept_traversal", model, _LARGEST, fp32)] = _accept_traversal(model, _LARGEST)
    return found


def _weight_cases() -> dict[str, Launch]:
    """Launches of the kernels that multiply few rows by large weights."""
    bf16 = torch.bfloat16
    found: dict[str, Launch] = {}
    for model, dtype in _IN_THEIR_DTYPES:
        for tree in [_PLAIN, _WIDE]:
            found[_name("skinny_linear", model, tree, dtype)] = _skinny_linear(model, tree.num_nodes, dtype)
            found[_name("draft_heads", model, tree, dtype)] = _draft_heads(model, 4, tree.num_nodes, dtype)
            found[_name("draft_heads_concat", model, tree, dtype)] = _draft_heads_concat(model, tree.num_nodes, dtype)
            found[_name("lstm_recurrence", model, tree, dtype)] = _lstm_recurrence(model, tree.num_nodes, dtype)
        found[_name("lstm_recurrence_first", model, _WIDE, dtype)] = _lstm_recurrence(model, 64, dtype, num_steps=1)
        found[_name("draft_heads_single", model, _WIDE, dtype)] = _draft_heads(model, 1, _WIDE.num_nodes, dtype)
        found[_name("lm_head_topk", model, None, dtype)] = _lm_head_topk(model, 1, dtype, num_heads=4, k=10)
        found[_name("lm_head_topk_rank128", model, None, dtype)] = _lm_head_topk(
            model, 1, dtype, num_heads=4, k=10, rank=128
        )
        found[_name("lm_head_topk_best", model, _WIDE, dtype)] = _lm_head_topk(
            model, _WIDE.num_nodes, dtype, num_heads=1, k=1
        )
        found[_name("lm_head_topk_lists", model, _WIDE, dtype)] = _lm_head_topk(
            model, _WIDE.num_nodes, dtype, num_heads=1, k=32
        )
    for num_rows, k in [(128, 1), (128, 10), (166, 1), (166, 10), (512, 1)]:
        found[f"lm_head_topk_{k}/Llama-2-7B/n{num_rows}/bfloat16"] = _lm_head_topk(
            LLAMA_2_7B, num_rows, bf16, num_heads=1, k=k
        )
    # a vocabulary that no tile divides, and rows whose stride is no multiple of 16 elements
    odd = replace(LLAMA_2_7B, name="odd-sizes", hidden_size=4095, vocab_size=32001)
    found[_name("lm_head_topk", odd, None, bf16)] = _lm_head_topk(odd, 1, bf16, num_heads=4, k=10)
    found[_name("lm_head_topk_bias", LLAMA_2_7B, _NARROW, bf16)] = _lm_head_topk(
        LLAMA_2_7B, _NARROW.num_nodes, bf16, num_heads=1, k=10, has_bias=True
    )
    # 128 rows, the most that a tile holds
    found["skinny_linear/Llama-2-7B/n128/bfloat16"] = _skinny_linear(LLAMA_2_7B, 128, bf16)
    found["lstm_recurrence/Llama-2-7B/n128/bfloat16"] = _lstm_recurrence(LLAMA_2_7B, 128, bf16)
    found["draft_heads_concat/Llama-2-7B/n128/bfloat16"] = _draft_heads_concat(LLAMA_2_7B, 128, bf16)
    return found


def _name(op: str, model: ModelShape | None, tree: TreeSize | None, dtype: torch.dtype) -> str:
    parts = [op, model and model.name, tree and f"n{tree.num_nodes}", str(dtype).removeprefix("torch.")]
    return "/".join(part for part in parts if part)


def _int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _launch(op: Callable[..., Any], *args: Any, **settings: Any) -> Launch:
    return functools.partial(op, *args, **settings, backend="triton")


def _tree_attention(model: ModelShape, tree: TreeSize, dtype: torch.dtype, window: int | None = None) -> Launch:
    q = torch.empty(1, tree.num_nodes, model.num_heads, model.head_dim, dtype=dtype, device="meta")
    cache = torch.empty(2, 2, 1, _CAPACITY, model.num_kv_heads, model.head_dim, dtype=dtype, device="meta")
    per_row = _int32(1), _int32(1, tree.num_nodes, triton.cdiv(tree.num_nodes, 32))
    settings = {"scale": model.head_dim**-0.5, "depth": _int32(1, tree.num_nodes) if window else None, "window": window}
    return _launch(tree_attention, q, cache[1, 0], cache[1, 1], *per_row, **settings)


def _kv_compact(model: ModelShape, tree: TreeSize, dtype: torch.dtype) -> Launch:
    shape = (model.num_layers, 2, 1, _CAPACITY, model.num_kv_heads, model.head_dim)
    cache = torch.empty(shape, dtype=dtype, device="meta")
    return _launch(kv_compact, cache, _int32(1), _int32(1, tree.max_depth + 1), _int32(1))


def _commit_pairs(model: ModelShape, tree: TreeSize, dtype: torch.dtype, *, keep: int) -> Launch:
    num_new, num_places = tree.max_depth + 1, tree.max_depth + 1 + keep
    states = torch.empty(1, tree.num_nodes, model.hidden_size, dtype=dtype, device="meta")
    pending = states[:, :num_places], _int32(1, num_places), _int32(1), _int32(1).long()
    return _launch(commit_pairs, *pending, states, _int32(1, num_new), _int32(1, num_new), _int32(1), keep=keep)


def _rms_norm(model: ModelShape, dtype: torch.dtype) -> Launch:
    x = torch.empty(64, model.hidden_size, dtype=dtype, device="meta")
    return _launch(rms_norm, x, x[0], eps=1e-5)


def _add_rms_norm(model: ModelShape, dtype: torch.dtype) -> Launch:
    x = torch.empty(64, model.hidden_size, dtype=dtype, device="meta")
    return _launch(add_rms_norm, x, x, x[0], eps=1e-5)


def _rope_kv_write(model: ModelShape, tree: TreeSize, dtype: torch.dtype) -> Launch:
    sizes = model.num_heads + 2 * model.num_kv_heads, model.head_dim
    fused = torch.empty(1, tree.num_nodes, *sizes, dtype=dtype, device="meta")
    q, k, v = fused.split([model.num_heads, model.num_kv_heads, model.num_kv_heads], dim=2)
    cache = torch.empty(2, 1, _CAPACITY, model.num_kv_heads, model.head_dim, dtype=dtype, device="meta")
    table = torch.empty(_CAPACITY, model.head_dim, dtype=dtype, device="meta")
    positions, slots = (_int32(1, tree.num_nodes) for _ in range(2))
    return _launch(rope_kv_write, q, k, v, positions, table, slots, cache[0], cache[1], lengths=_int32(1))


def _swiglu(model: ModelShape, dtype: torch.dtype) -> Launch:
    return _launch(swiglu, torch.empty(64, 2 * model.intermediate_size, dtype=dtype, device="meta"))


def _tree_rerank(lists: int, tree: TreeSize) -> Launch:
    pool = _int32(1, lists, 10), torch.empty(1, lists, 10, device="meta"), _int32(1, lists)
    return _launch(tree_rerank, *pool, _int32(1), num_nodes=tree.num_nodes, max_depth=tree.max_depth)


def _tree_grow(ranks: int, tree: TreeSize, *, lattice: bool) -> Launch:
    block = _int32(1, 16, ranks), _uniform(1, 16, ranks), _int32(1)
    edges = _uniform(1, 15, ranks, ranks) if lattice else None
    return _launch(tree_grow, *block, num_nodes=tree.num_nodes, edges=edges, logsumexp=_uniform(1, 16))


def _tree_merge(size: int, tree: TreeSize) -> Launch:
    pool = _int32(1, size), _int32(1, size), _uniform(1, size), _int32(size)
    sizes = {"num_nodes": tree.num_nodes, "num_gains": tree.num_nodes, "max_depth": 16}
    return _launch(tree_merge, *pool, _int32(1), _int32(4), **sizes)


def _learn_chances(size: int, tree: TreeSize) -> Launch:
    step = _int32(1, size), _int32(1, size), _int32(1, size), _int32(size), _int32(1, tree.max_depth + 1), _int32(1)
    table = _uniform(1, size, 2), _uniform(1, size, 2), _uniform(1, size + 1), _int32(1, 4)
    return _launch(learn_chances, *step, _uniform(size), *table, num_grades=8, decay=0.99, strength=4.0)


def _beam_step(lists: int) -> Launch:
    level, per_list = (_int32(1, lists, 10), _uniform(1, lists, 10)), _uniform(1, lists)
    return _launch(beam_step, *level, per_list, width=10, logsumexp=per_list)


def _tree_expand(tree: TreeSize) -> Launch:
    candidates = torch.empty(1, 4, 10, dtype=torch.int64, device="meta")
    return _launch(tree_expand, candidates, _int32(1), None, *[_int32(tree.num_nodes) for _ in range(3)])


def _accept(op: Callable[..., Any], tree: TreeSize, *after_nodes: Any, **settings: Any) -> Launch:
    """An acceptance rule: tokens and parents first, and the settings that all rules share."""
    nodes, walk = _int32(1, tree.num_nodes), {"budget": _int32(1), "stop_tokens": _int32(2)}
    return _launch(op, nodes, nodes, *after_nodes, max_depth=tree.max_depth, **walk, **settings)


def _logits(model: ModelShape, num_rows: int) -> torch.Tensor:
    return torch.empty(1, num_rows, model.vocab_size, dtype=torch.float32, device="meta")


def _uniform(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _two_laws(model: ModelShape, tree: TreeSize) -> tuple[torch.Tensor, ...]:
    """Logits of target and draft, which row of the draft's belongs to a node, uniforms of nodes and rows."""
    laws = _logits(model, tree.num_nodes), _logits(model, tree.max_depth), _int32(tree.num_nodes)
    return *laws, _uniform(1, tree.num_nodes), _uniform(1)


def _accept_greedy(tree: TreeSize) -> Launch:
    return _accept(accept_greedy, tree, _int32(1, tree.num_nodes))


def _emit_step(tree: TreeSize, rows: int) -> Launch:
    has_nan = torch.empty(rows, tree.num_nodes, dtype=torch.bool, device="meta")
    verdict, stops = (_int32(rows), _int32(rows, tree.max_depth + 1)), _int32(2)
    changed = _int32(rows, _CAPACITY), *(_int32(rows) for _ in range(4)), _int32(2)
    step = torch.empty((), dtype=torch.int64, device="meta")
    noted = step, _int32(_CAPACITY, 2, rows), _int32(rows)
    return _launch(emit_step, *verdict, _int32(1), has_nan, stops, *changed, *noted)


def _accept_naive(model: ModelShape, tree: TreeSize) -> Launch:
    return _accept(accept_naive, tree, _logits(model, tree.num_nodes), _uniform(1, tree.num_nodes))


def _accept_typical(model: ModelShape, tree: TreeSize, *, sampled: bool) -> Launch:
    uniform = _uniform(1) if sampled else None
    return _accept(accept_typical, tree, _logits(model, tree.num_nodes), uniform, threshold=0.09, alpha=0.3)


def _accept_rejection(model: ModelShape, tree: TreeSize, *, replacement: bool) -> Launch:
    return _accept(accept_rejection, tree, *_two_laws(model, tree), replacement=replacement)


def _accept_traversal(model: ModelShape, tree: TreeSize) -> Launch:
    tables = _int32(tree.num_nodes), _int32(tree.max_depth, 16)
    return _accept(accept_traversal, tree, *_two_laws(model, tree), *tables)


def _sample_probs(model: ModelShape, tree: TreeSize) -> Launch:
    nodes = _int32(1, tree.num_nodes)
    settings = WarpSettings().on("meta")
    tensors = _logits(model, tree.num_nodes), _int32(1), _int32(1), settings, nodes, nodes, _int32(1, _CAPACITY)
    return _launch(sample_probs, *tensors, seed=0)


def _philox(op: Callable[..., torch.Tensor], count: int) -> Launch:
    seeds = torch.empty(1, dtype=torch.int64, device="meta")
    return _launch(op, seeds, seeds[0], stream=2, count=count)


def _skinny_linear(model: ModelShape, num_rows: int, dtype: torch.dtype) -> Launch:
    weight = torch.empty(model.hidden_size, model.intermediate_size, dtype=dtype, device="meta")
    return _launch(skinny_linear, weight.new_empty(num_rows, weight.shape[1]), weight)


def _draft_heads(model: ModelShape, num_heads: int, num_rows: int, dtype: torch.dtype) -> Launch:
    weight = torch.empty(num_heads, model.hidden_size, model.hidden_size, dtype=dtype, device="meta")
    return _launch(draft_heads, weight.new_empty(num_rows, model.hidden_size), weight, weight[:, 0])


def _draft_heads_concat(model: ModelShape, num_rows: int, dtype: torch.dtype, num_parts: int = 3) -> Launch:
    weight = torch.empty(model.hidden_size, num_parts * model.hidden_size, dtype=dtype, device="meta")
    bias = weight.new_empty(model.hidden_size)
    parts = [weight.new_empty(num_rows, model.hidden_size) for _ in range(num_parts)]
    return _launch(draft_heads_concat, parts, weight, bias, weight, bias)


def _lstm_recurrence(model: ModelShape, num_rows: int, dtype: torch.dtype, num_steps: int = 2) -> Launch:
    """One sequence whose steps may be there or not, or branches that begin with the states of others.

    The first step is a kernel of its own; of more than one, the table has what the others are.
    """
    weight = torch.empty(4 * model.hidden_size, model.hidden_size, dtype=dtype, device="meta")
    given, state = weight.new_empty(1, num_rows, num_steps, weight.shape[0]), weight.new_empty(1, 1, 2, weight.shape[1])
    tensors = given, weight, weight.new_empty(weight.shape[0]), state
    if num_rows == 1:
        return _launch(lstm_recurrence, *tensors, first=_int32(1), counts=_int32(1))
    return _launch(lstm_recurrence, *tensors, torch.empty(num_rows, dtype=torch.int64, device="meta"))


def _lm_head_topk(
    model: ModelShape,
    num_rows: int,
    dtype: torch.dtype,
    *,
    num_heads: int,
    k: int,
    rank: int | None = None,
    has_bias: bool = False,
) -> Launch:
    x = torch.empty(num_heads, num_rows, model.hidden_size, dtype=dtype, device="meta")
    weight = x.new_empty(num_heads, model.vocab_size, rank or model.hidden_size)
    down = x.new_empty(num_heads, rank, model.hidden_size) if rank else None
    bias = weight.new_empty(weight.shape[:2]) if has_bias else None
    return _launch(lm_head_topk, x, weight, k=k, down=down, bias=bias)
