"""`specdec.load_drafter`: the loader of drafters, and what is measured where nobody says which tree or which drafter.

The loader itself (`specdec.drafters.load`) never measures anything.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

from transformers import PreTrainedModel

from specdec.drafters.load import load_drafter as load_one
from specdec.drafters.union.union import NUM_NODES, Union
from specdec.drafting.base import Drafter
from specdec.models.target.target import Target
from specdec.trees.dynamic import AnyTreeLike
from specdec.tuning.at_hand import drafters_at_hand
from specdec.tuning.union import measured, names_of

__all__ = ["AUTO", "AnySource", "load_drafter"]

logger = logging.getLogger(__name__)

AUTO = "auto"

OneSource: TypeAlias = Drafter | PreTrainedModel | str | os.PathLike[str] | None
AnySource: TypeAlias = OneSource | Sequence[OneSource]


def load_drafter(
    source: AnySource,
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
            a bundled drafter such as `"smollm2/eagle"`, a loaded causal LM, or None for plain decoding. A `Drafter` is
            returned as it is. Several of these in a list, or in a text with `+` between them
            (`"prompt_lookup+smollm2/eagle"`), make a union: one tree of what all propose. `"auto"` makes a union of
            what looks the text up in itself and a drafter for this model that is bundled or was downloaded before, if
            there is one.
        target: what it will draft for.
        kind: what `source` holds, when the files do not tell.
        tree: the draft tree, in any of the forms of `specdec.trees.dynamic.as_tree`; with `"dynamic"`, for drafters
            that grow trees, the settings `num_nodes` (root counted), `depth` and `top_k` are its limits. With `"auto"`
            the drafter's tree is cut step by step to what is worth it, plain decoding included; a union's always is.
            Both measure for some seconds what steps cost on this machine. A union with a number for a tree proposes as
            many nodes, of all its members, in every step. A plan of `specdec tune` is a choice made once.
        any_target: load a drafter that was trained for another target of the same sizes.
        settings: settings of the kind, such as prompt_lookup's `max_ngram` and `num_draft_tokens`, and of reading
            the files that others published, such as EAGLE's `tap_layers` and `rope_theta`. With `tree="auto"` and with
            several drafters also `num_nodes`, the nodes of the largest tree, and `batch_size`, the rows that costs are
            measured for.

    Raises:
        FileNotFoundError: no such folder or repository, and no kind of that name.
        TypeError: a source of another type, or a setting that the kind does not have.
        ValueError: a malformed checkpoint, or one of another target; drafters that make no union.
        NotImplementedError: a published file that asks for arithmetic which the kind's network does not have.
    """
    target = target if isinstance(target, Target) else Target(target)
    sources = _sources(source)
    if source == AUTO:
        sources = list(drafters_at_hand(target))
        logger.info("drafter: auto takes %s", " and ".join(map(str, sources)))
    elif len(sources) == 1 and tree != AUTO:
        return load_one(source, target, kind=kind, tree=tree, any_target=any_target, **settings)
    own = {name: settings.pop(name) for name in ("num_nodes", "batch_size") if name in settings}
    is_fixed = isinstance(tree, int) and not isinstance(tree, bool)
    if len(sources) > 1 or source == AUTO:
        _check_alone({"kind": kind, "tree": None if tree == AUTO or is_fixed else tree, **settings})
        members = [load_one(one, target, any_target=any_target) for one in sources]
    else:
        members = [load_one(sources[0], target, kind=kind, any_target=any_target, **settings)]
        if members[0].num_ways > 1:
            raise ValueError("tree: expected None with a union, which is sized at every step, got 'auto'")
        if members[0].shape.num_nodes == 1:  # plain decoding
            return members[0]
    if is_fixed and "num_nodes" in own:
        raise ValueError(f"num_nodes: expected none beside tree={tree!r}, which says how many, got {own['num_nodes']}")
    budget = tree if isinstance(tree, int) else own.get("num_nodes", NUM_NODES)
    union = Union(members, names=names_of(sources), num_nodes=budget)
    return union if is_fixed else measured(target, union, batch_size=own.get("batch_size", 1))


def _sources(source: AnySource) -> list[OneSource]:
    """The members that a source names; one of an ordinary drafter.

    Raises:
        ValueError: a list of fewer than two.
    """
    if isinstance(source, str):
        return [source] if os.path.exists(source) else list(split_names(source))
    if not isinstance(source, Sequence):
        return [source]
    if len(source) < 2:
        raise ValueError(f"drafter: expected two drafters or more for a union, got {list(source)!r}")
    return list(source)


def split_names(text: str) -> list[str]:
    """The names in `"a+b"`, of which some end in `++` themselves.

    Raises:
        ValueError: a place between two `+` that names nothing.
    """
    names: list[str] = []
    parts = text.split("+")
    while parts:
        name = parts.pop(0)
        if name and parts[:2] == ["", ""]:
            name, parts = f"{name}++", parts[2:]
        names.append(name)
    if not all(names):
        raise ValueError(f"drafter: expected names with + between them, got {text!r}")
    return names


def _check_alone(given: dict[str, Any]) -> None:
    """Refuse what says something about one drafter where there are several."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}: expected none with several drafters, which have their own (load them one by one and give the "
                f"objects), got {value!r}"
            )
