"""What an op must at least move and compute, by hand from its shapes, and the time that takes at a machine's limits.

Bytes count each input element that the op needs once and each output element once; what stays in registers, shared
memory or the L2 cache (partial results, second reads) is not counted. A multiply-add is two flops.

A function returns the cost of one call; for an op of a layer, of one layer. Sizes are named alike everywhere:

    batch B, num_nodes N, context and max_depth of a step        num_heads HQ, num_kv_heads HK, head_dim D, num_layers L
    num_rows, num_tokens of all leading dimensions               num_heads K of draft heads, num_parts P of their input
    width C, vocab_size V, num_outputs and num_columns           num_lists M of num_candidates M * R in a dynamic tree
    num_draft_laws: nodes that have children                     num_matrices side by side
    element_bytes of weights and states, of the cache, or of a logit
"""

from dataclasses import dataclass

__all__ = ["H200", "Cost", "Machine", "accept_greedy", "accept_naive", "accept_rejection", "accept_traversal"]
__all__ += ["accept_typical", "beam_step", "commit_pairs", "draft_heads", "draft_heads_concat", "emit_step"]
__all__ += ["kv_compact", "learn_chances"]
__all__ += ["lm_head_topk", "lstm_recurrence", "philox_uniform", "rms_norm", "rope_kv_write", "sample_race"]
__all__ += ["skinny_linear", "swiglu"]
__all__ += ["tree_attention", "tree_expand", "tree_grow", "tree_merge", "tree_rerank", "warp_logits"]

_INT32_BYTES = 4
_INT64_BYTES = 8


@dataclass(frozen=True, slots=True)
class Machine:
    """The limits of a machine, as measured on it.

    Attributes:
        name: name of the device.
        bytes_per_s: bytes read and written per second by a large copy.
        flops_per_s: rate of a large bfloat16 matrix product.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float


# one measurement: 1 GiB copy, 8192^3 product of random numbers; the benchmarks measure the device that they run on
H200 = Machine("NVIDIA H200", bytes_per_s=4.3e12, flops_per_s=780e12)


@dataclass(frozen=True, slots=True)
class Cost:
    """Least traffic and arithmetic of one call.

    Attributes:
        num_bytes: bytes read and written.
        num_flops: floating-point operations; 0 for an op on integers.
    """

    num_bytes: int
    num_flops: int = 0

    def roofline_us(self, machine: Machine) -> float:
        """Time in us below which no implementation can come on `machine`."""
        return 1e6 * max(self.num_bytes / machine.bytes_per_s, self.num_flops / machine.flops_per_s)


def tree_attention(
    *,
    batch: int,
    num_nodes: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    context: int,
    element_bytes: int,
    num_tree_nodes: int | None = None,
    shared_tree: bool = True,
) -> Cost:
    """Cost of tree_attention: keys and values of prefix and tree, queries and outputs, lengths and ancestor words.

    Every query is counted against every key of the tree, as a dense tile computes them. `num_nodes` ask; the keys of
    `num_tree_nodes` are in the cache, as many if not given. With `shared_tree` the batch has one set of ancestor words.
    """
    num_tree_nodes = num_nodes if num_tree_nodes is None else num_tree_nodes
    num_keys = context + num_tree_nodes
    cache = 2 * batch * num_keys * num_kv_heads * head_dim * element_bytes
    queries_and_outputs = 2 * batch * num_nodes * num_heads * head_dim * element_bytes
    words = (1 if shared_tree else batch) * num_nodes * ((num_tree_nodes + 31) // 32) * _INT32_BYTES
    return Cost(
        num_bytes=cache + queries_and_outputs + words + batch * _INT32_BYTES,
        num_flops=4 * batch * num_nodes * num_heads * head_dim * num_keys,
    )


def kv_compact(
    *,
    num_moved: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    batch: int,
    path_length: int,
) -> Cost:
    """Cost of kv_compact: every moved node is read and written, K and V, in all layers.

    `num_moved` nodes change their slot, summed over the batch; a node at its own slot does not move. A path has
    `path_length` entries.
    """
    moved = 2 * num_moved * 2 * num_layers * num_kv_heads * head_dim * element_bytes
    return Cost(num_bytes=moved + batch * (path_length + 2) * _INT32_BYTES)


def commit_pairs(*, batch: int, path_length: int, width: int, element_bytes: int) -> Cost:
    """Cost of commit_pairs without pairs to keep: a state per place in and out; the verdict, tokens and counts."""
    num_numbers = 3 * path_length + 2 + 2  # path, tokens in and out, accepted, count, and a place of twice the size
    return Cost(num_bytes=batch * (2 * path_length * width * element_bytes + num_numbers * _INT32_BYTES))


def emit_step(*, batch: int, num_emitted: int, num_places: int, num_stops: int) -> Cost:
    """Cost of emit_step: tokens in and out, four numbers of each request in and out, two noted, a flag of each place.

    `num_emitted` tokens are emitted, summed over the batch; logits were computed at `num_places` of each request.
    None has a NaN, which would be noted.
    """
    tokens = 2 * num_emitted * _INT32_BYTES
    rows = batch * ((1 + 2 * 4 + 2) * _INT32_BYTES + num_places)
    shared = (1 + num_stops + 2 * 2) * _INT32_BYTES + 2 * _INT64_BYTES  # deepest, progress; the step
    return Cost(num_bytes=tokens + rows + shared)


def tree_expand(*, batch: int, num_nodes: int, candidate_bytes: int) -> Cost:
    """Cost of tree_expand: one candidate per node but the root, three tables, root and length; two outputs.

    A candidate has 4 or 8 bytes.
    """
    reads = batch * ((num_nodes - 1) * candidate_bytes + 2 * _INT32_BYTES) + 3 * num_nodes * _INT32_BYTES
    return Cost(num_bytes=reads + 2 * batch * num_nodes * _INT32_BYTES)


def accept_greedy(
    *, batch: int, num_nodes: int, max_depth: int, num_stop_tokens: int = 0, shared_tree: bool = True
) -> Cost:
    """Cost of accept_greedy: tokens, target tokens, parents, budget and stop tokens; the verdict.

    With `shared_tree` the batch has one row of parents.
    """
    reads = 2 * batch * num_nodes + (1 if shared_tree else batch) * num_nodes + batch + num_stop_tokens
    writes = batch * (2 * (max_depth + 1) + 2)
    return Cost(num_bytes=(reads + writes) * _INT32_BYTES)


def rms_norm(*, num_rows: int, width: int, element_bytes: int, residual: bool = False) -> Cost:
    """Cost of rms_norm, or of add_rms_norm with `residual`: every row in and out, the weight once.

    With `residual` the residual stream is added first, and the sum is an output too.
    """
    rows_moved = 4 if residual else 2
    flops_per_element = 5 if residual else 4  # (add,) square, add to the sum, scale, weight
    return Cost(
        num_bytes=(rows_moved * num_rows + 1) * width * element_bytes, num_flops=flops_per_element * num_rows * width
    )


def beam_step(*, batch: int, num_candidates: int, num_lists: int, width: int) -> Cost:
    """Cost of beam_step: all candidates with tokens of 4 bytes, the beam; the next beam and all totals.

    `width` children are chosen; the additions are one per candidate.
    """
    # only the chosen candidates' tokens are needed
    reads = num_candidates + num_lists + width
    writes = num_candidates + 4 * width
    return Cost(num_bytes=batch * (reads + writes) * _INT32_BYTES, num_flops=batch * num_candidates)


def tree_rerank(*, batch: int, num_candidates: int, num_lists: int, num_nodes: int) -> Cost:
    """Cost of tree_rerank: all log-probabilities and parents, the chosen tokens of 4 bytes; the tree."""
    reads = num_candidates + num_lists + num_nodes
    writes = num_nodes * (4 + (num_nodes + 31) // 32) + 1
    return Cost(num_bytes=batch * (reads + writes) * _INT32_BYTES)


def tree_grow(*, batch: int, depth: int, num_ranks: int, num_nodes: int, lattice: bool) -> Cost:
    """Cost of tree_grow: all log-probabilities, sorted as numbers of 8 bytes, which are read again, the tree."""
    num_logps = num_ranks * (1 + (depth - 1) * num_ranks if lattice else depth)
    reads = num_logps + num_nodes
    writes = num_nodes * (4 + (num_nodes + 31) // 32) + 1
    return Cost(num_bytes=batch * (reads + 4 * num_logps + writes) * _INT32_BYTES)


def tree_merge(*, batch: int, num_candidates: int, num_groups: int, num_nodes: int, num_gains: int) -> Cost:
    """Cost of tree_merge: tokens, parents and chances of all candidates, their drafters; the tree, gains of each group.

    Comparisons of each candidate with each are integer operations and not counted.
    """
    reads = batch * (3 * num_candidates + 1) + num_candidates + num_groups
    writes = batch * (num_nodes * (4 + (num_nodes + 31) // 32) + 1 + num_groups * num_gains)
    return Cost(num_bytes=(reads + writes) * _INT32_BYTES)


def learn_chances(*, batch: int, num_candidates: int, num_emitted: int, num_cells: int, num_drafters: int) -> Cost:
    """Cost of learn_chances: candidates, their drafters, a step's tokens; a table in and out, and its chances.

    Ten flops of a cell: two products and sums of counts, two sums of totals, a product, two sums and a quotient.
    """
    pool = batch * (3 * num_candidates + num_emitted + 1) + num_candidates + num_cells
    table = batch * ((2 * 4 + 1) * num_cells + 2 * num_drafters)
    return Cost(num_bytes=(pool + table) * _INT32_BYTES, num_flops=10 * batch * num_cells)


def rope_kv_write(*, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> Cost:
    """Cost of rope_kv_write: q, k and v in, rotated q and the cache slots out, one row of the table per token."""
    moved = 2 * (num_heads + 2 * num_kv_heads) * head_dim * element_bytes
    table = head_dim * element_bytes + 2 * _INT32_BYTES
    return Cost(
        num_bytes=num_tokens * (moved + table), num_flops=3 * num_tokens * (num_heads + num_kv_heads) * head_dim
    )


def swiglu(*, num_rows: int, width: int, element_bytes: int) -> Cost:
    """Cost of swiglu: gate and up in, one row of half the width out.

    `width` is that of an output row. Five flops per element, with the exponential counted as one.
    """
    return Cost(num_bytes=3 * num_rows * width * element_bytes, num_flops=5 * num_rows * width)


def skinny_linear(
    *, num_rows: int, num_outputs: int, num_columns: int, element_bytes: int, num_matrices: int = 1
) -> Cost:
    """Cost of skinny_linear: the weight and the rows in, the products out."""
    elements = num_outputs * num_columns + num_rows * (num_columns + num_outputs)
    return Cost(
        num_bytes=num_matrices * elements * element_bytes,
        num_flops=2 * num_matrices * num_rows * num_outputs * num_columns,
    )


def draft_heads(*, num_heads: int, batch: int, width: int, element_bytes: int, shared_input: bool = True) -> Cost:
    """Cost of draft_heads: weights, biases and states in, states out; bias, SiLU and residual are not counted as flops.

    With `shared_input` all heads have one state.
    """
    states = batch * width * ((1 if shared_input else num_heads) + num_heads)
    weights = num_heads * width * (width + 1)
    return Cost(num_bytes=(states + weights) * element_bytes, num_flops=2 * num_heads * batch * width * width)


def draft_heads_concat(*, num_parts: int, num_rows: int, width: int, element_bytes: int) -> Cost:
    """Cost of draft_heads_concat with a residual weight: both weights and biases and all parts in, one state out."""
    states = num_rows * width * (num_parts + 1)
    weights = 2 * width * (num_parts * width + 1)
    return Cost(num_bytes=(states + weights) * element_bytes, num_flops=4 * num_rows * num_parts * width * width)


def lm_head_topk(
    *,
    num_heads: int,
    batch: int,
    width: int,
    vocab_size: int,
    k: int,
    element_bytes: int,
    rank: int | None = None,
    shared_weight: bool = False,
    has_bias: bool = False,
) -> Cost:
    """Cost of lm_head_topk: weights, biases and states in, the best tokens out.

    `k` tokens per row; low-rank heads have a `rank`; with `shared_weight` all heads have one weight.
    """
    rows, inner = num_heads * batch, width if rank is None else rank
    down = 0 if rank is None else num_heads * rank * width
    weights = (1 if shared_weight else num_heads) * vocab_size * (inner + has_bias) + down
    # values, tokens, log-sum-exp and a flag
    outputs = rows * (8 * k + 5)
    return Cost(
        num_bytes=(weights + rows * width) * element_bytes + outputs,
        num_flops=2 * rows * vocab_size * inner + 2 * batch * down,
    )


def lstm_recurrence(*, num_rows: int, num_steps: int, width: int, element_bytes: int) -> Cost:
    """Cost of lstm_recurrence from given states: the weights once a step, inputs, states and outputs.

    `num_rows` are the sequences of all rows. The nonlinearities are not counted as flops.
    """
    weights = num_steps * 4 * width * width + 4 * width
    moved = num_rows * width * (5 * num_steps + 4)
    return Cost(num_bytes=(weights + moved) * element_bytes, num_flops=8 * num_steps * num_rows * width * width)


def accept_naive(*, batch: int, num_nodes: int, max_depth: int, vocab_size: int, element_bytes: int) -> Cost:
    """Cost of accept_naive: all logits, a uniform per node, and what accept_greedy moves."""
    walk = accept_greedy(batch=batch, num_nodes=num_nodes, max_depth=max_depth)
    num_logits = batch * num_nodes * vocab_size
    # maximum, difference, exp, sum
    return Cost(num_bytes=num_logits * element_bytes + walk.num_bytes, num_flops=4 * num_logits)


def accept_typical(*, batch: int, num_nodes: int, max_depth: int, vocab_size: int, element_bytes: int) -> Cost:
    """Cost of accept_typical: all logits, and what accept_greedy moves, a score per node for a target token."""
    walk = accept_greedy(batch=batch, num_nodes=num_nodes, max_depth=max_depth)
    num_logits = batch * num_nodes * vocab_size
    # as accept_naive, a scale by the temperature, and the moment: a product and a sum
    return Cost(num_bytes=num_logits * element_bytes + walk.num_bytes, num_flops=7 * num_logits)


def accept_rejection(
    *, batch: int, num_nodes: int, num_draft_laws: int, max_depth: int, vocab_size: int, element_bytes: int
) -> Cost:
    """Cost of accept_rejection: both laws of every inner node, the target's of every leaf, and a walk.

    Further passes over laws that are in the cache by then are not counted: how many depends on the rejections.
    """
    walk = accept_greedy(batch=batch, num_nodes=num_nodes, max_depth=max_depth)
    num_logits = batch * (num_nodes + num_draft_laws) * vocab_size
    # as accept_naive; for inner nodes two more exp, a difference, a maximum and two sums
    num_flops = 4 * num_logits + 6 * batch * num_draft_laws * vocab_size
    extra_bytes = (num_nodes + batch) * _INT32_BYTES
    return Cost(num_bytes=num_logits * element_bytes + walk.num_bytes + extra_bytes, num_flops=num_flops)


def accept_traversal(
    *, batch: int, num_nodes: int, num_draft_laws: int, max_depth: int, vocab_size: int, element_bytes: int
) -> Cost:
    """Cost of accept_traversal: both laws of every inner node, the target's of every leaf, two tables, and a walk.

    The passes over both laws of its parent that every node but the root asks for are not counted: by then they are in
    the cache.
    """
    walk = accept_greedy(batch=batch, num_nodes=num_nodes, max_depth=max_depth)
    num_logits = batch * (num_nodes + num_draft_laws) * vocab_size
    # as accept_naive; for every node but the root two more exp, a difference, a maximum and a sum
    num_flops = 4 * num_logits + 5 * batch * (num_nodes - 1) * vocab_size
    extra_bytes = (3 * num_nodes + batch) * _INT32_BYTES
    return Cost(num_bytes=num_logits * element_bytes + walk.num_bytes + extra_bytes, num_flops=num_flops)


def warp_logits(*, batch: int, num_nodes: int, vocab_size: int, element_bytes: int) -> Cost:
    """Cost of warp_logits: all logits in, as many in fp32 out; two passes over the cache are not counted."""
    num_logits = batch * num_nodes * vocab_size
    return Cost(num_bytes=num_logits * (element_bytes + 4), num_flops=num_logits)


def sample_race(*, batch: int, num_nodes: int, vocab_size: int, element_bytes: int) -> Cost:
    """Cost of sample_race: all logits in, a token per node out; the random numbers are integer work."""
    num_logits = batch * num_nodes * vocab_size
    num_bytes = num_logits * element_bytes + (batch * num_nodes + batch + 1) * _INT32_BYTES
    # two logarithms, two differences, a comparison
    return Cost(num_bytes=num_bytes, num_flops=5 * num_logits)


def philox_uniform(*, batch: int, count: int, exponential: bool = False) -> Cost:
    """Cost of philox_uniform, or of philox_exponential with `exponential`: seeds and step in, fp32 numbers out.

    `count` numbers per row. The integer work of the generator, some 20 instructions for a number, is not counted.
    """
    num_numbers = batch * count
    flops_per_number = 4 if exponential else 1  # (add, scale, difference, logarithm), or scale
    return Cost(num_bytes=(batch + 1) * _INT64_BYTES + num_numbers * 4, num_flops=flops_per_number * num_numbers)
