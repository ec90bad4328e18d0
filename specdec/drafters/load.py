"""From a name, a path or a model to a drafter.

What a folder holds is told by its files: a `specdec.json` is ours (`drafter_folder`); the authors' files are known by
the names of their tensors (`specdec.models.published.readers`); any other causal LM is a draft model.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specdec.drafters.draft_model import DraftModel
from specdec.drafters.kinds import (
    DRAFTER_KINDS,
    KINDS_WITHOUT_WEIGHTS,
    NETWORK_KINDS,
    drafter_class,
    network_class,
    settings_of,
)
from specdec.drafting.base import Drafter
from specdec.drafting.folder import RECORD, TREE, WEIGHTS, DrafterRecord, TargetRecord, config_from, embeds_like
from specdec.models.networks.base import DraftNetwork, load_strictly
from specdec.models.published.files import TensorFiles, download, read_config, tensor_files
from specdec.models.published.readers import reader_of, recognise
from specdec.models.target.target import Target
from specdec.trees.dynamic import AnyTreeLike, DynamicTree, as_tree, load_tree
from specdec.trees.shape import TreeShape
from specdec.tuning.budget import read_plan

__all__ = ["DRAFTER_KINDS", "load_drafter"]

logger = logging.getLogger(__name__)

_DEFAULT_DRAFT_MODEL_TREE = (4, 2, 2)


def load_drafter(
    source: Drafter | PreTrainedModel | str | os.PathLike[str] | None,
    target: PreTrainedModel | Target,
    *,
    kind: str | None = None,
    tree: AnyTreeLike | None = None,
    any_target: bool = False,
    **settings: Any,
) -> Drafter:
    """Make a drafter that fits `target`.

    Args:
        source: a kind that needs no weights (`"none"`, `"prompt_lookup"`, ...), a folder or file of weights, a hub id,
            a loaded causal LM, or None for plain decoding. A `Drafter` is returned as it is.
        target: what it will draft for.
        kind: what `source` holds, when the files do not tell.
        tree: the draft tree, in any of the forms of `specdec.trees.dynamic.as_tree`; with `"dynamic"`, for drafters
            that grow trees, the settings `num_nodes` (root counted), `depth` and `top_k` are its limits. `"auto"`
            measures for some seconds which part of the default tree is fastest for one request on this machine, and a
            plan of `specdec tune` is such a choice on file; where no tree is expected to pay, both give plain decoding.
        any_target: load a drafter that was trained for another target of the same sizes.
        settings: settings of the kind, such as prompt_lookup's `max_ngram` and `num_draft_tokens`, and of reading
            the files that others published, such as EAGLE's `tap_layers` and `rope_theta`.

    Raises:
        FileNotFoundError: no such folder or repository, and no kind of that name.
        TypeError: a source of another type, or a setting that the kind does not have.
        ValueError: a malformed checkpoint, or one of another target.
        NotImplementedError: a published file that asks for arithmetic which the kind's network does not have.
    """
    target = target if isinstance(target, Target) else Target(target)
    if isinstance(source, Drafter):
        if tree is not None or settings:
            raise ValueError("tree: expected None with a Drafter object, which has its tree and settings already")
        return source
    if tree == "auto":
        return _tuned(load_drafter(source, target, kind=kind, any_target=any_target, **settings), target)
    if isinstance(tree, str | os.PathLike) and os.path.isfile(tree) and not _is_worth_it(tree):
        return _without_weights("none", None, {})
    if source is None:
        source = "none"
    if isinstance(source, PreTrainedModel):
        return _draft_model(source, tree, settings)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"drafter: expected a Drafter, a causal LM, a kind, a folder or a hub id, got {source!r}")
    name = os.fspath(source)
    if name in KINDS_WITHOUT_WEIGHTS:
        return _without_weights(name, tree, settings)
    path = Path(name)
    if not path.exists():
        if name in DRAFTER_KINDS:
            raise ValueError(f"drafter: expected a folder with {name} weights, got the kind's name alone")
        if path.suffix or len(path.parts) != 2:  # a hub id is owner/name
            raise FileNotFoundError(
                f"drafter: expected a kind ({', '.join(KINDS_WITHOUT_WEIGHTS)}), a folder or a hub id, got {name!r}"
            )
        path = download(name)
    if (path / RECORD).exists():
        return _load_own(path, target, kind, tree, any_target, settings)
    return _load_published(path, target, kind, tree, settings)


def _tuned(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with the part of its tree that is expected to be fastest."""
    from specdec.tuning.measure import tune, with_tree

    if drafter.shape.num_nodes == 1:  # plain decoding
        return drafter
    plan = tune(target, drafter)
    logger.info("tree: %s", plan)
    return with_tree(drafter, plan.tree)


def _is_worth_it(file: str | os.PathLike[str]) -> bool:
    """False for a plan that found plain decoding to be fastest."""
    plan = read_plan(file)
    if plan is None or plan.pays:
        return True
    logger.info("tree: plain decoding, as %s says", os.fspath(file))
    return False


def _without_weights(kind: str, tree: AnyTreeLike | None, settings: dict[str, Any]) -> Drafter:
    """A drafter that is made of settings alone."""
    if tree is not None and kind == "prompt_lookup":
        shape = as_tree(tree)
        if isinstance(shape, DynamicTree) or shape != TreeShape.chain(shape.max_depth):
            raise ValueError(f"tree: expected a chain, which is all that prompt_lookup proposes, got {shape!r}")
        settings = {"num_draft_tokens": shape.max_depth, **settings}
    elif tree is not None and kind == "none":
        raise ValueError("tree: expected None without a drafter, which proposes nothing")
    elif tree is not None:
        raise ValueError(f"tree: expected None with {kind}, whose settings say what it proposes, got {tree!r}")
    _check_settings(kind, settings)
    return drafter_class(kind)(**settings)


def _draft_model(model: PreTrainedModel, tree: AnyTreeLike | None, settings: dict[str, Any]) -> DraftModel:
    _check_settings("draft_model", settings)
    shape = as_tree(_DEFAULT_DRAFT_MODEL_TREE if tree is None else tree)
    if isinstance(shape, DynamicTree):
        raise ValueError(f"tree: expected a static tree with draft_model, which does not grow trees, got {shape}")
    return DraftModel(model, shape, **settings)


def _load_own(
    path: Path,
    target: Target,
    kind: str | None,
    tree: AnyTreeLike | None,
    any_target: bool,
    settings: dict[str, Any],
) -> Drafter:
    """A drafter from a folder of ours."""
    record = DrafterRecord.read(path / RECORD)
    drafter_type = network_class(record.kind)
    if kind is not None and not issubclass(drafter_type, drafter_class(kind)):
        raise ValueError(f"kind: expected {record.kind!r}, which is what {path} holds, got {kind!r}")
    weights = path / WEIGHTS
    if not weights.exists():
        raise FileNotFoundError(f"drafter: expected {WEIGHTS} in {path}, got none")
    config = config_from(drafter_type.network_class.config_class, record.config, source=str(path / RECORD))
    network = drafter_type.network_class(config)
    load_strictly(network, TensorFiles([weights]))
    here = TargetRecord.of(target)
    record.target.check(here, source=str(path), any_target=any_target)
    return _drafter(record.kind, network, path, target, here, tree, settings)


def _load_published(
    path: Path, target: Target, kind: str | None, tree: AnyTreeLike | None, settings: dict[str, Any]
) -> Drafter:
    """A drafter from files that were not written here."""
    config = read_config(path)
    if kind is not None:
        drafter_class(kind)  # an unknown kind is refused before any file is read
    if kind in KINDS_WITHOUT_WEIGHTS:
        raise ValueError(f"kind: expected one that has weights, got {kind!r} for {path}")
    if kind != "draft_model":
        tensors = tensor_files(path)
        kind = recognise(set(tensors), config) if kind is None else kind
        if kind is not None:
            reader = reader_of(kind)
            names = [name for name in reader.settings if name in settings]
            network = reader.read(tensors, config, **{name: settings.pop(name) for name in names})
            # a file of EAGLE may hold either network
            kind = next(name for name in NETWORK_KINDS if network_class(name).network_class is type(network))
            logger.info("checkpoint: read as %s", kind)
            _compare_embedding(network, reader.embedding, tensors, target)
            return _drafter(kind, network, path, target, TargetRecord.of(target), tree, settings)
        if "model_type" not in config:
            shown = ", ".join(sorted(tensors)[:4])
            raise ValueError(
                f"drafter: expected files of one of {', '.join(NETWORK_KINDS)} or a causal LM in {path}, got tensors "
                f"{shown} ...; kind= says which kind they are"
            )
    return _draft_model(_read_causal_lm(path, target), _saved_tree(path) if tree is None else tree, settings)


def _compare_embedding(
    network: DraftNetwork, embedding: str | None, tensors: Mapping[str, torch.Tensor], target: Target
) -> None:
    """See by the embedding in the file, if there is one, whether the drafter was trained for this target."""
    for name in tensors:
        if name.removeprefix("model.") != embedding:
            continue
        if embeds_like(target, tensors[name]):
            network.share_embedding()
            continue
        used = "target's" if getattr(network, "embed_tokens", None) is None else "file's"
        logger.warning(
            "%s: differs from the target's embedding; the %s is used. Either the drafter has an embedding of its own, "
            "or it was trained for another base model or revision (such as Vicuna v1.3 for v1.5) and will guess badly",
            name,
            used,
        )


def _read_causal_lm(path: Path, target: Target) -> PreTrainedModel:
    """A draft model, all of whose tensors must be in the files."""
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"drafter: expected config.json of a causal LM in {path}, got none")
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # what it would report raises an error below
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype, output_loading_info=True)
    finally:
        transformers_logging.set_verbosity(verbosity)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in loaded.get(problem) or ())
        if names:
            what = problem.removesuffix("_keys")
            raise ValueError(f"checkpoint: {what} tensors {names[:5]} of {type(model).__name__} in {path}")
    return model.eval()


def _drafter(
    kind: str,
    network: DraftNetwork,
    path: Path,
    target: Target,
    record: TargetRecord,
    tree: AnyTreeLike | None,
    settings: dict[str, Any],
) -> Drafter:
    """A drafter around a network that was read from `path`."""
    drafter_type = network_class(kind)
    if tree == "dynamic":
        tree = _dynamic_tree(settings)
    elif tree is None:
        tree = _saved_tree(path) or drafter_type.default_tree(network.config)
    _check_settings(kind, settings)
    network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
    shape = as_tree(tree)
    if isinstance(shape, DynamicTree) and not drafter_type.grows_trees:
        raise ValueError(f"tree: expected a static tree with {kind}, which does not grow trees, got {shape}")
    drafter = drafter_type(network.to(target.dtype).eval(), shape, **settings)
    drafter.target_record = record
    return drafter


def _saved_tree(path: Path) -> TreeShape | DynamicTree | None:
    """The tree that was saved beside the weights."""
    file = path / TREE
    return load_tree(file) if file.exists() else None


def _dynamic_tree(settings: dict[str, Any]) -> DynamicTree:
    """The limits of a dynamic tree, taken out of `settings`."""
    names = [field.name for field in fields(DynamicTree) if field.name in settings]
    return DynamicTree(**{name: settings.pop(name) for name in names})


def _check_settings(kind: str, settings: dict[str, Any]) -> None:
    """Raise TypeError for a setting that the kind does not have."""
    known = settings_of(kind)
    for name in settings:
        if name not in known:
            raise TypeError(f"{name}: {kind} has no such setting; it has {', '.join(known) or 'none'}")
