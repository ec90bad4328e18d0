"""From a name, a path or a model to a drafter.

What a folder holds is told by its files: a `specdec.json` is ours (`drafter_folder`); the authors' files are known by
the names of their tensors (`specdec.models.published.readers`); any other causal LM is a draft model.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specdec.bundled.load import NAMED_MODELS, bundled_drafter
from specdec.common.defaults import torch_defaults
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.kinds import (
    DRAFTER_KINDS,
    KINDS_WITHIN_TARGETS,
    KINDS_WITHOUT_WEIGHTS,
    NETWORK_KINDS,
    drafter_class,
    network_class,
    settings_of,
)
from specdec.drafters.weightless.none import NoDrafter
from specdec.drafting.base import Drafter
from specdec.drafting.folder import (
    RECORD,
    TREE,
    WEIGHTS,
    DrafterRecord,
    TargetRecord,
    config_from,
    embeds_like,
    heads_like,
)
from specdec.models.networks.base import DraftNetwork, load_strictly
from specdec.models.published.files import TensorFiles, download, read_config, tensor_files
from specdec.models.published.readers import reader_of, recognise
from specdec.models.target.target import Target
from specdec.trees.dynamic import GROWN_PRESETS, AnyTreeLike, DynamicTree, as_tree, load_tree
from specdec.trees.plan import read_plan
from specdec.trees.shape import TreeShape

__all__ = ["DRAFTER_KINDS", "load_drafter"]

logger = logging.getLogger(__name__)


@torch_defaults()
def load_drafter(
    source: Drafter | PreTrainedModel | str | os.PathLike[str] | None,
    target: PreTrainedModel | Target,
    *,
    kind: str | None = None,
    tree: AnyTreeLike | None = None,
    any_target: bool = False,
    **settings: Any,
) -> Drafter:
    """As the public `specdec.load_drafter` (`specdec.tuning.auto`), without `tree="auto"`: nothing is measured here."""
    target = target if isinstance(target, Target) else Target(target)
    if isinstance(source, Drafter):
        if tree is not None or settings:
            raise ValueError("tree: expected None with a Drafter object, which has its tree and settings already")
        return source
    if isinstance(tree, str | os.PathLike) and os.path.isfile(tree) and not _is_worth_it(tree):
        return NoDrafter()
    if source is None:
        source = "none"
    if isinstance(source, PreTrainedModel):
        return _draft_model(source, tree, settings)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"drafter: expected a Drafter, a causal LM, a kind, a folder or a hub id, got {source!r}")
    name = os.fspath(source)
    if name in KINDS_WITHOUT_WEIGHTS:
        _check_settings(name, settings)
        return drafter_class(name).from_settings(tree, **settings)
    if name in KINDS_WITHIN_TARGETS and not Path(name).exists():
        kind, name = name, _where_from(target)
    path = Path(name)
    if not path.exists():
        if name in DRAFTER_KINDS:
            raise ValueError(f"drafter: expected a folder with {name} weights, got the kind's name alone")
        if path.suffix or len(path.parts) != 2:  # a hub id is owner/name
            raise FileNotFoundError(
                f"drafter: expected a kind ({', '.join(KINDS_WITHOUT_WEIGHTS)}), a folder or a hub id, got {name!r}"
            )
        is_bundled = path.parts[0] in NAMED_MODELS
        path = bundled_drafter(*path.parts) if is_bundled else download(name)
    if (path / RECORD).exists():
        return _load_own(path, target, kind, tree, any_target, settings)
    return _load_published(path, target, kind, tree, settings)


def _where_from(target: Target) -> str:
    """The folder or hub id that the target's files came from."""
    name = str(getattr(target.model, "name_or_path", "") or "")
    if not name:
        raise ValueError(
            "drafter: expected the folder or hub id of the target's files, load_drafter(folder, model, kind='mtp'), as "
            "this model was not loaded from any"
        )
    return name


def _is_worth_it(file: str | os.PathLike[str]) -> bool:
    """False for a plan that found plain decoding to be fastest."""
    plan = read_plan(file)
    if plan is None or plan.pays:
        return True
    logger.info("tree: plain decoding, as %s says", os.fspath(file))
    return False


def _draft_model(model: PreTrainedModel, tree: AnyTreeLike | None, settings: dict[str, Any]) -> DraftModel:
    _check_settings("draft_model", settings)
    shape = as_tree(DraftModel.default_tree if tree is None else tree)
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
            known = {"vocab_size": target.vocab_size, "num_target_layers": target.num_layers, **settings}
            given = {name: known[name] for name in reader.settings if name in known}
            settings = {name: value for name, value in settings.items() if name not in given}
            network = reader.read(tensors, config, **given)
            # a file of EAGLE may hold either network
            kind = next(name for name in NETWORK_KINDS if network_class(name).network_class is type(network))
            logger.info("checkpoint: read as %s", kind)
            network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
            _compare_embedding(network, reader.embedding, tensors, target)
            if any(
                name.removeprefix("model.") == reader.lm_head and heads_like(target, tensors[name]) for name in tensors
            ):
                network.share_lm_head()
            if reader.copies is not None:
                _check_copies(reader.copies(set(tensors), config), tensors, target)
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
        if embeds_like(target, tensors[name], every_row=network.trains_embedding):
            network.share_embedding()
            continue
        used = "target's" if getattr(network, "embed_tokens", None) is None else "file's"
        logger.warning(
            "%s: differs from the target's embedding; the %s is used. Either the drafter has an embedding of its own, "
            "or it was trained for another base model or revision (such as Vicuna v1.3 for v1.5) and will guess badly",
            name,
            used,
        )


def _check_copies(names: Mapping[str, str], tensors: Mapping[str, torch.Tensor], target: Target) -> None:
    """Refuse what ought to be a copy of the target's embedding or LM head and is another tensor."""
    for name, what in names.items():
        is_same = embeds_like if what == "embedding" else heads_like
        if not is_same(target, tensors[name]):
            raise ValueError(f"{name}: expected a copy of the target's {what}, got another tensor")


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
    if isinstance(tree, str) and tree in GROWN_PRESETS:
        tree = _dynamic_tree(GROWN_PRESETS[tree], settings)
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


def _dynamic_tree(tree: DynamicTree, settings: dict[str, Any]) -> DynamicTree:
    """The tree with those limits that `settings` name, which are taken out of them."""
    names = [field.name for field in fields(DynamicTree) if field.name in settings]
    return replace(tree, **{name: settings.pop(name) for name in names})


def _check_settings(kind: str, settings: dict[str, Any]) -> None:
    """Raise TypeError for a setting that the kind does not have."""
    known = settings_of(kind)
    for name in settings:
        if name not in known:
            raise TypeError(f"{name}: {kind} has no such setting; it has {', '.join(known) or 'none'}")
