"""`specdec.load_drafter`: the loader of drafters, and trees that are measured when they are asked for.

The loader itself (`specdec.drafters.load`) never measures anything.
"""

import logging
import os
from typing import Any

from transformers import PreTrainedModel

from specdec.drafters.load import load_drafter as load_untuned
from specdec.drafting.base import Drafter
from specdec.models.target.target import Target
from specdec.trees.dynamic import AnyTreeLike
from specdec.tuning.measure import tune, with_tree

__all__ = ["load_drafter"]

logger = logging.getLogger(__name__)


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
            a bundled drafter such as `"smollm2/eagle"`, a loaded causal LM, or None for plain decoding. A `Drafter` is
            returned as it is.
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
    if tree != "auto" or isinstance(source, Drafter):
        return load_untuned(source, target, kind=kind, tree=tree, any_target=any_target, **settings)
    drafter = load_untuned(source, target, kind=kind, any_target=any_target, **settings)
    if drafter.shape.num_nodes == 1:  # plain decoding
        return drafter
    plan = tune(target, drafter)
    logger.info("tree: %s", plan)
    return with_tree(drafter, plan.tree)
