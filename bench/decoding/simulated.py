"""All of the decoding benchmark that is made up: weights of true shapes, and acceptance of a known law.

Random weights: targets and drafters at the sizes that were published, for speed alone. The target's text is a walk:
after token v comes v + 1. Its LM head holds the embedding's rows, moved by one, and the layers, which do all of a real
model's work, add little to the residual stream. So the margin between the first and the second token is wide, and
rounding in bfloat16, which differs between one row and 64 rows, cannot move the text. Weights are random numbers, not
zeros: a GPU's clock depends on the data.

Synthetic acceptance: speeds of drafters for which no trained weights of a size exist. A `SyntheticAcceptance` wraps a
drafter. The drafter does all its work; then the tokens of its tree are replaced, on the device, such that the target
follows one path of the tree to a depth that was drawn from a named profile, and no other node is right. The target
scores the same number of nodes as ever. What is real: the work of drafter, target, acceptance and commit. What is not:
tau. Every figure that comes from it says "synthetic acceptance".
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.bench.common.shapes import ModelShape
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.kinds import KINDS_WITHOUT_WEIGHTS, drafter_class, network_class
from specdec.drafters.weightless.lookahead import Lookahead
from specdec.drafting.base import Drafter, Prompt, Room
from specdec.drafting.candidates import Choose
from specdec.drafting.draft_tree import DraftTree
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.words import pack_words, unpack_words
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

__all__ = [
    "DRAFTERS",
    "PROFILES",
    "AcceptanceProfile",
    "SyntheticAcceptance",
    "leftmost_path",
    "random_drafter",
    "random_target",
]

_SPREAD = 0.02
_LAYERS_SHARE = 0.035  # of _SPREAD: all layers together stay well below the embedding in the residual stream
_LOW_RANK = 128


def _without_weights(kind: str) -> Callable[[Target], Drafter]:
    return lambda _target: drafter_class(kind).from_settings(None)


def random_target(
    shape: ModelShape, *, max_positions: int, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> LlamaForCausalLM:
    """A LLaMA of a true shape whose greedy text counts upwards, from any prompt.

    Args:
        shape: its sizes.
        max_positions: tokens of its context.
        device: where it is built.
        dtype: of all weights.
        seed: of the weights.
    """
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: LlamaForCausalLM = _build(lambda: LlamaForCausalLM(config), device, dtype, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(_LAYERS_SHARE)
        embedding = model.model.embed_tokens.weight
        embedding.normal_()
        model.lm_head.weight.copy_(embedding.roll(1, 0)).mul_(shape.hidden_size**-0.5)
    return model


def random_drafter(name: str, target: Target) -> Drafter:
    """The drafter of a name in `DRAFTERS` for a target, with random weights of the published sizes.

    Raises:
        ValueError: no such name.
    """
    if name not in DRAFTERS:
        raise ValueError(f"drafter: expected one of {', '.join(DRAFTERS)}, got {name!r}")
    return DRAFTERS[name](target)


def _build(make: Callable[[], Any], device: torch.device | str, dtype: torch.dtype, seed: int) -> Any:
    """Build a module where it belongs and fill all its matrices with random numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = make()
    finally:
        torch.set_default_dtype(before)
    if torch.device(device).type != "meta":
        generator = torch.Generator(device=device).manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, _SPREAD, generator=generator)
    return module.to(device=device, dtype=dtype).eval()


def _network(
    kind: str, *, tree: TreeShape | DynamicTree | None = None, sizes: str = "for_target", **settings: Any
) -> Callable[[Target], Drafter]:
    """A maker of a drafter with a network, whose config is that method's of its class with these settings."""

    def make(target: Target) -> Drafter:
        drafter: Any = network_class(kind)
        network = drafter.network_class
        config = getattr(network.config_class, sizes)(target.model.config, **settings)
        built = _build(lambda: network(config), target.device, target.dtype, seed=1)
        found: Drafter = drafter(built, drafter.default_tree(config) if tree is None else tree)
        return found

    return make


def _small_model(target: Target) -> Drafter:
    """A draft model of the sizes of vicuna-68m, in MCSD's tree."""
    wide = target.hidden_size >= 4096
    hidden, heads, inner = (768, 12, 3072) if wide else (max(64, target.hidden_size // 4), 4, target.hidden_size)
    shape = ModelShape("68m", 2, hidden, inner, heads, heads, hidden // heads, target.vocab_size)
    model = random_target(shape, max_positions=target.max_positions, device=target.device, dtype=target.dtype, seed=2)
    return DraftModel(model, TreeShape.from_k_config((4, 2, 2)))


def _eagle3(target: Target, kind: str = "eagle3", **settings: Any) -> Drafter:
    size, last = min(32000, target.vocab_size), target.num_layers - 1
    taps: dict[str, Any] = {} if target.num_layers >= 7 else {"tap_layers": (0, last // 2, last)}
    return _network(kind, draft_vocab_size=size, **taps, **settings)(target)


def _peagle(target: Target) -> Drafter:
    """Of the sizes of the authors' files: four layers, eight tokens a pass, an embedding of its own."""
    return _eagle3(target, "peagle", num_layers=4, num_masks=7, own_embedding=True)


def _block(kind: str, **settings: Any) -> Callable[[Target], Drafter]:
    """Of the sizes of the authors' files: five layers like the target's, five taps."""

    def make(target: Target) -> Drafter:
        taps: dict[str, Any] = {"tap_layers": tuple(range(min(5, target.num_layers)))} if target.num_layers < 8 else {}
        return _network(kind, num_layers=5, **taps, **settings)(target)

    return make


def _low_rank_amphista(target: Target) -> Drafter:
    rank = min(_LOW_RANK, math.ceil(target.hidden_size / 2))
    return _network("amphista", head_rank=rank)(target)


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "medusa": _network("medusa", num_heads=5),
    "eagle": _network("eagle"),
    "hydra++": _network("hydra++", sizes="plus_plus"),
    "mtp": _network("mtp"),
    "parallelspec": _network("parallelspec"),
    "peagle": _peagle,
    "dflash": _block("dflash"),
    "dspark": _block("dspark", block_size=7),
    "amphista_low_rank": _low_rank_amphista,
    "falcon": _network("falcon"),
    "eagle2": _network("eagle", tree=DynamicTree()),
    "eagle3": _eagle3,
    "amphista": _network("amphista"),
    "hydra": _network("hydra"),
    "parallelspec_medusa": _network("parallelspec", variant="medusa"),
    "draft_model": _small_model,
    **{kind: _without_weights(kind) for kind in KINDS_WITHOUT_WEIGHTS if kind != "none"},
}
"""Makers of drafters by name, the most telling first."""


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """A law of how deep the target follows a tree.

    Attributes:
        name: name in reports.
        acceptance_at_depth: entry d - 1 is the probability that a node at depth d is accepted, given that one at
            depth d - 1 was; the last entry holds for all further depths.
    """

    name: str
    acceptance_at_depth: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.acceptance_at_depth or not all(0 <= p <= 1 for p in self.acceptance_at_depth):
            raise ValueError(
                f"acceptance_at_depth: expected at least one probability, each from 0 to 1, "
                f"got {self.acceptance_at_depth}"
            )

    def at(self, max_depth: int) -> np.ndarray:
        """[max_depth] float64, the probability of every depth from 1 on."""
        given = self.acceptance_at_depth[:max_depth]
        return np.array([*given, *[self.acceptance_at_depth[-1]] * (max_depth - len(given))])

    def tau(self, max_depth: int) -> float:
        """Acceptance length of a long text with paths of this depth."""
        return 1.0 + float(np.cumprod(self.at(max_depth)).sum())

    def depths(self, batch_size: int, num_places: int, max_depth: int, seed: int) -> np.ndarray:
        """[batch_size, num_places] int64, independent depths: how far a step that begins at a place gets."""
        uniform = np.random.default_rng(seed).random((batch_size, num_places, max_depth))
        return (uniform < self.at(max_depth)).cumprod(-1).sum(-1).astype(np.int64)


PROFILES = {
    profile.name: profile
    for profile in (
        AcceptanceProfile("steady-75", (0.75,)),  # a drafter that continues its own guesses, such as EAGLE
        AcceptanceProfile("fading-75", (0.75, 0.6, 0.5, 0.4)),  # independent heads, such as Medusa's
        AcceptanceProfile("never", (0.0,)),
        AcceptanceProfile("always", (1.0,)),
    )
}


class SyntheticAcceptance(Drafter):
    """A drafter at work, whose proposals are replaced by ones of a known acceptance.

    Args:
        drafter: what does the work.
        continuation: [B, T] tokens that plain decoding emits after the prompts, first token included.
        profile: how deep the target follows.
        seed: of the depths; the depth of a step depends on its row and on how much text there is, on nothing else.
    """

    kind: ClassVar[str] = "synthetic"

    def __init__(
        self, drafter: Drafter, continuation: torch.Tensor, profile: AcceptanceProfile, *, seed: int = 0
    ) -> None:
        self.drafter = drafter
        self.shape = drafter.shape
        self.profile = profile
        self.kind = drafter.kind  # type: ignore[misc]  # errors name the drafter
        self._path = leftmost_path(_paths_of(drafter)) if isinstance(drafter.shape, TreeShape) else None
        self.planted_depth = drafter.shape.max_depth if self._path is None else len(self._path) - 1
        depths = profile.depths(continuation.shape[0], continuation.shape[1], self.planted_depth, seed)
        self._continuation = continuation.int()
        self._depths = torch.from_numpy(depths)

    def bind(self, target: Target) -> None:
        """Bind the drafter and place the tables on its device."""
        self.drafter.bind(target)
        self._vocab_size = target.vocab_size
        self._continuation = self._continuation.to(target.device)
        self._depths = self._depths.to(target.device)
        if self._path is not None:
            num_nodes = self.shape.num_nodes
            on_path = torch.zeros(num_nodes, dtype=torch.bool)
            on_path[self._path] = True
            parent = torch.full((num_nodes,), -1, dtype=torch.int32)
            parent[self._path[1:]] = torch.tensor(self._path[:-1], dtype=torch.int32)
            seen = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
            for depth, node in enumerate(self._path):
                seen[node, self._path[: depth + 1]] = True
            self._on_path, self._parent = on_path.to(target.device)[None], parent.to(target.device)[None]
            self._ancestors = pack_words(seen).to(target.device)[None]

    def session(self) -> AbstractContextManager[None]:
        """The drafter's."""
        return self.drafter.session()

    def allocate(self, room: Room, device: torch.device) -> None:
        """The drafter's state, and the tables for the rows that a captured step pads the batch with."""
        self.drafter = self.drafter.copy_for(room, device)  # whoever copied this one must not share its state
        self._place = torch.zeros(room.batch_size, dtype=torch.int64, device=device)  # emitted tokens before the root
        self._row_continuation = _with_rows(self._continuation, room.batch_size)
        self._row_depths = _with_rows(self._depths, room.batch_size)

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Start the drafter."""
        self._place.zero_()
        self.drafter.start(prompt, output)

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """The drafter's tree with other tokens."""
        tree = self.drafter.draft(root, choose)
        place = self._place[:, None]
        last = self._row_continuation.shape[1] - 1
        true = self._row_continuation.gather(1, (place + tree.depth).clamp(max=last))
        wanted = self._row_depths.gather(1, place.clamp(max=last))
        parent, ancestors = tree.parent, tree.ancestors
        if self._path is not None:
            # a drafter that found nothing to propose leaves its nodes without a parent
            parent = torch.where(self._on_path, self._parent, parent)
            ancestors = torch.where(self._on_path[:, :, None], self._ancestors, ancestors)
            on_path = self._on_path
        else:
            on_path = _path_to_the_deepest(tree)
        wrong = torch.where(tree.tokens == true, (true + 1) % self._vocab_size, tree.tokens)
        tokens = torch.where(on_path & (tree.depth <= wanted), true, wrong)
        tokens = torch.where(tree.depth == 0, tree.tokens, tokens)
        deepest = tree.deepest.clamp(min=self.planted_depth) if self._path is not None else tree.deepest
        return replace(tree, tokens=tokens, parent=parent, ancestors=ancestors, deepest=deepest)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """The drafter learns what was accepted."""
        self.drafter.commit(verdict, output)
        self._place += verdict.num_emitted


def _with_rows(table: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The table with its last row repeated up to `num_rows`."""
    return torch.cat((table, table[-1:].expand(max(0, num_rows - table.shape[0]), -1)))


def leftmost_path(paths: Sequence[tuple[int, ...]]) -> list[int]:
    """Nodes from the root down along the first children, of a tree whose nodes have these rank paths."""
    found = [paths.index(())]
    while below := [path for path in paths if path and path[:-1] == paths[found[-1]]]:
        found.append(paths.index(min(below)))
    return found


def _paths_of(drafter: Drafter) -> Sequence[tuple[int, ...]]:
    """The rank path of every node of a static tree, in the order in which its drafter proposes them."""
    if isinstance(drafter, Lookahead):
        return drafter.paths
    assert isinstance(drafter.shape, TreeShape)
    return drafter.shape.rank_paths


def _path_to_the_deepest(tree: DraftTree) -> torch.Tensor:
    """[B, N] bool: the first of each row's deepest nodes, and what is above it."""
    depth = torch.where(tree.parent >= 0, tree.depth, -1)
    deepest = depth.argmax(1)
    ancestors = tree.ancestors.expand(depth.shape[0], -1, -1)
    words = ancestors.gather(1, deepest[:, None, None].expand(-1, 1, ancestors.shape[2]))[:, 0]
    return unpack_words(words, depth.shape[1])
