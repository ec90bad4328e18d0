"""The published trees, stored in `presets/*.json` by the system that they belong to."""

import difflib
import functools
import json
from pathlib import Path
from typing import Any

__all__ = ["ALIASES", "preset_children", "preset_names", "suggestion"]

_FOLDER = Path(__file__).parent / "presets"
# Trees that were published under two names.
ALIASES = {
    "hydra/mc_sim_7b_63": "medusa/mc_sim_7b_63",
    "falcon/kmask2_8layer_tree_6": "falcon/kmask2_8layer_tree_5",
}


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Names of all published trees that `TreeShape.preset` knows, sorted."""
    return tuple(sorted([*preset_children(), *ALIASES]))


@functools.cache
def preset_children() -> dict[str, Any]:
    """The children of every stored tree by "system/name", as the files have them."""
    trees = {}
    for file in sorted(_FOLDER.glob("*.json")):
        for name, children in json.loads(file.read_bytes())["trees"].items():
            trees[f"{file.stem}/{name}"] = children
    return trees


def suggestion(name: str) -> str:
    """The end of an error message about an unknown preset: the closest names."""
    # a bare name fits every system that used it, so the part after the slash is compared as well
    known = preset_names()
    tails = [full for full in known if full.split("/")[1] == name]
    close = tails or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else "; specdec.trees.preset_names() lists the presets"
