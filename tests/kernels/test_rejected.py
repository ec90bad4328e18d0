"""Wrong arguments of every op but the acceptance rules', which are in test_accept.py: refused, and named.

Another dtype, device or last stride, and what is no tensor, is tried on every tensor in test_check.py.
"""

import re

import pytest

from lib.op_calls import LAUNCHERS, arguments_of
from lib.tensors import int32


def none(_):
    return None


def one(items):
    return items[:1]


def nothing(tensor):
    return tensor[..., :0]


# how the arguments of an op's small call are changed, the error, and how its message begins
REJECTED = {
    "commit_pairs": [
        ({"features_": lambda t: t[0]}, ValueError, "features_: expected shape [any, any, any], got [6, 16]"),
        ({"features_": lambda t: t.int()}, TypeError, "features_: expected torch.float32 or torch.float16"),
        ({"tokens_": lambda t: t.long()}, TypeError, "tokens_: expected torch.int32, got torch.int64"),
        ({"tokens_": lambda t: t[:, :5]}, ValueError, "tokens_: expected shape [3, 6], got [3, 5]"),
        ({"counts_": one}, ValueError, "counts_: expected shape [3], got [1]"),
        ({"last_": lambda t: t.int()}, TypeError, "last_: expected torch.int64, got torch.int32"),
        ({"states": lambda t: t[..., :5]}, ValueError, "states: expected shape [3, any, 16], got [3, 7, 5]"),
        ({"states": lambda t: t.half()}, TypeError, "states: expected torch.float32, got torch.float16"),
        ({"path": lambda t: t[0]}, ValueError, "path: expected shape [3, any], got [4]"),
        ({"path": lambda t: t.repeat(1, 2)}, ValueError, "path: expected at most 4 nodes beside keep=2, got 8"),
        ({"path": lambda t: t[:, :2]}, ValueError, "emitted: expected shape [3, 2], got [3, 4]"),
        ({"emitted": one}, ValueError, "emitted: expected shape [3, 4], got [1, 4]"),
        ({"num_accepted": lambda t: t[:, None]}, ValueError, "num_accepted: expected shape [3], got [3, 1]"),
        ({"keep": lambda _: 6}, ValueError, "keep: expected 0 to 5, fewer than there are places, got 6"),
        ({"keep": lambda _: -1}, ValueError, "keep: expected 0 to 5, fewer than there are places, got -1"),
    ],
    "draft_heads": [
        ({"x": lambda t: t[0, 0]}, ValueError, "x: expected shape [2, any, 16], got [16]"),
        ({"x": lambda t: t[0, :, :5]}, ValueError, "x: expected shape [any, 16], got [3, 5]"),
        ({"x": lambda t: t[..., :5]}, ValueError, "x: expected shape [2, any, 16], got [2, 3, 5]"),
        ({"x": one}, ValueError, "x: expected shape [2, any, 16], got [1, 3, 16]"),
        ({"x": lambda t: t.half()}, TypeError, "x: expected torch.float32, got torch.float16"),
        ({"weight": lambda t: t[..., :5]}, ValueError, "weight: expected shape [2, 16, 16], got [2, 16, 5]"),
        ({"weight": lambda t: t.int()}, TypeError, "weight: expected torch.float32 or torch.float16"),
        ({"bias": one}, ValueError, "bias: expected shape [2, 16], got [1, 16]"),
    ],
    "draft_heads_concat": [
        ({"parts": lambda _: []}, ValueError, "parts: expected 1 to 16 tensors, got 0"),
        ({"parts": lambda t: t * 9}, ValueError, "parts: expected 1 to 16 tensors, got 18"),
        ({"parts": lambda t: [t[0], t[1][:2]]}, ValueError, "parts[1]: expected shape [3, 70], got [2, 70]"),
        ({"parts": lambda t: [t[0], t[1].half()]}, TypeError, "parts[1]: expected torch.float32, got torch.float16"),
        ({"weight": lambda t: t[:, :70]}, ValueError, "weight: expected shape [70, 140], got [70, 70]"),
        ({"bias": lambda t: t[:9]}, ValueError, "bias: expected shape [70], got [9]"),
        ({"residual_weight": lambda t: t.mT.contiguous()}, ValueError, "residual_weight: expected shape [70, 140]"),
        ({"residual_bias": lambda t: t[:4]}, ValueError, "residual_bias: expected shape [70], got [4]"),
        ({"residual_weight": none}, ValueError, "residual_weight: expected a tensor for 2 parts, got None"),
        ({"parts": one, "weight": lambda t: t[:, :70], "residual_weight": none}, ValueError, "residual_bias: expected"),
    ],
    "emit_step": [
        ({"num_accepted": lambda t: t[:, None]}, ValueError, "num_accepted: expected shape [any], got [3, 1]"),
        ({"emitted": one}, ValueError, "emitted: expected shape [3, any], got [1, 4]"),
        ({"deepest": lambda t: t.repeat(2)}, ValueError, "deepest: expected 3 rows or 1, got shape [2]"),
        ({"has_nan": lambda t: t.int()}, TypeError, "has_nan: expected torch.bool, got torch.int32"),
        ({"has_nan": one}, ValueError, "has_nan: expected shape [3, any], got [1, 4]"),
        ({"output_": one}, ValueError, "output_: expected shape [3, any], got [1, 12]"),
        ({"num_output_": one}, ValueError, "num_output_: expected shape [3], got [1]"),
        ({"root_": one}, ValueError, "root_: expected shape [3], got [1]"),
        ({"budget_": one}, ValueError, "budget_: expected shape [3], got [1]"),
        ({"lengths_": lambda t: t.long()}, TypeError, "lengths_: expected torch.int32, got torch.int64"),
        ({"progress_": one}, ValueError, "progress_: expected shape [2], got [1]"),
        ({"step_": lambda t: t[None]}, ValueError, "step_: expected shape [], got [1]"),
        ({"steps_": lambda t: t[:, :1]}, ValueError, "steps_: expected shape [any, 2, 3], got [9, 1, 3]"),
        ({"nan_rows_": one}, ValueError, "nan_rows_: expected shape [3], got [1]"),
    ],
    "kv_compact": [
        ({"cache_": lambda t: t.int()}, TypeError, "cache_: expected torch.float16 or torch.bfloat16 or torch.float32"),
        ({"cache_": lambda t: t[0]}, ValueError, "cache_: expected shape [any, 2, any, any, any, any]"),
        ({"cache_": lambda t: t[:, :1]}, ValueError, "cache_: expected shape [any, 2, any, any, any, any]"),
        ({"cache_": lambda t: t.transpose(3, 4)}, ValueError, "cache_: expected stride 16 between heads, got 160"),
        ({"lengths": lambda t: t[:2]}, ValueError, "lengths: expected shape [3], got [2]"),
        ({"path": one}, ValueError, "path: expected shape [3, any], got [1, 4]"),
        ({"num_accepted": lambda t: t[:, None]}, ValueError, "num_accepted: expected shape [3], got [3, 1]"),
    ],
    "lstm_recurrence": [
        ({"weight": lambda t: t[:, :5]}, ValueError, "weight: expected shape [20, 5], got [280, 5]"),
        ({"given": lambda t: t[:, 0]}, ValueError, "given: expected shape [any, any, any, 280], got [3, 2, 280]"),
        ({"given": lambda t: t[:, :, :0]}, ValueError, "given: expected at least one step, got none"),
        ({"given": lambda t: t.half()}, TypeError, "given: expected torch.float32, got torch.float16"),
        ({"bias": lambda t: t[:70]}, ValueError, "bias: expected shape [280], got [70]"),
        ({"state": one}, ValueError, "state: expected shape [3, any, 2, 70], got [1, 4, 2, 70]"),
        (
            {"state": lambda t: t[:, :2], "source": none},
            ValueError,
            "state: expected shape [3, 4, 2, 70], got [3, 2, 2, 70]",
        ),
        ({"source": lambda t: t[:1]}, ValueError, "source: expected shape [4], got [1]"),
        ({"state": none}, ValueError, "source: expected None without state, got a tensor"),
        ({"counts": lambda t: t[:2]}, ValueError, "counts: expected shape [3], got [2]"),
        ({"counts": lambda t: t.float()}, TypeError, "counts: expected torch.int32 or torch.int64, got torch.float32"),
    ],
    "philox_uniform": [
        ({"seeds": lambda t: t[:, None]}, ValueError, "seeds: expected shape [any], got [3, 1]"),
        ({"step": lambda t: t[None]}, ValueError, "step: expected shape [], got [1]"),
        ({"stream": lambda _: -1}, ValueError, "stream: expected 0 to 2**31 - 1, got -1"),
        ({"stream": lambda _: 2**31}, ValueError, "stream: expected 0 to 2**31 - 1, got 2147483648"),
        ({"count": lambda _: -1}, ValueError, "count: expected 0 to 2**31 - 1, got -1"),
        ({"count": lambda _: 2**31}, ValueError, "count: expected 0 to 2**31 - 1, got 2147483648"),
    ],
    "rms_norm": [
        ({"x": nothing}, ValueError, "x: expected a last dimension of 1 to 32768, got shape [3, 4, 0]"),
    ],
    "add_rms_norm": [
        ({"x": nothing}, ValueError, "x: expected a last dimension of 1 to 32768, got shape [3, 4, 0]"),
        ({"x": lambda t: t[0, 0, 0]}, ValueError, "x: expected a last dimension of 1 to 32768, got shape []"),
        ({"weight": lambda t: t.half()}, TypeError, "weight: expected torch.float32, got torch.float16"),
        ({"weight": lambda t: t[:3]}, ValueError, "weight: expected shape [16], got [3]"),
        ({"residual": one}, ValueError, "residual: expected shape [3, 4, 16], got [1, 4, 16]"),
        ({"residual": lambda t: t.half()}, TypeError, "residual: expected torch.float32, got torch.float16"),
    ],
    "rope_kv_write": [
        ({"q": lambda t: t[..., :15]}, ValueError, "q: expected an even head dimension of 2 to 256, got 15"),
        ({"q": lambda t: t.repeat(1, 1, 1, 17)}, ValueError, "q: expected an even head dimension of 2 to 256, got 272"),
        ({"q": lambda t: t[0]}, ValueError, "q: expected shape [any, any, any, any], got [4, 4, 16]"),
        ({"k": lambda t: t.half()}, TypeError, "k: expected torch.float32, got torch.float16"),
        ({"k": lambda t: t[:, :2]}, ValueError, "k: expected shape [3, 4, any, 16], got [3, 2, 2, 16]"),
        ({"k": lambda t: t[:, :, :0]}, ValueError, "k: expected at least one head, as of q, got 0, and 4 of q"),
        ({"v": lambda t: t[:, :, :1]}, ValueError, "v: expected shape [3, 4, 2, 16], got [3, 4, 1, 16]"),
        ({"cos_sin_table": lambda t: t.half()}, TypeError, "cos_sin_table: expected torch.float32, got torch.float16"),
        ({"cos_sin_table": lambda t: t[:, :8]}, ValueError, "cos_sin_table: expected shape [any, 16], got [9, 8]"),
        ({"cos_sin_table": nothing}, ValueError, "cos_sin_table: expected shape [any, 16], got [9, 0]"),
        ({"cos_sin_table": lambda t: t[:0]}, ValueError, "cos_sin_table: expected at least one position, got none"),
        ({"positions": lambda t: t[:2]}, ValueError, "positions: expected 3 rows or 1, got shape [2, 4]"),
        ({"slots": lambda t: t[:2]}, ValueError, "slots: expected 3 rows or 1, got shape [2, 4]"),
        ({"slots": lambda t: t[:, :2]}, ValueError, "slots: expected shape [any, 4], got [3, 2]"),
        ({"lengths": lambda t: t[:2]}, ValueError, "lengths: expected shape [3], got [2]"),
        ({"lengths": lambda t: t.long()}, TypeError, "lengths: expected torch.int32, got torch.int64"),
        ({"k_cache_": lambda t: t[:, :, :1]}, ValueError, "k_cache_: expected shape [3, any, 2, 16]"),
        ({"v_cache_": lambda t: t[:, :4]}, ValueError, "v_cache_: expected shape [3, 9, 2, 16], got [3, 4, 2, 16]"),
    ],
    "sample_probs": [
        ({"logits": lambda t: t[0]}, ValueError, "logits: expected shape [any, any, any], got [4, 9]"),
        ({"tokens": none}, ValueError, "parent: expected None, as tokens, got the other"),
        ({"parent": none}, ValueError, "parent: expected a tensor, as tokens, got the other"),
        ({"parent": lambda t: t[:2]}, ValueError, "parent: expected 3 rows or 1, got shape [2, 4]"),
        ({"tokens": lambda t: t[:, :2]}, ValueError, "tokens: expected shape [3, 4], got [3, 2]"),
        ({"history": lambda t: t.float()}, TypeError, "history: expected torch.int32, got torch.float32"),
        ({"row_ids": lambda t: t[:2]}, ValueError, "row_ids: expected shape [3], got [2]"),
        ({"step": lambda t: t[0]}, ValueError, "step: expected shape [1], got []"),
        ({"seed": lambda _: -1}, ValueError, "seed: expected 0 to 2**63 - 1, got -1"),
        ({"settings": lambda t: t[0]}, ValueError, "settings: expected shape [any, 5], got [5]"),
        ({"settings": lambda t: t[:, :4]}, ValueError, "settings: expected shape [any, 5], got [1, 4]"),
        ({"settings": lambda t: t.repeat(2, 1)}, ValueError, "settings: expected 3 rows or 1, got shape [2, 5]"),
    ],
    "skinny_linear": [
        ({"x": lambda t: t[0, 0]}, ValueError, "x: expected shape [M, K] or [H, M, K] with M <= 128, got [16]"),
        ({"x": lambda t: t.repeat(1, 43, 1)}, ValueError, "x: expected shape [M, K] or [H, M, K] with M <= 128"),
        ({"x": lambda t: t.int()}, TypeError, "x: expected torch.float32 or torch.float16 or torch.bfloat16"),
        ({"weight": lambda t: t[..., :5]}, ValueError, "weight: expected shape [2, any, 16], got [2, 70, 5]"),
        ({"weight": one}, ValueError, "weight: expected shape [2, any, 16], got [1, 70, 16]"),
        ({"x": lambda t: t[0], "weight": one}, ValueError, "weight: expected shape [any, 16], got [1, 70, 16]"),
        ({"weight": lambda t: t.half()}, TypeError, "weight: expected torch.float32, got torch.float16"),
    ],
    "swiglu": [
        ({"gate_up": lambda t: t[..., :5]}, ValueError, "gate_up: expected an even last dimension"),
        ({"gate_up": nothing}, ValueError, "gate_up: expected an even last dimension, got shape [3, 4, 0]"),
        ({"gate_up": lambda t: t[0, 0, 0]}, ValueError, "gate_up: expected an even last dimension, got shape []"),
    ],
    "tree_attention": [
        ({"q": lambda t: t[..., 0]}, ValueError, "q: expected shape [any, any, any, any], got [3, 4, 4]"),
        ({"q": lambda t: t.int()}, TypeError, "q: expected torch.float16 or torch.bfloat16 or torch.float32"),
        ({"q": lambda t: t[:, :, :3]}, ValueError, "q: expected a multiple of the 2 heads of k_cache, got 3 heads"),
        ({"q": lambda t: t.repeat(1, 1, 1, 2)}, ValueError, "k_cache: expected shape [3, any, any, 32]"),
        ({"k_cache": lambda t: t.half()}, TypeError, "k_cache: expected torch.float32, got torch.float16"),
        ({"v_cache": lambda t: t[:, 1:]}, ValueError, "v_cache: expected shape [3, 9, 2, 16], got [3, 8, 2, 16]"),
        ({"lengths": lambda t: t[:2]}, ValueError, "lengths: expected shape [3], got [2]"),
        ({"ancestors": lambda t: t.repeat(1, 1, 2)}, ValueError, "ancestors: expected shape [3, 4, 1], got [3, 4, 2]"),
        ({"ancestors": lambda t: t[0, 0, 0]}, ValueError, "ancestors: expected shape [3, 4, 1], got []"),
        ({"ancestors": lambda t: t.bool()}, TypeError, "ancestors: expected torch.int32, got torch.bool"),
        ({"q": lambda t: t[:, :, :0]}, ValueError, "k_cache: expected at least one head, as of q, got 2, and 0 of q"),
        ({"q": nothing, "k_cache": nothing, "v_cache": nothing}, ValueError, "q: expected a head dimension of 1 to"),
        ({"num_tree_nodes": lambda _: 2}, ValueError, "num_tree_nodes: expected 1 <= N <= num_tree_nodes <= 9, got N"),
        ({"num_tree_nodes": lambda _: 47}, ValueError, "num_tree_nodes: expected 1 <= N <= num_tree_nodes <= 9, got N"),
        ({"window": lambda _: 0}, ValueError, "window: expected at least 1, got 0"),
        ({"window": lambda _: 5}, ValueError, "depth: expected a tensor because window is given, got None"),
        ({"window": lambda _: 5, "depth": lambda _: int32([[0]])}, ValueError, "depth: expected shape [1, 4]"),
    ],
    "tree_expand": [
        ({"candidates": lambda t: t.float()}, TypeError, "candidates: expected torch.int32 or torch.int64"),
        ({"candidates": lambda t: t[0]}, ValueError, "candidates: expected shape [any, any, any], got [2, 4]"),
        ({"lengths": one}, ValueError, "lengths: expected shape [3], got [1]"),
        ({"row": lambda t: t[:0]}, ValueError, "row: expected 1 to 512 nodes, root included, got 0"),
        ({"rank": lambda t: t[:2]}, ValueError, "rank: expected shape [5], got [2]"),
        ({"depth": lambda t: t.float()}, TypeError, "depth: expected torch.int32, got torch.float32"),
    ],
    "tree_grow": [
        ({"tokens": lambda t: t.float()}, TypeError, "tokens: expected torch.int32 or torch.int64, got torch.float32"),
        ({"tokens": lambda t: t[0]}, ValueError, "tokens: expected shape [any, any, any], got [5, 4]"),
        ({"tokens": lambda t: t[:, :0]}, ValueError, "tokens: expected up to 32 positions of up to 16 candidates, at"),
        ({"tokens": lambda t: t.repeat(1, 7, 1)}, ValueError, "tokens: expected up to 32 positions of up to 16"),
        ({"tokens": lambda t: t.repeat(1, 1, 5)}, ValueError, "tokens: expected up to 32 positions of up to 16"),
        ({"logps": lambda t: t[:, :1]}, ValueError, "logps: expected shape [3, 5, 4], got [3, 1, 4]"),
        ({"edges": lambda t: t[:, :1]}, ValueError, "edges: expected shape [3, 4, 4, 4], got [3, 1, 4, 4]"),
        ({"logsumexp": one}, ValueError, "logsumexp: expected shape [3, 5], got [1, 5]"),
        ({"root": one}, ValueError, "root: expected shape [3], got [1]"),
        ({"num_nodes": lambda _: 0}, ValueError, "num_nodes: expected 1 to 512 nodes, root included, got 0"),
    ],
    "learn_chances": [
        ({"tokens": lambda t: t.long()}, TypeError, "tokens: expected torch.int32, got torch.int64"),
        ({"tokens": lambda t: t[0]}, ValueError, "tokens: expected shape [any, any], got [16]"),
        ({"tokens": nothing}, ValueError, "tokens: expected 1 to 512 candidates per request, got 0"),
        ({"tokens": lambda t: t.repeat(1, 33)}, ValueError, "tokens: expected 1 to 512 candidates per request, got"),
        ({"parent": lambda t: t[:, :1]}, ValueError, "parent: expected shape [3, 16], got [3, 1]"),
        ({"cell": one}, ValueError, "cell: expected shape [3, 16], got [1, 16]"),
        ({"member": one}, ValueError, "member: expected shape [16], got [1]"),
        ({"emitted": one}, ValueError, "emitted: expected shape [3, any], got [1, 4]"),
        ({"num_accepted": one}, ValueError, "num_accepted: expected shape [3], got [1]"),
        ({"prior": nothing}, ValueError, "prior: expected 1 to 1024 cells, got 0"),
        ({"prior": lambda t: t.repeat(129)}, ValueError, "prior: expected 1 to 1024 cells, got 1032"),
        ({"num_grades": lambda _: 5}, ValueError, "num_grades: expected a divisor of the 8 cells, got 5"),
        ({"num_grades": lambda _: 0}, ValueError, "num_grades: expected a divisor of the 8 cells, got 0"),
        ({"counts_": lambda t: t[..., :1]}, ValueError, "counts_: expected shape [3, 8, 2], got [3, 8, 1]"),
        ({"totals_": one}, ValueError, "totals_: expected shape [3, 8, 2], got [1, 8, 2]"),
        ({"chance_": lambda t: t[:, :8]}, ValueError, "chance_: expected shape [3, 9], got [3, 8]"),
        ({"agreed_": one}, ValueError, "agreed_: expected shape [3, any], got [1, 2]"),
        ({"agreed_": nothing}, ValueError, "agreed_: expected 1 to 31 drafters, got 0"),
        ({"decay": lambda _: 1.5}, ValueError, "decay: expected 0 to 1, got 1.5"),
        ({"strength": lambda _: 0.0}, ValueError, "strength: expected more than 0, got 0.0"),
    ],
    "tree_merge": [
        ({"tokens": lambda t: t.long()}, TypeError, "tokens: expected torch.int32, got torch.int64"),
        ({"tokens": lambda t: t[0]}, ValueError, "tokens: expected shape [any, any], got [16]"),
        ({"tokens": nothing}, ValueError, "tokens: expected 1 to 512 candidates per request, got 0"),
        ({"tokens": lambda t: t.repeat(1, 33)}, ValueError, "tokens: expected 1 to 512 candidates per request, got"),
        ({"parent": lambda t: t[:, :1]}, ValueError, "parent: expected shape [3, 16], got [3, 1]"),
        ({"chance": lambda t: t.double()}, TypeError, "chance: expected torch.float32, got torch.float64"),
        ({"member": one}, ValueError, "member: expected shape [16], got [1]"),
        ({"root": one}, ValueError, "root: expected shape [3], got [1]"),
        ({"groups": nothing}, ValueError, "groups: expected at least one, got 0"),
        ({"num_nodes": lambda _: 513}, ValueError, "num_nodes: expected 1 to 512 nodes, root included, got 513"),
        ({"num_gains": lambda _: 0}, ValueError, "num_gains: expected 1 or more, got 0"),
        ({"max_depth": lambda _: -1}, ValueError, "max_depth: expected 0 or more, got -1"),
    ],
    "tree_rerank": [
        ({"tokens": lambda t: t.float()}, TypeError, "tokens: expected torch.int32 or torch.int64, got torch.float32"),
        ({"tokens": lambda t: t[0]}, ValueError, "tokens: expected shape [any, any, any], got [2, 4]"),
        ({"tokens": lambda t: t[:, :0]}, ValueError, "tokens: expected 1 to 2048 candidates per request, got shape"),
        ({"tokens": lambda t: t.repeat(1, 1, 257)}, ValueError, "tokens: expected 1 to 2048 candidates per request"),
        ({"logps": lambda t: t[:, :1]}, ValueError, "logps: expected shape [3, 2, 4], got [3, 1, 4]"),
        ({"parent": lambda t: t[:, :1]}, ValueError, "parent: expected shape [3, 2], got [3, 1]"),
        ({"num_nodes": lambda _: 0}, ValueError, "num_nodes: expected 1 to 512 nodes, root included, got 0"),
        ({"max_depth": lambda _: -1}, ValueError, "max_depth: expected 0 or more, got -1"),
    ],
    "beam_step": [
        ({"tokens": lambda t: t.float()}, TypeError, "tokens: expected torch.int32 or torch.int64, got torch.float32"),
        ({"beam_logps": lambda t: t[:, :1]}, ValueError, "beam_logps: expected shape [3, 2], got [3, 1]"),
        ({"logsumexp": lambda _: int32([1])}, TypeError, "logsumexp: expected torch.float32, got torch.int32"),
        ({"width": lambda _: 9}, ValueError, "width: expected 1 to 8, the number of candidates, got 9"),
        ({"width": lambda _: 0}, ValueError, "width: expected 1 to 8, the number of candidates, got 0"),
        ({"first_index": lambda _: -1}, ValueError, "first_index: expected 0 or more, got -1"),
    ],
}
REJECTED["philox_exponential"] = REJECTED["philox_uniform"]


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"), [(name, *case) for name in REJECTED for case in REJECTED[name]]
)
def test_wrong_arguments_are_named(name, changes, error, message):
    arguments = arguments_of(name)
    for argument, change in changes.items():
        arguments[argument] = change(arguments.get(argument))
    with pytest.raises(error, match="^" + re.escape(message)):
        LAUNCHERS[name](**arguments)
