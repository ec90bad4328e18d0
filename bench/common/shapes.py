"""Shapes that benchmarks run at: models, trees, batches and contexts. No benchmark file has literals of its own.

A machine without a GPU gets the tiny shapes only: its times are no claim, they show that the benchmark works.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BATCHES", "CONTEXTS", "LLAMA_2_7B", "LLAMA_3_8B", "MODELS", "TINY", "TREES", "VICUNA_13B", "ModelShape"]
__all__ += ["StepShape", "TreeSize", "matrices", "step_shapes"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a LLaMA-shaped model, by the names of its config.

    Attributes:
        name: name in reports.
        num_layers: decoder layers.
        hidden_size: C.
        intermediate_size: width of the MLP.
        num_heads: HQ, query heads.
        num_kv_heads: HK, key and value heads.
        head_dim: D.
        vocab_size: V.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


LLAMA_2_7B = ModelShape("Llama-2-7B", 32, 4096, 11008, 32, 32, 128, 32000)
LLAMA_3_8B = ModelShape("Llama-3-8B", 32, 4096, 14336, 32, 8, 128, 128256)
VICUNA_13B = ModelShape("Vicuna-13B", 40, 5120, 13824, 40, 40, 128, 32000)
TINY = ModelShape("tiny", 6, 256, 704, 4, 2, 64, 2048)
MODELS = (LLAMA_2_7B, LLAMA_3_8B, VICUNA_13B)


@dataclass(frozen=True, slots=True)
class TreeSize:
    """A regular tree of a given size: the nodes are spread evenly over the depths.

    Attributes:
        num_nodes: N, root included.
        max_depth: largest depth; the root has depth 0.
    """

    num_nodes: int
    max_depth: int

    def __post_init__(self) -> None:
        if not 0 <= self.max_depth < self.num_nodes:
            raise ValueError(f"max_depth: expected 0 to {self.num_nodes - 1}, got {self.max_depth}")
        if self.max_depth == 0 and self.num_nodes > 1:
            raise ValueError(f"max_depth: expected 1 or more for {self.num_nodes} nodes, got 0")

    def levels(self) -> list[list[int]]:
        """Nodes by depth, the root first; a depth that gets one node more comes before one that does not."""
        widths = [1]
        if self.max_depth:
            share, extra = divmod(self.num_nodes - 1, self.max_depth)
            widths += [share + (d < extra) for d in range(self.max_depth)]
        ends = list(itertools.accumulate(widths))
        return [list(range(end - width, end)) for end, width in zip(ends, widths, strict=True)]

    def parents(self) -> list[int]:
        """Parent of every node, -1 for the root; a depth hangs on the one above it in turn."""
        parents = [-1]
        for above, level in itertools.pairwise(self.levels()):
            parents += sorted(above[i % len(above)] for i in range(len(level)))
        return parents

    def parent(self, device: torch.device | str) -> torch.Tensor:
        """[1, N] int32, parent of every node."""
        return torch.tensor([self.parents()], dtype=torch.int32, device=device)

    def depth(self, device: torch.device | str) -> torch.Tensor:
        """[1, N] int32, depth of every node."""
        depths = [d for d, level in enumerate(self.levels()) for _ in level]
        return torch.tensor([depths], dtype=torch.int32, device=device)

    def ancestors(self, device: torch.device | str) -> torch.Tensor:
        """[1, N, W] int32: bit j % 32 of word j // 32 says that a node sees node j; W = ceil(N / 32)."""
        bits = [0] * self.num_nodes
        for node, parent in enumerate(self.parents()):
            bits[node] = 1 << node | (bits[parent] if parent >= 0 else 0)
        num_words = (self.num_nodes + 31) // 32
        words = [[bit >> 32 * w & 0xFFFFFFFF for w in range(num_words)] for bit in bits]
        # bit 31 is the sign of an int32
        return torch.tensor([words], dtype=torch.int64, device=device).to(torch.int32)

    def path(self) -> list[int]:
        """Node ids from the root to the last node, max_depth + 1 of them: the accepted path of a full acceptance."""
        parents, path = self.parents(), [self.num_nodes - 1]
        while path[-1] > 0:
            path.append(parents[path[-1]])
        return path[::-1]


TREES = (TreeSize(1, 0), TreeSize(16, 3), TreeSize(64, 5), TreeSize(128, 6))
BATCHES = (1, 2, 4, 8)
CONTEXTS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class StepShape:
    """One decoding step.

    Attributes:
        model: the target.
        batch: B, requests.
        tree: the draft tree.
        context: tokens in the cache, the same for all requests.
        dtype: of weights, activations and cache.
    """

    model: ModelShape
    batch: int
    tree: TreeSize
    context: int
    dtype: torch.dtype

    def __str__(self) -> str:
        """Name of the benchmark: model, batch, nodes and context."""
        return f"{self.model.name}-b{self.batch}-n{self.tree.num_nodes}-ctx{self.context}"

    def sizes(self, *names: str) -> dict[str, Any]:
        """Some sizes (int) by the names that cost functions have for them; what is not a step's is its model's."""
        own = {"batch": self.batch, "context": self.context, "element_bytes": self.dtype.itemsize}
        own |= {"num_nodes": self.tree.num_nodes, "num_rows": self.batch * self.tree.num_nodes}
        own |= {"max_depth": self.tree.max_depth, "width": self.model.hidden_size}
        return {name: own[name] if name in own else getattr(self.model, name) for name in names}

    def normal(self, generator: torch.Generator, *size: int) -> torch.Tensor:
        """[size] of the step's dtype, normal random numbers on the generator's device."""
        return torch.randn(size, generator=generator, device=generator.device, dtype=self.dtype)

    def random_tokens(self, generator: torch.Generator, *size: int) -> torch.Tensor:
        """[size] int32, random tokens on the generator's device."""
        high = self.model.vocab_size
        return torch.randint(high, size, generator=generator, device=generator.device, dtype=torch.int32)


def step_shapes(
    *,
    models: Sequence[ModelShape] = MODELS,
    batches: Sequence[int] = BATCHES,
    trees: Sequence[TreeSize] = TREES,
    contexts: Sequence[int] = CONTEXTS,
) -> list[StepShape]:
    """All combinations, in bfloat16; without a GPU one tiny shape in float32 instead.

    Args:
        models: targets.
        batches: numbers of requests.
        trees: draft trees.
        contexts: tokens in the cache. An op that does not read the cache passes one.

    Returns:
        The shapes to run on this machine, the most telling first: a run may be cut off.
    """
    if not torch.cuda.is_available():
        return [StepShape(TINY, batch=2, tree=TreeSize(16, 3), context=64, dtype=torch.float32)]
    combinations = itertools.product(models, batches, trees, contexts)
    found = [StepShape(*combination, dtype=torch.bfloat16) for combination in combinations]
    return sorted(found, key=_distance)


def _distance(shape: StepShape) -> int:
    """In how many respects a step differs from the usual one: one request, 64 nodes, 2048 tokens."""
    return (shape.batch != 1) + (shape.tree.num_nodes != 64) + (shape.context != 2048)


def matrices(model: ModelShape) -> dict[str, tuple[int, int]]:
    """Weights of a layer and the LM head by name: outputs, inputs. Fused as a runtime would fuse them."""
    width = model.hidden_size
    return {
        "qkv": ((model.num_heads + 2 * model.num_kv_heads) * model.head_dim, width),
        "o": (width, model.num_heads * model.head_dim),
        "gate_up": (2 * model.intermediate_size, width),
        "down": (width, model.intermediate_size),
        "lm_head": (model.vocab_size, width),
    }
