"""A small call of every op, by its name."""

import ast
import importlib
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


KERNELS = Path(__file__).resolve().parents[2] / "kernels"


CHAIN = [[-1, 0, 1, 2]]


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


def rand(*shape):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def tree_call(*floats, **keywords):
    """A batch of two chains of four nodes, for the acceptance rules."""
    limits = {"max_depth": 3, "budget": int32([3, 0]), "stop_tokens": int32([4])}
    return (int32([[1, 2, 3, 4], [4, 3, 2, 1]]), int32(CHAIN), *floats), limits | keywords


SAMPLING = {"seed": 3, "temperature": 0.7, "top_k": 4, "repetition_penalty": 1.2}


def calls():
    """A call of every op, as (positional, keyword) arguments."""
    q, k = rand(2, 3, 4, 16), rand(2, 3, 2, 16)
    cache, lengths, logits = rand(2, 2, 2, 8, 2, 16), int32([5, 2]), rand(2, 4, 9)
    level = int32([[[1, 2], [3, 4]]] * 2), -rand(2, 2, 2).abs(), -rand(2, 2).abs()
    pool_parent, root = int32([[-1, 0]] * 2), int32([7, 8])
    words = int32([[[1], [3], [5]]])
    path, slots = int32([[0, 2, -1], [0, 1, 2]]), int32([[5, 6, 7], [2, -1, 3]])
    uniform = torch.tensor([[0.1, 0.4, 0.6, 0.9]] * 2, device=DEVICE)
    parents, seeds = int32([[-1, 0, 0, 1]]), torch.tensor([3, -5], device=DEVICE)
    accept_rejection = tree_call(
        logits, rand(2, 3, 9), int32([0, 1, 2, -1]), uniform, uniform[:, 0].contiguous(), replacement=True
    )
    accept_traversal = tree_call(
        logits, rand(2, 3, 9), int32([0, 1, 2, -1]), uniform, uniform[:, 0].contiguous(),
        int32([3, 2, 1, 0]), int32([[1], [2], [3]]),
    )  # fmt: skip
    return {
        "accept_greedy": tree_call(int32([[2, 3, 5, 6]] * 2)),
        "accept_naive": tree_call(logits, uniform),
        "accept_rejection": accept_rejection,
        "accept_traversal": accept_traversal,
        "accept_typical": tree_call(logits, None, threshold=0.1, alpha=0.3),
        "add_rms_norm": ((rand(3, 8), rand(3, 8), rand(8)), {"eps": 1e-5}),
        "beam_step": (level, {"width": 3, "first_index": 4, "logsumexp": rand(2, 2)}),
        "draft_heads": ((rand(3, 16), rand(2, 16, 16), rand(2, 16)), {}),
        "draft_heads_concat": (([rand(3, 16), rand(3, 16)], rand(16, 32), rand(16), rand(16, 32)), {}),
        "kv_compact": ((cache, lengths, path, int32([1, 2])), {}),
        "lm_head_topk": ((rand(2, 3, 16), rand(1, 20, 16)), {"k": 4}),
        "philox_exponential": ((seeds, seeds[0].clone()), {"stream": 2, "count": 9}),
        "philox_uniform": ((seeds, seeds[0].clone()), {"stream": 2, "count": 9}),
        "rms_norm": ((rand(2, 3, 8), rand(8)), {"eps": 1e-5}),
        "rope_kv_write": ((q, k, k, int32([[0, 1, 1], [3, 4, 4]]), rand(9, 16), slots, cache[0, 0], cache[0, 1]), {}),
        "sample_probs": ((logits, root, int32([1]), int32([[7, 1, 2, 3]] * 2), parents, slots), SAMPLING),
        "sample_race": ((logits, root, int32([1])), {"seed": 3}),
        "skinny_linear": ((rand(3, 16), rand(20, 16)), {}),
        "swiglu": ((rand(2, 3, 8),), {}),
        "tree_attention": ((q[:1], cache[0, 0, :1], cache[0, 1, :1], lengths[:1], words), {"scale": 0.25}),
        "tree_expand": ((level[0], root, lengths, int32([-1, 0, 1]), int32([-1, 1, 0]), int32([0, 1, 2])), {}),
        "tree_rerank": ((level[0], level[1], pool_parent, root), {"num_nodes": 40, "max_depth": 2}),
        "warp_logits": ((logits,), {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.05}),
    }


CALLS = calls()


def copy_of(value):
    """A copy of an argument that keeps its strides."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [copy_of(item) for item in value] if isinstance(value, list) else value


def call_of(name):
    """Copies of the arguments of an op's call."""
    args, kwargs = CALLS[name]
    return tuple(map(copy_of, args)), {key: copy_of(value) for key, value in kwargs.items()}
