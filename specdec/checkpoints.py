"""From a name, a path or a model to a drafter; and drafters to folders.

A folder of ours holds `specdec.json` (its kind), `model.safetensors` and, if one was chosen, `tree.json`. A folder
with a transformers `config.json` that names a causal LM is a draft model. The authors' Medusa-1 files
(`medusa_lm_head.pt` or `.safetensors`) load as they are.
"""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.medusa import Medusa
from specdec.drafters.none import NoDrafter
from specdec.drafters.prompt_lookup import PromptLookup
from specdec.files import replace_folder
from specdec.models.medusa import MedusaHeads
from specdec.models.target import Target
from specdec.trees import TreeLike, TreeShape, as_tree_shape

__all__ = ["DRAFTER_KINDS", "load_drafter", "save_medusa"]

DRAFTER_KINDS = ("none", "prompt_lookup", "medusa", "draft_model")
_WITHOUT_WEIGHTS: dict[str, Callable[..., Drafter]] = {"none": NoDrafter, "prompt_lookup": PromptLookup}
_PUBLISHED_MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_DEFAULT_DRAFT_MODEL_TREE: TreeLike = (4, 2, 2)


def load_drafter(
    source: Drafter | PreTrainedModel | str | os.PathLike[str] | None,
    target: PreTrainedModel | Target,
    *,
    kind: str | None = None,
    tree: TreeLike | None = None,
    **settings: Any,
) -> Drafter:
    """Make a drafter that fits `target`.

    Args:
        source: a kind that needs no weights (`"none"`, `"prompt_lookup"`), a folder, a hub id of a causal LM, a loaded
            causal LM, or None for plain decoding. A `Drafter` is returned as it is.
        target: what it will draft for.
        kind: what `source` holds, when the files do not tell.
        tree: the draft tree, in any of the forms of `specdec.trees.as_tree_shape`.
        settings: settings of the kind, such as prompt_lookup's `max_ngram` and `num_draft_tokens`.

    Raises:
        FileNotFoundError: no such folder, and no kind of that name.
        TypeError, ValueError: settings that the kind does not have, a malformed checkpoint, a drafter that misfits.
    """
    target = target if isinstance(target, Target) else Target(target)
    if isinstance(source, Drafter):
        if tree is not None or settings:
            raise ValueError("tree: expected None with a Drafter object, which has its tree and settings already")
        return source
    if source is None:
        source = "none"
    if isinstance(source, PreTrainedModel):
        return _draft_model(source, tree, settings)
    name = os.fspath(source)
    if name in _WITHOUT_WEIGHTS:
        return _without_weights(name, tree, settings)
    if name in DRAFTER_KINDS:
        raise ValueError(f"drafter: expected a folder with {name} weights, got the kind's name alone")
    path = Path(name)
    kind = kind or _kind_of(path)
    if kind == "medusa":
        return _load_medusa(path, tree, settings)
    if kind != "draft_model":
        raise ValueError(f"kind: expected one of {', '.join(DRAFTER_KINDS)}, got {kind!r}")
    return _draft_model(AutoModelForCausalLM.from_pretrained(name, dtype=target.dtype), tree, settings)


def save_medusa(heads: MedusaHeads, folder: str | os.PathLike[str], *, tree: TreeShape | None = None) -> None:
    """Save heads (and the tree to use with them) to a folder that `load_drafter` reads; replaced in one step."""
    with replace_folder(folder) as staging:
        save_file(heads.to_published(), staging / "model.safetensors")
        record = {"kind": "medusa", "format": 1}
        staging.joinpath("specdec.json").write_text(json.dumps(record, indent=2) + "\n")
        if tree is not None:
            tree.save(staging / "tree.json")


def _without_weights(kind: str, tree: TreeLike | None, settings: dict[str, Any]) -> Drafter:
    if tree is not None and kind == "prompt_lookup":
        shape = as_tree_shape(tree)
        if shape != TreeShape.chain(shape.max_depth):
            raise ValueError(f"tree: expected a chain, which is all that prompt_lookup proposes, got {shape!r}")
        settings = {"num_draft_tokens": shape.max_depth, **settings}
    elif tree is not None:
        raise ValueError("tree: expected None without a drafter, which proposes nothing")
    try:
        return _WITHOUT_WEIGHTS[kind](**settings)
    except TypeError as error:
        raise TypeError(f"drafter: {kind} does not take these settings: {error}") from error


def _draft_model(model: PreTrainedModel, tree: TreeLike | None, settings: dict[str, Any]) -> DraftModel:
    if settings:
        raise TypeError(f"{next(iter(settings))}: draft_model has no such setting")
    return DraftModel(model, as_tree_shape(_DEFAULT_DRAFT_MODEL_TREE if tree is None else tree))


def _kind_of(path: Path) -> str:
    """What a folder holds, by its files."""
    if not path.exists():
        if path.suffix or len(path.parts) != 2:  # a hub id is owner/name
            raise FileNotFoundError(
                f"drafter: expected a kind ({', '.join(_WITHOUT_WEIGHTS)}), a folder or a hub id, got {str(path)!r}"
            )
        return "draft_model"
    if any((path / name).exists() for name in _PUBLISHED_MEDUSA):
        return "medusa"
    record = path / "specdec.json"
    if record.exists():
        try:
            return str(json.loads(record.read_text())["kind"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{record}: expected a JSON object with the key 'kind', got {error!r}") from error
    if (path / "config.json").exists():
        return "draft_model"
    raise FileNotFoundError(
        f"drafter: expected specdec.json, {_PUBLISHED_MEDUSA[0]} or config.json in {path}, got none"
    )


def _load_medusa(path: Path, tree: TreeLike | None, settings: dict[str, Any]) -> Medusa:
    if settings:
        raise TypeError(f"{next(iter(settings))}: medusa has no such setting")
    files = [path / name for name in ("model.safetensors", *_PUBLISHED_MEDUSA) if (path / name).exists()]
    if not files:
        raise FileNotFoundError(f"drafter: expected model.safetensors in {path}, got none")
    heads = MedusaHeads.from_published(_read_tensors(files[0]))
    if tree is None:
        saved = path / "tree.json"
        tree = TreeShape.load(saved) if saved.exists() else _default_medusa_tree(heads.config.num_heads)
    return Medusa(heads, as_tree_shape(tree))


def _default_medusa_tree(num_heads: int) -> TreeShape:
    """The authors' tree of 63 nodes where there are heads for its depth of four, else one of a width per depth."""
    return TreeShape.preset("medusa/mc_sim_7b_63") if num_heads >= 4 else TreeShape.from_k_config((8, 4, 1)[:num_heads])


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, or of a pickle that may hold nothing but tensors."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise ValueError(f"{file}: expected a readable checkpoint, got {error}") from error
