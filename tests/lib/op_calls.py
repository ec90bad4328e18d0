"""Calls of every op by its name: a small one, and a large one that several programs share along every axis.

In both the batch has three rows and nothing else has the size 3, so that the rows of any tensor can be told.
"""

import ast
import importlib
import inspect
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import torch

from lib.laws import draw_tokens, random_logits, traversal_tables
from lib.tensors import DEVICE, float32, int32, int64, rand, randint, randn

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
BATCH = 3


def public_functions(file):
    """Names of a module's functions in its `__all__`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    exported = next(ast.literal_eval(node.value) for node in tree.body if ast.unparse(node).startswith("__all__"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in exported]


def launchers():
    """Every launcher of a kernel by its name."""
    found = {}
    for file in sorted(KERNELS.glob("*.py")):
        if (KERNELS / "reference" / file.name).exists() and file.name != "__init__.py":
            module = importlib.import_module(f"specdec.kernels.{file.stem}")
            found |= {name: getattr(module, name) for name in public_functions(file)}
    return found


LAUNCHERS = launchers()


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call. None is 3: that is the batch."""

    parents: tuple  # of the nodes of a tree
    vocab: int
    warped: int  # tokens of the vocabulary, and nodes, whose logits are processed, which takes long
    judged: int
    width: int  # of a state
    heads: tuple  # of a drafter, () for one weight on its own
    head_dim: int
    lengths: tuple  # of the rows in the cache
    attended: int  # nodes of the tree that attention is asked for
    beams: int  # candidate lists
    tree: int  # nodes of a tree that is put together


SMALL = Sizes((-1, 0, 0, 1), 9, 9, 4, 16, (2,), 16, (5, 2, 0), 4, 2, 5)
LARGE = Sizes((-1, 0, 0, 1, 1, 2, 4), 9000, 4500, 2, 1100, (), 64, (600, 63, 0), 50, 9, 300)


def tree_words(generator, num_nodes):
    """[B, N, W] int32: every node sees itself and some of the nodes before it."""
    seen = torch.rand(BATCH, num_nodes, 32 * -(-num_nodes // 32), generator=generator) < 0.5
    seen = seen.tril(-1) | torch.eye(num_nodes, seen.shape[2], dtype=torch.bool)
    return (seen.unflatten(2, (-1, 32)) * 2 ** torch.arange(32)).sum(-1).int().to(DEVICE)


def lstm_call(generator, num_sequences, width=70):
    """Two steps, of which rows take the first, none and the second, from states that sequences share."""
    given = randn(generator, BATCH, num_sequences, 2, 4 * width)
    weight, bias = randn(generator, 4 * width, width), randn(generator, 4 * width)
    state, source = randn(generator, BATCH, 4, 2, width), randint(generator, 0, 4, num_sequences)
    steps = {"first": int64([0, 0, 1]), "counts": int64([1, 0, 2])}
    return (given, weight, bias), {"state": state, "source": source} | steps


def pairs_of(generator, path, width, *, keep):
    """The call of `commit_pairs` after a step with this path: rows with old pairs, without new ones and full."""
    num_new = path.shape[1]
    features, states = (randn(generator, BATCH, num, width) for num in (num_new + keep, 7))
    pending = features, randint(generator, 0, 9, BATCH, num_new + keep), int32([num_new, 1, 2]), int64([0, 0, 0])
    return (*pending, states, path, path + 1, int32([1, -1, num_new - 1])), {"keep": keep}


def end_of_step(g, n, lengths):
    """Whether any row goes on, or has a NaN, is one number: so the first and the last do; the other is finished."""
    verdict = int32([1, -1, n - 1]), randint(g, 0, 7, BATCH, n), int32([n])
    has_nan = rand(g, BATCH, n) > torch.arange(n, device=DEVICE)
    rows = int32([1, 0, n]), int32([7, 8, 9]), int32([4, 0, 9 + n]), int32(lengths)
    noted = int32([1, -1]), int64([7])[0], randint(g, 0, 9, 9, 2, BATCH), int32([0, 1, 0])
    return *verdict, has_nan, int32([8, 7]), randint(g, 0, 9, BATCH, 3 * n), *rows, *noted


def slots_of(g, num_tokens, device):
    """Where every row's tokens go, one of them nowhere."""
    slots = torch.stack([torch.randperm(7, generator=g)[:num_tokens] for _ in range(BATCH)]).int().to(device)
    slots[1, 1] = -1
    return slots


def lattice_of(g, depth, root):
    """Four candidates of every position, as probable as the one before makes them."""
    tokens, logits = randint(g, 0, 32000, BATCH, depth, 4), -rand(g, BATCH, depth, 4)
    edges = -rand(g, BATCH, depth - 1, 4, 4)
    return (tokens, logits, root), {"num_nodes": 40, "edges": edges, "logsumexp": rand(g, BATCH, depth)}


def pool_calls(g, size, root, *, num_nodes, num_places, num_cells):
    """The calls that take candidates of two drafters.

    Few tokens and few chances, so that many paths and many reaches are equal; a step that emitted some of the same few
    tokens, and a row that has finished.
    """
    order = torch.arange(size, device=DEVICE)
    parent = torch.minimum(randint(g, -1, size, BATCH, size), (order - 1) // 2).int()
    tokens, member = randint(g, 0, 4, BATCH, size), randint(g, 0, 2, size)
    chance, cell = randint(g, 0, 9, BATCH, size) / 8, randint(g, 0, num_cells + 1, BATCH, size)
    verdict = randint(g, 0, 4, BATCH, num_places), int32([1, -1, num_places - 1])
    counts, totals = 9 * rand(g, BATCH, num_cells, 2), randint(g, 0, 99, BATCH, num_cells, 2).float()
    table = rand(g, num_cells), counts, totals, rand(g, BATCH, num_cells + 1), randint(g, 0, 9, BATCH, 2)
    settings = {"num_grades": 4, "decay": 0.9, "strength": 2.5}
    merged = {"num_nodes": num_nodes, "num_gains": 11, "max_depth": 5}
    return {
        "learn_chances": ((tokens, parent, cell, member, *verdict, *table), settings),
        "tree_merge": ((tokens, parent, chance, member, root, int32([0b11, 0b10])), merged),
    }


def calls(sizes):
    """A call of every op, as (positional, keyword) arguments."""
    g = torch.Generator().manual_seed(1)
    n, vocab, width, dim, beams = len(sizes.parents), sizes.vocab, sizes.width, sizes.head_dim, sizes.beams
    parent, draft_row = int32([sizes.parents] * BATCH), [*range(n - 1), -1]
    drafts = random_logits(g, BATCH, n, vocab)
    logits = drafts + randn(g, *drafts.shape)  # near the draft: at every place some tests pass and some do not
    tokens = draw_tokens(g, parent, drafts, draft_row, replacement=False)
    root, uniform, last = tokens[:, 0].contiguous(), rand(g, BATCH, n), rand(g, BATCH)
    rejection = logits, drafts, int32(draft_row), uniform**0.5, last
    # rows with a tight budget, with none left and with plenty
    limits = {"max_depth": n - 1, "budget": int32([2, 0, 9]), "stop_tokens": int32([4, vocab - 1])}
    lengths, names, step = int32(sizes.lengths), int32([5, -9, 77]), int32([7])
    level = randint(g, 0, 32000, BATCH, beams, 4), -rand(g, BATCH, beams, 4), -rand(g, BATCH, beams)
    pool_parent, lm_weight = randint(g, -1, 4, BATCH, beams), randn(g, 2, 16 + width // 4, 16)
    nodes = randint(g, -1, beams, sizes.tree), randint(g, 0, 4, sizes.tree), randint(g, 0, 6, sizes.tree)
    q, k, v = randn(g, BATCH, n, 4, dim), randn(g, BATCH, n, 2, dim), randn(g, BATCH, n, 2, dim)
    slots = slots_of(g, n, q.device)
    cache, kv = randn(g, 2, 2, BATCH, 8 + n, 10, dim), randn(g, 2, BATCH, 9, 2, dim)
    path = int32([[0, 2, 2, 2, 3, 4], [0, 1, 2, 4, 5, 6], [0, 2, 4, 5, 5, 6]])[:, :n].contiguous()
    prefix = randn(g, 2, BATCH, max(sizes.lengths) + sizes.attended, 2, 16)
    asking = randn(g, BATCH, sizes.attended, 4, 16), tree_words(g, sizes.attended)
    states, weight = randn(g, *sizes.heads, BATCH, width), randn(g, *sizes.heads, 70, width)
    heads = randn(g, *(sizes.heads or (1,)), width, width, scale=width**-0.5)
    parts = [randn(g, BATCH, 70) for _ in range(max(2, width // 70 + 1))]
    mixing, bias = randn(g, 2, 70, 70 * len(parts)), randn(g, 2, 70)
    rows = (BATCH,) if sizes is LARGE else (BATCH, n)  # of one dimension they are read where they lie
    history, seeds = randint(g, -1, vocab, BATCH, 5), int64([2**40 + 3, -5, 9])
    warped = [x[:, : sizes.judged].contiguous() for x in (logits[..., : sizes.warped], tokens, parent)]
    # a row of every kind: a filter or two, all that there is, and nothing
    warping = float32([[0.7, 4, 1, 0, 1.2], [0.8, 0, 0.9, 0.05, 1], [1, 0, 1, 0, 1]])
    everything = float32([[0.7, 4, 0.9, 0.05, 1.2]])
    return {
        "accept_greedy": ((tokens, parent, tokens.roll(-1, 1)), limits),
        "accept_naive": ((tokens, parent, logits, uniform), limits),
        "accept_rejection": ((tokens, parent, *rejection), limits | {"replacement": False}),
        "accept_traversal": ((tokens, parent[:1], *rejection, *traversal_tables(sizes.parents)), limits),
        "accept_typical": ((tokens, parent, logits, None), limits | {"threshold": 0.1, "alpha": 0.3}),
        "add_rms_norm": ((randn(g, *rows, width), randn(g, *rows, width), randn(g, width)), {"eps": 1e-5}),
        "beam_step": (level, {"width": beams, "first_index": 4, "logsumexp": rand(g, BATCH, beams)}),
        "commit_pairs": pairs_of(g, path, width, keep=2 * (sizes is SMALL)),
        "draft_heads": ((states, heads, randn(g, *heads.shape[:2])), {}),
        "draft_heads_concat": ((parts, mixing[0], bias[0], mixing[1], bias[1]), {}),
        "emit_step": (end_of_step(g, n, sizes.lengths), {}),
        "kv_compact": ((cache, lengths.clamp(max=2), path, int32([0, path.shape[1] - 1, 2])), {}),
        "lm_head_topk": ((randn(g, 2, BATCH, 16), lm_weight), {"k": 4, "bias": randn(g, *lm_weight.shape[:2])}),
        "lstm_recurrence": lstm_call(g, 2 * beams),
        "philox_exponential": ((seeds, seeds[0].clone()), {"stream": 2, "count": vocab}),
        "philox_uniform": ((seeds, seeds[0].clone()), {"stream": 2, "count": vocab}),
        "rms_norm": ((randn(g, *rows, width), randn(g, width)), {"eps": 1e-5}),
        "rope_kv_write": ((q, k, v, slots.clamp(min=0), rand(g, 9, dim), slots, *kv), {"lengths": int32([1, 0, 2])}),
        "sample_probs": ((warped[0], names, step, everything, *warped[1:], history), {"seed": 3}),
        "sample_race": ((warped[0], names, step), {"seed": 3}),
        "skinny_linear": ((states, weight), {}),
        "swiglu": ((randn(g, *rows, 2 * width),), {}),
        "tree_attention": ((asking[0], *prefix, lengths, asking[1]), {"scale": 0.25}),
        "tree_expand": ((level[0], root, lengths, *nodes), {}),
        "tree_grow": lattice_of(g, beams + 3, root),
        "tree_rerank": ((level[0], level[1], pool_parent, root), {"num_nodes": 40, "max_depth": 2}),
        "warp_logits": ((warped[0], warping, *warped[1:], history), {}),
    } | pool_calls(g, 8 * beams, root, num_nodes=sizes.tree, num_places=n, num_cells=4 * beams)


CALLS, LARGE_CALLS = calls(SMALL), calls(LARGE)


def copy_of(value):
    """A copy of an argument that keeps its strides."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [copy_of(item) for item in value] if isinstance(value, list) else value


def call_of(name, table=CALLS):
    """Copies of the arguments of an op's call."""
    args, kwargs = table[name]
    return tuple(map(copy_of, args)), {key: copy_of(value) for key, value in kwargs.items()}


def arguments_of(name, table=CALLS, **changes):
    """Copies of the arguments of an op's call by their names, changed."""
    args, kwargs = call_of(name, table)
    return {**inspect.signature(LAUNCHERS[name]).bind(*args, **kwargs).arguments, **changes}


def tensors_of(result):
    """The tensors of a result, with None for what is not there."""
    if is_dataclass(result):
        return [getattr(result, field.name) for field in fields(result)]
    return [result] if result is None or isinstance(result, torch.Tensor) else list(result)
